"""Tokens of a run as pieces of text, by the run's own tokenizer, without transformers."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from rollouts.errors import RecordError
from rollouts.inspect.read import find_checkpoints
from rollouts.run_dir import RunDir

Decode = Callable[[list[int]], str]  # ids to text, special tokens included
UNFINISHED = "\ufffd"  # at the end of a text: more tokens belong to its last character
# tokens before a piece with which it is decoded: some tokenizers drop a space at the beginning of what they
# decode
CONTEXT = 4
LONGEST = 8  # tokens of one piece; bytes that are no text by then stay what they decode to


def load_decoder(run_dir: RunDir) -> Decode:
    """Decodes tokens of the run by the tokenizer of its newest checkpoint, or of the model directory that its
    config names.

    Raises RecordError where there is no tokenizer.json, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = find_tokenizer(run_dir)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more exact
        raise RecordError(f"{path} cannot be read as a tokenizer ({error})") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def find_tokenizer(run_dir: RunDir) -> Path:
    """The tokenizer.json of the newest checkpoint, else of the newest snapshot of weights, else of model.name
    if it is a directory.

    Raises RecordError if there is none.
    """
    checkpoints = [run_dir.checkpoint(stage, step) for stage, step in find_checkpoints(run_dir)]
    newest = sorted(checkpoints, key=lambda path: (path / "manifest.json").stat().st_mtime, reverse=True)
    snapshots = sorted(run_dir.weights.glob("v*"), key=lambda path: path.stat().st_mtime, reverse=True)
    places = [*newest, *snapshots, *find_model_dir(run_dir.config)]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place / "tokenizer.json"
    raise RecordError(
        f"{run_dir.root} has no tokenizer.json yet: the first checkpoint brings it; until then tokens have no"
        " text"
    )


def find_model_dir(config: Path) -> list[Path]:
    """The directory that model.name of a config is, if it is one."""
    try:
        model = tomllib.loads(config.read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError):
        return []
    name = model.get("name") if isinstance(model, dict) else None
    return [Path(name).expanduser()] if isinstance(name, str) and Path(name).expanduser().is_dir() else []


def split_text(ids: Sequence[int], decode: Decode) -> list[tuple[int, int, str]]:
    """Pieces (first token, end, text) that together are the text: one token each, but where several make up
    one character.
    """
    pieces: list[tuple[int, int, str]] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        context = list(ids[max(0, begin - CONTEXT) : begin])
        before = decode(context)
        text = decode([*context, *ids[begin:end]])
        unfinished = text.endswith(UNFINISHED) and end - begin < LONGEST and end < len(ids)
        if unfinished:
            continue
        pieces.append(
            (begin, end, text[len(before) :] if text.startswith(before) else decode(list(ids[begin:end])))
        )
        begin = end
    return pieces

"""Tokens of a run as pieces of text, by the run's own tokenizer, without transformers."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollouts.errors import RecordError
from rollouts.inspect.record import find_checkpoints
from rollouts.run_dir import RunDir

Decode = Callable[[list[int]], str]  # ids to text, special tokens included
UNFINISHED = "\ufffd"  # at the end of a text: more tokens belong to its last character
CONTEXT = 4  # tokens that are decoded before a piece: some tokenizers drop a space at the beginning
LONGEST = 8  # tokens of one piece; bytes that are no text by then stay what they decode to


def load_decoder(run_dir: RunDir) -> Decode:
    """Decodes tokens by the tokenizer.json of the newest checkpoint, else of the weights, else of model.name.

    Raises RecordError where there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    places = [run_dir.checkpoint(stage, step) for stage, step in reversed(find_checkpoints(run_dir))]
    places += sorted(run_dir.weights.glob("v*"), key=lambda path: path.stat().st_mtime, reverse=True)
    with suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # a run without a readable config still has those
        places.append(Path(tomllib.loads(run_dir.config.read_text("utf-8"))["model"]["name"]).expanduser())
    path = next((path for place in places if (path := place / "tokenizer.json").is_file()), None)
    if path is None:
        raise RecordError(f"{run_dir.root} has no tokenizer.json yet: the first checkpoint brings it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more exact
        raise RecordError(f"{path} cannot be read as a tokenizer ({error})") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def split_text(ids: Sequence[int], decode: Decode) -> list[tuple[int, int, str]]:
    """Pieces (first token, end, text) that together are the text: one token each, but where several make up
    one character.
    """
    pieces: list[tuple[int, int, str]] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        context = list(ids[max(0, begin - CONTEXT) : begin])
        before, text = decode(context), decode([*context, *ids[begin:end]])
        if text.endswith(UNFINISHED) and end - begin < LONGEST and end < len(ids):
            continue
        own = text[len(before) :] if text.startswith(before) else decode(list(ids[begin:end]))
        pieces.append((begin, end, own))
        begin = end
    return pieces

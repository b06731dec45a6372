"""Tokens of a run as pieces of text, by the run's own tokenizer, without transformers."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollouts.errors import RecordError
from rollouts.inspect.record import find_checkpoints
from rollouts.run_dir import RunDir


def load_tokenizer(run_dir: RunDir) -> Tokenizer:
    """The tokenizer.json of the newest checkpoint, else of the weights, else of model.name.

    Raises RecordError where there is none, or it cannot be read.
    """
    places = [run_dir.checkpoint(stage, step) for stage, step in reversed(find_checkpoints(run_dir))]
    places += sorted(run_dir.weights.glob("v*"), key=lambda path: path.stat().st_mtime, reverse=True)
    with suppress(OSError, ValueError, KeyError, TypeError):  # no readable config: the others may do
        places.append(Path(tomllib.loads(run_dir.config.read_text("utf-8"))["model"]["name"]).expanduser())
    path = next((path for place in places if (path := place / "tokenizer.json").is_file()), None)
    if path is None:
        raise RecordError(f"{run_dir.root} has no tokenizer.json yet: the first checkpoint brings it")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more exact
        raise RecordError(f"{path} cannot be read as a tokenizer ({error})") from error


def split_text(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token, special ones included; of a character made of several the last has the text."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]

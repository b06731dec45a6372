"""What the trainer and a reward worker send each other: JSON, one object a line.

    trainer ──► request: a random id, a function's name, samples
    worker  ──► answer: the function is loaded; then: rewards · raised · refused · crashed

The worker trusts the trainer. The trainer checks all of an answer: what is not one is a BadAnswer.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollouts.types import RewardResult, Sample

TEXT_CHARS = 2000  # of a message or a traceback
ARRAYS = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "weight_versions": np.int64,
}


class BadAnswer(ValueError):
    """A worker's bytes are no answer."""


class RaisedInWorker(Exception):
    """An exception of the user's function, whose own object stays in the worker."""

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


class Answer(msgspec.Struct, omit_defaults=True):
    """One line of a worker's. Exactly one of files, rewards, raised, refused and crashed is set."""

    id: str  # of the request
    files: dict[str, str] | None = None  # the function is loaded, from these files: path, SHA-256
    rewards: list[RewardResult] | None = None  # one per sample
    raised: str | None = None  # "KeyError: 'gold'"
    traceback: str = ""
    refused: str | None = None  # the function cannot be loaded, or returned something that is no reward
    crashed: str | None = None  # the function spoiled its process: "called sys.exit(3)"
    unfit: bool = False  # the call left something behind: the worker must not serve another


def parse_answer(line: bytes, *, request_id: str, count: int | None) -> Answer:
    """The answer to the request of that id: its `count` rewards, or with None that its function is loaded; or
    why not. Raises BadAnswer.
    """
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"an answer that is none ({error})") from error
    if answer.id != request_id:
        raise BadAnswer("an answer to no request (did it write to file descriptor 3, which is the worker's?)")
    expected = answer.files if count is None else answer.rewards
    if sum(part is not None for part in (expected, answer.raised, answer.refused, answer.crashed)) != 1:
        raise BadAnswer("an answer without what was asked for")
    results = answer.rewards or []
    if count is not None and answer.rewards is not None and len(results) != count:
        raise BadAnswer(f"an answer with {len(results)} rewards, not {count}")
    if not all(math.isfinite(value) for one in results for value in (one.reward, *one.parts.values())):
        raise BadAnswer("a reward that is not finite")
    return answer


def encode_request(request: Mapping[str, Any]) -> bytes:
    """A line of ASCII, so that half a surrogate pair crosses too. Raises ValueError on NaN and infinity."""
    return json.dumps(request, allow_nan=False, default=dict).encode() + b"\n"


def encode_sample(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values; arrays as base64 of their bytes, five times as fast as lists of numbers."""
    return {
        "id": sample.id,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "group_index": sample.group_index,
        "status": str(sample.status),
        "metadata": sample.metadata,
        **{name: base64.b64encode(getattr(sample, name).tobytes()).decode() for name in ARRAYS},
    }


def decode_sample(record: Mapping[str, Any]) -> Sample:
    """The sample that encode_sample wrote."""
    arrays = {name: np.frombuffer(base64.b64decode(record[name]), dtype) for name, dtype in ARRAYS.items()}
    return Sample(**{**record, **arrays})

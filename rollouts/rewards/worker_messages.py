"""What the trainer and a reward worker say to each other: JSON in frames whose length comes first.

    trainer ──► request: an id that nobody can guess; a function's name; samples, or none to only load it
    worker  ──► answer:  the id; rewards · raised · refused (what the function returned is no reward) · crashed; what makes the worker unfit for more

Token arrays are base64 of their bytes: for long samples five times as fast as lists of numbers. The worker
believes the trainer; the trainer believes nothing: everything of an answer is checked here.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from rollouts.types import RewardResult, Sample

HEADER = struct.Struct("<I")  # bytes of the body that follows
TEXT_CHARS = 2000  # of a message or a traceback
ENCODE = json.JSONEncoder(
    allow_nan=False, separators=(",", ":")
).encode  # bound here: a function may replace what is in the json module
ARRAYS = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "weight_versions": np.int64,
}


class BadAnswer(ValueError):
    """A worker's bytes are no answer."""


class RaisedInWorker(Exception):
    """Stands for an exception of the user's function, whose own object stays in the worker; group.fail_sample
    writes its traceback down.
    """

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


@dataclass(frozen=True, slots=True)
class Loaded:
    """The function is there; nothing was called."""

    digests: Mapping[str, str] = field(
        default_factory=dict
    )  # path of each file that was imported for it: SHA-256, hexadecimal digits


@dataclass(frozen=True, slots=True)
class Rewards:
    """The function answered: one checked reward per sample."""

    results: tuple[RewardResult, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised."""

    message: str  # "KeyError: 'gold'"
    traceback_text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The function could not be loaded, or answered with something that is no reward."""

    message: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """The function spoiled its process, which has to be replaced."""

    reason: str  # "called os.fork"


Answer = Loaded | Rewards | Raised | Refused | Crashed


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and what the call left behind in its process; "" if nothing, so that the worker may serve
    the next call.
    """

    answer: Answer
    unfit: str = ""


# --- frames -------------------------------------------------------------------------------------------------


def encode_frame(value: object) -> bytes:
    """`value` as compact JSON in ASCII, so that lone surrogates cross too, behind its length. Raises
    ValueError on NaN and infinity.
    """
    body = ENCODE(value).encode("ascii")
    return HEADER.pack(len(body)) + body


def decode_frame(body: bytes) -> Any:
    """The JSON value. Raises BadAnswer if it is none, or nests too deep, or holds NaN."""
    try:
        return DECODE(body.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"an answer that is not JSON ({type(error).__name__}: {error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


DECODE = json.JSONDecoder(parse_constant=_refuse_constant).decode


# --- requests -----------------------------------------------------------------------------------------------


def encode_request(
    *,
    request_id: str,
    name: str,
    base_dir: str,
    role: str,
    combine: str,
    where: str,
    samples: Sequence[Sample] | None,
) -> bytes:
    """The frame that asks a worker to call a function, and the one named `combine` (may be "") on its parts;
    without samples, only to load them.
    """
    request: dict[str, Any] = {
        "id": request_id,
        "name": name,
        "base_dir": base_dir,
        "role": role,
        "combine": combine,
        "where": where,
    }
    if samples is not None:
        request["samples"] = [encode_sample(sample) for sample in samples]
    return encode_frame(request)


def encode_sample(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values."""
    return {
        "id": sample.id,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "group_index": sample.group_index,
        "status": str(sample.status),
        "metadata": _plain(sample.metadata),
        **{field: base64.b64encode(getattr(sample, field).tobytes()).decode("ascii") for field in ARRAYS},
    }


def _plain(value: Any) -> Any:
    """JSON values whose mappings are dicts: json knows no other."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def decode_sample(record: Mapping[str, Any]) -> Sample:
    """The sample that encode_sample wrote."""
    arrays = {field: np.frombuffer(base64.b64decode(record[field]), dtype) for field, dtype in ARRAYS.items()}
    return Sample(**{**record, **arrays})


# --- answers ------------------------------------------------------------------------------------------------


def encode_answer(answer: Answer, *, request_id: str, unfit: str = "") -> bytes:
    """The frame of an answer to the request of that id."""
    return encode_frame({"id": request_id, "unfit": unfit, **_encode(answer)})


def _encode(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Rewards):
        return {"rewards": [[result.reward, dict(result.parts), result.note] for result in answer.results]}
    if isinstance(answer, Raised):
        return {"raised": answer.message[:TEXT_CHARS], "traceback": answer.traceback_text[-TEXT_CHARS:]}
    if isinstance(answer, Refused):
        return {"refused": answer.message[:TEXT_CHARS]}
    if isinstance(answer, Crashed):
        return {"crashed": answer.reason[:TEXT_CHARS]}
    return {"loaded": dict(answer.digests)}


def parse_reply(body: bytes, *, count: int | None, request_id: str) -> Reply:
    """A worker's reply to the request of that id, with `count` samples (None: to load). Raises BadAnswer
    saying what is wrong with it.
    """
    record = decode_frame(body)
    if not isinstance(record, dict):
        raise BadAnswer(f"an answer that is a {type(record).__name__}")
    if record.get("id") != request_id:
        raise BadAnswer("an answer to no request (did it write to file descriptor 3, which is the worker's?)")
    return Reply(_parse_answer(record, count), _parse_text(record, "unfit"))


def _parse_answer(record: dict[str, Any], count: int | None) -> Answer:
    if "rewards" in record and count is not None:
        return Rewards(_parse_results(record["rewards"], count))
    if "raised" in record:
        return Raised(_parse_text(record, "raised"), _parse_text(record, "traceback"))
    if "refused" in record:
        return Refused(_parse_text(record, "refused"))
    if "crashed" in record:
        return Crashed(_parse_text(record, "crashed"))
    if "loaded" in record and count is None:
        digests = record["loaded"]
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise BadAnswer("an answer whose loaded is no mapping from paths to digests")
        return Loaded(digests)
    raise BadAnswer(f"an answer with the keys {', '.join(record)[:80] or 'of nothing'}")


def _parse_text(record: dict[str, Any], key: str) -> str:
    text = record.get(key)
    if not isinstance(text, str):
        raise BadAnswer(f"an answer whose {key} is no text")
    return text[:TEXT_CHARS]


def _parse_results(records: Any, count: int) -> tuple[RewardResult, ...]:
    if not isinstance(records, list) or len(records) != count:
        raise BadAnswer(f"an answer without {count} rewards")
    return tuple(_parse_result(record) for record in records)


def _parse_result(record: Any) -> RewardResult:
    if not isinstance(record, list) or len(record) != 3:
        raise BadAnswer("a reward that is not [number, parts, note]")
    reward, parts, note = record
    if (
        not _is_finite(reward)
        or not isinstance(parts, dict)
        or not all(_is_finite(part) for part in parts.values())
    ):
        raise BadAnswer("a reward that is not a finite number with parts that are")
    if note is not None and not isinstance(note, str):
        raise BadAnswer("a note that is no text")
    return RewardResult(float(reward), {name: float(part) for name, part in parts.items()}, note)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False

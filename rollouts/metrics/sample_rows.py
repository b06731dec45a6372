"""What a row of samples.jsonl says of a sample: its texts, and beside them at most ROW_BYTES."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.metrics.record import encode_row
from rollouts.types import JSONValue, Sample, encode_json

ROW_BYTES = 700  # of a row's JSON beside prompt, response and failure
TEXT_CHARS = 2000  # of each text of a failure
FAILURE_TEXTS = ("class", "function", "message", "traceback")
VALUE_CHARS = 120  # of the JSON of one value of metadata; a longer one is cut
NO_TEXTS = {"prompt": "", "response": ""}
# around what may be cut
BARE = (
    b',"prompt":"","response":"","rewards":{},"rewards_cut":999999,'
    b'"metadata":{"failure":{}},"metadata_cut":999999'
)


def encode_sample_rows(head: Mapping[str, Any], samples: Sequence[Sample]) -> bytes:
    """The row of each sample as a line: `head`, text and numbers, no per-token arrays. What a sample does not
    have is absent.

    Of the rewards' parts, and then of the metadata, what comes first is kept while there is room in
    ROW_BYTES; rewards_cut and metadata_cut say how many were left out. The texts of a failure stand beside
    that, each up to TEXT_CHARS.
    """
    beginning = encode_row(head)[:-1] + b","
    return b"".join(
        beginning + _encode_row(sample, room=ROW_BYTES - len(beginning))[1:] + b"\n" for sample in samples
    )


def _encode_row(sample: Sample, *, room: int) -> bytes:
    """The row's JSON without a head, which has `room` bytes beside its texts."""
    row: dict[str, Any] = {"id": sample.id}
    if sample.group_index is not None:
        row["group_index"] = sample.group_index
    row["status"] = sample.status.value
    if sample.reward is not None:
        row["reward"] = sample.reward
    versions = sample.weight_versions[sample.loss_mask]
    row |= {"tokens": len(sample.tokens), "response_length": len(versions)}
    if len(versions):
        row |= {
            "weight_version_min": int(np.minimum.reduce(versions)),
            "weight_version_max": int(np.maximum.reduce(versions)),
        }
    texts = {"prompt": sample.prompt, "response": sample.response}
    parts = {
        name: values
        for name, values in (("rewards", sample.rewards), ("metadata", sample.metadata))
        if values
    }
    if all(map(_is_short, parts.values())):  # as most are
        whole = encode_row({**row, **texts, **parts})
        if len(whole) - _count_chars(sample) <= room or len(encode_row({**row, **NO_TEXTS, **parts})) <= room:
            return whole
    return encode_row({**row, **texts, **_cut(sample, room=room + 1 - len(encode_row(row)) - len(BARE))})


def _count_chars(sample: Sample) -> int:
    """Of prompt and response; the JSON of a text has at least a byte for each."""
    prompt = sample.prompt
    return len(sample.response) + (
        len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
    )


def _is_short(values: Mapping[str, JSONValue]) -> bool:
    """Whether each value is a text, a number or nothing whose JSON has up to VALUE_CHARS. A failure never is:
    it has rules of its own.
    """
    if "failure" in values:
        return False
    for value in values.values():
        if isinstance(value, str):
            short = len(value) <= VALUE_CHARS
        elif isinstance(value, int):  # bool too
            short = -(1 << 63) <= value < 1 << 63
        else:
            short = value is None or isinstance(value, float)
        if not short:
            return False
    return True


def _cut(sample: Sample, *, room: int) -> dict[str, Any]:
    """The rewards' parts and the metadata as far as they fit into `room` bytes, a failure beside that, and
    how many were left out.
    """
    rewards, rewards_cut, left = keep_what_fits(sample.rewards, room)
    failed = "failure" in sample.metadata
    others = (
        {key: value for key, value in sample.metadata.items() if key != "failure"}
        if failed
        else sample.metadata
    )
    metadata, metadata_cut, _ = keep_what_fits(others, left)
    if failed:
        metadata["failure"] = shorten_failure(sample.metadata["failure"])
    cuttable = {
        "rewards": rewards,
        "rewards_cut": rewards_cut,
        "metadata": metadata,
        "metadata_cut": metadata_cut,
    }
    return {name: value for name, value in cuttable.items() if value}


def keep_what_fits(values: Mapping[str, JSONValue], room: int) -> tuple[dict[str, JSONValue], int, int]:
    """(the entries that fit into `room` bytes of JSON, in order; how many do not; the bytes that are left).
    Long values are shortened first.
    """
    whole = len(encode_row(values)) - 1  # the braces less a comma
    if whole <= min(room, VALUE_CHARS) and values:  # nothing in it can be long
        return dict(values), 0, room - whole
    kept: dict[str, JSONValue] = {}
    for key, value in values.items():
        short = shorten_json(value, VALUE_CHARS)
        size = len(encode_row({key: short})) - 1
        if size <= room:
            kept[key] = short
            room -= size
    return kept, len(values) - len(kept), room


def shorten_json(value: JSONValue, chars: int) -> JSONValue:
    """The value, or the beginning of its JSON text and a remark if that is longer than `chars`."""
    if isinstance(value, str):
        return value if len(value) <= chars else f"{value[:chars]}… ({len(value)} characters)"
    if value is None or isinstance(value, bool | float):
        return value
    text = encode_json(value)
    return value if len(text) <= chars else f"{text[:chars]}… ({len(text)} characters)"


def shorten_failure(failure: JSONValue) -> JSONValue:
    """Class, function, message and traceback of a failure, each up to TEXT_CHARS; something else under that
    name as one text.
    """
    if not isinstance(failure, Mapping):
        return shorten_json(failure, TEXT_CHARS)
    return {key: shorten_json(failure[key], TEXT_CHARS) for key in FAILURE_TEXTS if key in failure}


def select_evenly(length: int, count: int) -> list[int]:
    """`count` indices below `length`, ascending and evenly spaced from 0; all of them if there are fewer."""
    chosen = min(length, count)
    return [index * length // chosen for index in range(chosen)]

"""What a row of samples.jsonl says of a sample: its texts, and beside them at most ROW_BYTES."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.metrics.record import Fields, encode_row, encode_rows
from rollouts.types import JSONValue, Sample, encode_json

ROW_BYTES = 700  # of a row's JSON beside prompt, response and failure
WHOLE = ("messages", "trajectory")  # metadata of many turns, which stand beside prompt and response, uncut
TEXT_CHARS = 2000  # of each text of a failure
FAILURE_TEXTS = ("class", "function", "message", "traceback")
VALUE_CHARS = 120  # of the JSON of one value of metadata; a longer one is cut
# the names of what may be cut, and of what stands beside it
CUT = ',"rewards":{},"rewards_cut":9999,"metadata":{"failure":{}},"metadata_cut":9999'


def encode_sample_rows(head: Fields, samples: Sequence[Sample]) -> bytes:
    """The row of each sample as a line: `head`, text and numbers, no per-token arrays. What a sample does not
    have is absent.

    Of the rewards' parts, and then of the metadata, what comes first is kept while there is room in
    ROW_BYTES; rewards_cut and metadata_cut say how many were left out. The texts of a failure stand beside
    that, each up to TEXT_CHARS.
    """
    rows = [{**head, **make_sample_row(sample)} for sample in samples]
    lines = encode_rows(rows)  # one call of the encoder for most: a character of a text has at least a byte
    for row, line in zip(rows, lines.split(b"\n"), strict=False):
        if len(line) > ROW_BYTES + len(row["prompt"]) + len(row["response"]):
            lines = b""
            cut_sample_row(row)
    return lines or encode_rows(rows)


def make_sample_row(sample: Sample) -> dict[str, Any]:
    """The row without a head, of any length."""
    versions = sample.weight_versions[sample.loss_mask]
    row: dict[str, Any] = {
        "id": sample.id,
        "group_index": sample.group_index,
        "status": sample.status.value,
        "reward": sample.reward,
        "tokens": len(sample.tokens),
        "response_length": len(versions),
        "weight_version_min": int(np.minimum.reduce(versions)) if len(versions) else None,
        "weight_version_max": int(np.maximum.reduce(versions)) if len(versions) else None,
        "prompt": sample.prompt,
        "response": sample.response,
    }
    row = {name: value for name, value in row.items() if value is not None}
    metadata = dict(sample.metadata)
    if "trajectory" in metadata:
        row |= {name: metadata.pop(name) for name in WHOLE if name in metadata}
    for name, values in (("rewards", sample.rewards), ("metadata", metadata)):
        if values:
            row[name] = {
                key: shorten_failure(value) if key == "failure" else shorten_json(value, VALUE_CHARS)
                for key, value in values.items()
            }
    return row


def cut_sample_row(row: dict[str, Any]) -> None:
    """Leaves out what does not fit, and counts it."""
    texts = dict.fromkeys(("prompt", "response", *WHOLE), "")
    if len(encode_row({**row, **texts})) <= ROW_BYTES:
        return
    parts = {name: row.pop(name) for name in ("rewards", "metadata") if name in row}
    room = ROW_BYTES - len(encode_row({**row, **texts})) - len(CUT)
    for name, values in parts.items():
        kept = row[name] = {}
        for key, value in values.items():
            size = len(encode_row({key: value})) - 1  # the braces less a comma
            if name == "metadata" and key == "failure":
                kept[key] = value
            elif size <= room:
                kept[key] = value
                room -= size
        if len(kept) < len(values):
            row[f"{name}_cut"] = len(values) - len(kept)
        if not kept:
            del row[name]


def shorten_json(value: JSONValue, chars: int) -> JSONValue:
    """The value, or the beginning of its text or JSON and a remark if that is longer than `chars`."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = value if isinstance(value, str) else encode_json(value)
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

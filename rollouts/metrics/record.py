"""One row of a metrics file, as a pure function of what happened."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import MetricError
from rollouts.messages import drop_none
from rollouts.types import Fields, JSONValue, Numbers, Sample, encode_json

SCHEMA = 1  # raised when a field changes its meaning; new fields and metrics do not raise it
# clip_ratio is the share itself, above its parts clip_ratio/low and clip_ratio/high
METRIC_NAME = re.compile(r"clip_ratio|[a-z][a-z0-9_]*(/[a-z0-9_]+(@[0-9]+)?){1,4}")


def check_metric(name: str, value: object) -> float:
    """The value as a float. Raises MetricError, naming the metric, for a name out of form or a value that is
    not a finite number.
    """
    if METRIC_NAME.fullmatch(name) is None:
        raise MetricError(
            f"metric {name!r} = {value!r}: a name is <area>/<name>[/<stat>] in lower_snake, a stat may end in"
            " @k; for example reward/format/mean"
        )
    with suppress(TypeError, ValueError):
        number = float(value)  # pyright: ignore[reportArgumentType]
        if math.isfinite(number) and not isinstance(value, str):
            return number
    raise MetricError(
        f"metric {name} = {value!r}: a value is a finite number; leave out a metric that has none in this"
        " step"
    )


def make_head(stage: str, step: int, policy_version: int, attempt: int, time_unix: float) -> Fields:
    """The fields that every row of every file begins with."""
    assert stage and step >= 0 and attempt >= 1, (stage, step, attempt)
    return {
        "schema": SCHEMA,
        "stage": stage,
        "step": step,
        "policy_version": policy_version,
        "attempt": attempt,
        "time_unix": round(time_unix, 3),
    }


def make_row(head: Fields, metrics: Numbers) -> Fields:
    """One row: the head, with `name` for an evaluation, then the metrics, flat and in the order given (their
    slash keeps them apart from fields).

    Raises MetricError naming the metric whose name or value may not be written.
    """
    return {**head, **{metric: check_metric(metric, value) for metric, value in metrics.items()}}


def encode_rows(rows: Sequence[Fields]) -> bytes:
    """The rows as lines, each with its newline; one call of the encoder for all.

    Raises MetricError naming the field of a number that is not finite.
    """
    try:
        lines = _encoder.encode_lines(rows)
        if b"null" not in lines:  # what the encoder makes of such a number, and also a None or a text
            return lines
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold: a question mark instead
        pass
    return b"".join(_encode_slowly(msgspec.to_builtins(row, enc_hook=_convert)) for row in rows)


def encode_row(row: Fields) -> bytes:
    """The row as one line of JSON, without its newline. Raises MetricError like encode_rows."""
    return encode_rows([row])[:-1]


def _encode_slowly(row: Fields) -> bytes:
    """The row as a line, by an encoder that refuses numbers that are not finite."""
    for name, value in row.items():
        try:
            encode_json(value)
        except ValueError as error:
            raise MetricError(
                f"field {name} = {value}: a number in a row is finite; leave out a field that has none"
            ) from error
    return f"{encode_json(row)}\n".encode(errors="replace")


def _convert(value: object) -> Any:
    """What the encoders do not know, as something that they do."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_encoder = msgspec.json.Encoder(enc_hook=_convert)


# --- what a row of samples.jsonl says of a sample: its texts, and beside them at most ROW_BYTES -------------


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


def make_sample_row(sample: Sample) -> Fields:
    """The row without a head, of any length."""
    versions = sample.weight_versions[sample.loss_mask]
    row = {
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
    row = drop_none(row)
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


def cut_sample_row(row: Fields) -> None:
    """Leaves out what does not fit, and counts it."""
    texts = dict.fromkeys(("prompt", "response", *WHOLE), "")
    if len(encode_row({**row, **texts})) <= ROW_BYTES:
        return
    parts = {name: row.pop(name) for name in ("rewards", "metadata") if name in row}
    room = ROW_BYTES - len(encode_row({**row, **texts})) - len(CUT)
    for name, values in parts.items():
        kept = {}
        for key, value in values.items():
            size = len(encode_row({key: value})) - 1  # the braces less a comma
            if name == "metadata" and key == "failure":
                kept[key] = value
            elif size <= room:
                kept[key] = value
                room -= size
        if kept:
            row[name] = kept
        if len(kept) < len(values):
            row[f"{name}_cut"] = len(values) - len(kept)


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

"""One row of a metrics file, as a pure function of what happened."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import MetricError
from rollouts.types import encode_json

Fields = Mapping[str, Any]  # of a row, by name
SCHEMA = 1  # raised when a field changes its meaning; new fields and metrics do not raise it
SEGMENT = r"[a-z0-9_]+(@[0-9]+)?"
# clip_ratio is the share itself, above its parts clip_ratio/low and clip_ratio/high
METRIC_NAME = re.compile(rf"clip_ratio|[a-z][a-z0-9_]*(/{SEGMENT}){{1,4}}")


def check_metric(name: str, value: object) -> float:
    """The value as a float. Raises MetricError, naming the metric, for a name out of form or a value that is
    not a finite number.
    """
    if METRIC_NAME.fullmatch(name) is None:
        raise MetricError(
            f"metric {name!r} = {value!r}: a name is <area>/<name>[/<stat>] in lower_snake, a stat may end in"
            " @k; for example reward/format/mean"
        )
    try:
        number = math.nan if isinstance(value, str) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MetricError(
            f"metric {name} = {value!r}: a value is a finite number; leave out a metric that has none in this"
            " step"
        )
    return number


def make_head(stage: str, step: int, policy_version: int, attempt: int, time_unix: float) -> dict[str, Any]:
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


def make_row(head: Fields, metrics: Mapping[str, float]) -> dict[str, Any]:
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

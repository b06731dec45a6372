"""Lines of a record's .jsonl files as columns: what an index keeps of every row.

Numbers become float64 or int64 columns, NaN or −1 where a row has none; texts that repeat (stage, status,
failure class) become codes into a list of texts, 0 where a row has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import Row, parse_row

ABSENT = -1  # in a column of whole numbers
TEXT, WHOLE, REAL = "<i4", "<i8", "<f8"  # how a column lies on disk
HEAD: dict[str, str] = {
    "stage": TEXT,
    "step": WHOLE,
    "attempt": WHOLE,
    "policy_version": WHOLE,
    "time_unix": REAL,
}
PLACE: dict[str, str] = {
    "part": WHOLE,
    "offset": WHOLE,
    "length": WHOLE,
}  # of the row: its file's number, first byte, bytes with the newline
HEAD_NAMES = frozenset({*HEAD, *PLACE, "schema"})
LARGEST = 2**62  # of a whole number that a column takes


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other in one file, as columns."""

    rows: int
    numbers: Mapping[str, np.ndarray]  # WHOLE and REAL columns
    texts: Mapping[str, Sequence[str | None]]  # TEXT columns, not coded yet


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of one kind of file."""

    name: str  # of the file: metrics.jsonl is "metrics"
    columns: Mapping[
        str, str
    ]  # those that every index of the kind has, and how they lie on disk; more are REAL
    decode: Callable[
        [bytes], Block
    ]  # whole lines; raises msgspec.MsgspecError, or ValueError, for a line that is no such row


class _Head(msgspec.Struct):
    """What every row must have, and what it may have."""

    stage: str
    step: int
    attempt: int
    policy_version: int | None = None
    time_unix: float | None = None


class _Failure(msgspec.Struct):
    kind: str | None = msgspec.field(name="class", default=None)


class _Metadata(msgspec.Struct):
    failure: _Failure | None = None


class _SampleRow(_Head):
    status: str | None = None
    reward: float | None = None
    tokens: int | None = None
    response_length: int | None = None
    group_index: int | None = None
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    metadata: _Metadata | None = None


class _ContributionRow(_Head):
    update: int | None = None
    row: int | None = None
    group_index: int | None = None
    advantage: float | None = None
    weight: float | None = None
    share: float | None = None
    tokens: int | None = None
    reward: float | None = None


class _SpanRow(_Head):
    name: str | None = None
    track: str | None = None
    start_unix: float | None = None
    duration_s: float | None = None
    tokens: int | None = None


SAMPLE_COLUMNS = {
    "status": TEXT,
    "reward": REAL,
    "tokens": WHOLE,
    "response_length": WHOLE,
    "group_index": WHOLE,
    "weight_version_min": WHOLE,
    "weight_version_max": WHOLE,
}
CONTRIBUTION_COLUMNS = {
    "update": WHOLE,
    "row": WHOLE,
    "group_index": WHOLE,
    "advantage": REAL,
    "weight": REAL,
    "share": REAL,
    "tokens": WHOLE,
    "reward": REAL,
}
SPAN_COLUMNS = {"name": TEXT, "track": TEXT, "start_unix": REAL, "duration_s": REAL, "tokens": WHOLE}


def _make_struct_decoder(kind: type[_Head], columns: Mapping[str, str]) -> Callable[[bytes], Block]:
    decoder = msgspec.json.Decoder(kind)

    def decode(lines: bytes) -> Block:
        rows = decoder.decode_lines(lines)
        values = {name: [getattr(row, name) for row in rows] for name in columns if name != "failure"}
        if "failure" in columns:
            values["failure"] = [_failure_class(row) for row in rows]
        return _make_block(len(rows), values, columns)

    return decode


def _failure_class(row: Any) -> str | None:
    metadata = row.metadata
    return None if metadata is None or metadata.failure is None else metadata.failure.kind


def _make_block(count: int, values: Mapping[str, Sequence[Any]], columns: Mapping[str, str]) -> Block:
    numbers = {name: _to_column(values[name], dtype) for name, dtype in columns.items() if dtype != TEXT}
    return Block(count, numbers, {name: values[name] for name, dtype in columns.items() if dtype == TEXT})


def _to_column(values: Sequence[float | None], dtype: str) -> np.ndarray:
    """Raises ValueError for a whole number that a column does not take."""
    if dtype == REAL:
        return np.array(values, dtype=REAL)  # None becomes NaN
    try:
        return np.array([ABSENT if value is None else value for value in values], dtype=WHOLE)
    except OverflowError as error:
        raise ValueError("a whole number is too large") from error


_metric_decoder = msgspec.json.Decoder(dict[str, int | float | str | None])


def _decode_metrics(lines: bytes) -> Block:
    rows: list[dict[str, Any]] = _metric_decoder.decode_lines(lines)
    for row in rows:
        if (
            type(row.get("stage")) is not str
            or type(row.get("step")) is not int
            or type(row.get("attempt")) is not int
        ):
            raise ValueError("no head")
    head = {name: [row.get(name) for row in rows] for name in HEAD}
    block = _make_block(len(rows), head, HEAD)
    return Block(len(rows), {**block.numbers, **_collect_metrics(rows)}, block.texts)


def _collect_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """A REAL column of every number in the rows beside the head. Rows of the same names are converted
    together.
    """
    places: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(tuple(row), []).append(index)
    columns: dict[str, np.ndarray] = {}
    for names, indices in places.items():
        kept = [
            place
            for place, name in enumerate(names)
            if name not in HEAD_NAMES and type(rows[indices[0]][name]) is not str
        ]
        table = _to_table([list(rows[index].values()) for index in indices], kept)
        for place, values in zip(kept, table.T, strict=True):
            columns.setdefault(names[place], np.full(len(rows), math.nan))[indices] = values
    return columns


def _to_table(values: Sequence[Sequence[Any]], kept: Sequence[int]) -> np.ndarray:
    """[rows, kept] float64; what is no number is NaN."""
    chosen = [[row[place] for place in kept] for row in values]
    texts = any(
        type(value) is str for value in chain.from_iterable(chosen)
    )  # numpy would read "1" as a number
    clean = (
        [[math.nan if type(value) is str else value for value in row] for row in chosen] if texts else chosen
    )
    return np.array(clean, dtype=REAL).reshape(len(values), len(kept))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("metrics", HEAD, _decode_metrics),
        Layout(
            "samples",
            {**HEAD, **SAMPLE_COLUMNS, "failure": TEXT},
            _make_struct_decoder(_SampleRow, {**HEAD, **SAMPLE_COLUMNS, "failure": TEXT}),
        ),
        Layout(
            "contributions",
            {**HEAD, **CONTRIBUTION_COLUMNS},
            _make_struct_decoder(_ContributionRow, {**HEAD, **CONTRIBUTION_COLUMNS}),
        ),
        Layout("spans", {**HEAD, **SPAN_COLUMNS}, _make_struct_decoder(_SpanRow, {**HEAD, **SPAN_COLUMNS})),
    )
}


def decode_lines(layout: Layout, lines: bytes, *, path: Path, first_row: int) -> Block:
    """The columns of whole lines, each of which is a row. `first_row`: number of the first in its file, from
    1.

    Raises RunDirError naming the file and the row that is no row of this kind.
    """
    try:
        block = layout.decode(lines)
        if block.rows == lines.count(b"\n"):
            return block
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        pass
    blocks = [
        _decode_line(layout, line, path=path, number=number)
        for number, line in enumerate(lines.split(b"\n")[:-1], first_row)
    ]
    return join_blocks(blocks)


def _decode_line(layout: Layout, line: bytes, *, path: Path, number: int) -> Block:
    """One row, by a slower way that leaves out what has an unexpected form beside the head."""
    try:
        block = layout.decode(line)
        if block.rows:
            return block
        row = None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        row = parse_row(line)
    if row is None:
        raise RunDirError(
            f"{path}:{number} is not a JSON object ({line[:40]!r}…); the file is damaged: restore it, or"
            " delete that line"
        )
    if not (isinstance(row.get("stage"), str) and is_whole(row.get("step")) and is_whole(row.get("attempt"))):
        raise RunDirError(
            f"{path}:{number} has no text 'stage' and whole 'step' and 'attempt'; rollouts did not write it"
        )
    if layout.name == "metrics":
        known = {name: value for name, value in row.items() if name in HEAD or is_number(value)}
        return _make_metric_block(known)
    values = {name: [_take(row, name, dtype)] for name, dtype in layout.columns.items()}
    return _make_block(1, values, layout.columns)


def _make_metric_block(row: Row) -> Block:
    head = {name: [_take(row, name, dtype)] for name, dtype in HEAD.items()}
    block = _make_block(1, head, HEAD)
    return Block(1, {**block.numbers, **_collect_metrics([row])}, block.texts)


def _take(row: Row, name: str, dtype: str) -> Any:
    """The field if it has the form of its column, else None."""
    value = row.get(name)
    if name == "failure":
        metadata = row.get("metadata")
        failure = metadata.get("failure") if isinstance(metadata, dict) else None
        value = failure.get("class") if isinstance(failure, dict) else None
    fits = (
        isinstance(value, str) if dtype == TEXT else is_whole(value) if dtype == WHOLE else is_number(value)
    )
    return value if fits else None


def is_whole(value: object) -> bool:
    """Whether it is a whole number that a column takes."""
    return type(value) is int and abs(value) < LARGEST


def is_number(value: object) -> bool:
    """Whether it is a number that a column takes; true and false are none."""
    return is_whole(value) or (type(value) is float and math.isfinite(value))


def join_blocks(blocks: Sequence[Block]) -> Block:
    """The blocks one after another; a REAL column that one of them lacks is NaN there."""
    total = sum(block.rows for block in blocks)
    numbers: dict[str, np.ndarray] = {}
    texts: dict[str, list[str | None]] = {}
    begin = 0
    for block in blocks:
        for name, values in block.numbers.items():
            if name not in numbers:
                numbers[name] = (
                    np.full(total, math.nan)
                    if values.dtype.kind == "f"
                    else np.full(total, ABSENT, dtype=WHOLE)
                )
            numbers[name][begin : begin + block.rows] = values
        for name, words in block.texts.items():
            texts.setdefault(name, []).extend(words)
        begin += block.rows
    return Block(total, numbers, texts)

"""Reading the .jsonl files of a run directory: whole rows, over all parts of a file, and of what was done
again the newest attempt.

A row is one line. Only the last line of the last part can be torn: its writer was killed, or is writing it;
readers leave it out and say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir, list_parts

Row = dict[str, Any]
TAIL_BYTES = 1 << 16  # how much of a file's end is read at a time when looking for its last newline
_decode = msgspec.json.Decoder().decode


def parse_row(line: bytes) -> Row | None:
    """The JSON object on a line, None if there is none."""
    try:
        row = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        row = _parse_json(line)
    return row if isinstance(row, dict) else None


def _parse_json(line: bytes) -> Any:
    """What the standard library makes of it: it takes NaN and half surrogates, which other writers' JSON may
    hold.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_rows(path: Path, *, report: Callable[[str], None] | None = None) -> list[Row]:
    """The rows of all parts of a .jsonl file, none if it is missing. A torn last line, as a running or killed
    writer leaves, is left out.

    `report` is called with a sentence when a line was left out. Raises RunDirError naming file and line for
    anything else that is not a JSON object.
    """
    parts = list_parts(path)
    rows: list[Row] = []
    for part in parts:
        whole, torn = _read_part(part)
        rows += whole
        if not torn:
            continue
        last = parse_row(torn)
        if last is not None:
            rows.append(last)
        elif part is not parts[-1]:
            raise RunDirError(
                f"{part} ends in a torn line, and a part follows it; the file is damaged: restore it, or"
                " delete that line"
            )
        elif report is not None:
            report(
                f"{part}: the last line is torn ({len(torn)} bytes) and left out; its writer was killed, or"
                " is writing it"
            )
    return rows


def _read_part(path: Path) -> tuple[list[Row], bytes]:
    """The rows of the lines that have their newline, and what follows the last."""
    *lines, torn = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        row = parse_row(line)
        if row is None:
            raise RunDirError(
                f"{path}:{number} is not a JSON object ({line[:40]!r}…); the file is damaged: restore it, or"
                " delete that line"
            )
        rows.append(row)
    return rows, torn


def newest_attempts(rows: Iterable[Row]) -> list[Row]:
    """The rows of the highest attempt per (stage, step), and per name where rows have one, in the order of
    the file.
    """
    held = list(rows)
    newest: dict[tuple[object, ...], int] = {}
    for row in held:
        key = _row_key(row)
        newest[key] = max(newest.get(key, 0), row.get("attempt", 0))
    return [row for row in held if row.get("attempt", 0) == newest[_row_key(row)]]


def _row_key(row: Row) -> tuple[object, ...]:
    return row.get("stage"), row.get("step"), row.get("name")


def drop_outdated(evaluations: Iterable[Row], steps: Iterable[Row]) -> list[Row]:
    """The evaluations that are of weights which were not lost since, in the order of the file. `steps`: the
    rows of the metrics file.

    An evaluation after step N is outdated once a later attempt has trained step N of its stage, or one before
    it, again: that attempt had begun from an older checkpoint. Rows without a step and an attempt are left
    out.
    """
    first: dict[object, dict[int, int]] = {}  # stage → attempt → the first step that it trained
    for row in steps:
        if has_place(row):
            begun = first.setdefault(row.get("stage"), {})
            begun[row["attempt"]] = min(row["step"], begun.get(row["attempt"], row["step"]))
    return [
        row
        for row in evaluations
        if has_place(row)
        and not any(
            attempt > row["attempt"] and step <= row["step"]
            for attempt, step in first.get(row.get("stage"), {}).items()
        )
    ]


def has_place(row: Row) -> bool:
    """Whether the row says of which step and attempt it is."""
    return type(row.get("step")) is int and type(row.get("attempt")) is int


def next_attempt(run_dir: RunDir) -> int:
    """1 for a run that has written no row, else one more than the highest attempt in its files.

    All files count: an attempt that was killed between a step's samples and its row would else have its
    number used again, and readers would take both attempts' samples for one.
    """
    return 1 + max(read_last_attempt(path) for path in run_dir.row_files)


def read_last_attempt(path: Path) -> int:
    """The attempt of the last whole row of a .jsonl file, 0 if there is none: attempts never decrease in a
    file, and long ones are slow to read.
    """
    for part in reversed(list_parts(path)):
        row = _read_last_row(part)
        if row is not None:
            return int(row.get("attempt", 0))
    return 0


def _read_last_row(path: Path) -> Row | None:
    with path.open("rb") as file:
        start, tails = file.seek(0, os.SEEK_END), [b""]
        while start > 0:
            begin = max(0, start - TAIL_BYTES)
            file.seek(begin)
            tails.append(file.read(start - begin))
            start = begin
            if start and b"\n" not in tails[-1]:
                continue  # no line begins in it
            lines = b"".join(reversed(tails)).split(b"\n")[1 if start else 0 :]
            rows = (row for line in reversed(lines) if (row := parse_row(line)) is not None)
            row = next(rows, None)
            if row is not None:
                return row
    return None

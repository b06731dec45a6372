"""Reading the .jsonl files of a run directory: whole rows, over all parts of a file, and of what was done
again the newest attempt.

A row is one line. Only the last line of the last part can be torn: its writer was killed, or is writing it;
readers leave it out and say so.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir, list_parts, part_path

LINE_BYTES = 1 << 16  # of a row, at most, where a file has lost its end
Row = dict[str, Any]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_decode = msgspec.json.Decoder().decode


def parse_row(line: bytes) -> Row | None:
    """The JSON object on a line, None if there is none.

    The standard library's parser is asked where msgspec's refuses: it takes NaN and half surrogates, which
    other writers' JSON may hold.
    """
    for parse in (_decode, json.loads):
        with suppress(ValueError, RecursionError):
            row = parse(line)
            return row if isinstance(row, dict) else None
    return None


def read_rows(path: Path) -> list[Row]:
    """The rows of iterate_rows in a list."""
    return list(iterate_rows(path, report=lambda text: None))


def iterate_rows(path: Path, *, report: Callable[[str], object]) -> Iterator[Row]:
    """The rows of all parts of a .jsonl file, one by one, none if it is missing. A torn last line, as a
    running or killed writer leaves, is left out.

    `report` is called with a sentence when a line was left out. Raises RunDirError naming file and line for
    anything else that is not a JSON object.
    """
    parts = list_parts(path)
    for part in parts:
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = parse_row(line)
                if row is not None:
                    yield row
                elif line.endswith(b"\n") or part is not parts[-1]:
                    raise RunDirError(
                        f"{part}:{number} is not a JSON object ({line[:40]!r}…); the file is damaged:"
                        " restore it, or delete that line"
                    )
                else:
                    report(
                        f"{part}: the last line is torn ({len(line)} bytes) and left out; its writer was"
                        " killed, or is writing it"
                    )


class Place(msgspec.Struct, frozen=True):
    """A place in a .jsonl file: the beginning of a row."""

    part: NonNegative = 0  # 0 is NAME.jsonl, n is NAME.n.jsonl
    offset: NonNegative = 0  # bytes from the beginning of the part


def read_lines(path: Path, place: Place) -> Iterator[tuple[bytes, Place]]:
    """Each whole line after a place, over the parts, with the place after it. A line without its newline is
    waited for. Raises OSError.
    """
    part, offset, has_next = place.part, place.offset, True
    while has_next:
        # looked at before the part is read: a part begins when the last row of the one before is written
        has_next = part_path(path, part + 1).exists()
        with suppress(FileNotFoundError), part_path(path, part).open("rb") as file:
            # at the beginning of a line also where a power cut has taken the file's end, and rows were added
            offset = min(offset, file.seek(0, os.SEEK_END))
            begin = file.seek(max(0, offset - LINE_BYTES))
            file.seek(begin + file.read(offset - begin).rfind(b"\n") + 1)
            while (line := file.readline()).endswith(b"\n"):
                yield line, Place(part, file.tell())
        part, offset = part + 1, 0


def newest_attempts(rows: Iterable[Row]) -> list[Row]:
    """The rows of the highest attempt per (stage, step), and per name where rows have one, in the order of
    the file.
    """
    held = [
        ((row.get("stage"), row.get("step"), row.get("name")), row.get("attempt", 0), row) for row in rows
    ]
    newest: dict[object, int] = {}
    for place, attempt, _ in held:
        newest[place] = max(newest.get(place, 0), attempt)
    return [row for place, attempt, row in held if attempt == newest[place]]


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
    return 1 + max(map(read_last_attempt, run_dir.row_files))


def read_last_attempt(path: Path) -> int:
    """The attempt of the last whole row of a .jsonl file, 0 if there is none: attempts never decrease in a
    file, and long ones are slow to read.
    """
    for part in reversed(list_parts(path)):
        for line in read_backwards(part):
            if (row := parse_row(line)) is not None:
                return row.get("attempt") or 0
    return 0


def read_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file from its last to its first, each with its newline where it has one."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            while end > 0:
                begin = view.rfind(b"\n", 0, end - 1) + 1
                yield view[begin:end]
                end = begin

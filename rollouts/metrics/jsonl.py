"""The .jsonl files of a run directory, which grow by whole rows, and are read as whole rows, over all parts
of a file, and of what was done again the newest attempt.

    RecordFile.append(data) ─► NAME.jsonl, NAME.1.jsonl, …  whole lines, in one write, to a file opened for
                                                            appending

A row is one line. Only the last line of the last part can be torn: its writer was killed, or is writing it;
readers leave it out and say so. A part is flushed to the device before the next is begun.

A file is never renamed, and where parts are limited the oldest go. It is cut in two cases only: a torn last
line is repaired by the next attempt when it opens the file, and what a refused write has left is cut off
before the next.
"""

import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollouts.errors import RecordLost, RunDirError, StorageError
from rollouts.protocols import Say
from rollouts.run_dir import RunDir, list_parts, parse_part, part_path

LINE_BYTES = 1 << 16  # of a row, at most, where a file has lost its end
PART_BYTES = 256 << 20  # a part that has reached this is complete
WAITING_BYTES = 1 << 26  # of one file's data that wait for a disk that refuses them
Row = dict[str, Any]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_decode = msgspec.json.Decoder().decode


def parse_row(line: bytes) -> Row | None:
    """The JSON object on a line; None if there is none, or its stage, step or attempt is none.

    The standard library's parser is asked where msgspec's refuses: it takes NaN and half surrogates, which
    other writers' JSON may hold.
    """
    for parse in (_decode, json.loads):
        with suppress(ValueError, RecursionError):
            row = parse(line)
            if not isinstance(row, dict) or not isinstance(row.get("stage", ""), str):
                return None
            counts = row.get("step"), row.get("attempt")
            return row if all(isinstance(one, int | None) for one in counts) else None
    return None


def read_rows(path: Path) -> list[Row]:
    """The rows of iterate_rows in a list."""
    return list(iterate_rows(path, report=lambda text: None))


def iterate_rows(path: Path, *, report: Say) -> Iterator[Row]:
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
    newest = {}
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
    first = {}  # stage → attempt → the first step that it trained
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
    file, and long ones are slow to read. Raises StorageError for what cannot be read.
    """
    try:
        lines = chain.from_iterable(map(read_backwards, reversed(list_parts(path))))
        return next((row.get("attempt") or 0 for row in map(parse_row, lines) if row is not None), 0)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}); restore it, or move it away") from error


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


# --- writing ------------------------------------------------------------------------------------------------


class AppendedFile:
    """A file that grows by whole pieces. What a refused piece leaves is cut off, at the latest before the
    next.
    """

    def __init__(self, path: Path, flags: int = 0) -> None:
        """Makes the file if it is missing. Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o644)
        self.end = os.fstat(self.descriptor).st_size  # bytes of whole pieces

    def append(self, data: bytes) -> None:
        """Writes `data` in one call; a short write (a disk that fills up) is continued until the system
        refuses with its own OSError.
        """
        if os.fstat(self.descriptor).st_size != self.end:
            os.ftruncate(self.descriptor, self.end)
        written = 0
        try:
            while written < len(data):
                written += os.write(self.descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.end)
            raise
        self.end += written

    def is_kept(self) -> bool:
        """Whether the path still names this file, with all that was written to it."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that does not answer says nothing
            return True
        return found.st_size >= self.end and os.path.samestat(found, os.fstat(self.descriptor))

    def close(self) -> None:
        """Flushes the file to the device and closes it. Raises OSError, closed all the same."""
        try:
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


class RecordFile:
    """One file of the record, rows in parts that grow to a limit, or the lines of updates.log: repaired at
    once, made with its first line, flushed by `close`. The methods block; they are called by one thread at a
    time, off the event loop.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        """Makes the last part end in a whole line: cuts a torn one off, but gives a last row that is whole
        the newline that it lacks. keep: parts that stay when another is begun; 0: all. Raises OSError.
        """
        self._path, self._keep = path, keep
        self._waiting = b""  # what the disk refused
        self.lost = ""  # what happened, once somebody has taken rows away
        self._repair()
        parts = list_parts(path)  # opened at once: from now on it is noticed if it vanishes
        self._part = AppendedFile(parts[-1]) if parts else None

    def _repair(self) -> None:
        path = self._path
        for part in list_parts(path)[-1:]:
            last = next(read_backwards(part), b"\n")
            if last.endswith(b"\n"):
                continue
            if path.suffix == ".jsonl" and parse_row(last) is not None:
                with part.open("ab") as file:
                    file.write(b"\n")
            else:
                os.truncate(part, part.stat().st_size - len(last))

    def append(self, data: bytes) -> None:
        """Appends whole lines.

        What the disk refuses waits in memory, is said once, and is written with what comes next. Raises
        StorageError when too much waits.
        """
        assert not data or data.endswith(b"\n"), self._path
        was_refused, self._waiting = bool(self._waiting), self._waiting + data
        try:
            self._write_waiting()
        except StorageError as error:
            if len(self._waiting) > WAITING_BYTES:
                raise
            if not was_refused:
                logging.getLogger("rollouts").warning(
                    "warning: %s; rows wait in memory until it takes them", error
                )

    def close(self) -> None:
        """Writes what waits, flushes the file to the device and closes it. Raises StorageError if the disk
        still refuses: rows are lost. Raises RecordLost where rows were taken away.
        """
        try:
            self._write_waiting()
            self._look()
            if self.lost:
                raise RecordLost(self.lost)
        finally:
            if self._part:
                self._part.close()

    def _write_waiting(self) -> None:
        """All or nothing. Raises StorageError."""
        try:
            if self._waiting:
                self._choose_part().append(self._waiting)
                self._waiting = b""
        except OSError as error:
            raise StorageError(
                f"rows of {self._path.name} cannot be written ({error}); free space, or point output.dir at"
                " another disk"
            ) from error

    def _look(self) -> None:
        """Another file in place of one that is not what was written."""
        if self._part and not self._part.is_kept():
            lost, self._part = self._part, None
            self.lost = (
                f"{lost.path} was deleted, moved or cut by someone else; what follows is in a file of that"
                " name, to be put behind what is left of the old one"
            )
            lost.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._repair()

    def _choose_part(self) -> AppendedFile:
        """The last part, or another where that is full and on the device."""
        self._look()
        part = self._part = self._part or AppendedFile((list_parts(self._path) or [self._path])[-1])
        if part.end >= PART_BYTES and self._path.suffix == ".jsonl":
            self._part = None  # opened again if what follows is refused
            part.close()
            number = parse_part(self._path, part.path.name) or 0
            part = self._part = AppendedFile(part_path(self._path, number + 1), os.O_EXCL)
            for old in list_parts(self._path)[: -self._keep] if self._keep else ():
                old.unlink()
        return part

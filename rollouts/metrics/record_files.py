"""A file that a run's record is written to: rows in parts that grow to a limit, or the lines of updates.log.

    append(data) ─► NAME.jsonl, NAME.1.jsonl, …  whole lines, in one write, to a file opened for appending

A file is never renamed. It is cut in two cases only: a process that was killed inside a write can leave a
torn last line, which the next attempt repairs when it opens the file, and what a refused write has left is
cut off before the next. Only the last part of a file can be torn: a part is flushed to the device before the
next is begun. The methods block; they are called by one thread at a time, off the event loop.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from rollouts.errors import StorageError
from rollouts.metrics.jsonl import parse_row, read_backwards
from rollouts.run_dir import list_parts, parse_part, part_path

PART_BYTES = 256 << 20  # a part that has reached this is complete
WAITING_BYTES = 1 << 26  # of one file's data that wait for a disk that refuses them
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class RecordFile:
    """One file of the record: repaired at once, made with its first line, flushed by `close`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be repaired."""
        self._path = path
        self._file = -1  # descriptor of the last part
        self._number = self._end = 0  # of the last part, and bytes of its whole lines
        self._waiting = b""  # what the disk refused
        repair_last_line(path)

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
                text = "warning: %s; rows wait in memory until it takes them"
                logging.getLogger("rollouts").warning(text, error)

    def close(self) -> None:
        """Writes what waits, flushes the file to the device and closes it. Raises StorageError if the disk
        still refuses: rows are lost.
        """
        try:
            self._write_waiting()
        finally:
            if self._file >= 0:
                try:
                    os.fsync(self._file)
                finally:
                    os.close(self._file)

    def _write_waiting(self) -> None:
        """All or nothing: what a refused write leaves is cut off, at the latest before the next. Raises
        StorageError.
        """
        try:
            if self._waiting:
                self._choose_part()
                if os.fstat(self._file).st_size != self._end:
                    os.ftruncate(self._file, self._end)
                write_whole(self._file, self._waiting)
                self._end += len(self._waiting)
                self._waiting = b""
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise StorageError(
                f"rows of {self._path.name} cannot be written ({error}); free space, or point output.dir at"
                " another disk"
            ) from error

    def _choose_part(self) -> None:
        """Opens the last part, or begins another where it is full and on the device."""
        if self._file < 0:
            last = (list_parts(self._path) or [self._path])[-1]
            self._file = os.open(last, FLAGS, 0o644)
            self._number, self._end = parse_part(self._path, last.name) or 0, os.fstat(self._file).st_size
        if self._end >= PART_BYTES and self._path.suffix == ".jsonl":
            os.fsync(self._file)
            full, following = self._file, part_path(self._path, self._number + 1)
            self._file = os.open(following, FLAGS | os.O_EXCL, 0o644)
            self._number, self._end = self._number + 1, 0
            os.close(full)


def write_whole(file: int, data: bytes) -> None:
    """Writes `data` in one call; a short write (a disk that fills up) is continued until the system refuses
    with its own OSError.
    """
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def repair_last_line(path: Path) -> None:
    """Makes the last part of a file of lines end in a whole line: cuts a torn one off, but gives a last row
    that is whole the newline that it lacks.
    """
    for part in list_parts(path)[-1:]:
        last = next(read_backwards(part), b"\n")
        if last.endswith(b"\n"):
            return
        if path.suffix == ".jsonl" and parse_row(last) is not None:
            with part.open("ab") as file:
                file.write(b"\n")
        else:
            os.truncate(part, part.stat().st_size - len(last))

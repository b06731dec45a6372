"""The files that a run's record is written to: rows in parts that grow to a limit, and the lines of
updates.log.

    append(name, data) ─► NAME.jsonl, NAME.1.jsonl, …  whole lines, in one write, to a file opened for
        appending

A file is never renamed. It is cut in two cases only: a process that was killed inside a write can leave a
torn last line, which the next attempt repairs when it opens the file, and what a refused write has left is
cut off before the next. Only the last part of a file can be torn: a part is flushed to the device before the
next is begun. The methods block; they are called by one thread at a time, off the event loop.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rollouts.errors import StorageError
from rollouts.metrics.jsonl import parse_row, read_backwards
from rollouts.run_dir import RunDir, list_parts, parse_part, part_path

PART_BYTES = 256 << 20  # a part that has reached this is complete
WAITING_BYTES = 1 << 26  # of one file's data that wait for a disk that refuses them
ALWAYS = ("metrics", "samples", "evaluations")  # made at once; the others with their first row
UPDATES = "updates"  # the name of updates.log, the only file that is not of rows and has one part
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


@dataclass(slots=True)
class _Growing:
    """The part of a file that is written to."""

    path: Path
    file: int  # descriptor
    end: int  # bytes of whole lines


class RecordFiles:
    """The files of one run, repaired and open for appending. `close` flushes them to the device."""

    def __init__(self, run_dir: RunDir, *, part_bytes: int = PART_BYTES) -> None:
        """Raises OSError where the directory or a file cannot be made or opened."""
        assert part_bytes >= 1, part_bytes
        self._paths = {path.stem: path for path in run_dir.row_files} | {UPDATES: run_dir.updates_log}
        self._part_bytes = part_bytes
        self._growing: dict[str, _Growing] = {}
        self._waiting: dict[str, bytes] = {}  # what the disk refused, by name
        self._refused = False  # whether that was said
        run_dir.root.mkdir(parents=True, exist_ok=True)
        self.repaired_bytes = sum(repair_last_line(path) for path in self._paths.values())
        with ExitStack() as stack:
            stack.callback(self._close_files)
            for name in ALWAYS:
                self._open_last(name)
            stack.pop_all()

    def append(self, name: str, data: bytes) -> None:
        """Appends whole lines to the file `name`: metrics, samples, evaluations, contributions, spans or
        updates.

        What the disk refuses waits in memory, is said once, and is written with what comes next. Raises
        StorageError when too much waits.
        """
        assert name in self._paths and (not data or data.endswith(b"\n")), name
        data = self._waiting.get(name, b"") + data
        try:
            if data:
                self._write(name, data)
        except OSError as error:
            self._waiting[name] = data
            refusal = self._describe(name, error)
            if len(data) > WAITING_BYTES:
                raise refusal from error
            if not self._refused:
                logging.getLogger("rollouts").warning(
                    "warning: %s; rows wait in memory until it takes them", refusal
                )
            self._refused = True
        else:
            self._waiting.pop(name, None)
            self._refused = self._refused and bool(self._waiting)

    def close(self) -> None:
        """Writes what waits, flushes the files to the device and closes them. Raises StorageError if the disk
        still refuses: rows are lost.
        """
        try:
            for name, data in self._waiting.items():
                try:
                    self._write(name, data)
                except OSError as error:
                    raise self._describe(name, error) from error
        finally:
            self._close_files()

    def _describe(self, name: str, error: OSError) -> StorageError:
        return StorageError(
            f"rows of {self._paths[name].name} cannot be written ({error}); free space, or point output.dir"
            " at another disk"
        )

    def _write(self, name: str, data: bytes) -> None:
        """All or nothing: what a refused write leaves is cut off, at the latest before the next. Raises
        OSError.
        """
        growing = self._growing.get(name) or self._open_last(name)
        if growing.end >= self._part_bytes and name != UPDATES:
            growing = self._open_next(name, growing)
        if os.fstat(growing.file).st_size != growing.end:
            os.ftruncate(growing.file, growing.end)
        try:
            write_whole(growing.file, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(growing.file, growing.end)
            raise
        growing.end += len(data)

    def _open_last(self, name: str) -> _Growing:
        """The last part there is, made if there is none."""
        path = (list_parts(self._paths[name]) or [self._paths[name]])[-1]
        file = os.open(path, FLAGS, 0o644)
        self._growing[name] = _Growing(path, file, os.fstat(file).st_size)
        return self._growing[name]

    def _open_next(self, name: str, full: _Growing) -> _Growing:
        """The part after `full`, which is on the device before the next has its name."""
        os.fsync(full.file)
        number = parse_part(self._paths[name], full.path.name)
        assert number is not None, full.path
        path = part_path(self._paths[name], number + 1)
        self._growing[name] = _Growing(path, os.open(path, FLAGS | os.O_EXCL, 0o644), 0)
        os.close(full.file)
        return self._growing[name]

    def _close_files(self) -> None:
        with ExitStack() as stack:
            for growing in self._growing.values():
                stack.callback(os.close, growing.file)
                stack.callback(os.fsync, growing.file)
            self._growing.clear()


def write_whole(file: int, data: bytes) -> None:
    """Writes `data` in one call; a short write (a disk that fills up) is continued until the system refuses
    with its own OSError.
    """
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def repair_last_line(path: Path) -> int:
    """Bytes cut off the last part of a file of lines to make it end in a whole line; 0 for a file that is
    whole, missing or empty.

    A last row that is whole but for its newline is kept and gets the newline.
    """
    for part in list_parts(path)[-1:]:
        torn = next(read_backwards(part), b"\n")
        if torn.endswith(b"\n"):
            return 0
        with part.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if path.suffix == ".jsonl" and parse_row(torn) is not None:
                file.write(b"\n")
                return 0
            file.truncate(size - len(torn))
            return len(torn)
    return 0

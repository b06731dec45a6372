"""How far a tracker has followed a run: RUN/trackers/NAME.json, and the rows after that place.

    files     where the next row begins, per file        everything before it was taken
    sending   where the rows being sent end              stored before they are sent: after a kill exactly these are sent again
    number    rows taken so far
    handed    rows that a library took after these, without saying whether the service has them: sent again after a kill
    mark      what the sink said of them
"""

from __future__ import annotations

import heapq
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir
from rollouts.trackers.sinks import Mark, TrackedRow

SCHEMA = 1
BATCH_BYTES = 8 << 20  # of one batch; a single longer row is a batch of its own


class Place(NamedTuple):
    """A place in a file of the run."""

    part: int  # 0 is NAME.jsonl, n is NAME.n.jsonl
    offset: int  # bytes from the beginning of the part, always the beginning of a row


@dataclass(frozen=True, slots=True)
class Position:
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: Mapping[str, Place] = field(default_factory=dict)  # a file that is not in it begins at its beginning
    sending: Mapping[str, Place] | None = None
    number: int = 0
    handed: int = 0
    mark: Mark | None = None

    def place(self, file: str) -> Place:
        return self.files.get(file, Place(0, 0))


class Batch(NamedTuple):
    """Rows to send, and where each file's next row begins after them."""

    rows: list[TrackedRow]
    ends: dict[str, Place]


def position_path(root: Path, name: str) -> Path:
    return root / "trackers" / f"{name}.json"


def read_position(path: Path) -> Position | None:
    """None where there is none yet. Raises RunDirError for a file that says something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        held = json.loads(text)
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {held['schema']}, not {SCHEMA}")
        sending = held["sending"]
        return Position(
            id=str(held["id"]),
            files=_parse_places(held["files"]),
            sending=None if sending is None else _parse_places(sending),
            number=int(held["number"]),
            handed=int(held["handed"]),
            mark=held["mark"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError(f"{path} does not say how far the tracker is ({error!r}); remove it to send the whole run again, as a new one") from error


def write_position(path: Path, position: Position) -> None:
    """The whole position under this name, on disk when this returns, or what was there before. Raises OSError."""
    held = {
        "schema": SCHEMA,
        "id": position.id,
        "files": _dump_places(position.files),
        "sending": None if position.sending is None else _dump_places(position.sending),
        "number": position.number,
        "handed": position.handed,
        "mark": position.mark,
    }
    partial = path.with_name(f".tmp-{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(held, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def open_position(path: Path) -> Position:
    """The stored position; a new one is stored first, so that a kill never gives a run two identities. Raises OSError, RunDirError."""
    position = read_position(path)
    if position is None:
        path.parent.mkdir(exist_ok=True)
        position = Position(uuid.uuid4().hex)
        write_position(path, position)
    return position


def advance(position: Position, ends: Mapping[str, Place], rows: int, mark: Mark | None) -> Position:
    """The position after `rows` rows up to `ends` were taken. A sink that says no mark keeps its last one."""
    return replace(
        position, files={**position.files, **ends}, sending=None, number=position.number + rows, mark=position.mark if mark is None else mark
    )


# --- the rows after a position -----------------------------------------------------------------------------------------------


def read_batch(
    root: Path, files: Sequence[str], position: Position, *, limit: int, say: Callable[[str], None], batch_bytes: int = BATCH_BYTES
) -> Batch:
    """Whole rows after the position: exactly the ones being sent if some are, else up to `limit`, of all files together by their time.

    Within a file rows keep their order. A line that is no row is passed over and said; one without its newline is waited for. Raises OSError.
    """
    sources = [_read_lines(root, file, position, say) for file in files]
    rows: list[TrackedRow] = []
    ends: dict[str, Place] = {}
    size = 0
    for line in heapq.merge(*sources, key=lambda line: line.time_unix):
        if position.sending is None and (len(rows) == limit or (rows and size + line.size > batch_bytes)):
            break
        size += line.size
        ends[line.file] = line.end
        if line.row is not None:
            rows.append(TrackedRow(line.file, line.row, position.number + len(rows)))
    return Batch(rows, ends if position.sending is None else dict(position.sending))


def count_unsent(root: Path, files: Sequence[str], position: Position) -> int:
    """Bytes of rows that were not taken yet."""
    unsent = 0
    for file in files:
        part, offset = position.place(file)
        while (path := part_path(root, file, part)).exists():
            unsent += max(0, path.stat().st_size - offset)
            part, offset = part + 1, 0
    return unsent


def part_path(root: Path, file: str, part: int) -> Path:
    """The file that holds a part of a record: part 0 has the plain name."""
    return root / (f"{file}.jsonl" if part == 0 else f"{file}.{part}.jsonl")


class _Line(NamedTuple):
    time_unix: float
    file: str
    row: Mapping[str, Any] | None  # None: a line that is no row
    end: Place
    size: int


def _read_lines(root: Path, file: str, position: Position, say: Callable[[str], None]) -> Iterator[_Line]:
    """The whole lines of a file after its place; up to the end of what is being sent if something is."""
    part, offset = position.place(file)
    stop = None if position.sending is None else position.sending.get(file, Place(part, offset))
    while True:
        # Looked at before the part is read: the writer begins a part only when it has written the last row of the one before.
        has_next = part_path(root, file, part + 1).exists()
        for line, end in _read_part(part_path(root, file, part), offset, last=not has_next, say=say):
            if stop is not None and Place(part, offset) >= stop:
                return
            offset = end
            row = _parse_row(line)
            if row is None:
                say(f"{part_path(root, file, part).name}: no row ends at byte {end} ({line[:40]!r}…): passed over")
            time_unix = float("-inf") if row is None else float(row["time_unix"])
            yield _Line(time_unix, file, row, Place(part, end), len(line))
        if not has_next or (stop is not None and Place(part, offset) >= stop):
            return
        part, offset = part + 1, 0


def _read_part(path: Path, offset: int, *, last: bool, say: Callable[[str], None]) -> Iterator[tuple[bytes, int]]:
    """(line, where the next begins). A line without a newline is left where it is in the last part, for more of it may come."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if offset:
            offset = _find_row_start(file.fileno(), path, offset, say)
            file.seek(offset)
        for line in file:
            if not line.endswith(b"\n") and last:
                return
            offset += len(line)
            yield line, offset


def _find_row_start(descriptor: int, path: Path, offset: int, say: Callable[[str], None]) -> int:
    """`offset`, or the beginning of the line before it where no row begins there: a power cut took the file's end, and others were written since."""
    size = os.fstat(descriptor).st_size
    if offset <= size and os.pread(descriptor, 1, offset - 1) == b"\n":
        return offset
    start = min(offset, size)
    while start > 0 and os.pread(descriptor, 1, start - 1) != b"\n":
        start -= 1
    say(f"{path.name} is not what it was at byte {offset}, as after a power cut: goes on at byte {start}")
    return start


def _parse_row(line: bytes) -> Mapping[str, Any] | None:
    """A row with the fields that every row has."""
    try:
        row = json.loads(line)
        whole = isinstance(row["stage"], str) and isinstance(row["step"], int) and isinstance(row["attempt"], int)
        float(row["time_unix"])
    except (ValueError, KeyError, TypeError):
        return None
    return row if whole else None


def _parse_places(held: Mapping[str, Any]) -> dict[str, Place]:
    places = {file: Place(int(place["part"]), int(place["offset"])) for file, place in held.items()}
    if any(part < 0 or offset < 0 for part, offset in places.values()):
        raise ValueError(f"a place below 0 in {held}")
    return places


def _dump_places(places: Mapping[str, Place]) -> dict[str, dict[str, int]]:
    return {file: place._asdict() for file, place in places.items()}


def check_followable(run_dir: RunDir) -> None:
    """Raises RunDirError if this is no run directory."""
    if not run_dir.root.is_dir():
        raise RunDirError(f"{run_dir.root} is not a directory; name a run directory, for example one in runs/")
    if not any(path.exists() for path in (run_dir.config, run_dir.metrics, run_dir.evaluations)):
        raise RunDirError(f"{run_dir.root} has neither config.toml nor metrics.jsonl: it is not a run directory")

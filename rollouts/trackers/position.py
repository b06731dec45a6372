"""How far a tracker has followed a run: RUN/trackers/NAME.json, and the rows after that place.

files     where the next row begins, per file        everything before it was taken
sending   where the rows being sent end              stored before they are sent: after a kill exactly these are sent again
number    rows taken so far, or left out
left_out  how many of them the service refused for good, and which was the last
handed    rows that a library took after these, without saying whether the service has them: sent again after a kill
mark      what the sink said of them
"""

from __future__ import annotations

import heapq
import json
import math
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
TAIL_BYTES = 1 << 16  # of a file's end that are read at once when its last newline is looked for


class Place(NamedTuple):
    """A place in a file of the run."""

    part: int  # 0 is NAME.jsonl, n is NAME.n.jsonl
    offset: int  # bytes from the beginning of the part, always the beginning of a row


class LeftOut(NamedTuple):
    """Rows that the tracker's service refused for good."""

    rows: int = 0
    last: str = ""  # which row was the last of them


@dataclass(frozen=True, slots=True)
class Position:
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: Mapping[str, Place] = field(
        default_factory=dict
    )  # a file that is not in it begins at its beginning
    sending: Mapping[str, Place] | None = None
    number: int = 0
    handed: int = 0
    mark: Mark | None = None
    left_out: LeftOut = field(default_factory=LeftOut)

    def place(self, file: str) -> Place:
        return self.files.get(file, Place(0, 0))


class Batch(NamedTuple):
    """Rows to send, and where each file's next row begins after them."""

    rows: list[TrackedRow]
    ends: dict[str, Place]
    places: list[Place]  # for each row, where the next one of its file begins

    def find_ends(self, begin: int, end: int) -> dict[str, Place]:
        """Where each file's next row begins after rows `begin` to `end` of the batch, without what was passed
        over after the last of them.
        """
        return {
            row.file: place for row, place in zip(self.rows[begin:end], self.places[begin:end], strict=True)
        }


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
            left_out=(
                LeftOut(int(held["left_out"]["rows"]), str(held["left_out"]["last"]))
                if "left_out" in held
                else LeftOut()
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError(
            f"{path} does not say how far the tracker is ({error!r}); remove it to send the whole run again,"
            " as a new one"
        ) from error


def write_position(path: Path, position: Position) -> None:
    """The whole position under this name, on disk when this returns, or what was there before. Raises
    OSError.
    """
    held = {
        "schema": SCHEMA,
        "id": position.id,
        "files": _dump_places(position.files),
        "sending": None if position.sending is None else _dump_places(position.sending),
        "number": position.number,
        "handed": position.handed,
        "mark": position.mark,
        "left_out": position.left_out._asdict(),
    }
    partial = path.with_name(f".tmp-{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(held, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def open_position(path: Path) -> Position:
    """The stored position; a new one is stored first, so that a kill never gives a run two identities. Raises
    OSError, RunDirError.
    """
    position = read_position(path)
    if position is None:
        path.parent.mkdir(exist_ok=True)
        position = Position(uuid.uuid4().hex)
        write_position(path, position)
    return position


def advance(position: Position, ends: Mapping[str, Place], rows: int, mark: Mark | None) -> Position:
    """The position after `rows` rows up to `ends` were taken. A sink that says no mark keeps its last one."""
    return replace(
        position,
        files={**position.files, **ends},
        sending=None,
        number=position.number + rows,
        mark=position.mark if mark is None else mark,
    )


def describe_left_out(position: Position) -> str:
    """What the tracker will never have, empty where that is nothing."""
    rows, last = position.left_out
    values = (position.mark or {}).get(
        "left_out"
    )  # of a sink whose service may take a batch without some of its values
    said = [f"{rows} refused for good and left out, the last: {last}"] if rows else []
    said += [f"{values} values left out by the service"] if isinstance(values, int) and values else []
    return "; ".join(said)


# --- the rows after a position ------------------------------------------------------------------------------


def read_batch(
    root: Path,
    files: Sequence[str],
    position: Position,
    *,
    limit: int,
    say: Callable[[str], None],
    batch_bytes: int = BATCH_BYTES,
) -> Batch:
    """Whole rows after the position: exactly the ones being sent if some are, else up to `limit`, of all
    files together by their time.

    Within a file rows keep their order. A line that is no row is passed over and said; one without its
    newline is waited for. Raises OSError.
    """
    sources = [_read_lines(root, file, position, say) for file in files]
    rows: list[TrackedRow] = []
    ends: dict[str, Place] = {}
    places: list[Place] = []
    size = 0
    for line in heapq.merge(*sources, key=lambda line: line.time_unix):
        if position.sending is None and (len(rows) == limit or (rows and size + line.size > batch_bytes)):
            break
        size += line.size
        ends[line.file] = line.end
        if line.row is not None:
            rows.append(TrackedRow(line.file, line.row, position.number + len(rows)))
            places.append(line.end)
    return Batch(rows, ends if position.sending is None else dict(position.sending), places)


def count_unsent(root: Path, files: Sequence[str], position: Position) -> int:
    """Bytes of rows that were not taken yet. A torn last line, as a killed writer leaves, is no row. Raises
    OSError.
    """
    unsent = 0
    for file in files:
        part, offset = position.place(file)
        while (path := part_path(root, file, part)).exists():
            has_next = part_path(root, file, part + 1).exists()
            unsent += max(0, (path.stat().st_size if has_next else find_last_row_end(path, offset)) - offset)
            part, offset = part + 1, 0
    return unsent


def find_last_row_end(path: Path, start: int) -> int:
    """Where the last line of a file ends that has its newline; `start` if none that begins after it has one.
    Raises OSError.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > start:
            begin = max(start, end - TAIL_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return start


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
        # Looked at before the part is read: the writer begins a part only when it has written the last row of
        # the one before.
        has_next = part_path(root, file, part + 1).exists()
        for line, end in _read_part(part_path(root, file, part), offset, last=not has_next, say=say):
            if stop is not None and Place(part, offset) >= stop:
                return
            offset = end
            row = _parse_row(line)
            if row is None:
                say(
                    f"{part_path(root, file, part).name}: no row ends at byte {end} ({line[:40]!r}…): passed"
                    " over"
                )
            time_unix = float("-inf") if row is None else float(row["time_unix"])
            yield _Line(time_unix, file, row, Place(part, end), len(line))
        if not has_next or (stop is not None and Place(part, offset) >= stop):
            return
        part, offset = part + 1, 0


def _read_part(
    path: Path, offset: int, *, last: bool, say: Callable[[str], None]
) -> Iterator[tuple[bytes, int]]:
    """(line, where the next begins). A line without a newline is left where it is in the last part, for more
    of it may come.
    """
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
    """`offset`, or the beginning of the line before it where no row begins there: a power cut took the file's
    end, and others were written since.
    """
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
        whole = (
            isinstance(row["stage"], str) and isinstance(row["step"], int) and isinstance(row["attempt"], int)
        )
        timed = isinstance(row["time_unix"], int | float) and math.isfinite(row["time_unix"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return row if whole and timed else None


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
        raise RunDirError(
            f"{run_dir.root} is not a directory; name a run directory, for example one in runs/"
        )
    if not any(path.exists() for path in (run_dir.config, run_dir.metrics, run_dir.evaluations)):
        raise RunDirError(
            f"{run_dir.root} has neither config.toml nor metrics.jsonl: it is not a run directory"
        )

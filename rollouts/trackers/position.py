"""How far a tracker has followed a run, in RUN/trackers/NAME.json, and the rows after that place.

files     where the next row begins, per file: everything before it was taken
number    rows taken so far, or left out
left_out  how many of them the service refused for good, and which was the last
mark      what the sink said of them
"""

from __future__ import annotations

import heapq
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import RunDirError
from rollouts.trackers.sinks import Mark, Place, TrackedRow

SCHEMA = 1


class LeftOut(NamedTuple):
    """Rows that the tracker's service refused for good."""

    rows: int = 0
    last: str = ""  # which row was the last of them


NOTHING = LeftOut()


@dataclass(frozen=True, slots=True)
class Position:
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: Mapping[str, Place] = field(default_factory=dict)
    number: int = 0
    mark: Mark | None = None
    left_out: LeftOut = NOTHING

    def describe_left_out(self) -> str:
        """What the tracker will never have, empty where that is nothing."""
        rows, last = self.left_out
        values = (self.mark or {}).get("left_out")
        said = [f"{rows} refused for good and left out, the last: {last}"] if rows else []
        return "; ".join([*said, *([f"{values} values left out by the service"] if values else [])])


class Batch(NamedTuple):
    """Rows to send, and where each file's next row begins after them and the lines that are no rows."""

    rows: list[TrackedRow]
    ends: dict[str, Place]


def position_path(root: Path, name: str) -> Path:
    return root / "trackers" / f"{name}.json"


def read_position(path: Path) -> Position | None:
    """None where there is none yet. Raises RunDirError for a file that says something else."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {held['schema']}, not {SCHEMA}")
        files = {
            file: Place(int(place["part"]), int(place["offset"])) for file, place in held["files"].items()
        }
        if any(min(place) < 0 for place in files.values()):
            raise ValueError("a place below 0")
        left_out = LeftOut(**held.get("left_out", {}))
        return Position(str(held["id"]), files, int(held["number"]), held.get("mark"), left_out)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError(
            f"{path} does not say how far the tracker is ({error!r}); remove it to send the whole run again,"
            " as a new one"
        ) from error


def write_position(path: Path, position: Position) -> None:
    """The whole position is on disk under this name when this returns. Raises OSError."""
    held = {
        "schema": SCHEMA,
        "id": position.id,
        "files": {file: place._asdict() for file, place in position.files.items()},
        "number": position.number,
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


# --- the rows after a position ------------------------------------------------------------------------------


def read_batch(
    root: Path, files: Sequence[str], position: Position, *, limit: int, say: Callable[[str], None]
) -> Batch:
    """Up to `limit` whole rows after the position, of all files together by their time.

    Within a file rows keep their order. A line that is no row is passed over and said; one without its
    newline is waited for. Raises OSError.
    """
    sources = [read_lines(root, file, position.files.get(file, Place()), say) for file in files]
    batch = Batch([], {})
    for _, file, row, end in heapq.merge(*sources, key=lambda line: line[0]):
        if row is not None:
            if len(batch.rows) == limit:
                break
            batch.rows.append(TrackedRow(file, row, position.number + len(batch.rows), end))
        batch.ends[file] = end
    return batch


def read_lines(
    root: Path, file: str, place: Place, say: Callable[[str], None]
) -> Iterator[tuple[float, str, Mapping[str, Any] | None, Place]]:
    """(time, file, row, where the next row begins) of each whole line; row None: it is none."""
    part, offset = place
    while True:
        path = root / (f"{file}.{part}.jsonl" if part else f"{file}.jsonl")
        # Looked at before the part is read: a part begins when the last row of the one before is written.
        has_next = (root / f"{file}.{part + 1}.jsonl").exists()
        if path.exists():
            with path.open("rb") as opened:
                opened.seek(find_row_start(opened.fileno(), offset))
                for line in opened:
                    if not line.endswith(b"\n") and not has_next:
                        return
                    end = Place(part, opened.tell())
                    row = parse_row(line)
                    if row is None:
                        say(f"{path.name}: no row ends at byte {end.offset} ({line[:40]!r}…): passed over")
                    yield -math.inf if row is None else float(row["time_unix"]), file, row, end
        if not has_next:
            return
        part, offset = part + 1, 0


def find_row_start(descriptor: int, offset: int) -> int:
    """`offset`, or where its line begins: a power cut may have taken the file's end, and rows were added."""
    start = min(offset, os.fstat(descriptor).st_size)
    while start > 0 and os.pread(descriptor, 1, start - 1) != b"\n":
        start -= 1
    return start


def parse_row(line: bytes) -> Mapping[str, Any] | None:
    """A row with the fields that every row has; None for another line."""
    try:
        row = json.loads(line)
        kinds = (
            (row["stage"], str),
            (row["step"], int),
            (row["attempt"], int),
            (row["time_unix"], int | float),
        )
        whole = all(isinstance(value, kind) for value, kind in kinds) and math.isfinite(row["time_unix"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return row if whole else None

"""How far a tracker has followed a run, in RUN/trackers/NAME.json, and the rows after that place."""

from __future__ import annotations

import heapq
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.errors import RunDirError
from rollouts.trackers.sinks import NonNegative, Place, TrackedRow

SCHEMA = 1


class LeftOut(msgspec.Struct, frozen=True):
    """Rows that the tracker's service refused for good."""

    rows: int = 0
    last: str = ""  # which row was the last of them


class Position(msgspec.Struct, frozen=True):
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: dict[str, Place] = {}  # where the next row begins, per file: everything before it was taken
    number: NonNegative = 0  # rows taken so far, or left out
    mark: dict[str, Any] | None = None  # what the sink said of them
    left_out: LeftOut = LeftOut()
    schema: int = SCHEMA

    def describe_left_out(self) -> str:
        """What the tracker will never have, empty where that is nothing."""
        rows, values = self.left_out.rows, (self.mark or {}).get("left_out")
        said = [f"{rows} refused for good and left out, the last: {self.left_out.last}"] if rows else []
        return "; ".join([*said, *([f"{values} values left out by the service"] if values else [])])


class Batch(NamedTuple):
    """Rows to send, and where each file's next row begins after them and the lines that are no rows."""

    rows: list[TrackedRow]
    ends: dict[str, Place]


def position_path(root: Path, name: str) -> Path:
    """Where a tracker's position is."""
    return root / "trackers" / f"{name}.json"


def read_position(path: Path) -> Position | None:
    """None where there is none yet. Raises RunDirError for a file that says something else."""
    try:
        position = msgspec.json.decode(path.read_bytes(), type=Position)
        if position.schema != SCHEMA:
            raise ValueError(f"schema {position.schema}, not {SCHEMA}")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunDirError(
            f"{path} does not say how far the tracker is ({error}); remove it to send the whole run again,"
            " as a new one"
        ) from error
    return position


def write_position(path: Path, position: Position) -> None:
    """The whole position is on disk under this name when this returns. Raises OSError."""
    partial = path.with_name(f".tmp-{path.name}")
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(position), indent=1) + b"\n")
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
    part, offset, has_next = place.part, place.offset, True
    while has_next:
        path = root / (f"{file}.{part}.jsonl" if part else f"{file}.jsonl")
        # looked at before the part is read: a part begins when the last row of the one before is written
        has_next = (root / f"{file}.{part + 1}.jsonl").exists()
        if path.exists():
            with path.open("rb") as opened:
                offset = min(offset, os.fstat(opened.fileno()).st_size)
                while offset > 0 and os.pread(opened.fileno(), 1, offset - 1) != b"\n":
                    offset -= 1  # a power cut has taken the file's end, and rows were added
                opened.seek(offset)
                for line in opened:
                    if not line.endswith(b"\n") and not has_next:
                        return
                    row, end = parse_row(line), Place(part, opened.tell())
                    if row is None:
                        say(f"{path.name}: no row ends at byte {end.offset} ({line[:40]!r}…): passed over")
                    yield -math.inf if row is None else float(row["time_unix"]), file, row, end
        part, offset = part + 1, 0


def parse_row(line: bytes) -> Mapping[str, Any] | None:
    """A row with the fields that every row has; None for another line."""
    try:
        row = json.loads(line)
        kinds = {"stage": str, "step": int, "attempt": int, "time_unix": int | float}
        whole = all(isinstance(row[name], kind) for name, kind in kinds.items())
        return row if whole and math.isfinite(row["time_unix"]) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None

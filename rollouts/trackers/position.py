"""How far a tracker has followed a run, in RUN/trackers/NAME.json, and the rows after that place."""

import heapq
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import NonNegative, Place, read_lines
from rollouts.run_dir import replace_file
from rollouts.trackers.sinks import TrackedRow


class LeftOut(msgspec.Struct, frozen=True):
    """Rows that the tracker's service refused for good."""

    rows: int = 0
    last: str = ""  # which row was the last of them


class Position(msgspec.Struct):
    """How far one tracker has followed one run."""

    id: str  # 32 hex digits; the run's identity in the tracker
    files: dict[str, Place] = {}  # where the next row begins, per file: everything before it was taken
    number: NonNegative = 0  # rows taken so far, or left out
    mark: dict[str, Any] | None = None  # what the sink said of them
    left_out: LeftOut = LeftOut()
    schema: Literal[1] = 1

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


def read_position(path: Path) -> Position:
    """The stored position, a new one where there is none. Raises RunDirError for a file that says something
    else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Position)
    except FileNotFoundError:
        return Position(uuid.uuid4().hex)
    except ValueError as error:
        raise RunDirError(
            f"{path} does not say how far the tracker is ({error}); remove it to send the whole run again,"
            " as a new one"
        ) from error


def write_position(path: Path, position: Position) -> None:
    """The whole position is on disk under this name when this returns. Raises StorageError."""
    replace_file(path, [msgspec.json.format(msgspec.json.encode(position), indent=1), b"\n"])


# --- the rows after a position ------------------------------------------------------------------------------


class Head(msgspec.Struct):
    """What every row has."""

    stage: str
    step: int
    attempt: int
    time_unix: float


def read_batch(
    root: Path, files: Sequence[str], position: Position, *, limit: int, say: Callable[[str], None]
) -> Batch:
    """Up to `limit` whole rows after the position, of all files together by their time.

    Within a file rows keep their order. A line that is no row is passed over and said; one without its
    newline is waited for. Raises OSError.
    """
    rows: list[TrackedRow] = []
    ends: dict[str, Place] = {}
    sources = [parse_lines(root, file, position.files.get(file, Place()), say) for file in files]
    for _, file, row, end in heapq.merge(*sources, key=itemgetter(0)):
        if row is not None:
            if len(rows) == limit:
                break
            rows.append(TrackedRow(file, row, position.number + len(rows), end))
        ends[file] = end
    return Batch(rows, ends)


def parse_lines(
    root: Path, file: str, place: Place, say: Callable[[str], None]
) -> Iterator[tuple[float, str, Mapping[str, Any] | None, Place]]:
    """(time, file, row, where the next line begins) of each whole line; row None: it is none."""
    for line, end in read_lines(root / f"{file}.jsonl", place):
        try:
            row = msgspec.json.decode(line)
            yield msgspec.convert(row, Head).time_unix, file, row, end
        except (ValueError, RecursionError):
            say(f"{file}.jsonl: no row ends at byte {end.offset} ({line[:40]!r}…): passed over")
            yield -math.inf, file, None, end

"""spans.jsonl as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open: a
process for the run, a thread for each track.

    first pass:  when each span began and where its row lies ──► sorted ──► second pass: one event a span, in that order

The events of one thread must nest, so a track has lanes: one for its own work, and further ones for requests
that it answers at once. Only times and places are held in memory, 24 bytes a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from rollouts.errors import RunDirError, StorageError
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import RunDir

Attempts = dict[tuple[str, int], int]  # by stage and step
encode = msgspec.json.Encoder().encode
PID = 1
FIRST_TRACKS = ("trainer", "checkpoints", "rewards")  # engines come below them
# what a piece of work may seem to outlast the whole it is part of, because clocks were read one after the
# other
CLOCK_SLIP_US = 100
SORT_STEP = 1000  # between the places of tracks, so that their lanes fit in


def export_trace(root: Path, output: Path, *, steps: range | None = None) -> int:
    """How many spans were written to `output`, which appears when it is complete. Of a step that was
    repeated, the newest attempt's.

    Raises RunDirError where `root` has no spans (of these steps), or a file is damaged; StorageError where
    `output` cannot be written.
    """
    if not root.is_dir():
        raise RunDirError(f"{root} is not a directory; name a run directory, for example one in runs/")
    run_dir = RunDir(root)
    parts = run_dir.parts(run_dir.spans)
    newest = find_attempts(row for _, _, row in _iterate(parts))
    places = find_spans(parts, newest, steps)
    if not len(places):
        which = "spans.jsonl has no span" + (f" of steps {steps[0]} to {steps[-1]}" if steps else "")
        raise RunDirError(f"{root}: {which}; name the directory of a run that has trained a step")
    partial = output.with_name(f".tmp-{output.name}")
    try:
        with partial.open("wb") as file:
            _write_trace(file, run_dir, places, newest, steps)
        partial.replace(output)
    except OSError as error:
        raise StorageError(
            f"{output} cannot be written ({error}); name another file with --output FILE"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return len(places)


# --- first pass ---------------------------------------------------------------------------------------------

PLACE = np.dtype(
    [
        ("start_us", np.int64),
        ("shorter", np.int64),
        ("part", np.int32),
        ("size", np.int32),
        ("offset", np.int64),
    ]
)


def find_attempts(rows: Iterable[Row]) -> Attempts:
    """The highest attempt by stage and step."""
    newest: Attempts = {}
    for row in rows:
        key = row["stage"], row["step"]
        newest[key] = max(newest.get(key, 0), row["attempt"])
    return newest


def find_spans(parts: Sequence[Path], newest: Attempts, steps: range | None) -> np.ndarray:
    """Where the rows of the newest attempts lie, by the time at which their spans began, of equal times the
    longest first.
    """
    places = np.empty(1024, PLACE)
    count = 0
    for number, (offset, size), row in _iterate(parts):
        if newest[row["stage"], row["step"]] != row["attempt"] or (
            steps is not None and row["step"] not in steps
        ):
            continue
        if count == len(places):
            places = np.resize(places, 2 * count)
        start_us, end_us = _times_us(row)
        places[count] = (start_us, start_us - end_us, number, size, offset)
        count += 1
    found = places[:count]
    return found[np.lexsort((found["shorter"], found["start_us"]))]


def _iterate(parts: Sequence[Path]) -> Iterator[tuple[int, tuple[int, int], Row]]:
    """Part, place and row of every span. A torn last line is left out. Raises RunDirError for another line
    that is no span.
    """
    for number, path in enumerate(parts):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                row = parse_row(line)
                whole = line.endswith(b"\n")
                if (
                    row is not None
                    and has_place(row)
                    and all(isinstance(row.get(name), kind) for name, kind in SPAN_FIELDS)
                ):
                    yield number, (offset, len(line)), row
                elif whole:
                    raise RunDirError(
                        f"{path}: the line at byte {offset} is no span ({line[:40]!r}…); restore the file, or"
                        " delete that line"
                    )
                offset += len(line)


SPAN_FIELDS = (
    ("stage", str),
    ("name", str),
    ("track", str),
    ("start_unix", int | float),
    ("duration_s", int | float),
)


def _times_us(row: Row) -> tuple[int, int]:
    """Begin and end, microseconds since 1970."""
    return round(row["start_unix"] * 1e6), round((row["start_unix"] + row["duration_s"]) * 1e6)


# --- second pass --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Lane:
    """One thread of the trace."""

    tid: int
    ends: list[int] = field(default_factory=list)  # µs, of the spans that are open, the outermost first

    def fit(self, start_us: int, end_us: int, *, nests: bool) -> int | None:
        """When the span ends if it goes here, cut by what clocks may slip; None if it would cross one that is
        open, or lie in one and may not.
        """
        while self.ends and self.ends[-1] <= start_us:
            self.ends.pop()
        if not self.ends:
            return end_us
        if not nests or end_us > self.ends[-1] + CLOCK_SLIP_US:
            return None
        return min(end_us, self.ends[-1])


class _Lanes:
    """The threads of the trace so far: of each track its own work, and requests beside each other."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, bool], list[_Lane]] = {}
        self._places: dict[str, int] = {track: place for place, track in enumerate(FIRST_TRACKS)}
        self._count = 0

    def place(
        self, track: str, start_us: int, end_us: int, *, of_sample: bool
    ) -> tuple[int, int, list[dict[str, Any]]]:
        """Thread and end of a span, and the events that name the thread if it is new."""
        lanes = self._lanes.setdefault((track, of_sample), [])
        for lane in lanes:
            cut_us = lane.fit(start_us, end_us, nests=not of_sample)
            if cut_us is not None:
                lane.ends.append(cut_us)
                return lane.tid, cut_us, []
        self._count += 1
        lanes.append(_Lane(self._count, [end_us]))
        number = len(lanes)
        name = f"{track} · {number}" if of_sample or number > 1 else track
        order = (
            SORT_STEP * self._places.setdefault(track, len(self._places))
            + (SORT_STEP // 2 if of_sample else 0)
            + min(number, 400)
        )
        about = {"ph": "M", "pid": PID, "tid": self._count}
        return (
            self._count,
            end_us,
            [
                {**about, "name": "thread_name", "args": {"name": name}},
                {**about, "name": "thread_sort_index", "args": {"sort_index": order}},
            ],
        )


def _write_trace(
    file: IO[bytes], run_dir: RunDir, places: np.ndarray, newest: Attempts, steps: range | None
) -> None:
    origin_us = int(places["start_us"][0])
    about = {"run": run_dir.root.resolve().name, "start_unix": origin_us / 1e6}
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
    process = {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": about["run"]}}
    file.write(encode(process))
    events = _iterate_events(run_dir.parts(run_dir.spans), places, origin_us)
    for event in chain(events, _iterate_counters(run_dir, newest, origin_us, steps)):
        file.write(b",\n" + encode(event))
    file.write(b"\n]}\n")


def _iterate_events(parts: Sequence[Path], places: np.ndarray, origin_us: int) -> Iterator[dict[str, Any]]:
    lanes = _Lanes()
    files = [path.open("rb") for path in parts]
    try:
        for place in places:
            file = files[place["part"]]
            file.seek(int(place["offset"]))
            row = parse_row(file.read(int(place["size"])))
            assert row is not None, "a row that was read before is there no more: a run only appends"
            start_us, end_us = _times_us(row)
            tid, end_us, names = lanes.place(row["track"], start_us, end_us, of_sample="id" in row)
            yield from names
            yield {
                "ph": "X",
                "pid": PID,
                "tid": tid,
                "name": row["name"],
                "cat": row["stage"],
                "ts": start_us - origin_us,
                "dur": end_us - start_us,
                "args": {
                    key: row[key]
                    for key in ("step", "policy_version", "attempt", "id", "tokens")
                    if key in row
                },
            }
    finally:
        for file in files:
            file.close()


def _iterate_counters(
    run_dir: RunDir, spans: Attempts, origin_us: int, steps: range | None
) -> Iterator[dict[str, Any]]:
    """Requests that each member of a fleet answered and that waited, as the rows of metrics say, from the
    trace's beginning on.

    Of a step that was repeated, the newest attempt's; there may be spans of it and no row yet.
    """
    rows = find_attempts(_iterate_metrics(run_dir))
    for row in _iterate_metrics(run_dir):
        key = row["stage"], row["step"]
        if row["attempt"] < max(rows[key], spans.get(key, 0)) or (
            steps is not None and row["step"] not in steps
        ):
            continue
        values = {
            key.split("/")[1]: value
            for key, value in row.items()
            if key.startswith("engine/") and key.endswith("/in_flight")
        }
        at_us = (
            round(row["time_unix"] * 1e6) - origin_us if isinstance(row.get("time_unix"), int | float) else -1
        )
        if values and at_us >= 0:
            values["queued"] = row.get("fleet/queued", 0.0)
            yield {"ph": "C", "pid": PID, "name": "requests in flight", "ts": at_us, "args": values}


def _iterate_metrics(run_dir: RunDir) -> Iterator[Row]:
    for path in run_dir.parts(run_dir.metrics):
        with path.open("rb") as file:
            for line in file:
                row = parse_row(line)
                if row is not None and has_place(row) and isinstance(row.get("stage"), str):
                    yield row

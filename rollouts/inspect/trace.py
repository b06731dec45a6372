"""spans.jsonl as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

The run is a process, each track a thread. The events of a thread must nest, so a track has lanes: one for its
own work, and further ones for requests that it answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import RunDirError, StorageError
from rollouts.inspect.record import Record
from rollouts.metrics.jsonl import Row

PID = 1
FIRST_TRACKS = ("trainer", "checkpoints", "rewards")  # engines come below them
CLOCK_SLIP_US = (
    100  # what a part may seem to outlast its whole by, because clocks were read one after the other
)
SORT_STEP = 1000  # between the places of tracks, so that their lanes fit in


def export_trace(record: Record, output: Path, *, steps: range | None = None) -> int:
    """How many spans were written to `output`, which appears when it is complete.

    Raises RunDirError where the run has no spans (of these steps), StorageError where `output` cannot be
    written.
    """
    counters = list(iterate_counters(record, steps))  # a statement ends where the next begins
    record.load("spans")
    held = "FROM spans_held WHERE start_unix IS NOT NULL AND duration_s IS NOT NULL"
    if steps is not None:
        held += f" AND step BETWEEN {steps[0]} AND {steps[-1]}"
    count, begin = record.connection.execute(f"SELECT count(*), min(start_unix) {held}").fetchall()[0]
    if not count:
        which = f" of steps {steps[0]} to {steps[-1]}" if steps else ""
        raise RunDirError(
            f"{record.root}: spans.jsonl has no span{which}; name a run that has trained a step"
        )
    origin_us = round(begin * 1e6)
    about = {"run": record.root.resolve().name, "start_unix": origin_us / 1e6}
    process = {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": about["run"]}}
    spans = record.iterate_rows(f"SELECT * {held} ORDER BY start_unix, duration_s DESC, place")
    shown = (event | {"ts": event["ts"] - origin_us} for event in counters if event["ts"] >= origin_us)
    partial = output.with_name(f".tmp-{output.name}")
    encode = msgspec.json.Encoder().encode
    try:
        with partial.open("wb") as file:
            head = {"displayTimeUnit": "ms", "otherData": about}
            file.write(encode(head)[:-1] + b',"traceEvents":[\n' + encode(process))
            for event in chain(iterate_events(spans, origin_us), shown):
                file.write(b",\n" + encode(event))
            file.write(b"\n]}\n")
        partial.replace(output)
    except OSError as error:
        raise StorageError(
            f"{output} cannot be written ({error}); name another file with --output"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return count


@dataclass(slots=True)
class Lane:
    """One thread of the trace."""

    tid: int
    ends: list[int] = field(default_factory=list)  # µs, of the spans that are open, the outermost first

    def fit(self, start_us: int, end_us: int, *, nests: bool) -> int | None:
        """When the span ends if it goes here, cut by what clocks may slip; None if it does not fit."""
        while self.ends and self.ends[-1] <= start_us:
            self.ends.pop()
        if not self.ends:
            return end_us
        if not nests or end_us > self.ends[-1] + CLOCK_SLIP_US:
            return None
        return min(end_us, self.ends[-1])


def iterate_events(spans: Iterator[Row], origin_us: int) -> Iterator[dict[str, Any]]:
    """One event for each span, in order of their beginnings, and before the first of a lane its name."""
    lanes: dict[tuple[str, bool], list[Lane]] = {}
    places = {track: place for place, track in enumerate(FIRST_TRACKS)}
    count = 0
    for row in spans:
        start_us = round(row["start_unix"] * 1e6)
        end_us = round((row["start_unix"] + row["duration_s"]) * 1e6)
        track, of_sample = row.get("track", ""), "id" in row
        own = lanes.setdefault((track, of_sample), [])
        for lane in own:
            cut_us = lane.fit(start_us, end_us, nests=not of_sample)
            if cut_us is not None:
                break
        else:
            count += 1
            lane, cut_us = Lane(count), end_us
            own.append(lane)
            name = f"{track} · {len(own)}" if of_sample or len(own) > 1 else track
            order = SORT_STEP * places.setdefault(track, len(places)) + min(len(own), 400) + 500 * of_sample
            about = {"ph": "M", "pid": PID, "tid": count}
            yield {**about, "name": "thread_name", "args": {"name": name}}
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": order}}
        lane.ends.append(cut_us)
        shown = ("step", "policy_version", "attempt", "id", "tokens")
        yield {
            "ph": "X",
            "pid": PID,
            "tid": lane.tid,
            "name": row.get("name", ""),
            "cat": row["stage"],
            "ts": start_us - origin_us,
            "dur": cut_us - start_us,
            "args": {name: row[name] for name in shown if name in row},
        }


def iterate_counters(record: Record, steps: range | None) -> Iterator[dict[str, Any]]:
    """Requests that each engine answered and that waited when a step ended, with the absolute time in µs."""
    for stage in record.stages.values():
        columns = {name: values for name, values in stage.columns.items() if name.endswith("/in_flight")}
        times = stage.columns["time_unix"]
        for place in np.flatnonzero(np.isfinite(times)).tolist():
            held = {name.split("/")[1]: float(values[place]) for name, values in columns.items()}
            known = {name: value for name, value in held.items() if np.isfinite(value)}
            if known and (steps is None or int(stage.columns["step"][place]) in steps):
                queued = (
                    float(stage.columns["fleet/queued"][place]) if "fleet/queued" in stage.columns else 0.0
                )
                known["queued"] = queued if np.isfinite(queued) else 0.0
                at_us = round(float(times[place]) * 1e6)
                yield {"ph": "C", "pid": PID, "name": "requests in flight", "ts": at_us, "args": known}

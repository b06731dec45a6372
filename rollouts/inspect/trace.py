"""spans.jsonl as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

The run is a process, each track a thread. The events of a thread must nest, so a track has lanes: one for its
own work, and further ones for requests that it answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
CLOCK_SLIP_US = 100  # what a part may seem to outlast its whole by, as clocks were read one after the other
ARGUMENTS = ("step", "policy_version", "attempt", "id", "tokens")


def export_trace(record: Record, output: Path, *, steps: range | None = None) -> int:
    """How many spans were written to `output`, which appears when it is complete.

    Raises RunDirError where the run has no spans (of these steps), StorageError where `output` cannot be
    written.
    """
    counters = list(iterate_counters(record, steps))  # a statement ends where the next begins
    record.load("spans")
    held = "FROM spans_held WHERE start_unix IS NOT NULL AND duration_s IS NOT NULL"
    which = ""
    if steps is not None:
        held += f" AND step BETWEEN {steps[0]} AND {steps[-1]}"
        which = f" of steps {steps[0]} to {steps[-1]}"
    count, begin = record.connection.execute(f"SELECT count(*), min(start_unix) {held}").fetchall()[0]
    if not count:
        raise RunDirError(
            f"{record.root}: spans.jsonl has no span{which}; name a run that has trained a step"
        )
    spans = record.iterate_rows(f"SELECT * {held} ORDER BY start_unix, duration_s DESC, place")
    origin_us, name = round(begin * 1e6), record.root.resolve().name
    head = {"displayTimeUnit": "ms", "otherData": {"run": name, "start_unix": origin_us / 1e6}}
    events = chain(iterate_events(spans), (event for event in counters if event["ts"] >= origin_us))
    partial = output.with_name(f".tmp-{output.name}")
    encode = msgspec.json.Encoder().encode
    try:
        with partial.open("wb") as file:
            file.write(
                encode(head)[:-1] + b',"traceEvents":[\n' + encode(describe("process_name", 0, name=name))
            )
            for event in events:
                if "ts" in event:
                    event["ts"] -= origin_us
                file.write(b",\n" + encode(event))
            file.write(b"\n]}\n")
        partial.replace(output)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise StorageError(
            f"{output} cannot be written ({error}); name another file with --output"
        ) from error
    return count


def describe(what: str, tid: int, **arguments: object) -> dict[str, Any]:
    """The event that says something of a thread or the process."""
    return {"ph": "M", "pid": PID, "tid": tid, "name": what, "args": arguments}


def iterate_events(spans: Iterator[Row]) -> Iterator[dict[str, Any]]:
    """One event for each span with its absolute time in µs, in order of their beginnings, and before the
    first of a lane the lane's name and place.
    """
    lanes: dict[
        tuple[str, bool], dict[int, list[int]]
    ] = {}  # by tid, ends of the open spans, outermost first
    places = {track: place for place, track in enumerate(FIRST_TRACKS)}
    count = 0
    for row in spans:
        start_us, end_us = (
            round(at * 1e6) for at in (row["start_unix"], row["start_unix"] + row["duration_s"])
        )
        track, of_sample = row.get("track", ""), "id" in row
        own = lanes.setdefault((track, of_sample), {})
        for lane, ends in own.items():
            while ends and ends[-1] <= start_us:
                ends.pop()
            if not ends or (not of_sample and end_us <= ends[-1] + CLOCK_SLIP_US):
                tid, end_us = lane, min([end_us, *ends[-1:]])
                break
        else:
            tid = count = count + 1
            ends = own[tid] = []
            label = f"{track} · {len(own)}" if of_sample or len(own) > 1 else track
            order = 1000 * places.setdefault(track, len(places)) + min(len(own), 400) + 500 * of_sample
            yield describe("thread_name", tid, name=label)
            yield describe("thread_sort_index", tid, sort_index=order)
        ends.append(end_us)
        event = {"ph": "X", "pid": PID, "tid": tid, "name": row.get("name", ""), "cat": row["stage"]}
        arguments = {name: row[name] for name in ARGUMENTS if name in row}
        yield event | {"ts": start_us, "dur": end_us - start_us, "args": arguments}


def iterate_counters(record: Record, steps: range | None) -> Iterator[dict[str, Any]]:
    """Requests that each engine answered and that waited when a step ended, with the absolute time in µs."""
    for stage in record.stages.values():
        columns = {name: values for name, values in stage.columns.items() if name.endswith("/in_flight")}
        queued, times = stage.filled("fleet/queued"), stage.columns["time_unix"]
        for place in np.flatnonzero(np.isfinite(times)).tolist():
            held = {name.split("/")[1]: float(values[place]) for name, values in columns.items()}
            known = {name: value for name, value in held.items() if np.isfinite(value)}
            if known and (steps is None or int(stage.columns["step"][place]) in steps):
                at_us, known["queued"] = round(float(times[place]) * 1e6), float(queued[place])
                yield {"ph": "C", "pid": PID, "name": "requests in flight", "ts": at_us, "args": known}

"""spans.jsonl as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

The run is a process, each track a thread. The events of a thread must nest, so a track has lanes: one for its
own work, and further ones for requests that it answers at once.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import RunDirError
from rollouts.inspect.record import Record
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import replace_file

FIRST_TRACKS = ("trainer", "checkpoints", "rewards")  # engines come below them
CLOCK_SLIP_US = 100  # what a part may seem to outlast its whole by, as clocks were read one after the other
# `shown`: the spans of the steps that are exported; times in events are µs since the first of them
SHOWN = """
    CREATE TABLE shown AS SELECT *, rowid AS place FROM spans_held
    WHERE start_unix IS NOT NULL AND duration_s IS NOT NULL AND step BETWEEN ? AND ?"""
EVENTS = """
    SELECT coalesce(track, '') AS track, id IS NOT NULL AS of_sample, json_merge_patch('{}', json_object(
        'ph', 'X', 'pid', 1, 'name', coalesce(name, ''), 'cat', stage,
        'ts', round(start_unix * 1e6)::BIGINT - round((SELECT min(start_unix) FROM shown) * 1e6)::BIGINT,
        'dur', round((start_unix + duration_s) * 1e6)::BIGINT - round(start_unix * 1e6)::BIGINT,
        'args', json_object('step', step, 'policy_version', policy_version, 'attempt', attempt, 'id', id,
            'tokens', tokens))) AS event
    FROM shown ORDER BY start_unix, duration_s DESC, place"""
# requests that each engine answered and that waited when a step ended
COUNTERS = """
    SELECT 'C' AS ph, 1 AS pid, 'requests in flight' AS name,
        round(time_unix * 1e6)::BIGINT - round((SELECT min(start_unix) FROM shown) * 1e6)::BIGINT AS ts,
        json_group_object(if(name = 'fleet/queued', 'queued', split_part(name, '/', 2)), value) AS args
    FROM points
    WHERE (name = 'fleet/queued' OR name LIKE 'engine/%/in_flight') AND step BETWEEN ? AND ?
    GROUP BY stage, step, time_unix HAVING ts >= 0 AND max(name LIKE 'engine/%')"""


def export_trace(record: Record, output: Path, *, steps: tuple[int, int] | None = None) -> int:
    """How many spans were written to `output`, which appears when it is complete. `steps`: first and last.

    Raises RunDirError where the run has no spans (of these steps), StorageError where `output` cannot be
    written.
    """
    record.load("spans")
    between = list(steps or (-1, 1 << 62))
    record.connection.execute(SHOWN, between)
    (found,) = record.rows("SELECT count(*) AS spans FROM shown")
    if not found["spans"]:
        which = f" of steps {steps[0]} to {steps[1]}" if steps else ""
        raise RunDirError(
            f"{record.root}: spans.jsonl has no span{which}; name a run that has trained a step"
        )
    events = chain(place_events(record.iterate_rows(EVENTS)), record.rows(COUNTERS, between))
    encode, process = msgspec.json.encode, describe("process_name", 0, name=record.root.resolve().name)
    begin = b'{"traceEvents":[\n' + encode(process)
    chunks = chain([begin], (b",\n" + encode(event) for event in events), [b"\n]}\n"])
    replace_file(output, chunks, way_out="name another file with --output FILE")
    return found["spans"]


def describe(what: str, tid: int, **arguments: object) -> dict[str, Any]:
    """The event that says something of a thread or the process."""
    return {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": arguments}


def place_events(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The events of spans with their lanes, in order of their beginnings, and before the first of a lane the
    lane's name and place.
    """
    lanes: dict[
        tuple[str, bool], dict[int, list[int]]
    ] = {}  # by tid, ends of the open spans, outermost first
    places = {track: place for place, track in enumerate(FIRST_TRACKS)}
    count = 0
    for row in rows:
        event, track, of_sample = row["event"], row["track"], row["of_sample"]
        begin, end = event["ts"], event["ts"] + event["dur"]
        own = lanes.setdefault((track, of_sample), {})
        for tid, ends in own.items():  # noqa: B007
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (not of_sample and end <= ends[-1] + CLOCK_SLIP_US):
                break
        else:
            tid = count = count + 1
            ends = own[tid] = []
            label = f"{track} · {len(own)}" if of_sample or len(own) > 1 else track
            order = 1000 * places.setdefault(track, len(places)) + min(len(own), 400) + 500 * of_sample
            yield describe("thread_name", tid, name=label)
            yield describe("thread_sort_index", tid, sort_index=order)
        ends.append(min([end, *ends[-1:]]))
        yield event | {"tid": tid, "dur": ends[-1] - begin}

from __future__ import annotations

import json
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError, RunDirError, StorageError
from rollouts.inspect.trace import export_trace
from rollouts.inspect.trace_command import parse_steps

BEGAN = 1_800_000_000.0


def make_row(
    name: str,
    track: str,
    start_s: float,
    duration_s: float,
    *,
    step: int = 1,
    attempt: int = 1,
    **more: object,
) -> dict[str, Any]:
    head = {
        "schema": 1,
        "stage": "rl",
        "step": step,
        "policy_version": step - 1,
        "attempt": attempt,
        "time_unix": BEGAN + 60,
    }
    return {
        **head,
        "name": name,
        "track": track,
        "start_unix": BEGAN + start_s,
        "duration_s": duration_s,
        **more,
    }


def write(root: Path, *parts: list[dict[str, Any]], end: str = "") -> Path:
    root.mkdir(exist_ok=True)
    for number, rows in enumerate(parts):
        name = "spans.jsonl" if number == 0 else f"spans.{number}.jsonl"
        (root / name).write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + (end if number == len(parts) - 1 else "")
        )
    return root


def export(root: Path, **options: Any) -> dict[str, Any]:
    export_trace(root, root / "trace.json", **options)
    return json.loads((root / "trace.json").read_text())


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def assert_threads_nest(trace: dict[str, Any]) -> None:
    """Of any two events of a thread one lies in the other, or they do not overlap."""
    by_thread: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in complete(trace):
        by_thread[event["tid"]].append(event)
    for events in by_thread.values():
        for one in events:
            for other in events:
                if (
                    one is other
                    or one["ts"] + one["dur"] <= other["ts"]
                    or other["ts"] + other["dur"] <= one["ts"]
                ):
                    continue
                inner, outer = sorted((one, other), key=lambda event: event["dur"])
                assert (
                    outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
                ), (one, other)


def test_a_span_is_an_event_in_microseconds_of_its_thread(tmp_path: Path):
    rows = [
        make_row("train", "trainer", 2.5, 0.125, step=3),
        make_row("generate", "vllm-0", 2.0, 0.25, step=3, id="g1-s0", tokens=7),
    ]
    trace = export(write(tmp_path / "run", rows))
    assert trace["otherData"] == {"run": "run", "start_unix": BEGAN + 2.0}
    first, second = complete(trace)
    assert first == {
        "ph": "X", "pid": 1, "tid": first["tid"], "name": "generate", "cat": "rl", "ts": 0, "dur": 250_000,
        "args": {"step": 3, "policy_version": 2, "attempt": 1, "id": "g1-s0", "tokens": 7},
    }  # fmt: skip
    assert (second["ts"], second["dur"], second["name"]) == (500_000, 125_000, "train")
    assert thread_names(trace) == {first["tid"]: "vllm-0 · 1", second["tid"]: "trainer"}
    assert {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "run"}} in trace[
        "traceEvents"
    ]
    order = {
        event["tid"]: event["args"]["sort_index"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_sort_index"
    }
    assert order[second["tid"]] < order[first["tid"]], "the trainer is above the engines"


def test_requests_of_one_engine_that_overlap_lie_side_by_side(tmp_path: Path):
    spans = [
        (0.0, 3.0),
        (1.0, 1.0),
        (2.5, 2.0),
        (3.5, 0.5),
    ]  # crossing, contained, and one after the first has ended
    rows = [
        make_row("generate", "vllm-0", start, seconds, id=f"s{number}")
        for number, (start, seconds) in enumerate(spans)
    ]
    trace = export(write(tmp_path / "run", rows))
    names = thread_names(trace)
    lanes = {event["args"]["id"]: names[event["tid"]] for event in complete(trace)}
    assert lanes == {"s0": "vllm-0 · 1", "s1": "vllm-0 · 2", "s2": "vllm-0 · 2", "s3": "vllm-0 · 1"}
    assert_threads_nest(trace)


def test_the_parts_of_an_update_lie_in_it_though_clocks_slip(tmp_path: Path):
    rows = [
        make_row("weight_sync", "vllm-0", 1.0, 1.0),
        make_row("weight_sync_pause", "vllm-0", 1.0, 0.5),
        make_row("weight_sync_load", "vllm-0", 1.1, 0.4),
        make_row("weight_sync_probe", "vllm-0", 1.6, 0.40002),
        make_row("generate", "vllm-0", 0.5, 1.0, id="s0"),
    ]
    trace = export(write(tmp_path / "run", rows))
    assert sorted(thread_names(trace).values()) == ["vllm-0", "vllm-0 · 1"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete(trace)][-1] == (
        "weight_sync_probe",
        1_100_000,
        400_000,
    )
    assert_threads_nest(trace)


def test_work_of_one_track_that_crosses_gets_a_second_lane(tmp_path: Path):
    trace = export(
        write(
            tmp_path / "run",
            [make_row("train", "trainer", 0.0, 1.0), make_row("evaluate", "trainer", 0.5, 1.0)],
        )
    )
    assert sorted(thread_names(trace).values()) == ["trainer", "trainer · 2"]
    assert_threads_nest(trace)


def test_events_come_in_the_order_of_time_over_all_parts(tmp_path: Path):
    first = [make_row("train", "trainer", 4.0 + step, 0.5, step=step) for step in (1, 2)]
    second = [make_row("generate", "rewards", 1.0 * step, 0.5, step=step, id=f"s{step}") for step in (3, 4)]
    events = complete(export(write(tmp_path / "run", first, second)))
    assert [event["args"]["step"] for event in events] == [3, 4, 1, 2]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)


def test_of_a_step_that_was_repeated_the_newest_attempt_is_shown(tmp_path: Path):
    rows = [
        make_row("train", "trainer", 0.0, 1.0),
        make_row("train", "trainer", 5.0, 1.0, attempt=2),
        make_row("train", "trainer", 2.0, 1.0, step=2),
    ]
    events = complete(export(write(tmp_path / "run", rows)))
    assert [(event["args"]["step"], event["args"]["attempt"]) for event in events] == [(2, 1), (1, 2)]


def test_only_the_steps_that_were_asked_for(tmp_path: Path):
    root = write(
        tmp_path / "run", [make_row("train", "trainer", float(step), 0.5, step=step) for step in range(1, 6)]
    )
    assert [event["args"]["step"] for event in complete(export(root, steps=range(2, 4)))] == [2, 3]
    with pytest.raises(RunDirError, match="no span of steps 9 to 9"):
        export(root, steps=range(9, 10))


def test_requests_in_flight_are_counters(tmp_path: Path):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)])
    row = {
        "stage": "rl",
        "step": 1,
        "attempt": 1,
        "time_unix": BEGAN + 2,
        "engine/vllm_0/in_flight": 3.0,
        "fleet/queued": 5.0,
    }
    (root / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (counter,) = (event for event in export(root)["traceEvents"] if event["ph"] == "C")
    assert counter == {
        "ph": "C",
        "pid": 1,
        "name": "requests in flight",
        "ts": 2_000_000,
        "args": {"vllm_0": 3.0, "queued": 5.0},
    }


def test_counters_are_of_the_newest_attempts_and_not_from_before_the_trace(tmp_path: Path):
    first = [make_row("train", "trainer", 10.0 * step, 1.0, step=step) for step in (2, 3, 4)]
    root = write(tmp_path / "run", [*first, make_row("train", "trainer", 50.0, 1.0, step=4, attempt=2)])
    # step 1 ended before the first span began; step 3 was repeated; of step 4 the second attempt has spans,
    # and no row yet
    rows = [(1, 1, 11.0, 1.0), (2, 1, 21.0, 2.0), (3, 1, 31.0, 3.0), (4, 1, 41.0, 4.0), (3, 2, 49.0, 9.0)]
    head = {"schema": 1, "stage": "rl", "policy_version": 0}
    lines = [
        {**head, "step": step, "attempt": attempt, "time_unix": BEGAN + at, "engine/a/in_flight": n}
        for step, attempt, at, n in rows
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counters = [
        (event["ts"], event["args"]["a"]) for event in export(root)["traceEvents"] if event["ph"] == "C"
    ]
    assert counters == [
        (1_000_000, 2.0),
        (29_000_000, 9.0),
    ]  # µs after 20 s, when the first span that is shown began
    assert [
        event["args"]["a"] for event in export(root, steps=range(3, 4))["traceEvents"] if event["ph"] == "C"
    ] == [9.0]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)])
    with pytest.raises(StorageError, match=r"missing/t\.json cannot be written .*--output"):
        export_trace(root, tmp_path / "missing" / "t.json")


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    assert (
        len(
            complete(
                export(
                    write(
                        tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)], end='{"stage": "rl", "st'
                    )
                )
            )
        )
        == 1
    )


def test_a_line_that_is_no_span_is_refused_by_place(tmp_path: Path):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0), {"stage": "rl", "step": 1}])
    with pytest.raises(RunDirError, match=r"spans\.jsonl: the line at byte \d+ is no span"):
        export(root)
    assert not (root / "trace.json").exists()


def test_a_run_without_spans_is_refused(tmp_path: Path):
    with pytest.raises(RunDirError, match="no span"):
        export(write(tmp_path / "run"))


def test_memory_stays_small_however_many_spans_there_are(tmp_path: Path):
    root = tmp_path / "run"
    root.mkdir()
    count = 10_000
    with (root / "spans.jsonl").open("w") as file:
        for number in range(count):
            file.write(
                json.dumps(
                    make_row(
                        "generate",
                        f"vllm-{number % 4}",
                        number * 0.01,
                        0.1,
                        step=1 + number // 100,
                        id=f"s{number}",
                    )
                )
                + "\n"
            )
    tracemalloc.start()
    try:
        assert export_trace(root, root / "trace.json") == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150 * count, (
        "about 100 bytes a span while places are sorted; a row as an object takes about 1000"
    )


@pytest.mark.parametrize(("text", "steps"), [("3..5", range(3, 6)), ("7", range(7, 8)), ("0..0", range(1))])
def test_steps_are_read(text: str, steps: range):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["5..3", "a..b", "..3", "1..", "-1..2"])
def test_steps_that_are_none_are_refused(text: str):
    with pytest.raises(ConfigError, match="--steps"):
        parse_steps(text)

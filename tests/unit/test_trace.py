from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.cli import main
from rollouts.inspect.record import open_record
from rollouts.inspect.trace import export_trace
from tests.unit.run_rows import write_rows

BEGAN = 1_800_000_000.0


def make_row(name: str, track: str, start_s: float, duration_s: float, **more: object) -> dict[str, Any]:
    return {"name": name, "track": track, "start_unix": BEGAN + start_s, "duration_s": duration_s, **more}


def write(root: Path, *parts: list[dict[str, Any]]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.toml").write_text("")
    for number, rows in enumerate(parts):
        write_rows(root / ("spans.jsonl" if number == 0 else f"spans.{number}.jsonl"), *rows)
    return root


def export(root: Path, **options: Any) -> dict[str, Any]:
    with open_record(root, points=True) as record:
        export_trace(record, root / "trace.json", **options)
    return json.loads((root / "trace.json").read_text())


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


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
        "args": {"step": 3, "policy_version": 0, "attempt": 1, "id": "g1-s0", "tokens": 7},
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


def test_spans_come_by_time_over_all_parts_and_of_a_repeated_step_those_of_the_newest_attempt(tmp_path: Path):
    first = [make_row("train", "trainer", 4.0, 1.0), make_row("train", "trainer", 2.0, 1.0, step=2)]
    second = [
        make_row("train", "trainer", 1.0, 0.5, attempt=2),
        make_row("train", "trainer", 1.2, 1.5, step=3),
    ]
    trace = export(write(tmp_path / "run", first, second))
    shown = [(event["args"]["step"], event["args"]["attempt"]) for event in complete(trace)]
    assert shown == [(1, 2), (3, 1), (2, 1)]
    assert sorted(thread_names(trace).values()) == ["trainer", "trainer · 2"], "what crosses has another lane"


def test_requests_in_flight_are_counters(tmp_path: Path):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)])
    row = {"time_unix": BEGAN + 2, "engine/vllm_0/in_flight": 3.0, "fleet/queued": 5.0}
    earlier = {"step": 2, "time_unix": BEGAN - 1, "engine/vllm_0/in_flight": 1.0}
    write_rows(root / "metrics.jsonl", {**row, "fleet/queued": 9.0}, {**row, "attempt": 2}, earlier)
    (counter,) = (event for event in export(root)["traceEvents"] if event["ph"] == "C")
    assert counter == {
        "ph": "C",
        "pid": 1,
        "name": "requests in flight",
        "ts": 2_000_000,
        "args": {"vllm_0": 3.0, "queued": 5.0},
    }


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--steps", "3..5"], 2, "no span of steps 3 to 5"),
        (["--steps", "5..3"], 2, "--steps 5..3: give two whole numbers"),
        (["--output", "/nowhere/t.json"], 1, "t.json cannot be written"),
        (["--steps", "1"], 0, "1 damaged line left out"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)])
    with (root / "spans.jsonl").open("a") as file:
        file.write("no span\n")
    assert main(["export-trace", str(root), *words]) == code
    assert message in capsys.readouterr().err

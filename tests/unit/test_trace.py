"""spans.jsonl as a trace: events, lanes, counters, and what the command refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def write(root: Path, rows: list[dict[str, Any]], later: Sequence[dict[str, Any]] = ()) -> Path:
    write_rows(root / "spans.jsonl", *rows)
    write_rows(root / "spans.1.jsonl", *later)
    (root / "config.toml").write_text("")
    return root


def export(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The events by their kind."""
    with open_record(root, points=True) as record:
        export_trace(record, root / "trace.json")
    trace = json.loads((root / "trace.json").read_text())
    assert trace["otherData"]["run"] == root.name
    kinds: dict[str, list[dict[str, Any]]] = {"X": [], "M": [], "C": []}
    for event in trace["traceEvents"]:
        kinds[event["ph"]].append(event)
    return kinds


def name_threads(trace: dict[str, Any], kind: str = "thread_name", value: str = "name") -> dict[int, Any]:
    return {event["tid"]: event["args"][value] for event in trace["M"] if event["name"] == kind}


def test_a_span_is_an_event_in_microseconds_of_its_thread(tmp_path: Path):
    rows = [
        make_row("train", "trainer", 2.5, 0.125, step=3),
        make_row("generate", "vllm-0", 2.0, 0.25, step=3, id="g1-s0", tokens=7),
    ]
    trace = export(write(tmp_path / "run", rows))
    first, second = trace["X"]
    expected = """{"ph": "X", "pid": 1, "name": "generate", "cat": "rl", "ts": 0, "dur": 250000,
        "args": {"step": 3, "policy_version": 0, "attempt": 1, "id": "g1-s0", "tokens": 7}}"""
    assert first == json.loads(expected) | {"tid": first["tid"]}
    assert (second["ts"], second["dur"], second["name"]) == (500_000, 125_000, "train")
    assert name_threads(trace) == {first["tid"]: "vllm-0 · 1", second["tid"]: "trainer"}
    order = name_threads(trace, "thread_sort_index", "sort_index")
    assert order[second["tid"]] < order[first["tid"]], "the trainer is above the engines"


def test_requests_of_one_engine_that_overlap_lie_side_by_side(tmp_path: Path):
    # crossing, contained, and one after the first has ended
    spans = [(0.0, 3.0), (1.0, 1.0), (2.5, 2.0), (3.5, 0.5)]
    rows = [make_row("generate", "vllm-0", *span, id=f"s{number}") for number, span in enumerate(spans)]
    trace = export(write(tmp_path / "run", rows))
    lanes = [name_threads(trace)[event["tid"]] for event in trace["X"]]
    assert lanes == ["vllm-0 · 1", "vllm-0 · 2", "vllm-0 · 2", "vllm-0 · 1"]


def test_spans_come_by_time_over_all_parts_and_of_a_repeated_step_those_of_the_newest_attempt(tmp_path: Path):
    first = [make_row("train", "trainer", 4.0, 1.0), make_row("train", "trainer", 2.0, 1.0, step=2)]
    again = make_row("train", "trainer", 1.0, 0.5, attempt=2)
    trace = export(write(tmp_path / "run", first, [again, make_row("train", "trainer", 1.2, 1.5, step=3)]))
    shown = [(event["args"]["step"], event["args"]["attempt"]) for event in trace["X"]]
    assert shown == [(1, 2), (3, 1), (2, 1)]
    assert sorted(name_threads(trace).values()) == ["trainer", "trainer · 2"], "what crosses has another lane"


def test_requests_in_flight_are_counters(tmp_path: Path):
    root = write(tmp_path / "run", [make_row("train", "trainer", 0.0, 1.0)])
    row = {"time_unix": BEGAN + 2, "engine/vllm_0/in_flight": 3.0, "fleet/queued": 5.0}
    earlier = {"step": 2, "time_unix": BEGAN - 1, "engine/vllm_0/in_flight": 1.0}
    write_rows(root / "metrics.jsonl", {**row, "fleet/queued": 9.0}, {**row, "attempt": 2}, earlier)
    (counter,) = export(root)["C"]
    assert (counter["ts"], counter["args"]) == (2_000_000, {"vllm_0": 3.0, "queued": 5.0})


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

"""spans.jsonl as a trace: events, lanes, counters, and what the command refuses."""

import json
from collections import defaultdict
from functools import partial

import pytest

from rollouts.cli import main
from rollouts.inspect.commands import export_trace
from rollouts.inspect.record import open_record
from tests.support.text_tables import cases
from tests.unit.run_rows import write_rows

BEGAN = 1_800_000_000.0


def make_row(name, track, start_s, duration_s, **more):
    return {"name": name, "track": track, "start_unix": BEGAN + start_s, "duration_s": duration_s, **more}


TRAIN = make_row("train", "trainer", 0.0, 1.0)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").touch()
    return tmp_path


def export(run, *rows):
    """The trace's events by their kind; each event of a span has its `lane`, the name of its thread."""
    write_rows(run / "spans.jsonl", *rows)
    with open_record(run, points=True) as record:
        export_trace(record, run / "trace.json")
    trace = json.loads((run / "trace.json").read_text())
    assert trace["traceEvents"][0]["args"] == {"name": run.name}
    kinds = defaultdict(list)
    for event in trace["traceEvents"]:
        kinds[event["ph"]].append(event)
    names = {event["tid"]: event["args"]["name"] for event in kinds["M"] if event["name"] == "thread_name"}
    for event in kinds["X"]:
        event["lane"] = names[event["tid"]]
    return kinds


def test_a_span_is_an_event_in_microseconds_of_its_thread(run):
    request = make_row("generate", "vllm-0", 2.0, 0.25, step=3, id="g1-s0", tokens=7)
    trace = export(run, make_row("train", "trainer", 2.5, 0.125, step=3), request)
    first, second = trace["X"]
    expected = """{"ph": "X", "pid": 1, "name": "generate", "cat": "rl", "ts": 0, "dur": 250000,
        "lane": "vllm-0 · 1",
        "args": {"step": 3, "policy_version": 0, "attempt": 1, "id": "g1-s0", "tokens": 7}}"""
    sorts = (event for event in trace["M"] if event["name"] == "thread_sort_index")
    order = {event["tid"]: event["args"]["sort_index"] for event in sorts}
    assert order[second["tid"]] < order[first.pop("tid")]  # the trainer is above the engines
    assert first == json.loads(expected)
    assert (second["ts"], second["dur"], second["lane"]) == (500_000, 125_000, "trainer")


def test_requests_of_one_engine_that_overlap_lie_side_by_side(run):
    # crossing, contained, and one after the first has ended
    spans = json.loads("[[0.0, 3.0], [1.0, 1.0], [2.5, 2.0], [3.5, 0.5]]")
    trace = export(run, *(make_row("generate", "vllm-0", *span, id=str(span)) for span in spans))
    assert [event["lane"][-1] for event in trace["X"]] == ["1", "2", "2", "1"]


def test_spans_come_by_time_over_all_parts_and_of_a_repeated_step_those_of_the_newest_attempt(run):
    train = partial(make_row, "train", "trainer")
    write_rows(run / "spans.1.jsonl", train(1.0, 0.5, attempt=2), train(1.2, 1.5, step=3))
    events = export(run, train(4.0, 1.0), train(2.0, 1.0, step=2))["X"]
    shown = [(event["args"]["step"], event["args"]["attempt"]) for event in events]
    assert shown == [(1, 2), (3, 1), (2, 1)]
    assert {event["lane"] for event in events} == {"trainer", "trainer · 2"}  # what crosses has another lane


def test_requests_in_flight_are_counters(run):
    row = {"time_unix": BEGAN + 2, "engine/vllm_0/in_flight": 3.0, "fleet/queued": 5.0}
    earlier = {"step": 2, "time_unix": BEGAN - 1, "engine/vllm_0/in_flight": 1.0}
    write_rows(run / "metrics.jsonl", {**row, "fleet/queued": 9.0}, {**row, "attempt": 2}, earlier)
    (counter,) = export(run, TRAIN)["C"]
    assert (counter["ts"], counter["args"]) == (2_000_000, {"vllm_0": 3.0, "queued": 5.0})


@cases("""
words                     | code | message
--steps 3..5              | 2 | no span of steps 3 to 5
--steps 5..3              | 2 | --steps 5..3: give two whole numbers
--output /nowhere/t.json  | 1 | t.json cannot be written
--steps 1                 | 0 | 1 damaged line left out
""")
def test_the_command_says_what_is_wrong(run, words, code: int, message, capsys):
    with write_rows(run / "spans.jsonl", TRAIN).open("a") as file:
        file.write("no span\n")
    assert main(["export-trace", str(run), *words.split()]) == code
    assert message in capsys.readouterr().err

"""The sinks of TensorBoard, OpenTelemetry, StatsD and Prometheus, each against a real one on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rollouts.engines.processes import find_free_port
from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable
from rollouts.metrics.names import METRICS
from rollouts.trackers.follower import position_path, read_position
from rollouts.trackers.sinks import Place, RunInfo, TrackedRow, open_sink
from tests.support.otlp_collector import (
    open_collector,
    read_labels,
    read_points,
    read_spans,
    read_steps,
)
from tests.support.text_tables import cases
from tests.support.tracker_runs import BEGAN, append, make_row, make_run, make_span, read_events

ID = "0123456789abcdef" * 2
AT = 1_800_001_000  # time of a row of attempt 1 and step 0


def open_named(name, root=Path("/nowhere"), mark=None):
    return open_sink(name, RunInfo(ID, "my run", root, {}, os.environ, mark or {}))


def make_rows(*steps, attempt=1, stage="rl"):
    return [
        TrackedRow("metrics", make_row(step, attempt=attempt, stage=stage), number, Place(0, 10 * step))
        for number, step in enumerate(steps)
    ]


EVALUATION = TrackedRow("evaluations", make_row(2, **{"name": "heldout", "eval/heldout/avg@4": 0.25}), 9)


# --- TensorBoard --------------------------------------------------------------------------------------------


def write_events(root, *batches, mark=None):
    """The mark after the first batch: a follower that is killed later stores no other."""
    with closing(open_named("tensorboard", root, mark)) as sink:
        first, *_ = [json.dumps(sink.send(rows)) for rows in batches]  # as it is stored
    return json.loads(first)


def test_what_a_killed_follower_wrote_after_the_mark_is_cut_off_and_written_again(tmp_path):
    """A row is a point of each metric, and a stage is a run."""
    rest = [*make_rows(3, 4), *make_rows(1, stage="sft"), EVALUATION]
    mark = write_events(tmp_path, make_rows(1, 2), rest)
    with next((tmp_path / "trackers/tensorboard/rl").iterdir()).open("ab") as file:
        file.write(b"\x10\0\0\0")  # a torn event
    other = tmp_path / "trackers/tensorboard/rl/events.out.tfevents.1800000000.myhost.0"
    other.write_bytes(b"of somebody else")
    write_events(tmp_path, rest, mark=mark)
    other.unlink()
    assert read_events(tmp_path) == {
        "loss/total": [(step, -float(step)) for step in (1, 2, 3, 4)],
        "reward/mean": [(step, step / 2) for step in (1, 2, 3, 4)],
        "eval/heldout/avg@4": [(2, 0.25)],
    }
    assert read_events(tmp_path, "sft")["loss/total"] == [(1, -1.0)]
    assert len(list(tmp_path.rglob("events.*"))) == 3


def test_repeated_steps_of_a_resumed_run_replace_those_of_the_attempt_before(tmp_path):
    mark = write_events(tmp_path, make_rows(1, 2, 3, 4))
    write_events(tmp_path, make_rows(3, 4, 5, attempt=2), mark=mark)
    expected = enumerate([-1.0, -2.0, -6.0, -8.0, -10.0], start=1)
    assert read_events(tmp_path)["loss/total"] == [*expected]


# --- OpenTelemetry ------------------------------------------------------------------------------------------


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with open_collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server


def refuse_steps(collector, status, *bad, most=99):
    """The collector refuses requests that hold a row of one of these steps, or more rows."""

    def judge(path, body):
        points = read_points(body) if path == "/v1/metrics" else []
        held = {at // 10**9 - AT for _, at, *_ in points} or set(read_steps(read_spans(body)))
        refused = held & {*bad} or len(held) > most
        return (status, b"bad value\nof planted-secret") if refused else (200, b"")

    collector.judge = judge


def test_a_point_has_the_time_of_its_row_and_the_labels_of_its_stage(collector):
    open_named("otlp").send([*make_rows(3), EVALUATION])
    labels = {"stage": "rl", "attempt": 1}
    values = {"step": 3.0, "policy_version": 2.0, "loss.total": -3.0, "reward.mean": 1.5}
    points = collector.points()
    for name, value in values.items():
        assert (f"rollouts.{name}", (AT + 3) * 10**9, value, labels) in points
    (found,) = (point[1:] for point in points if "avg_at_4" in point[0])
    assert found == ((AT + 2) * 10**9, 0.25, {**labels, "evaluation": "heldout"})


def test_a_span_keeps_its_time_and_the_same_row_has_the_same_ids(collector):
    row = make_span(4, name="generate", track="vllm-0", start_unix=BEGAN + 0.25, id="g1-s0", tokens=12)
    for _ in range(2):  # as after a kill
        open_named("otlp").send([TrackedRow("spans", row, 8, Place(0, 77))])
    first, second = collector.spans()
    assert first == second
    assert (len(first.trace_id), len(first.span_id), first.name) == (16, 8, "generate")
    assert first.start_time_unix_nano == 1_800_000_000_250_000_000
    assert first.end_time_unix_nano == 1_800_000_001_750_000_000
    labels = """{"track": "vllm-0", "stage": "rl", "step": 4, "policy_version": 3, "attempt": 1,
        "id": "g1-s0", "tokens": 12}"""
    assert read_labels(first.attributes) == json.loads(labels)


@cases("""
error           | statuses
SinkUnavailable | [408, 429, 500, 503]
SinkRefused     | [401, 403, 404]
RowsRefused     | [400, 413, 422]
""")
def test_an_answer_says_who_is_at_fault(collector, error, statuses: Any, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=top%20secret,tenant=1")
    for status in statuses:
        collector.faults = [status] * 9
        with pytest.raises(globals()[error], match=f"answered {status} to metrics") as raised:
            open_named("otlp").send(make_rows(1, 2))
        assert "secret" not in str(raised.value)
    assert collector.headers[0]["x-key"] == "top secret"


def test_a_single_row_is_at_fault_only_where_an_empty_message_is_taken(collector):
    refuse_steps(collector, 400, 1)
    with pytest.raises(RowsRefused, match="400 to metrics: bad value of planted-secret"):
        open_named("otlp").send(make_rows(1))
    collector.judge = lambda path, body: (400, b"sent to HTTPS port")
    with pytest.raises(SinkRefused, match="sent to HTTPS port, even without rows"):
        open_named("otlp").send(make_rows(1))


def test_values_that_a_collector_leaves_out_are_counted(collector):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsPartialSuccess,
        ExportMetricsServiceResponse,
    )

    partial = ExportMetricsPartialSuccess(rejected_data_points=3, error_message="too old")
    body = ExportMetricsServiceResponse(partial_success=partial).SerializeToString()
    collector.judge = lambda path, posted: (200, body)
    mark = open_named("otlp").send(make_rows(1))
    assert open_named("otlp", mark=mark).send(make_rows(2)) == {"left_out": 6}


def test_the_command_leaves_out_what_is_refused_and_sends_all_else_once(collector, tmp_path, monkeypatch):
    """Of 20 rows of metrics and 20 spans two of each are refused, and the collector repeats our key. A
    fault comes first; a socket of an agent gets the rows too.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=planted-secret")
    monkeypatch.setenv("DD_DOGSTATSD_URL", f"unix://{tmp_path / 'dsd'}")
    root = make_run(tmp_path / "run")
    append(root, *(make_row(step) for step in range(1, 16)))
    append(root, *(make_row(step) for step in range(16, 21)), part=1)
    append(root, *(make_span(step) for step in range(1, 21)), file="spans")
    collector.faults = [503] * 6
    refuse_steps(collector, 400, 3, 11, most=8)
    words = "-m", "rollouts", "track", str(root), "--to", "otlp", "--to", "statsd", "--once"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "dsd"))
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
        )
        lines = receive_lines(agent)
    kept = [step for step in range(1, 21) if step not in (3, 11)]
    steps = {value for name, _, value, _ in collector.points() if name == "rollouts.step"}
    assert sorted(steps) == sorted(read_steps(collector.spans())) == kept
    assert "refuses row 'train' of spans.jsonl (stage rl, step 11, attempt 1) for good" in done.stderr
    assert "answered 400 to traces: bad value of ***" in done.stderr
    assert "otlp: 36 rows sent (4 refused for good and left out, the last: row" in done.stdout
    assert done.returncode == 0, done.stderr
    position = read_position(position_path(root, "otlp"))
    assert (position.number, position.left_out.rows) == (40, 4)
    assert sum(line.startswith("rollouts.step") for line in lines) == 20
    written = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    assert b"planted-secret" not in written + done.stderr.encode() + done.stdout.encode()


# --- StatsD -------------------------------------------------------------------------------------------------


def receive_lines(server):
    """What has arrived: datagrams on one machine are there when they have been sent."""
    text = ""
    server.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            text += server.recv(65536).decode() + "\n"
    return text.split()


@contextmanager
def open_agent(monkeypatch, host, port):
    """A socket that takes datagrams; the variables of these names say where."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv(host, "127.0.0.1")
        monkeypatch.setenv(port, str(server.getsockname()[1]))
        yield server


def test_plain_statsd_gets_the_newest_value_of_each_metric(monkeypatch):
    with open_agent(monkeypatch, "STATSD_HOST", "STATSD_PORT") as server:
        with closing(open_named("statsd")) as sink:
            sink.send(make_rows(3, 4))
        # a sign is a change, so a negative gauge is set from zero
        values = "step:4", "loss.total:0", "loss.total:-4.0", "reward.mean:2.0"
        assert receive_lines(server) == [f"rollouts.my_run.rl.{value}|g" for value in values]


def test_dogstatsd_gets_every_row_with_its_time_and_tags(tmp_path, monkeypatch):
    monkeypatch.setenv("DD_DOGSTATSD_URL", f"unix://{tmp_path / 'dsd'}")
    with pytest.raises(SinkUnavailable, match="nothing takes datagrams"):
        open_named("statsd").send(make_rows(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "dsd"))
        sink = open_named("statsd")
        sink.send(make_rows(*range(1, 21)))
        lines = receive_lines(server)
        assert len(lines) == 60
        assert f"rollouts.loss.total:-2.0|g|#run:my_run,stage:rl,attempt:1|T{AT + 2}" in lines
    with pytest.raises(SinkUnavailable, match="nothing takes datagrams"):
        sink.send(make_rows(1))


def test_every_metric_has_the_name_in_datadog_that_the_documentation_says(monkeypatch):
    names = {re.sub(r"\{\w+\}", "4", metric.name) for metric in METRICS}
    with open_agent(monkeypatch, "DD_AGENT_HOST", "DD_DOGSTATSD_PORT") as server:
        with closing(open_named("statsd")) as sink:
            sink.send([TrackedRow("metrics", make_row(1, **dict.fromkeys(names, 1.0)))])
        sent = {line.partition(":")[0] for line in receive_lines(server)}
    documented = {f"rollouts.{name.replace('/', '.').replace('@', '_at_')}" for name in names}
    assert sent == documented | {"rollouts.step"}


# --- Prometheus ---------------------------------------------------------------------------------------------


def test_a_scrape_reads_the_newest_values_also_of_a_sink_that_is_opened_again(monkeypatch):
    from prometheus_client.parser import text_string_to_metric_families

    port = find_free_port()
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    with closing(open_named("prometheus")) as sink:
        mark = sink.send([*make_rows(1, 2, 3), EVALUATION])
        with pytest.raises(SinkRefused, match="OTEL_EXPORTER_PROMETHEUS_PORT"):
            open_named("prometheus")
    address = f"http://127.0.0.1:{port}/metrics"
    with closing(open_named("prometheus", mark=mark)), urlopen(address, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} == {"gauge"}
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values == json.loads("""{"rollouts_step": 3, "rollouts_attempt": 1, "rollouts_loss_total": -3,
        "rollouts_reward_mean": 1.5, "rollouts_eval_heldout_avg_at_4": 0.25}""")
    assert families[2].samples[0].labels == {"run": "my run", "stage": "rl"}

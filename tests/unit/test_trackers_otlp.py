"""The OTLP sink against a collector on this machine: what arrives, what a collector may refuse, and what the
environment says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers.position import position_path, read_position
from rollouts.trackers.sinks import TrackedRow
from tests.unit.tracker_collector import (
    BEGAN,
    Collector,
    free_port,
    make_info,
    make_row,
    make_span,
    metrics_rows,
    open_collector,
    read_points,
    read_span_steps,
)

pytest.importorskip("opentelemetry.proto")
Judge = Callable[[str, bytes], tuple[int, bytes, str]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    from rollouts.trackers import otlp

    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(otlp, "_taken", {})
    monkeypatch.setattr(otlp, "_left_out", {})


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as server:
        yield server


def open_otlp(url: str, **environment: str):
    from rollouts.trackers.otlp import open_sink

    return open_sink(make_info(OTEL_EXPORTER_OTLP_ENDPOINT=url, **environment))


# --- what is sent -------------------------------------------------------------------------------------------


def test_a_point_has_the_time_of_its_row_and_the_labels_of_its_stage(collector: Collector):
    sink = open_otlp(collector.url)
    sink.send([TrackedRow("metrics", make_row(3, **{"reward/mean": 0.25}), 0, {"reward": 0.25})])
    labels = {"stage": "rl", "attempt": 1}
    at = 1_800_000_003 * 10**9
    assert sorted(collector.points()) == sorted(
        [
            ("reward", at, 0.25, labels),
            ("rollouts.policy_version", at, 2.0, labels),
            ("rollouts.reward.mean", at, 0.25, labels),
            ("rollouts.step", at, 3.0, labels),
        ],
        key=lambda point: point[0],
    )
    sink.close()


def test_everything_arrives_once_after_a_collector_that_refuses_hangs_and_fails(collector: Collector):
    """Refused, hung, 503 with Retry-After, a bad gateway between metrics and spans; the follower opens the
    sink anew and sends the same batch.
    """
    spans = [
        TrackedRow(
            "spans", make_row(step, name="train", track="trainer", start_unix=BEGAN, duration_s=1.5), 9 + step
        )
        for step in (1, 2)
    ]
    rows = [*metrics_rows(5), *spans]
    with pytest.raises(SinkUnavailable, match="cannot be reached"):
        open_otlp(f"http://127.0.0.1:{free_port()}").send(rows)
    collector.faults = ["hang", (503, {"Retry-After": "7"}), None, (502, {})]
    failures: list[SinkUnavailable] = []
    for _ in range(4):
        sink = open_otlp(collector.url, OTEL_EXPORTER_OTLP_TIMEOUT="300")
        try:
            sink.send(rows)
        except SinkUnavailable as error:
            failures.append(error)
        sink.close()
    assert [error.retry_after_s for error in failures] == [None, 7.0, None]
    losses = [(at, value) for name, at, value, _ in collector.points() if name == "rollouts.loss.total"]
    assert losses == [((1_800_000_000 + step) * 10**9, -0.5 * step) for step in range(1, 6)]
    assert len(collector.points()) == 5 * 5  # three metrics, step and policy_version of five rows
    assert len(collector.bodies["/v1/traces"]) == 1


def test_a_span_keeps_its_time_and_the_same_row_has_the_same_ids(collector: Collector):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from rollouts.trackers import otlp

    row = make_row(
        4, name="generate", track="vllm-0", start_unix=BEGAN + 0.25, duration_s=0.5, id="g1-s0", tokens=12
    )
    for _ in range(2):  # as after a kill, which leaves nothing to remember
        otlp._taken.clear()
        open_otlp(collector.url).send([TrackedRow("spans", row, 8)])
    first, second = (
        ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans[0]
        for body in collector.bodies["/v1/traces"]
    )
    assert first == second
    assert (len(first.trace_id), len(first.span_id), first.name) == (16, 8, "generate")
    assert first.start_time_unix_nano == 1_800_000_000_250_000_000
    assert first.end_time_unix_nano - first.start_time_unix_nano == 500_000_000
    labels = {entry.key: entry.value.string_value or entry.value.int_value for entry in first.attributes}
    assert labels == {
        "track": "vllm-0",
        "stage": "rl",
        "step": 4,
        "policy_version": 3,
        "attempt": 1,
        "id": "g1-s0",
        "tokens": 12,
    }


def test_headers_come_from_the_environment_and_stand_in_no_message(collector: Collector):
    collector.faults = [None, (401, {})]
    sink = open_otlp(
        collector.url.replace("http://", "http://user:hidden@"),
        OTEL_EXPORTER_OTLP_HEADERS="x-key=top%20secret,tenant=1",
    )
    sink.send(metrics_rows(1))
    assert (collector.headers[0]["x-key"], collector.headers[0]["tenant"]) == ("top secret", "1")
    with pytest.raises(SinkRefused, match="answered 401") as raised:
        sink.send([TrackedRow("metrics", make_row(2, **{"reward/mean": 0.5}), 1)])
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)


# --- what a collector refuses -------------------------------------------------------------------------------


def make_status(message: str) -> bytes:
    """google.rpc.Status(code=3, message=…): a number in field 1, a text in field 2."""
    return b"\x08\x03\x12" + bytes([len(message)]) + message.encode()


def find_steps(path: str, body: bytes) -> list[float]:
    """The step of each row of a request."""
    if path == "/v1/traces":
        return [float(step) for step in read_span_steps(body)]
    return [value for name, _, value, _ in read_points(body) if name == "rollouts.step"]


def refuse_steps(status: int, *bad: int) -> Judge:
    """Requests that hold a row of one of these steps are refused."""

    def judge(path: str, body: bytes) -> tuple[int, bytes, str]:
        refused = set(bad) & set(find_steps(path, body))
        return (
            (status, make_status("bad value\nof planted-secret"), "application/x-protobuf")
            if refused
            else (200, b"", "application/x-protobuf")
        )

    return judge


def refuse_more_than(rows: int) -> Judge:
    def judge(path: str, body: bytes) -> tuple[int, bytes, str]:
        return (413, b"too large", "text/plain") if len(find_steps(path, body)) > rows else (200, b"", "")

    return judge


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_collector_that_finds_rows_at_fault_is_no_outage(collector: Collector, status: int):
    collector.judge = refuse_steps(status, 3)
    with pytest.raises(RowsRefused, match=f"answered {status} to metrics: bad value of planted-secret$"):
        open_otlp(collector.url).send(metrics_rows(5))
    assert collector.posts == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_single_row_is_at_fault_only_where_a_message_without_rows_is_taken(
    collector: Collector, status: int
):
    (row,) = metrics_rows(1)
    collector.judge = refuse_steps(status, 1)
    with pytest.raises(RowsRefused):
        open_otlp(collector.url).send([row])
    collector.judge = lambda path, body: (
        status,
        b"The plain HTTP request was sent to HTTPS port",
        "text/html",
    )
    with pytest.raises(
        SinkRefused, match="sent to HTTPS port, even without rows; check OTEL_EXPORTER_OTLP_ENDPOINT"
    ):
        open_otlp(collector.url).send([row])
    collector.faults = [(status, {}), (503, {})]
    with pytest.raises(SinkUnavailable):
        open_otlp(collector.url).send([row])


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405])
def test_a_person_must_act_where_the_setting_is_wrong(collector: Collector, status: int):
    collector.faults = [(status, {})]
    with pytest.raises(SinkRefused, match=f"answered {status}"):
        open_otlp(collector.url).send(metrics_rows(2))


@pytest.mark.parametrize("status", [408, 429, 500, 501, 502, 503, 504, 507])
def test_a_service_in_trouble_is_tried_again(collector: Collector, status: int):
    collector.faults = [(status, {"Retry-After": "3"})]
    with pytest.raises(SinkUnavailable, match=f"answered {status}") as raised:
        open_otlp(collector.url).send(metrics_rows(2))
    assert raised.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (make_status("name too long"), "application/x-protobuf", "name too long"),
        (b'{"code": 3, "message": "name too long"}', "application/json", "name too long"),
        (b'["name too long"]', "application/json", '["name too long"]'),
        (b"name\r\ntoo\x1b[31m long", "text/plain", "name too [31m long"),
        (b"x" * 1000, "text/plain", "x" * 300 + "…"),
        (b"", "application/x-protobuf", "it does not say why"),
    ],
)
def test_the_collectors_words_are_one_line(collector: Collector, body: bytes, kind: str, words: str):
    collector.judge = lambda path, posted: (400, body, kind)
    with pytest.raises(RowsRefused) as raised:
        open_otlp(collector.url).send(metrics_rows(2))
    assert str(raised.value).endswith(f"answered 400 to metrics: {words}")


def test_a_row_that_cannot_be_told_as_otlp_is_at_fault_and_no_other(collector: Collector):
    sink = open_otlp(collector.url)
    broken = [
        TrackedRow("metrics", make_row(10**30), 0),
        TrackedRow("spans", {**make_span(1), "start_unix": None}, 1),
    ]
    for row in broken:
        with pytest.raises(RowsRefused, match="cannot be told as OTLP"):
            sink.send([row])
    assert collector.posts == 0
    sink.send([TrackedRow("metrics", make_row(2), 2)])
    assert collector.steps() == [2.0]


@pytest.mark.parametrize(
    "answer",
    [
        (202, b"", ""),
        (200, b"OK", ""),
        (200, b"{}", "application/json"),
        (200, b"\xff\xff", "application/x-protobuf"),
    ],
)
def test_an_answer_of_success_that_is_no_otlp_says_that_the_rows_are_taken(
    collector: Collector, answer: tuple[int, bytes, str]
):
    collector.judge = lambda path, body: answer
    open_otlp(collector.url).send(metrics_rows(2))
    assert collector.steps() == [1.0, 2.0]


def test_values_that_a_collector_leaves_out_are_counted(collector: Collector):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsPartialSuccess,
        ExportMetricsServiceResponse,
    )

    partial = ExportMetricsPartialSuccess(rejected_data_points=3, error_message="too old")
    body = ExportMetricsServiceResponse(partial_success=partial).SerializeToString()
    collector.judge = lambda path, posted: (200, body, "application/x-protobuf")
    rows = metrics_rows(2)
    assert open_otlp(collector.url).send(rows[:1]) == {"left_out": 3}
    assert open_otlp(collector.url).send(rows[1:]) == {"left_out": 6}


# --- through the follower -----------------------------------------------------------------------------------


def make_run(root: Path, count: int) -> Path:
    """A run with a row of metrics and a span for each step."""
    root.mkdir()
    (root / "config.toml").write_text('name = "t"\n')
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps(make_row(step, **{"loss/total": 0.5})) + "\n" for step in range(1, count + 1))
    )
    (root / "spans.jsonl").write_text(
        "".join(json.dumps(make_span(step)) + "\n" for step in range(1, count + 1))
    )
    return root


def track(root: Path, collector: Collector) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=planted-secret",
    }
    command = [sys.executable, "-m", "rollouts", "track", str(root), "--to", "otlp", "--once"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_rows_that_a_collector_refuses_for_good_are_named_and_all_others_arrive_once(
    tmp_path: Path, collector: Collector
):
    """Of 20 rows of metrics and 20 spans two of each are refused; the collector says our own key back."""
    root = make_run(tmp_path / "run", 20)
    collector.judge = refuse_steps(400, 3, 11)
    done = track(root, collector)
    kept = [step for step in range(1, 21) if step not in (3, 11)]
    assert (sorted(collector.steps()), sorted(collector.span_steps())) == (kept, kept)
    assert done.stderr.count("for good; it is left out") == 4
    assert (
        "refuses row of metrics.jsonl (stage rl, step 3, attempt 1) for good; it is left out: the collector"
        " at 127.0.0.1:" in done.stderr
    )
    assert "refuses row 'train' of spans.jsonl (stage rl, step 11, attempt 1) for good" in done.stderr
    assert "answered 400 to traces: bad value of ***" in done.stderr
    last = "row 'train' of spans.jsonl (stage rl, step 11, attempt 1)"
    assert done.stdout == f"otlp: 36 rows sent (4 refused for good and left out, the last: {last})\n"
    assert done.returncode == 0
    position = read_position(position_path(root, "otlp"))
    assert position is not None
    assert (position.number, position.left_out.rows, position.sending) == (40, 4, None)
    written = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    assert not any(
        b"planted-secret" in content for content in [*written, (done.stdout + done.stderr).encode()]
    )


def test_a_batch_that_is_too_large_arrives_in_parts(tmp_path: Path, collector: Collector):
    root = make_run(tmp_path / "run", 20)
    collector.judge = refuse_more_than(3)
    done = track(root, collector)
    assert (done.returncode, done.stdout, done.stderr) == (0, "otlp: 40 rows sent\n", "")
    assert sorted(collector.steps()) == sorted(collector.span_steps()) == list(range(1, 21))


def test_nothing_is_left_out_where_the_address_is_wrong(tmp_path: Path, collector: Collector):
    root = make_run(tmp_path / "run", 20)
    collector.judge = lambda path, body: (400, b"no such thing here", "text/plain")
    done = track(root, collector)
    assert done.returncode == 1
    assert done.stdout == "otlp: 0 rows sent, not all\n"
    assert "even without rows; check OTEL_EXPORTER_OTLP_ENDPOINT" in done.stderr
    collector.judge = refuse_steps(400)
    assert track(root, collector).stdout == "otlp: 40 rows sent\n"
    assert sorted(collector.steps()) == list(range(1, 21))


# --- the environment ----------------------------------------------------------------------------------------


def test_a_setting_of_one_signal_takes_the_place_of_the_common_one(collector: Collector):
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{collector.url}/v1/metrics",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=common",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=traces%2C%20only",
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    from rollouts.trackers.otlp import open_sink
    from rollouts.trackers.otlp_environment import read_route

    open_sink(make_info(**environment)).send([*metrics_rows(1), TrackedRow("spans", make_span(1), 1)])
    assert [headers["x-key"] for headers in collector.headers] == ["common", "traces, only"]
    assert [read_route(environment, signal).timeout_s for signal in ("metrics", "traces")] == [2.5, 10.0]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            r"^OTEL_EXPORTER_OTLP_PROTOCOL='grpc' is not spoken; set it to http/protobuf",
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            r"^OTEL_EXPORTER_OTLP_TRACES_PROTOCOL='http/json'",
        ),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x-key=top%0Asecret"}, r"^OTEL_EXPORTER_OTLP_HEADERS has a value"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x-key=top%C3%A9secret"}, r"^OTEL_EXPORTER_OTLP_HEADERS has a value"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x-key=topésecret"}, r"^OTEL_EXPORTER_OTLP_HEADERS has a value"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x-key=top%00secret"}, r"^OTEL_EXPORTER_OTLP_HEADERS has a value"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "top secret=1"}, r"^OTEL_EXPORTER_OTLP_HEADERS has a name"),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_HEADERS": "x-key=top%ffsecret"},
            r"^OTEL_EXPORTER_OTLP_METRICS_HEADERS has a value",
        ),
        ({"OTEL_RESOURCE_ATTRIBUTES": "topsecret"}, r"^OTEL_RESOURCE_ATTRIBUTES is to be name=value"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:top/secret@host:4318"},
            r"^OTEL_EXPORTER_OTLP_ENDPOINT is no http address",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[topsecret"},
            r"^OTEL_EXPORTER_OTLP_ENDPOINT is no http address",
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "localhost"},
            r"^OTEL_EXPORTER_OTLP_TRACES_ENDPOINT .* like http://localhost:4318/v1/traces$",
        ),
        ({"OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "0"}, r"^OTEL_EXPORTER_OTLP_METRICS_TIMEOUT='0'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_no_secret_is_said(
    environment: dict[str, str], message: str
):
    from rollouts.trackers.otlp import open_sink

    with pytest.raises(TrackerError, match=message) as raised:
        open_sink(make_info(**environment))
    assert "secret" not in str(raised.value)
    assert "top" not in str(raised.value)


def test_a_key_with_a_lines_end_around_it_is_taken(collector: Collector):
    open_otlp(collector.url, OTEL_EXPORTER_OTLP_HEADERS=" x-key = abc=%3D%20 \n").send(metrics_rows(1))
    assert collector.headers[0]["x-key"] == "abc=="


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "rollouts"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=from%20attributes,team=rl"}, "from attributes"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a", "OTEL_SERVICE_NAME": "b"}, "b"),
    ],
)
def test_the_services_name_is_that_of_its_own_variable_first(environment: dict[str, str], name: str):
    from rollouts.trackers.otlp_environment import read_resource

    resource = read_resource(make_info(**environment))
    assert resource["service.name"] == name
    assert resource["rollouts.run"] == "my run"


def test_the_variables_of_the_docs_are_those_that_are_read():
    """The code is asked with an environment that keeps what it is asked for."""
    from rollouts.trackers.otlp import open_sink

    class Watched(dict[str, str]):
        def get(self, key: str, default: str = "") -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            asked.add(key)
            return default

    asked: set[str] = set()
    info = make_info()
    open_sink(type(info)(info.id, info.name, info.root, {}, Watched())).close()
    docs = (
        (Path(__file__).parents[2] / "docs" / "trackers.md")
        .read_text()
        .partition("## OpenTelemetry")[2]
        .partition("## Outages")[0]
    )
    named = {
        word
        for line in docs.splitlines()
        if line.startswith("| `OTEL")
        for word in line.split("|")[1].replace("`", "").split(", ")
    }
    named = {word.strip().replace("…", "OTEL_EXPORTER_OTLP") for word in named}
    assert named == asked


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "no http address"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "topsecret"}, "name=value"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "milliseconds"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_name(environment: dict[str, str], message: str):
    from rollouts.trackers.otlp import open_sink

    with pytest.raises(TrackerError, match=message) as raised:
        open_sink(make_info(**environment))
    assert "topsecret" not in str(raised.value)


def test_a_signal_may_have_an_address_of_its_own():
    from rollouts.trackers.otlp_environment import find_url

    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1/base/",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://b/x",
    }
    assert find_url(environment, "metrics") == "http://a:1/base/v1/metrics"
    assert find_url(environment, "traces") == "https://b/x"
    assert find_url({}, "metrics") == "http://localhost:4318/v1/metrics"
    assert (
        find_url({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://u:p@a/base?x=1#y"}, "traces")
        == "https://u:p@a/base/v1/traces?x=1"
    )

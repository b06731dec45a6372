"""The sinks that speak to a service through a socket: OTLP, StatsD and DogStatsD, Prometheus. Each against a real one on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from rollouts.errors import SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers.sinks import RunInfo, TrackedRow

ID = "0123456789abcdef" * 2
BEGAN = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "*")


def make_info(run_id: str = ID, **environment: str) -> RunInfo:
    return RunInfo(run_id, "my run", Path("/nowhere"), {}, environment)


def make_row(step: int, **more: object) -> dict[str, object]:
    head = {"schema": 1, "stage": "rl", "step": step, "policy_version": step - 1, "attempt": 1, "time_unix": BEGAN + step}
    return {**head, **more}


def metrics_rows(count: int) -> list[TrackedRow]:
    rows = [make_row(step, **{"reward/mean": step / 4, "loss/total": -0.5 * step, "time/step": 2.0}) for step in range(1, count + 1)]
    return [TrackedRow("metrics", row, number) for number, row in enumerate(rows)]


# --- OTLP --------------------------------------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Stores what is posted to it, or does as the next of its faults says: a status, with or without Retry-After, or "hang"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.faults: list[object] = []
        self.bodies: dict[str, list[bytes]] = {"/v1/metrics": [], "/v1/traces": []}
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are part of the tests."""

    def points(self) -> list[tuple[str, int, float, dict[str, object]]]:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        found = []
        for body in self.bodies["/v1/metrics"]:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in metric.gauge.data_points:
                        labels = {entry.key: entry.value.string_value or entry.value.int_value for entry in point.attributes}
                        found.append((metric.name, point.time_unix_nano, point.as_double, labels))
        return found


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            self.server.released.wait(30)
            return
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if fault is None:
            self.server.bodies[self.path].append(body)
        status, more = fault if isinstance(fault, tuple) else (200, {})
        self.send_response(status)
        for name, value in {"Content-Length": "0", "Content-Type": "application/x-protobuf", **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestOtlp:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch):
        pytest.importorskip("opentelemetry.proto")
        from rollouts.trackers import otlp

        monkeypatch.setattr(otlp, "_taken", {})

    def open(self, url: str, **environment: str):
        from rollouts.trackers.otlp import open_sink

        return open_sink(make_info(OTEL_EXPORTER_OTLP_ENDPOINT=url, **environment))

    def test_a_point_has_the_time_of_its_row_and_the_labels_of_its_stage(self, collector: Collector):
        sink = self.open(collector.url)
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

    def test_everything_arrives_once_after_a_collector_that_refuses_hangs_and_fails(self, collector: Collector):
        """Refused, hung, 503 with Retry-After, a bad gateway between metrics and spans; the follower opens the sink anew and sends the same batch."""
        spans = [TrackedRow("spans", make_row(step, name="train", track="trainer", start_unix=BEGAN, duration_s=1.5), 9 + step) for step in (1, 2)]
        rows = [*metrics_rows(5), *spans]
        with pytest.raises(SinkUnavailable, match="cannot be reached"):
            self.open(f"http://127.0.0.1:{free_port()}").send(rows)
        collector.faults = ["hang", (503, {"Retry-After": "7"}), None, (502, {})]
        failures: list[SinkUnavailable] = []
        for _ in range(4):
            sink = self.open(collector.url, OTEL_EXPORTER_OTLP_TIMEOUT="300")
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

    def test_a_span_keeps_its_time_and_the_same_row_has_the_same_ids(self, collector: Collector):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        from rollouts.trackers import otlp

        row = make_row(4, name="generate", track="vllm-0", start_unix=BEGAN + 0.25, duration_s=0.5, id="g1-s0", tokens=12)
        for _ in range(2):  # as after a kill, which leaves nothing to remember
            otlp._taken.clear()
            self.open(collector.url).send([TrackedRow("spans", row, 8)])
        first, second = (
            ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans[0] for body in collector.bodies["/v1/traces"]
        )
        assert first == second
        assert (len(first.trace_id), len(first.span_id), first.name) == (16, 8, "generate")
        assert first.start_time_unix_nano == 1_800_000_000_250_000_000
        assert first.end_time_unix_nano - first.start_time_unix_nano == 500_000_000
        labels = {entry.key: entry.value.string_value or entry.value.int_value for entry in first.attributes}
        assert labels == {"track": "vllm-0", "stage": "rl", "step": 4, "policy_version": 3, "attempt": 1, "id": "g1-s0", "tokens": 12}

    def test_headers_come_from_the_environment_and_stand_in_no_message(self, collector: Collector):
        collector.faults = [None, (401, {})]
        sink = self.open(collector.url.replace("http://", "http://user:hidden@"), OTEL_EXPORTER_OTLP_HEADERS="x-key=top%20secret,tenant=1")
        sink.send(metrics_rows(1))
        assert (collector.headers[0]["x-key"], collector.headers[0]["tenant"]) == ("top secret", "1")
        with pytest.raises(SinkRefused, match="answered 401") as raised:
            sink.send([TrackedRow("metrics", make_row(2, **{"reward/mean": 0.5}), 1)])
        assert "secret" not in str(raised.value)
        assert "hidden" not in str(raised.value)

    @pytest.mark.parametrize(
        ("environment", "message"),
        [
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "no http address"),
            ({"OTEL_EXPORTER_OTLP_HEADERS": "topsecret"}, "name=value"),
            ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "milliseconds"),
        ],
    )
    def test_settings_that_cannot_be_read_are_refused_by_name(self, environment: dict[str, str], message: str):
        from rollouts.trackers.otlp import open_sink

        with pytest.raises(TrackerError, match=message) as raised:
            open_sink(make_info(**environment))
        assert "topsecret" not in str(raised.value)

    def test_a_signal_may_have_an_address_of_its_own(self):
        from rollouts.trackers.otlp import find_url

        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1/base/", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://b/x"}
        assert find_url(environment, "metrics") == "http://a:1/base/v1/metrics"
        assert find_url(environment, "traces") == "https://b/x"
        assert find_url({}, "metrics") == "http://localhost:4318/v1/metrics"


# --- StatsD --------------------------------------------------------------------------------------------------------------------


def receive_lines(server: socket.socket) -> list[str]:
    """What has arrived: datagrams on one machine are there when they have been sent."""
    lines: list[str] = []
    server.setblocking(False)
    while True:
        try:
            lines += server.recv(65536).decode().split("\n")
        except BlockingIOError:
            return lines


class TestStatsd:
    def open(self, **environment: str):
        from rollouts.trackers.statsd import open_sink

        return open_sink(make_info(**environment))

    def test_plain_statsd_gets_the_newest_value_of_each_metric(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("127.0.0.1", 0))
            sink = self.open(STATSD_HOST="127.0.0.1", STATSD_PORT=str(server.getsockname()[1]))
            sink.send(metrics_rows(4))
            assert sorted(receive_lines(server)) == sorted(
                [
                    "rollouts.my_run.rl.step:4.0|g",
                    "rollouts.my_run.rl.reward.mean:1.0|g",
                    "rollouts.my_run.rl.loss.total:0|g",  # a sign is a change, so a negative gauge is set from zero
                    "rollouts.my_run.rl.loss.total:-2.0|g",
                    "rollouts.my_run.rl.time.step:2.0|g",
                ]
            )
            sink.close()

    def test_dogstatsd_gets_every_row_with_its_time_and_tags(self, tmp_path: Path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(str(tmp_path / "dsd"))
            sink = self.open(DD_DOGSTATSD_URL=f"unix://{tmp_path / 'dsd'}")
            sink.send(metrics_rows(2))
            lines = receive_lines(server)
            assert len(lines) == 8
            assert "rollouts.loss.total:-0.5|g|#run:my_run,stage:rl,attempt:1|T1800000001" in lines
            assert "rollouts.loss.total:-1.0|g|#run:my_run,stage:rl,attempt:1|T1800000002" in lines
            sink.close()

    def test_a_socket_that_is_absent_at_first_gets_the_rows_later(self, tmp_path: Path):
        url = f"unix://{tmp_path / 'dsd'}"
        with pytest.raises(SinkUnavailable, match="nothing takes datagrams"):
            self.open(DD_DOGSTATSD_URL=url)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(str(tmp_path / "dsd"))
            sink = self.open(DD_DOGSTATSD_URL=url)
            sink.send(metrics_rows(3))
            assert len(receive_lines(server)) == 12
        with pytest.raises(SinkUnavailable, match="nothing takes datagrams"):
            sink.send(metrics_rows(1))
        sink.close()

    def test_a_port_at_which_nothing_listens_is_noticed(self):
        port = free_port(socket.SOCK_DGRAM)
        sink = self.open(DD_AGENT_HOST="127.0.0.1", DD_DOGSTATSD_PORT=str(port))
        with pytest.raises(SinkUnavailable, match=f"127.0.0.1:{port}"):
            sink.send(metrics_rows(1))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("127.0.0.1", port))
            sink.send(metrics_rows(1))
            assert len(receive_lines(server)) == 4
        sink.close()

    def test_lines_are_packed_and_never_cut(self):
        from rollouts.trackers.statsd import pack_lines

        lines = [f"name{number}:1|g" for number in range(100)]
        datagrams = list(pack_lines(lines, 64))
        assert max(map(len, datagrams)) <= 64
        assert b"\n".join(datagrams).decode().split("\n") == lines
        assert list(pack_lines(["x" * 100, "y"], 64)) == [b"x" * 100, b"y"]
        assert list(pack_lines([], 64)) == []

    @pytest.mark.parametrize(("value", "text"), [(1e-7, "0.000000100000"), (1e22, "10000000000000000000000"), (-0.25, "-0.25"), (3, "3.0")])
    def test_numbers_are_decimals(self, value: float, text: str):
        from rollouts.trackers.statsd import format_value

        assert format_value(value) == text

    @pytest.mark.parametrize("environment", [{"DD_DOGSTATSD_URL": "http://x:1"}, {"STATSD_PORT": "many"}, {"DD_DOGSTATSD_URL": "udp://x:0"}])
    def test_an_address_that_is_none_is_refused(self, environment: dict[str, str]):
        with pytest.raises(TrackerError, match="|".join(environment)):
            self.open(**environment)

    def test_where_datagrams_go(self):
        from rollouts.trackers.statsd import Address, find_address

        assert find_address({}) == Address(False, None, "localhost", 8125)
        assert find_address({"DD_DOGSTATSD_URL": "udp://agent"}) == Address(True, None, "agent", 8125)
        assert find_address({"DD_DOGSTATSD_URL": "udp://agent:9"}) == Address(True, None, "agent", 9)
        assert find_address({"DD_AGENT_HOST": "agent"}) == Address(True, None, "agent", 8125)
        assert find_address({"DD_DOGSTATSD_URL": "unix:///run/dsd"}) == Address(True, "/run/dsd")


# --- Prometheus ------------------------------------------------------------------------------------------------------------------


def scrape(port: int, path: str = "/metrics", accept: str = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5") -> tuple[str, str]:
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


class TestPrometheus:
    def open(self, run: RunInfo | None = None):
        from rollouts.trackers.prometheus import open_sink

        return open_sink(run or make_info(OTEL_EXPORTER_PROMETHEUS_PORT="0"))

    def test_a_scrape_reads_the_newest_values(self):
        parser = pytest.importorskip("prometheus_client.parser")
        sink = self.open()
        sink.send(metrics_rows(3))
        sink.send([TrackedRow("evaluations", make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.5}), 3, {"some.alias": 1.0})])
        kind, text = scrape(sink.port)
        assert kind.startswith("text/plain; version=0.0.4")
        families = list(parser.text_string_to_metric_families(text))
        assert {family.type for family in families} == {"gauge"}
        values = {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}
        labels = {"run": "my run", "stage": "rl"}
        assert values["rollouts_reward_mean"] == (labels, 0.75)
        assert values["rollouts_loss_total"] == (labels, -1.5)
        assert values["rollouts_step"] == (labels, 3.0)
        assert values["rollouts_eval_heldout_avg_at_4"] == (labels, 0.5)
        assert values["rollouts_some_alias"] == (labels, 1.0)
        assert next(family.documentation for family in families if family.name == "rollouts_time_step").endswith("(s)")
        sink.close()

    def test_a_sink_that_is_opened_again_shows_what_was_there(self):
        sink = self.open()
        mark = sink.send(metrics_rows(2))
        sink.close()
        again = self.open(RunInfo(ID, "my run", Path("/nowhere"), {}, {"OTEL_EXPORTER_PROMETHEUS_PORT": str(sink.port)}, mark))
        assert 'rollouts_reward_mean{run="my run",stage="rl"} 0.5\n' in scrape(again.port)[1]
        again.close()

    def test_a_port_that_is_taken_is_said(self):
        sink = self.open()
        with pytest.raises(SinkRefused, match="OTEL_EXPORTER_PROMETHEUS_PORT"):
            self.open(make_info(OTEL_EXPORTER_PROMETHEUS_PORT=str(sink.port)))
        sink.close()

    def test_a_name_with_odd_characters_does_not_break_the_page(self):
        from rollouts.trackers.prometheus import format_page

        parser = pytest.importorskip("prometheus_client.parser")
        page = format_page('a"b\\c\nd', {"reward/mean": {"rl": 1.0}, "x": {}}).decode()
        (sample,) = (sample for family in parser.text_string_to_metric_families(page) for sample in family.samples)
        assert sample.labels["run"] == 'a"b\\c\nd'

    def test_a_port_that_is_none_is_refused(self):
        with pytest.raises(TrackerError, match="no port"):
            self.open(make_info(OTEL_EXPORTER_PROMETHEUS_PORT="http"))


# --- through the follower ----------------------------------------------------------------------------------------------------------


def test_the_follower_catches_up_with_a_collector_that_fails_and_with_an_agent(collector: Collector, tmp_path: Path):
    """The command, over two parts of a file, with the steps of a first attempt that a second has repeated; a 503 in the middle."""
    pytest.importorskip("opentelemetry.proto")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('name = "t"\n')
    parts = [[make_row(step, **{"reward/mean": 0.25}) for step in range(1, 6)], [make_row(5, **{"reward/mean": 0.5, "attempt": 2})]]
    for name, rows in zip(("metrics.jsonl", "metrics.1.jsonl"), parts, strict=True):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    span = make_row(1, name="train", track="trainer", start_unix=BEGAN, duration_s=1.0)
    (run / "spans.jsonl").write_text(json.dumps(span) + "\n")
    collector.faults = [(503, {"Retry-After": "1"})]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "dsd"))
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=planted-secret",
            "DD_DOGSTATSD_URL": f"unix://{tmp_path / 'dsd'}",
        }
        command = [sys.executable, "-m", "rollouts", "track", str(run), "--to", "otlp", "--to", "statsd", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        lines = [line for line in receive_lines(agent) if line.startswith("rollouts.reward.mean")]
    rewards = [(at, value, labels["attempt"]) for name, at, value, labels in collector.points() if name == "rollouts.reward.mean"]
    assert rewards == [*(((1_800_000_000 + step) * 10**9, 0.25, 1) for step in range(1, 6)), (1_800_000_005 * 10**9, 0.5, 2)]
    assert len(collector.bodies["/v1/traces"]) == 1
    assert len(lines) == 6
    assert "rollouts.reward.mean:0.5|g|#run:run,stage:rl,attempt:2|T1800000005" in lines
    assert {headers["authorization"] for headers in collector.headers} == {"planted-secret"}
    written = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [name for name, content in written.items() if b"planted-secret" in content] == []
    assert "planted-secret" not in done.stdout + done.stderr

"""The sinks that speak to a service through a socket: StatsD and DogStatsD, Prometheus; OTLP's is beside this
file. Each against a real one on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from rollouts.errors import SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers.sinks import RunInfo, TrackedRow
from tests.unit.tracker_collector import (
    BEGAN,
    ID,
    Collector,
    free_port,
    make_info,
    make_row,
    metrics_rows,
    open_collector,
)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as server:
        yield server


# --- StatsD -------------------------------------------------------------------------------------------------


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
                    # a sign is a change, so a negative gauge is set from zero
                    "rollouts.my_run.rl.loss.total:0|g",
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

    @pytest.mark.parametrize(
        ("value", "text"),
        [(1e-7, "0.000000100000"), (1e22, "10000000000000000000000"), (-0.25, "-0.25"), (3, "3.0")],
    )
    def test_numbers_are_decimals(self, value: float, text: str):
        from rollouts.trackers.statsd import format_value

        assert format_value(value) == text

    @pytest.mark.parametrize(
        "environment",
        [{"DD_DOGSTATSD_URL": "http://x:1"}, {"STATSD_PORT": "many"}, {"DD_DOGSTATSD_URL": "udp://x:0"}],
    )
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


# --- Prometheus ---------------------------------------------------------------------------------------------


def scrape(
    port: int,
    path: str = "/metrics",
    accept: str = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
) -> tuple[str, str]:
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
        sink.send(
            [
                TrackedRow(
                    "evaluations",
                    make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.5}),
                    3,
                    {"some.alias": 1.0},
                )
            ]
        )
        kind, text = scrape(sink.port)
        assert kind.startswith("text/plain; version=0.0.4")
        families = list(parser.text_string_to_metric_families(text))
        assert {family.type for family in families} == {"gauge"}
        values = {
            sample.name: (sample.labels, sample.value) for family in families for sample in family.samples
        }
        labels = {"run": "my run", "stage": "rl"}
        assert values["rollouts_reward_mean"] == (labels, 0.75)
        assert values["rollouts_loss_total"] == (labels, -1.5)
        assert values["rollouts_step"] == (labels, 3.0)
        assert values["rollouts_eval_heldout_avg_at_4"] == (labels, 0.5)
        assert values["rollouts_some_alias"] == (labels, 1.0)
        assert next(
            family.documentation for family in families if family.name == "rollouts_time_step"
        ).endswith("(s)")
        sink.close()

    def test_a_sink_that_is_opened_again_shows_what_was_there(self):
        sink = self.open()
        mark = sink.send(metrics_rows(2))
        sink.close()
        again = self.open(
            RunInfo(
                ID, "my run", Path("/nowhere"), {}, {"OTEL_EXPORTER_PROMETHEUS_PORT": str(sink.port)}, mark
            )
        )
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
        (sample,) = (
            sample for family in parser.text_string_to_metric_families(page) for sample in family.samples
        )
        assert sample.labels["run"] == 'a"b\\c\nd'

    def test_a_port_that_is_none_is_refused(self):
        with pytest.raises(TrackerError, match="no port"):
            self.open(make_info(OTEL_EXPORTER_PROMETHEUS_PORT="http"))


# --- through the follower -----------------------------------------------------------------------------------


def test_the_follower_catches_up_with_a_collector_that_fails_and_with_an_agent(
    collector: Collector, tmp_path: Path
):
    """The command, over two parts of a file, with the steps of a first attempt that a second has repeated; a
    503 in the middle.
    """
    pytest.importorskip("opentelemetry.proto")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('name = "t"\n')
    parts = [
        [make_row(step, **{"reward/mean": 0.25}) for step in range(1, 6)],
        [make_row(5, **{"reward/mean": 0.5, "attempt": 2})],
    ]
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
        command = [
            sys.executable,
            "-m",
            "rollouts",
            "track",
            str(run),
            "--to",
            "otlp",
            "--to",
            "statsd",
            "--once",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in receive_lines(agent) if line.startswith("rollouts.reward.mean")]
    rewards = [
        (at, value, labels["attempt"])
        for name, at, value, labels in collector.points()
        if name == "rollouts.reward.mean"
    ]
    assert rewards == [
        *(((1_800_000_000 + step) * 10**9, 0.25, 1) for step in range(1, 6)),
        (1_800_000_005 * 10**9, 0.5, 2),
    ]
    assert len(collector.bodies["/v1/traces"]) == 1
    assert len(lines) == 6
    assert "rollouts.reward.mean:0.5|g|#run:run,stage:rl,attempt:2|T1800000005" in lines
    assert {headers["authorization"] for headers in collector.headers} == {"planted-secret"}
    written = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [name for name, content in written.items() if b"planted-secret" in content] == []
    assert "planted-secret" not in done.stdout + done.stderr

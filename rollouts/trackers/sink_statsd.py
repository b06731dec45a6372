"""StatsD and DogStatsD: gauges in datagrams, by Datadog's client.

DogStatsD is spoken where DD_DOGSTATSD_URL, DD_AGENT_HOST or DD_DOGSTATSD_PORT is set: run, stage and attempt
are tags, and each value has the time of its row (agents from 7.40 on). Otherwise plain StatsD to STATSD_HOST
and STATSD_PORT (localhost, 8125), which knows neither: run and stage are in the name, and of the rows that
wait only the newest value of each metric is sent.

Nobody confirms a datagram. An address at which nothing listens is noticed on this machine, and rows wait;
across a network what is lost is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from functools import partial

from datadog.dogstatsd.base import DogStatsd

from rollouts.errors import SinkUnavailable
from rollouts.trackers.sinks import RunInfo, TrackedRow, clean_name

DATADOG = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")  # the client reads them itself
VALUES_PER_FLUSH = 10
Send = partial[object]


class StatsdSink:
    """Sends gauges in datagrams of a few values. Raises SinkRefused for a port that is none."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._is_datadog = any(run.environment.get(name) for name in DATADOG)
        address = {}
        if not self._is_datadog:
            host = run.environment.get("STATSD_HOST") or "localhost"
            address = {"host": host, "port": run.read_port("STATSD_PORT", "8125")}
        self._client = DogStatsd(
            **address,
            disable_buffering=False,
            flush_interval=0,
            disable_telemetry=True,
            origin_detection_enabled=False,
            socket_timeout=5.0,
        )

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Returns when the system has taken the datagrams. Raises SinkUnavailable where nothing listens."""
        calls = [*(self._list_values(rows) if self._is_datadog else self._list_newest(rows))]
        for start in range(0, len(calls), VALUES_PER_FLUSH):
            for call in calls[start : start + VALUES_PER_FLUSH]:
                call()
            sent, connection = self._client.flush_buffered_metrics(), self._client.socket
            if not sent or (connection and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                self._client.close_socket()
                place = self._client.socket_path or f"{self._client.host}:{self._client.port}"
                raise SinkUnavailable(f"nothing takes datagrams at {place}")

    def close(self) -> None:
        """Closes the socket."""
        self._client.close_socket()

    def _list_values(self, rows: Sequence[TrackedRow]) -> Iterator[Send]:
        for tracked in rows:
            labels = {"run": self._run.name, **tracked.labels()}
            tags = [f"{key}:{value}" for key, value in labels.items()]
            for name, value in tracked.metrics("step").items():
                metric, time_s = f"rollouts.{clean_name(name, '.')}", int(tracked.row["time_unix"])
                yield partial(self._client.gauge_with_timestamp, metric, value, time_s, tags)

    def _list_newest(self, rows: Sequence[TrackedRow]) -> Iterator[Send]:
        newest = {
            ("rollouts", self._run.name, tracked.row["stage"], name): value
            for tracked in rows
            for name, value in tracked.metrics("step").items()
        }
        for parts, value in newest.items():
            metric = ".".join(clean_name(part, ".") for part in parts)
            # a sign means a change of a gauge, so a negative value follows a zero
            for number in (0, value) if value < 0 else (value,):
                yield partial(self._client.gauge, metric, number)


open_sink = StatsdSink

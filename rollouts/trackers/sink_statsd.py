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
from collections.abc import Sequence

from datadog.dogstatsd.base import DogStatsd

from rollouts.errors import SinkUnavailable, TrackerError
from rollouts.trackers.sinks import RunInfo, TrackedRow, clean_name

DATADOG = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")  # the client reads them itself
VALUES_PER_FLUSH = 10


def open_sink(run: RunInfo) -> StatsdSink:
    """The sink of a run. Raises TrackerError for a port that is none."""
    return StatsdSink(run)


class StatsdSink:
    """Sends gauges in datagrams of a few values."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._is_datadog = any(run.environment.get(name) for name in DATADOG)
        address = {}
        if not self._is_datadog:
            port = run.environment.get("STATSD_PORT") or "8125"
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise TrackerError(f"STATSD_PORT={port!r} is no port; give a number from 1 to 65535")
            address = {"host": run.environment.get("STATSD_HOST") or "localhost", "port": int(port)}
        self._client = DogStatsd(
            **address,
            disable_buffering=False,
            flush_interval=0,
            disable_telemetry=True,
            origin_detection_enabled=False,
            socket_timeout=5.0,
        )
        self._waiting = 0

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Returns when the system has taken the datagrams. Raises SinkUnavailable where nothing listens."""
        if self._is_datadog:
            for tracked in rows:
                tags = [
                    f"{key}:{value}" for key, value in {"run": self._run.name, **tracked.labels()}.items()
                ]
                for name, value in {"step": tracked.row["step"], **tracked.metrics()}.items():
                    metric = f"rollouts.{clean_name(name, '.')}"
                    self._client.gauge_with_timestamp(metric, value, int(tracked.row["time_unix"]), tags)
                    self._flush(VALUES_PER_FLUSH)
        else:
            newest = {
                (tracked.row["stage"], name): value
                for tracked in rows
                for name, value in {"step": tracked.row["step"], **tracked.metrics()}.items()
            }
            for (stage, name), value in newest.items():
                parts = (self._run.name, stage, name)
                metric = ".".join(["rollouts", *(clean_name(part, ".") for part in parts)])
                if value < 0:  # a sign means a change of a gauge, so a negative value follows a zero
                    self._client.gauge(metric, 0)
                self._client.gauge(metric, value)
                self._flush(VALUES_PER_FLUSH)
        self._flush(1)

    def close(self) -> None:
        """Closes the socket."""
        self._client.close_socket()

    def _flush(self, least: int) -> None:
        """Sends what waits where that is at least so many values."""
        self._waiting += 1
        if self._waiting < least:
            return
        self._waiting = 0
        sent = self._client.flush_buffered_metrics()
        connection = self._client.socket
        if not sent or (connection and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            self._client.close_socket()
            place = self._client.socket_path or f"{self._client.host}:{self._client.port}"
            raise SinkUnavailable(f"nothing takes datagrams at {place}")

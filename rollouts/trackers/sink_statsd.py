"""StatsD and DogStatsD: gauges in datagrams, by Datadog's client.

DogStatsD is spoken where DD_DOGSTATSD_URL, DD_AGENT_HOST or DD_DOGSTATSD_PORT is set: run, stage and attempt
are tags, and each value has the time of its row (agents from 7.40 on). Otherwise plain StatsD to STATSD_HOST
and STATSD_PORT (localhost, 8125), which knows neither: run and stage are in the name, and of the rows that
wait only the newest value of each metric is sent.

Nobody confirms a datagram. An address at which nothing listens is noticed on this machine, and rows wait;
across a network what is lost is lost.
"""

import socket
from collections.abc import Iterator

from datadog.dogstatsd.base import DogStatsd

from rollouts.errors import SinkUnavailable
from rollouts.trackers.sinks import Batch, RunInfo, Sink, clean_name

DATADOG = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")  # the client reads them itself
VALUES_PER_FLUSH = 10


def open_sink(run: RunInfo) -> Sink:
    """Sends gauges in datagrams of a few values. Raises SinkRefused for a port that is none."""
    is_datadog = any(run.environment.get(name) for name in DATADOG)
    host = run.environment.get("STATSD_HOST") or "localhost"
    client = DogStatsd(
        **{} if is_datadog else {"host": host, "port": run.read_port("STATSD_PORT", "8125")},
        disable_buffering=False,
        flush_interval=0,
        disable_telemetry=True,
        origin_detection_enabled=False,
        socket_timeout=5.0,
    )

    def flush() -> None:
        """Raises SinkUnavailable where nothing listens."""
        sent = client.flush_buffered_metrics()
        if not sent or (client.socket and client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            client.close_socket()
            raise SinkUnavailable(
                f"nothing takes datagrams at {client.socket_path or f'{client.host}:{client.port}'}"
            )

    def gauge_every(rows: Batch) -> Iterator[None]:
        """Each value, with its time and tags."""
        for tracked in rows:
            tags = [f"run:{run.name}", *(f"{key}:{of}" for key, of in tracked.labels().items())]
            time_s = int(tracked.row["time_unix"])
            for name, value in tracked.metrics("step").items():
                yield client.gauge_with_timestamp(f"rollouts.{clean_name(name, '.')}", value, time_s, tags)

    def gauge_newest(rows: Batch) -> Iterator[None]:
        """The newest value of each metric."""
        newest = {
            (tracked.row["stage"], name): value
            for tracked in rows
            for name, value in tracked.metrics("step").items()
        }
        for parts, value in newest.items():
            metric = ".".join(clean_name(part, ".") for part in ("rollouts", run.name, *parts))
            # a sign means a change of a gauge, so a negative value follows a zero
            for number in (0, value) if value < 0 else (value,):
                yield client.gauge(metric, number)

    def send(rows: Batch) -> None:
        """Returns when the system has taken the datagrams. Raises SinkUnavailable where nothing listens."""
        for number, _ in enumerate(gauge_every(rows) if is_datadog else gauge_newest(rows), 1):
            if number % VALUES_PER_FLUSH == 0:
                flush()
        flush()

    return Sink(send, client.close_socket)

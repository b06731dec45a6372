"""Prometheus: an endpoint on this machine that shows the newest value of each metric, for as long as the run
is followed, by prometheus_client.

    http://127.0.0.1:9464/metrics      another port: OTEL_EXPORTER_PROMETHEUS_PORT

Prometheus stamps what it scrapes, so values between two scrapes are not there. The mark is what was shown
last: a follower that starts again shows it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rollouts.errors import SinkRefused
from rollouts.metrics.names import find_metric
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow, clean_name

PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"


class PrometheusSink:
    """The endpoint of a run, with a gauge of each metric and its values by stage. Raises SinkRefused for a
    port that is none, or is taken.
    """

    def __init__(self, run: RunInfo) -> None:
        self._run, self._registry = run, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}  # by the name that Prometheus reads
        self._shown: dict[str, dict[str, float]] = {}  # by metric: by stage
        mark: Any = run.mark or {}
        for name, values in mark.get("shown", {}).items():
            for stage, value in values.items():
                self._show(name, stage, value)
        port = run.read_port(PORT, "9464")
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise SinkRefused(
                f"port {port} of this machine cannot be had ({error}); set {PORT} to a free one"
            ) from error

    def send(self, rows: Sequence[TrackedRow]) -> Mark:
        """Returns when the values are shown."""
        for tracked in rows:
            head = ("step", "attempt") if tracked.file == "metrics" else ()
            for name, value in tracked.metrics(*head).items():
                self._show(name, tracked.row["stage"], float(value))
        return {"shown": {name: dict(values) for name, values in self._shown.items()}}

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _show(self, name: str, stage: str, value: float) -> None:
        exposed = f"rollouts_{clean_name(name, '_').replace('.', '_')}"
        if exposed not in self._gauges:
            known = find_metric(name)
            meaning = f"{known.meaning}{f' ({known.unit})' if known.unit else ''}" if known else name
            self._gauges[exposed] = Gauge(exposed, meaning, ["run", "stage"], registry=self._registry)
        self._gauges[exposed].labels(self._run.name, stage).set(value)
        self._shown.setdefault(name, {})[stage] = value


open_sink = PrometheusSink

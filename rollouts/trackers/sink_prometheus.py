"""Prometheus: an endpoint on this machine that shows the newest value of each metric, for as long as the run
is followed, by prometheus_client.

    http://127.0.0.1:9464/metrics      another port: OTEL_EXPORTER_PROMETHEUS_PORT

Prometheus stamps what it scrapes, so values between two scrapes are not there. The mark is what was shown
last: a follower that starts again shows it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollouts.errors import SinkRefused, TrackerError
from rollouts.metrics.names import find_metric
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow, clean_name


def open_sink(run: RunInfo) -> PrometheusSink:
    """The endpoint of a run. Raises TrackerError for a bad port, SinkRefused for one that is taken."""
    text = run.environment.get("OTEL_EXPORTER_PROMETHEUS_PORT") or "9464"
    if not text.isdecimal() or int(text) > 65535:
        raise TrackerError(f"OTEL_EXPORTER_PROMETHEUS_PORT={text!r} is no port; give a number up to 65535")
    return PrometheusSink(run, int(text))


class PrometheusSink(Collector):
    """Holds the newest values: by metric, by stage."""

    def __init__(self, run: RunInfo, port: int) -> None:
        self._run = run
        shown = (run.mark or {}).get("shown", {})
        assert isinstance(shown, Mapping)
        self._shown: dict[str, dict[str, float]] = {name: dict(values) for name, values in shown.items()}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise SinkRefused(
                f"port {port} of this machine cannot be had ({error}); set OTEL_EXPORTER_PROMETHEUS_PORT to a"
                " free one"
            ) from error
        self.port = self._server.server_port

    def collect(self) -> Iterator[Metric]:
        """A gauge for each metric, with the labels run and stage."""
        for name, values in list(self._shown.items()):
            known = find_metric(name)
            meaning = f"{known.meaning}{f' ({known.unit})' if known.unit else ''}" if known else name
            exposed = f"rollouts_{clean_name(name, '_').replace('.', '_')}"
            gauge = GaugeMetricFamily(exposed, meaning, labels=["run", "stage"])
            for stage, value in list(values.items()):
                gauge.add_metric([self._run.name, stage], value)
            yield gauge

    def send(self, rows: Sequence[TrackedRow]) -> Mark:
        """Returns when the values are shown."""
        for tracked in rows:
            row = tracked.row
            place = {"step": row["step"], "attempt": row["attempt"]} if tracked.file == "metrics" else {}
            for name, value in {**place, **tracked.metrics()}.items():
                self._shown.setdefault(name, {})[row["stage"]] = float(value)
        return {"shown": {name: dict(values) for name, values in self._shown.items()}}

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

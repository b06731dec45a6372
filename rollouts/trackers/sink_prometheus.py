"""Prometheus: an endpoint on this machine that shows the newest value of each metric, for as long as the run
is followed, by prometheus_client.

    http://127.0.0.1:9464/metrics      another port: OTEL_EXPORTER_PROMETHEUS_PORT

Prometheus stamps what it scrapes, so values between two scrapes are not there. The mark is what was shown
last: a follower that starts again shows it at once.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rollouts.errors import SinkRefused
from rollouts.trackers.sinks import Batch, Mark, RunInfo, Sink, clean_name, describe_metric

PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"


def open_sink(run: RunInfo) -> Sink:
    """The endpoint of a run, with a gauge of each metric and its values by stage. Raises SinkRefused for a
    port that is none, or is taken.
    """
    shown = run.mark.get("shown", {})  # by metric: by stage

    class Shown(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            """What a scrape reads."""
            for name, values in list(shown.items()):
                family = GaugeMetricFamily(
                    f"rollouts_{clean_name(name, '_').replace('.', '_')}",
                    describe_metric(name),
                    labels=["run", "stage"],
                )
                for stage, value in list(values.items()):
                    family.add_metric([run.name, stage], value)
                yield family

    def send(rows: Batch) -> Mark:
        for tracked in rows:
            head = ("step", "attempt") if tracked.file == "metrics" else ()
            for name, value in tracked.metrics(*head).items():
                shown.setdefault(name, {})[tracked.row["stage"]] = float(value)
        return {"shown": shown}

    registry, port = CollectorRegistry(), run.read_port(PORT, "9464")
    registry.register(Shown())
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise SinkRefused(
            f"port {port} of this machine cannot be had ({error}); set {PORT} to a free one"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Sink(send, close)

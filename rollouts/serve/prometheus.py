"""GET /metrics: what a server has done since it began, and what it holds, for Prometheus.

requests that end, tokens that are trained and sampled ─► Meters ─┐
the queue, models, engine, trainer, caches, GPUs ─ looked at when ┴─► GET /metrics
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import prometheus_client as prometheus
import trio
from prometheus_client.core import GaugeMetricFamily
from starlette.responses import Response

from rollouts.metrics.gpus import read_gpus
from rollouts.types import Numbers

if TYPE_CHECKING:
    from rollouts.serve.app import Call
    from rollouts.serve.service import Service

SECONDS = [
    10 ** (k / 2) for k in range(-6, 7)
]  # bounds of buckets, from a millisecond to a quarter of an hour


class Meters:
    """Counts since the server began, and what the process takes, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = prometheus.CollectorRegistry()
        measure = partial(prometheus.Histogram, buckets=SECONDS, registry=own)
        self.seconds = measure(
            "rollouts_request_seconds", "of ended requests, from when work on them began", ["kind", "state"]
        )
        self.queued = measure("rollouts_request_queued_seconds", "until work on them began", ["kind"])
        self.trained = prometheus.Counter("rollouts_trained_tokens", "that had a gradient", registry=own)
        self.sampled = prometheus.Counter("rollouts_sampled_tokens", "of all sequences", registry=own)
        prometheus.ProcessCollector(registry=own)


class Shown(NamedTuple):
    """What one scrape reads."""

    service: "Service"
    gpus: Numbers

    def collect(self) -> Iterator[prometheus.Metric]:
        """Counts, then what there is now: numbers by name, of several kinds."""
        service, count = self.service, self.service.store.value
        yield from service.meters.registry.collect()
        depth = GaugeMetricFamily("rollouts_requests", "that have not ended", labels=["kind", "state"])
        for kind, state, number in service.store.all(
            "SELECT kind, state, COUNT(*) FROM requests WHERE state IN ('queued', 'running') GROUP BY 1, 2"
        ):
            depth.add_metric([kind, state], number)
        yield depth
        loaded, live = len(service.loaded), "sessions WHERE sessions.ended IS NULL"
        for kind, values in {
            "models": {"in_memory": loaded, "on_disk": len(service.models) - loaded},
            "clients": {
                "sessions": count(f"SELECT COUNT(*) FROM {live}"),
                "samplers": count(f"SELECT COUNT(*) FROM samplers, {live} AND sessions.id = session"),
            },
            "engine": service.engine.statistics(),
            "trainer": service.base.statistics(),
            "sampler_weights": service.samplers.statistics(),
            "references": service.references.statistics(),
            "gpu": self.gpus,
        }.items():
            found = GaugeMetricFamily(f"rollouts_{kind}", "see docs/service.md", labels=["name"])
            for name, value in values.items():
                found.add_metric([name.removeprefix("perf/gpu/")], value)
            yield found


async def get_metrics(call: "Call") -> Response:
    """Numbers of all users together, which name no user and no model: every key may read them."""
    shown = Shown(call.service, await trio.to_thread.run_sync(read_gpus, abandon_on_cancel=True))
    return Response(prometheus.generate_latest(shown), media_type=prometheus.CONTENT_TYPE_PLAIN_0_0_4)


METRICS = {"GET /metrics": get_metrics}

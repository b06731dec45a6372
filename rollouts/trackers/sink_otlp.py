"""OpenTelemetry: metrics as gauges and spans, by OpenTelemetry's own exporters (OTLP over HTTP, protobuf).

The exporters get finished points and spans with the times of their rows, so what is sent after an outage
lands where it belongs, and what is sent twice is the same twice. All settings are OpenTelemetry's variables.

    2xx                     taken
    400, 413, 422           RowsRefused; of a single row only where an empty message is taken
    408, 429, 5xx, silence  SinkUnavailable: tried again
    others (401, 403, 404)  SinkRefused: a person must act
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from rollouts import __version__
from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable
from rollouts.metrics.names import find_metric
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow, clean_name

ROWS_AT_FAULT = frozenset({400, 413, 422})
WORDS = 300  # characters of a collector's words that are worth a line
UNITS = {"": "1", "share": "1", "s": "s", "bytes": "By"}  # as OpenTelemetry writes them; others in braces
Signal = Literal["metrics", "traces"]


def open_sink(run: RunInfo) -> OtlpSink:
    """The sink of a run."""
    return OtlpSink(run)


class OtlpSink:
    """Exports each batch as one request of metrics and one of spans."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._answers: list[requests.Response] = []  # of the request under way
        self._left_out = int((run.mark or {}).get("left_out", 0))  # values that the collector left out
        session = requests.Session()
        session.hooks["response"].append(lambda answer, **_: self._answers.append(answer))
        session.max_redirects = 0
        self._exporters = {
            "metrics": OTLPMetricExporter(session=session),
            "traces": OTLPSpanExporter(session=session),
        }
        given = Resource.create().attributes
        unnamed = str(given["service.name"]).startswith("unknown_service")
        own = {"service.instance.id": run.id, "rollouts.run": run.name}
        self._resource = Resource({**given, **({"service.name": "rollouts"} if unnamed else {}), **own})
        self._scope = InstrumentationScope("rollouts", __version__)

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        """Returns when the collector has taken the batch."""
        empty = {"metrics": MetricsData([]), "traces": ()}
        for signal in ("metrics", "traces"):
            own = [row for row in rows if (row.file == "spans") == (signal == "traces")]
            if not own:
                continue
            try:
                message = self._make_spans(own) if signal == "traces" else self._make_metrics(own)
            except (KeyError, TypeError, ValueError, OverflowError) as error:  # another program wrote the row
                raise RowsRefused(f"it cannot be told as OTLP ({error!r})") from error
            try:
                self._post(signal, message)
            except RowsRefused as error:
                if len(rows) > 1:
                    raise
                try:
                    self._post(signal, empty[signal])
                except RowsRefused:
                    hint = "even without rows; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_RESOURCE_ATTRIBUTES"
                    raise SinkRefused(f"{error}, {hint}") from error
                raise
        return {"left_out": self._left_out} if self._left_out else None

    def close(self) -> None:
        """Closes the connection."""
        for exporter in self._exporters.values():
            exporter.shutdown()

    def _post(self, signal: Signal, message: Any) -> None:
        self._answers.clear()
        self._exporters[signal].export(message)
        if not self._answers:
            raise SinkUnavailable("the collector does not answer")
        answer = self._answers[-1]
        status = answer.status_code
        if 200 <= status < 300:
            self._left_out += count_rejected(signal, answer.content)
            return
        told = f"the collector answered {status} to {signal}"
        if status in (408, 429) or status >= 500:
            retry_after = answer.headers.get("retry-after", "")
            raise SinkUnavailable(told, retry_after_s=float(retry_after) if retry_after.isdecimal() else None)
        if status in ROWS_AT_FAULT:
            words = "".join(letter if letter.isprintable() else " " for letter in answer.text)
            raise RowsRefused(f"{told}: {' '.join(words.split())[:WORDS]}")
        raise SinkRefused(f"{told}; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS")

    def _make_metrics(self, rows: Sequence[TrackedRow]) -> MetricsData:
        """A gauge per metric with a point per row, at the row's time."""
        points: dict[str, list[NumberDataPoint]] = {}
        for tracked in rows:
            row = tracked.row
            time_ns = round(row["time_unix"] * 1000) * 1_000_000
            head = {"step": row["step"], "policy_version": row.get("policy_version", 0)}
            for name, value in {**head, **tracked.metrics()}.items():
                point = NumberDataPoint(tracked.labels(), 0, time_ns, float(value))
                points.setdefault(name, []).append(point)
        metrics: list[Metric] = []
        for name, held in points.items():
            known = find_metric(name)
            unit = UNITS.get(known.unit, f"{{{known.unit}}}") if known else "1"
            meaning = known.meaning if known else ""
            metrics.append(Metric(f"rollouts.{clean_name(name, '.')}", meaning, unit, Gauge(held)))
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])

    def _make_spans(self, rows: Sequence[TrackedRow]) -> list[ReadableSpan]:
        """The span of each row; those of one step of one attempt are a trace. Ids follow from run and row."""
        spans: list[ReadableSpan] = []
        for tracked in rows:
            row = tracked.row
            names = ("track", "stage", "step", "policy_version", "attempt", "id", "tokens")
            start_ns = round(row["start_unix"] * 1e6) * 1000
            trace_id = make_id(16, self._run.id, row["stage"], row["step"], row["attempt"])
            span_id = make_id(8, self._run.id, "span", tracked.key)
            spans.append(
                ReadableSpan(
                    row["name"],
                    SpanContext(trace_id, span_id, is_remote=False),
                    resource=self._resource,
                    attributes={name: row[name] for name in names if name in row},
                    kind=SpanKind.INTERNAL,
                    instrumentation_scope=self._scope,
                    start_time=start_ns,
                    end_time=start_ns + round(row["duration_s"] * 1e6) * 1000,
                )
            )
        return spans


def make_id(size: int, *parts: object) -> int:
    """A number of so many bytes that follows from the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:size], "big")


def count_rejected(signal: Signal, content: bytes) -> int:
    """How many values a collector took a batch without; 0 for an answer that is no OTLP message."""
    with contextlib.suppress(DecodeError):
        if signal == "metrics":
            return ExportMetricsServiceResponse.FromString(content).partial_success.rejected_data_points
        return ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans
    return 0

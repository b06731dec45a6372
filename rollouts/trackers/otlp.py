"""OpenTelemetry: metrics as gauges and spans, as OTLP over HTTP (protobuf) to a collector.

Every point has the time of its row and every span its own, so what is sent after an outage lands where it belongs. The SDK's metrics API stamps
points when they are sent; the messages are therefore made here and posted by httpx2.

Environment: OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4318), OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and …_TRACES_ENDPOINT for whole
addresses, OTEL_EXPORTER_OTLP_HEADERS (name=value,…, percent-encoded: keys go here), OTEL_EXPORTER_OTLP_TIMEOUT (milliseconds),
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.

A batch that is sent again has the same points and, for its spans, the same ids: a service that stores by time or id has them once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote, urlsplit

import httpx2
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from rollouts import __version__
from rollouts.errors import SinkRefused, SinkUnavailable, TrackerError
from rollouts.metrics.names import find_metric
from rollouts.trackers.sinks import RunInfo, TrackedRow

DEFAULT_ENDPOINT = "http://localhost:4318"
DEFAULT_TIMEOUT_S = 10.0
RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
UNITS = {"": "1", "s": "s", "bytes": "By", "share": "1", "tokens/s": "{tokens}/s"}  # as OpenTelemetry writes them; others go into braces
_taken: dict[tuple[str, str], int] = {}  # by run and signal: the number of the last row that the collector took, for a batch of which it took half


def open_sink(run: RunInfo) -> OtlpSink:
    """The sink of a run. Raises TrackerError for settings in the environment that cannot be read."""
    return OtlpSink(run)


class OtlpSink:
    """Posts each batch as one request of metrics and one of spans."""

    def __init__(self, run: RunInfo) -> None:
        environment = run.environment
        self._run = run
        self._urls = {signal: find_url(environment, signal) for signal in ("metrics", "traces")}
        self._scope = InstrumentationScope(name="rollouts", version=__version__)
        self._resource = Resource(attributes=make_attributes(read_resource(run)))
        headers = {**read_pairs(environment, "OTEL_EXPORTER_OTLP_HEADERS"), "content-type": "application/x-protobuf"}
        self._client = httpx2.Client(headers=headers, timeout=read_timeout_s(environment), follow_redirects=False)

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Returns when the collector has taken the batch. Raises SinkUnavailable, with the seconds that it asks to be left alone, or SinkRefused."""
        points = [row for row in rows if row.file != "spans" and self._is_new("metrics", row)]
        if points:
            scope = ScopeMetrics(scope=self._scope, metrics=make_metrics(points))
            request = ExportMetricsServiceRequest(resource_metrics=[ResourceMetrics(resource=self._resource, scope_metrics=[scope])])
            answer = ExportMetricsServiceResponse.FromString(self._post("metrics", request.SerializeToString()))
            warn_of_rejected("points", answer.partial_success.rejected_data_points, answer.partial_success.error_message)
            _taken[self._run.id, "metrics"] = max(row.number for row in points)
        spans = [row for row in rows if row.file == "spans" and self._is_new("traces", row)]
        if spans:
            scope = ScopeSpans(scope=self._scope, spans=[make_span(self._run, row) for row in spans])
            request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[scope])])
            answer = ExportTraceServiceResponse.FromString(self._post("traces", request.SerializeToString()))
            warn_of_rejected("spans", answer.partial_success.rejected_spans, answer.partial_success.error_message)
            _taken[self._run.id, "traces"] = max(row.number for row in spans)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _is_new(self, signal: str, row: TrackedRow) -> bool:
        return row.number > _taken.get((self._run.id, signal), -1)

    def _post(self, signal: str, body: bytes) -> bytes:
        url = self._urls[signal]
        where = f"{urlsplit(url).hostname}:{urlsplit(url).port or ''}".rstrip(":")  # without what else an address may hold
        try:
            answer = self._client.post(url, content=body)
        except httpx2.HTTPError as error:
            raise SinkUnavailable(f"the collector at {where} cannot be reached ({type(error).__name__})") from error
        if answer.status_code == 200:
            return answer.content if "protobuf" in answer.headers.get("content-type", "protobuf") else b""
        message = f"the collector at {where} answered {answer.status_code} to {signal}"
        if answer.status_code in RETRYABLE:
            raise SinkUnavailable(message, retry_after_s=read_retry_after_s(answer.headers.get("retry-after")))
        raise SinkRefused(f"{message}; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS")


def warn_of_rejected(what: str, count: int, message: str) -> None:
    """Says what a collector took a batch without: it would not take it the next time either."""
    if count:
        logging.getLogger("rollouts").warning("the collector left out %d %s: %s", count, what, message or "it does not say why")


# --- messages ------------------------------------------------------------------------------------------------------------------


def make_metrics(rows: Iterable[TrackedRow]) -> list[Metric]:
    """A gauge per metric with a point per row, at the row's time. `rollouts.step` says of which step the points of that time are."""
    points: dict[str, list[NumberDataPoint]] = {}
    units: dict[str, str] = {}
    for tracked in rows:
        row = tracked.row
        labels = make_attributes({"stage": row["stage"], "attempt": row["attempt"], **({"evaluation": row["name"]} if "name" in row else {})})
        time_unix_nano = round(row["time_unix"] * 1000) * 1_000_000
        values: dict[str, float] = {"step": row["step"], "policy_version": row.get("policy_version", 0), **tracked.metrics()}
        for name in values:
            known = find_metric(name)
            units[convert_name(name)] = convert_unit(known.unit) if known else "1"
        named = {convert_name(name): value for name, value in values.items()} | dict(tracked.aliases)
        for name, value in named.items():
            points.setdefault(name, []).append(NumberDataPoint(time_unix_nano=time_unix_nano, as_double=float(value), attributes=labels))
    return [Metric(name=name, unit=units.get(name, "1"), gauge=Gauge(data_points=held)) for name, held in points.items()]


def make_span(run: RunInfo, tracked: TrackedRow) -> Span:
    """The span of a row; those of one step of one attempt are a trace. Ids follow from the run and the row, so sent twice they are the same."""
    row = tracked.row
    optional = {name: row[name] for name in ("id", "tokens") if name in row}
    labels = {"stage": row["stage"], "step": row["step"], "policy_version": row.get("policy_version", 0), "attempt": row["attempt"]}
    return Span(
        trace_id=make_digest(run.id, row["stage"], row["step"], row["attempt"])[:16],
        span_id=make_digest(run.id, "span", tracked.number)[:8],
        name=row["name"],
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=round(row["start_unix"] * 1e6) * 1000,
        end_time_unix_nano=round((row["start_unix"] + row["duration_s"]) * 1e6) * 1000,
        attributes=make_attributes({"track": row["track"], **labels, **optional}),
    )


def make_digest(*parts: object) -> bytes:
    """32 bytes that follow from the parts."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


def convert_name(name: str) -> str:
    """rollouts.reward.mean for reward/mean, with none of the characters that OpenTelemetry does not allow."""
    return "rollouts." + name.replace("/", ".").replace("@", "_at_")


def convert_unit(unit: str) -> str:
    """The unit as OpenTelemetry writes it."""
    return UNITS.get(unit, f"{{{unit.replace(' ', '_')}}}")


def make_attributes(values: Mapping[str, str | int | float]) -> list[KeyValue]:
    """Texts and whole numbers by name."""
    return [
        KeyValue(key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=str(value)))
        for key, value in values.items()
    ]


# --- the environment -----------------------------------------------------------------------------------------------------------


def find_url(environment: Mapping[str, str], signal: str) -> str:
    """Where a signal is posted to. Raises TrackerError for what is no http address."""
    whole = environment.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "")
    url = whole or f"{(environment.get('OTEL_EXPORTER_OTLP_ENDPOINT') or DEFAULT_ENDPOINT).rstrip('/')}/v1/{signal}"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise TrackerError(f"the OTLP endpoint of {signal} is no http address; set OTEL_EXPORTER_OTLP_ENDPOINT to one like {DEFAULT_ENDPOINT}")
    return url


def read_pairs(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """name=value,… as OpenTelemetry writes it. Raises TrackerError, without the value, for another text."""
    pairs: dict[str, str] = {}
    for part in filter(None, map(str.strip, environment.get(name, "").split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise TrackerError(f"{name} is to be name=value,name=value with percent-encoded values; one of its parts is not")
        pairs[key.strip()] = unquote(value.strip())
    return pairs


def read_timeout_s(environment: Mapping[str, str]) -> float:
    """Seconds for one request. Raises TrackerError."""
    text = environment.get("OTEL_EXPORTER_OTLP_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT_S
    if not text.isdecimal() or int(text) == 0:
        raise TrackerError(f"OTEL_EXPORTER_OTLP_TIMEOUT={text!r} is to be a whole number of milliseconds above 0, for example 10000")
    return int(text) / 1000


def read_resource(run: RunInfo) -> dict[str, str]:
    """What names the run in the service."""
    name = run.environment.get("OTEL_SERVICE_NAME", "") or "rollouts"
    return {"service.name": name, **read_pairs(run.environment, "OTEL_RESOURCE_ATTRIBUTES"), "service.instance.id": run.id, "rollouts.run": run.name}


def read_retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None for none, and for a date."""
    return float(text) if text and text.strip().isdecimal() else None

"""OpenTelemetry: metrics as gauges and spans, by OpenTelemetry's own exporters (OTLP over HTTP, protobuf).

The exporters get finished points and spans with the times of their rows, so what is sent after an outage
lands where it belongs, and what is sent twice is the same twice. All settings are OpenTelemetry's variables.

    2xx                     taken
    400, 413, 422           RowsRefused; of a single row only where an empty message is taken
    408, 429, 5xx, silence  SinkUnavailable: tried again
    others (401, 403, 404)  SinkRefused: a person must act
"""

import hashlib
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from rollouts import __version__
from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable
from rollouts.trackers.sinks import Batch, Mark, RunInfo, Sink, clean_name, describe_metric

WORDS = 300  # characters of a collector's words that are worth a line
SPAN_FIELDS = ("track", "stage", "step", "policy_version", "attempt", "id", "tokens")
SCOPE = InstrumentationScope("rollouts", __version__)


def open_sink(run: RunInfo) -> Sink:
    """Exports each batch as one request of metrics and one of spans."""
    answers = []  # of the request under way
    session = requests.Session()
    session.hooks["response"].append(lambda answer, **_: answers.append(answer))
    session.max_redirects = 0
    metrics, traces = OTLPMetricExporter(session=session), OTLPSpanExporter(session=session)
    own = Resource({"service.instance.id": run.id, "rollouts.run": run.name})
    resource = Resource({"service.name": "rollouts"}).merge(OTELResourceDetector().detect()).merge(own)
    left_out = run.mark.get("left_out", 0)  # values that the collector left out

    def post(signal: str, exporter: Any, message: Any) -> None:
        nonlocal left_out
        answers.clear()
        exporter.export(message)
        if not answers:
            raise SinkUnavailable("the collector does not answer")
        left_out += read_answer(answers[-1], signal)

    def send_rows(signal: str, exporter: Any, make: Any, rows: Batch) -> None:
        if not rows:
            return
        try:
            message = make(resource, rows)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # another program wrote the row
            raise RowsRefused(f"it cannot be told as OTLP ({error!r})") from error
        try:
            post(signal, exporter, message)
        except RowsRefused as error:
            try:
                if len(rows) == 1:
                    post(signal, exporter, make(resource, []))
            except RowsRefused:
                raise SinkRefused(
                    f"{error}, even without rows; check OTEL_EXPORTER_OTLP_ENDPOINT and"
                    " OTEL_RESOURCE_ATTRIBUTES"
                ) from error
            raise

    def send(rows: Batch) -> Mark | None:
        """Returns when the collector has taken the batch."""
        send_rows("metrics", metrics, make_metrics, [row for row in rows if row.file != "spans"])
        send_rows("traces", traces, make_spans, [row for row in rows if row.file == "spans"])
        return {"left_out": left_out} if left_out else None

    def close() -> None:
        metrics.shutdown()
        traces.shutdown()

    return Sink(send, close)


def read_answer(answer: requests.Response, signal: str) -> int:
    """How many values the collector left out. Raises for a status that is no success."""
    status = answer.status_code
    told = f"the collector answered {status} to {signal}"
    if status in (408, 429) or status >= 500:
        raise SinkUnavailable(told)
    if status in (400, 413, 422):
        raise RowsRefused(f"{told}: {' '.join(answer.text.split())[:WORDS]}")
    if status >= 300:
        raise SinkRefused(f"{told}; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS")
    try:  # the answer to traces has its number in the same field
        return ExportMetricsServiceResponse.FromString(answer.content).partial_success.rejected_data_points
    except DecodeError:
        return 0


def make_metrics(resource: Resource, rows: Batch) -> sdk.MetricsData:
    """A gauge per metric with a point per row, at the row's time."""
    points = {}
    for tracked in rows:
        time_ns = round(tracked.row["time_unix"] * 1000) * 1_000_000
        for name, value in tracked.metrics("step", "policy_version").items():
            points.setdefault(name, []).append(
                sdk.NumberDataPoint(tracked.labels(), 0, time_ns, float(value))
            )
    metrics = [
        sdk.Metric(f"rollouts.{clean_name(name, '.')}", describe_metric(name), "", sdk.Gauge(held))
        for name, held in points.items()
    ]
    whole = [sdk.ResourceMetrics(resource, [sdk.ScopeMetrics(SCOPE, metrics, "")], "")]
    return sdk.MetricsData(whole if metrics else [])


def make_spans(resource: Resource, rows: Batch) -> list[ReadableSpan]:
    """The span of each row; those of one step of one attempt are a trace. Ids follow from run and row."""
    run, spans = resource.attributes["service.instance.id"], []
    for tracked in rows:
        row = tracked.row
        start_ns = round(row["start_unix"] * 1e6) * 1000
        trace = make_id(16, run, row["stage"], row["step"], row["attempt"])
        spans.append(
            ReadableSpan(
                row["name"],
                SpanContext(trace, make_id(8, run, "span", tracked.key), is_remote=False),
                resource=resource,
                attributes={name: row[name] for name in SPAN_FIELDS if name in row},
                instrumentation_scope=SCOPE,
                start_time=start_ns,
                end_time=start_ns + round(row["duration_s"] * 1e6) * 1000,
            )
        )
    return spans


def make_id(size: int, *parts: object) -> int:
    """A number of so many bytes that follows from the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:size], "big")

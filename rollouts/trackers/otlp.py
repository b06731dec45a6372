"""OpenTelemetry: metrics as gauges and spans, as OTLP over HTTP (protobuf) to a collector.

Every point has the time of its row and every span its own, so what is sent after an outage lands where it
belongs. The SDK's metrics API stamps points when they are sent; the messages are therefore made here and
posted by httpx2. Environment: rollouts.trackers.otlp_environment.

A batch that is sent again has the same points and, for its spans, the same ids: a service that stores by time
or id has them once.

    2xx                     taken
    400, 413, 422           these rows are at fault: RowsRefused; but a single row only where the collector takes a message without any
    408, 429, 5xx, silence  SinkUnavailable: tried again
    others (401, 403, 404)  SinkRefused: a person must act

Sources: opentelemetry.io/docs/specs/otlp (failures, throttling; 408 and all of 5xx are tried again here, for
nothing is to be lost).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence

import httpx2
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from rollouts import __version__
from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable
from rollouts.metrics.names import find_metric
from rollouts.trackers.otlp_environment import SIGNALS, Signal, read_resource, read_route
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow

ROWS_AT_FAULT = frozenset({400, 413, 422})
WORDS = 300  # characters of a collector's words that are worth a line
UNITS = {
    "": "1",
    "s": "s",
    "bytes": "By",
    "share": "1",
    "tokens/s": "{tokens}/s",
}  # as OpenTelemetry writes them; others go into braces
# Kept while the process lives, for a sink that is opened anew after a failure.
_taken: dict[
    tuple[str, str],
    int,
    # by run and signal: the number of the last row that the collector took, for a batch of which it took half
] = {}
_left_out: dict[str, int] = {}  # by run: points and spans that the collector took batches without


def open_sink(run: RunInfo) -> OtlpSink:
    """The sink of a run. Raises TrackerError for settings in the environment that cannot be read."""
    return OtlpSink(run)


class OtlpSink:
    """Posts each batch as one request of metrics and one of spans."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._routes = {signal: read_route(run.environment, signal) for signal in SIGNALS}
        self._scope = InstrumentationScope(name="rollouts", version=__version__)
        self._resource = Resource(attributes=make_attributes(read_resource(run)))
        self._client = httpx2.Client(follow_redirects=False)
        before = (run.mark or {}).get("left_out", 0)
        _left_out.setdefault(run.id, before if isinstance(before, int) else 0)

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        """Returns when the collector has taken the batch. Raises SinkUnavailable, with the seconds that it
        asks to be left alone, SinkRefused, or RowsRefused, with the collector's words.
        """
        for signal in SIGNALS:
            new = [
                row
                for row in rows
                if (row.file == "spans") == (signal == "traces") and self._is_new(signal, row)
            ]
            if new:
                self._export(signal, new)
                _taken[self._run.id, signal] = max(row.number for row in new)
        return {"left_out": _left_out[self._run.id]} if _left_out[self._run.id] else None

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _is_new(self, signal: str, row: TrackedRow) -> bool:
        return row.number > _taken.get((self._run.id, signal), -1)

    def _export(self, signal: Signal, rows: Sequence[TrackedRow]) -> None:
        try:
            body = self._make_body(signal, rows)
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ) as error:  # of a row that another program wrote
            raise RowsRefused(f"it cannot be told as OTLP ({error!r})") from error
        try:
            answer = self._post(signal, body)
        except RowsRefused:
            if len(rows) == 1:
                self._check_route(signal)
            raise
        count, message = read_partial_success(signal, answer)
        if count:  # the collector would not take them the next time either
            _left_out[self._run.id] += count
            logging.getLogger("rollouts").warning(
                "the collector left out %d values of %s: %s", count, signal, message
            )

    def _make_body(self, signal: Signal, rows: Sequence[TrackedRow]) -> bytes:
        if signal == "metrics":
            scope = ScopeMetrics(scope=self._scope, metrics=make_metrics(rows))
            return ExportMetricsServiceRequest(
                resource_metrics=[ResourceMetrics(resource=self._resource, scope_metrics=[scope])]
            ).SerializeToString()
        spans = ScopeSpans(scope=self._scope, spans=[make_span(self._run, row) for row in rows])
        return ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[spans])]
        ).SerializeToString()

    def _check_route(self, signal: Signal) -> None:
        """Raises SinkRefused where even a message without rows is refused, which a collector has to take: the
        rows are not at fault, and must not be left out for a wrong port or a resource attribute that the
        service does not like.
        """
        try:
            self._post(signal, self._make_body(signal, ()))
        except RowsRefused as error:
            raise SinkRefused(
                f"{error}, even without rows; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_RESOURCE_ATTRIBUTES"
            ) from error

    def _post(self, signal: Signal, body: bytes) -> httpx2.Response:
        route = self._routes[signal]
        try:
            answer = self._client.post(
                route.url, content=body, headers=route.headers, timeout=route.timeout_s
            )
        except httpx2.HTTPError as error:
            raise SinkUnavailable(
                f"the collector at {route.host} cannot be reached ({type(error).__name__})"
            ) from error
        if answer.is_success:
            return answer
        message = f"the collector at {route.host} answered {answer.status_code} to {signal}"
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            raise SinkUnavailable(
                message, retry_after_s=read_retry_after_s(answer.headers.get("retry-after"))
            )
        if answer.status_code in ROWS_AT_FAULT:
            raise RowsRefused(f"{message}: {read_words(answer)}")
        raise SinkRefused(f"{message}; check OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS")


# --- answers ------------------------------------------------------------------------------------------------


def read_partial_success(signal: Signal, answer: httpx2.Response) -> tuple[int, str]:
    """How many values a collector took a batch without, and why. (0, "") of an answer that is no OTLP
    message: it says that the batch is taken.
    """
    if "protobuf" not in answer.headers.get("content-type", "protobuf"):
        return 0, ""
    try:
        if signal == "metrics":
            metrics = ExportMetricsServiceResponse.FromString(answer.content).partial_success
            return metrics.rejected_data_points, clean_words(metrics.error_message)
        spans = ExportTraceServiceResponse.FromString(answer.content).partial_success
        return spans.rejected_spans, clean_words(spans.error_message)
    except DecodeError:
        return 0, ""


def read_words(answer: httpx2.Response) -> str:
    """What a collector says of a refusal: the message of a google.rpc.Status, as protobuf or JSON, or a text."""
    kind = answer.headers.get("content-type", "")
    try:
        if "protobuf" in kind:
            # A google.rpc.Status has its message where this one has it, and its package is not needed for
            # anything else.
            return clean_words(ExportMetricsPartialSuccess.FromString(answer.content).error_message)
        if "json" in kind:
            return clean_words(str(json.loads(answer.content)["message"]))
    except (DecodeError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return clean_words(answer.content[: 4 * WORDS].decode(errors="replace"))


def clean_words(text: str) -> str:
    """The text in one line, without what would steer a terminal."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if 0 < len(line) <= WORDS else f"{line[:WORDS]}…" if line else "it does not say why"


def read_retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None for none, and for a date."""
    return float(text) if text and text.strip().isdecimal() else None


# --- messages -----------------------------------------------------------------------------------------------


def make_metrics(rows: Iterable[TrackedRow]) -> list[Metric]:
    """A gauge per metric with a point per row, at the row's time. `rollouts.step` says of which step the
    points of that time are.
    """
    points: dict[str, list[NumberDataPoint]] = {}
    units: dict[str, str] = {}
    for tracked in rows:
        row = tracked.row
        labels = make_attributes(
            {
                "stage": row["stage"],
                "attempt": row["attempt"],
                **({"evaluation": row["name"]} if "name" in row else {}),
            }
        )
        time_unix_nano = round(row["time_unix"] * 1000) * 1_000_000
        values: dict[str, float] = {
            "step": row["step"],
            "policy_version": row.get("policy_version", 0),
            **tracked.metrics(),
        }
        for name in values:
            known = find_metric(name)
            units[convert_name(name)] = convert_unit(known.unit) if known else "1"
        named = {convert_name(name): value for name, value in values.items()} | dict(tracked.aliases)
        for name, value in named.items():
            points.setdefault(name, []).append(
                NumberDataPoint(time_unix_nano=time_unix_nano, as_double=float(value), attributes=labels)
            )
    return [
        Metric(name=name, unit=units.get(name, "1"), gauge=Gauge(data_points=held))
        for name, held in points.items()
    ]


def make_span(run: RunInfo, tracked: TrackedRow) -> Span:
    """The span of a row; those of one step of one attempt are a trace. Ids follow from the run and the row,
    so sent twice they are the same.
    """
    row = tracked.row
    optional = {name: row[name] for name in ("id", "tokens") if name in row}
    labels = {
        "stage": row["stage"],
        "step": row["step"],
        "policy_version": row.get("policy_version", 0),
        "attempt": row["attempt"],
    }
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
        KeyValue(
            key=key,
            value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=str(value)),
        )
        for key, value in values.items()
    ]

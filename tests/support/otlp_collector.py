"""An OTLP collector on this machine that does as it is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Judge = Callable[[str, bytes], tuple[int, bytes, str]]


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Collector(ThreadingHTTPServer):
    """Stores what is posted to it, or answers with the next of its faults: a status and headers. Without a
    fault it asks its judge for (status, body, content type).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.judge: Judge = lambda path, body: (200, b"", "text/plain")
        self.bodies: dict[str, list[bytes]] = {"/v1/metrics": [], "/v1/traces": []}
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are part of the tests."""

    def points(self) -> list[tuple[str, int, float, dict[str, object]]]:
        return [point for body in self.bodies["/v1/metrics"] for point in read_points(body)]

    def span_steps(self) -> list[int]:
        """Of the spans that were taken, in their order."""
        return [step for body in self.bodies["/v1/traces"] for step in read_span_steps(body)]


def read_points(body: bytes) -> list[tuple[str, int, float, dict[str, object]]]:
    """(name, nanoseconds, value, labels) of each point of a request."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    found = []
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            for point in metric.gauge.data_points:
                labels = {
                    entry.key: entry.value.string_value or entry.value.int_value for entry in point.attributes
                }
                found.append((metric.name, point.time_unix_nano, point.as_double, labels))
    return found


def read_span_steps(body: bytes) -> list[int]:
    """The step of each span of a request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return [
        entry.value.int_value
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        for entry in span.attributes
        if entry.key == "step"
    ]


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        status, answer, kind = self.server.judge(self.path, body)
        more: dict[str, str] = {}
        if self.server.faults:
            status, more = self.server.faults.pop(0)
        if 200 <= status < 300:
            self.server.bodies[self.path].append(body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), "Content-Type": kind, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def open_collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

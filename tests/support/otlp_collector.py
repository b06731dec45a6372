"""An OTLP collector on this machine that does as it is told."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector(ThreadingHTTPServer):
    """Stores what is posted to it, or answers with the next of its faults, which are statuses. Without a
    fault it asks its judge for (status, body).
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.faults: list[int] = []
        self.judge: Callable[[str, bytes], tuple[int, bytes]] = lambda path, body: (200, b"")
        self.bodies: dict[str, list[bytes]] = {"/v1/metrics": [], "/v1/traces": []}
        self.headers: list[dict[str, str]] = []

    def handle_error(self, request, client_address):
        """Clients that give up are part of the tests."""

    def points(self):
        return [point for body in self.bodies["/v1/metrics"] for point in read_points(body)]

    def spans(self):
        """Those that were taken, in their order."""
        return [span for body in self.bodies["/v1/traces"] for span in read_spans(body)]


def read_labels(attributes):
    return {entry.key: entry.value.string_value or entry.value.int_value for entry in attributes}


def read_points(body):
    """(name, nanoseconds, value, labels) of each point of a request."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    return [
        (metric.name, point.time_unix_nano, point.as_double, read_labels(point.attributes))
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for metric in resource.scope_metrics[0].metrics
        for point in metric.gauge.data_points
    ]


def read_spans(body):
    """The spans of a request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    resources = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span for resource in resources for span in resource.scope_spans[0].spans]


def read_steps(spans):
    return [read_labels(span.attributes)["step"] for span in spans]


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        status, answer = self.server.judge(self.path, body)
        if self.server.faults:
            status = self.server.faults.pop(0)
        if status == 200:
            self.server.bodies[self.path].append(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format, *args):  # noqa: A002
        """Nothing."""


@contextmanager
def open_collector():
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

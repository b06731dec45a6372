"""Prometheus: an endpoint on this machine that shows the newest value of each metric, for as long as the run
is followed.

    http://127.0.0.1:9464/metrics      another port: OTEL_EXPORTER_PROMETHEUS_PORT

Prometheus asks when it likes and stamps what it gets, so values between two of its scrapes are not there, and
neither are those of an outage. The mark is what was shown last: a follower that starts again shows it at
once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from rollouts.errors import SinkRefused, TrackerError
from rollouts.metrics.names import find_metric
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow

DEFAULT_PORT = 9464
# of every answer: whoever asks for another form can read this one
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STALL_S = 5.0  # until a client that says nothing is left

Shown = dict[str, dict[str, float]]  # name of a metric → stage → newest value


def open_sink(run: RunInfo) -> PrometheusSink:
    """The endpoint of a run. Raises TrackerError for a port that is none, SinkRefused where another process
    has it.
    """
    return PrometheusSink(run, read_port(run.environment))


class PrometheusSink:
    """Holds the newest values, and serves them from threads of its own."""

    def __init__(self, run: RunInfo, port: int) -> None:
        self._run = run
        shown = (run.mark or {}).get("shown", {})
        self._shown: Shown = (
            {name: dict(values) for name, values in shown.items()} if isinstance(shown, Mapping) else {}
        )  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._page = format_page(run.name, self._shown)
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise SinkRefused(
                f"port {port} of this machine cannot be had ({error}); set OTEL_EXPORTER_PROMETHEUS_PORT to a"
                " free one"
            ) from error
        self._server.read_page = lambda: self._page
        # A thread, though the project has none elsewhere: a follower's worker has no event loop, and blocks
        # by design, so that the system's alarm can end a library that hangs. Prometheus must be answered
        # meanwhile. All that the threads share is a page of bytes, replaced as a whole.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    def send(self, rows: Sequence[TrackedRow]) -> Mark:
        """Returns when the values are shown."""
        for tracked in rows:
            stage, row = str(tracked.row["stage"]), tracked.row
            place = {"step": row["step"], "attempt": row["attempt"]} if tracked.file == "metrics" else {}
            values = {**place, **tracked.metrics(), **tracked.aliases}
            for name, value in values.items():
                self._shown.setdefault(name, {})[stage] = float(value)
        self._page = format_page(self._run.name, self._shown)
        return {"shown": {name: dict(values) for name, values in self._shown.items()}}

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    read_page: Callable[[], bytes]

    def server_bind(self) -> None:
        """As any TCP server: an HTTP server would look up its own name, which can take as long as a name
        server does not answer.
        """
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    timeout = STALL_S

    def do_GET(self) -> None:
        """The page, at its address alone."""
        found = self.path.partition("?")[0] in ("/", "/metrics")
        assert isinstance(self.server, _Server)
        body = self.server.read_page() if found else b"the metrics are at /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes are not worth a line."""


def format_page(run: str, shown: Shown) -> bytes:
    """The exposition of all values, as gauges with the labels run and stage."""
    lines: list[str] = []
    seen: set[str] = set()
    for name, values in shown.items():
        known, exposed = find_metric(name), convert_name(name)
        if exposed in seen:  # an alias that differs from another name only by what a name here cannot have
            continue
        seen.add(exposed)
        meaning = f"{known.meaning}{f' ({known.unit})' if known.unit else ''}" if known else name
        lines += [f"# HELP {exposed} {escape(meaning, quote=False)}", f"# TYPE {exposed} gauge"]
        lines += [
            f'{exposed}{{run="{escape(run)}",stage="{escape(stage)}"}} {value!r}'
            for stage, value in values.items()
        ]
    return "".join(f"{line}\n" for line in lines).encode()


def convert_name(name: str) -> str:
    """rollouts_reward_mean for reward/mean."""
    return "rollouts_" + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))


def escape(text: str, *, quote: bool = True) -> str:
    """The text as the format has it."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def read_port(environment: Mapping[str, str]) -> int:
    """The port to listen on; 0 is any free one. Raises TrackerError."""
    text = environment.get("OTEL_EXPORTER_PROMETHEUS_PORT", "")
    if not text:
        return DEFAULT_PORT
    if not text.isdecimal() or int(text) > 65535:
        raise TrackerError(
            f"OTEL_EXPORTER_PROMETHEUS_PORT={text!r} is no port; give a number up to 65535, or leave it out"
            f" for {DEFAULT_PORT}"
        )
    return int(text)

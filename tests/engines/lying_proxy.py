"""A proxy in front of a vLLM server that says 200 to every order to load weights and does not pass it on.
Usage: lying_proxy.py URL.
"""

from __future__ import annotations

import http.client
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Liar(BaseHTTPRequestHandler):
    """Passes everything on but weights."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/collective_rpc" and b"reload_weights" in body:
            self.send(200, b'{"results":[null]}')
            return
        connection = http.client.HTTPConnection(ADDRESS, timeout=300)
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() in ("authorization", "content-type")
        }
        connection.request(self.command, self.path, body or None, headers)
        reply = connection.getresponse()
        self.send(reply.status, reply.read())
        connection.close()

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """The run's own output is what is read."""


if __name__ == "__main__":
    ADDRESS = urlsplit(sys.argv[1]).netloc
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    print(f"http://127.0.0.1:{proxy.server_address[1]}", flush=True)
    proxy.serve_forever()

"""A stand-in for vLLM and SGLang: the standard library answers their readiness paths. FAKE_SERVER, a JSON
object, says how it behaves.

pids: file that gets the ids of this process and its descendants · not_ready: how often health says 503 · die:
exit code at once · never: does not listen · strays: leaves descendants in sessions of their own · stubborn:
ignores SIGTERM · open: takes everybody
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import time
from pathlib import Path

behaviour = json.loads(os.environ.get("FAKE_SERVER", "{}"))


def read_key():
    if "--config" in sys.argv:
        path = Path(sys.argv[sys.argv.index("--config") + 1])
        print(f"config mode {path.stat().st_mode & 0o777:o}", flush=True)
        return path.read_text().split('"')[1]
    return os.environ["VLLM_API_KEY"]


def fork_stray(write_fd, *, depth):
    """A child that leaves the session, ignores SIGTERM and has a child like itself; ids go to the pipe."""
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(write_fd, f"{os.getpid()} ".encode())
    if depth:
        fork_stray(write_fd, depth=depth - 1)
    else:
        os.write(write_fd, b"\n")
    while True:
        signal.pause()


class Answers(http.server.BaseHTTPRequestHandler):
    left = behaviour.get("not_ready", 0)

    def do_GET(self):
        status = 200
        if self.path in ("/health", "/ready"):
            status = 503 if Answers.left > 0 else 200
            Answers.left -= 1
        elif self.headers.get("Authorization") != f"Bearer {KEY}" and not behaviour.get("open"):
            status = 401
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


print("fake server says hello", flush=True)
KEY = read_key()
print(f"api_key={KEY}", flush=True)
pids = [os.getpid()]
if behaviour.get("strays"):
    readable, writable = os.pipe()
    fork_stray(writable, depth=1)
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(readable, 100)
    pids += [int(word) for word in text.split()]
Path(behaviour["pids"]).write_text(" ".join(map(str, pids)))
if "die" in behaviour:
    print("\n".join(f"line {n}" for n in range(40)), flush=True)
    print("RuntimeError: no memory", flush=True)
    sys.exit(behaviour["die"])
if not behaviour.get("stubborn"):
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while behaviour.get("never"):
    time.sleep(3600)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()

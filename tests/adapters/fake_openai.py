"""A server of OpenAI's chat completions that says "a", then "b"; prints its port, and what it is asked."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        print(json.dumps(body), flush=True)
        self.send_response(200 if self.headers["authorization"] == "Bearer k" else 400)
        self.end_headers()
        said = {"role": "assistant", "content": "b" if len(body.get("messages", ())) > 2 else "a"}
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        self.wfile.write(json.dumps({**answer, "choices": [choice]}).encode())


if __name__ == "__main__":
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()

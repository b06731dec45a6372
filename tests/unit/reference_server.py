"""A stand-in for vLLM and SGLang that gives log-probs of prompts, in their wire shapes, from a model that it
holds.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import torch
import trio

from rollouts.models.load import load_hf_model

KEY = "key of the reference"
Spoil = Callable[[dict[str, Any]], tuple[int, Any] | None]
"""Another status and body for an answer; None: as it is."""


class ReferenceServer:
    """Answers /v1/models, /v1/completions and /generate."""

    def __init__(self, path: Path, *, context: int = 256) -> None:
        self.model = load_hf_model(path)
        self.context = context
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.busy = self.most_busy = 0
        self.spoil: Spoil = lambda answer: None

    def score(self, ids: list[int]) -> list[float]:
        with torch.no_grad():
            rows = torch.tensor([ids])
            log_probs = self.model(input_ids=rows).logits[0, :-1].float().log_softmax(-1)
        return log_probs.gather(1, rows[0, 1:, None])[:, 0].tolist()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {
                "object": "list",
                "data": [{"id": "policy", "object": "model", "max_model_len": self.context}],
            }
        self.asked.append((path, body))
        made: dict[str, Any] = {}
        if path == "/v1/completions":
            assert body["model"] == "policy" and body["max_tokens"] == 1 and body["prompt_logprobs"] == 0, (
                body
            )
            log_probs = self.score(body["prompt"])
            pairs = zip(body["prompt"][1:], log_probs, strict=True)
            entries = [
                {str(token): {"logprob": value, "rank": 3, "decoded_token": "x"}} for token, value in pairs
            ]
            made = {
                "id": "cmpl-1",
                "choices": [
                    {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": [None, *entries]}
                ],
            }
        else:
            assert path == "/generate" and body["return_logprob"] and body["logprob_start_len"] == 0, (
                path,
                body,
            )
            assert body["sampling_params"]["max_new_tokens"] == 0
            ids = body["input_ids"]
            triples = [
                [None, ids[0], None],
                *([value, token, None] for token, value in zip(ids[1:], self.score(ids), strict=True)),
            ]
            meta = {
                "id": "1",
                "finish_reason": {"type": "length", "length": 0},
                "input_token_logprobs": triples,
            }
            made = {"text": "", "output_ids": [], "meta_info": meta}
        return self.spoil(made) or (200, made)

    async def serve(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        while True:
            request, parts = None, []
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    try:
                        connection.receive_data(await stream.receive_some(65536))
                    except trio.BrokenResourceError:
                        return
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                else:
                    return
            assert request is not None
            authorised = dict(request.headers).get(b"authorization") == f"Bearer {KEY}".encode()
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
            await trio.lowlevel.checkpoint()
            status, made = (
                self.answer(request.target.decode(), json.loads(b"".join(parts) or b"{}"))
                if authorised
                else (401, {})
            )
            self.busy -= 1
            content = json.dumps(made).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
            events = (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=content),
                h11.EndOfMessage(),
            )
            pieces = [connection.send(event) for event in events]
            try:
                await stream.send_all(b"".join(piece for piece in pieces if piece))
            except trio.BrokenResourceError:
                return
            connection.start_next_cycle()


@asynccontextmanager
async def open_reference_server(
    path: Path, *, context: int = 256
) -> AsyncIterator[tuple[str, ReferenceServer]]:
    """(url, server) on the loopback interface."""
    server = ReferenceServer(path, context=context)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.serve, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", server
        nursery.cancel_scope.cancel()

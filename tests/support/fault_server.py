"""An inference server that speaks as vLLM or SGLang does and suffers a fault plan. It has no model.

    client ──► FaultTransport (in this process, also in virtual time) ┐
           └─► 127.0.0.1 (open_fault_server)                          ┴► FaultServer ──► SimulatedProcess

Dialects are those of vLLM 0.32 and SGLang 0.5.23, as far as rollouts uses them, with their traits: vLLM puts
a prefix before request ids, guards only /v1 and /inference and takes an empty list of aborts for all; SGLang
aborts every id that begins with the one it is given, and dies of a token id that it does not have.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import msgspec
import numpy as np
import trio

from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.engines.vllm_wire import SERVER_PREFIX
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.types import GenerateRequest, SamplingParams
from tests.support.fault_plan import NO_FAULTS, FaultPlan
from tests.support.simulated_process import (
    Answer,
    BadAnswer,
    ConnectionLost,
    ReadWeights,
    ServerSpeed,
    SimulatedProcess,
    open_simulated_process,
)

DialectName = Literal["vllm", "sglang"]
DIALECTS: tuple[DialectName, ...] = ("vllm", "sglang")


class Reply(NamedTuple):
    """What goes back; `arriving` bytes of the body before the connection closes, None: all."""

    body: bytes = b"{}"
    status: int = 200
    headers: Mapping[str, str] = {}
    arriving: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the server."""

    path: str
    query: str
    body: dict[str, Any]


class FaultServer:
    """The HTTP of one process. `overrides` come before what it would answer, by path: bytes, JSON, a Reply,
    an error to raise, or a function of the body that returns one of them.
    """

    def __init__(
        self,
        process: SimulatedProcess,
        dialect: DialectName,
        *,
        settings: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        model: str = "simulated",
    ) -> None:
        """`settings` replace what it says of its own: vLLM's config, SGLang's /server_info."""
        self.process = process
        self.dialect: DialectName = dialect
        self.settings = dict(settings or {})
        self.api_key = api_key
        self.model = model
        self.url = f"http://{process.name}"
        self.calls: list[tuple[str, Any]] = []  # path with query, and body, in order of arrival
        self.overrides: dict[str, Any] = {}
        self._answer = _vllm if dialect == "vllm" else _sglang

    def paths(self, *of: str) -> list[str]:
        """The paths called so far; only those of `of` if some are given."""
        return [path for path, _ in self.calls if not of or path.split("?")[0] in of]

    async def respond(self, target: str, key: str | None, content: bytes) -> Reply | None:
        """None where the connection breaks."""
        path, _, query = target.partition("?")
        body = json.loads(content or b"{}")
        self.calls.append((target, body))
        free = ("/ready",) if self.dialect == "sglang" else ()
        guarded = self.dialect == "sglang" or path.startswith(("/v1", "/inference"))
        try:
            if path in self.overrides:
                return await self._override(self.overrides[path], body)
            if self.api_key and guarded and path not in free and key != f"Bearer {self.api_key}":
                raise BadAnswer(401, "Unauthorized")
            if path in (
                "/is_paused",
                "/server_info",
                "/v1/models",
                "/health",
                "/ready",
                "/metrics",
                "/v1/loads",
            ):
                await self.process.enter(self.process.speed.control_s)
            said = await self._answer(self, Call(path, query, body))
        except ConnectionLost:
            return None
        except BadAnswer as bad:
            headers = {} if bad.retry_after_s is None else {"retry-after": str(bad.retry_after_s)}
            return Reply(_encode({"success": False, "message": str(bad)}), bad.status, headers)
        return said if isinstance(said, Reply) else Reply(_encode(said))

    async def _override(self, value: Any, body: Any) -> Reply:
        await trio.lowlevel.checkpoint()
        if callable(value):
            value = value(body)
        if isinstance(value, Awaitable):
            value = await value
        if isinstance(value, Exception):
            raise value
        if isinstance(value, Reply):
            return value
        return Reply(value if isinstance(value, bytes) else _encode(value))

    def transport(self) -> httpx.AsyncBaseTransport:
        return FaultTransport(self)

    def open_engine(self, *, silence_s: float = 60.0, **options: Any) -> Any:
        """The real client of this server's dialect, over FaultTransport unless the server listens."""
        opened = open_vllm_engine if self.dialect == "vllm" else open_sglang_engine
        options = {"vocab_size": self.process.vocab_size, "name": self.process.name} | options
        if not self.url.startswith("http://127"):
            options["transport"] = self.transport
        return opened(self.url, silence_s=silence_s, api_key=self.api_key, **options)


def _encode(value: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(value)).encode()


def _find(call: Call, routes: Mapping[str, Callable[[], Awaitable[Any]]]) -> Awaitable[Any]:
    if call.path not in routes:
        raise BadAnswer(404, "Not Found")
    return routes[call.path]()


async def _say(value: Any) -> Any:
    return value


async def _do(work: Awaitable[None], value: Any = None) -> Any:
    await work
    return value or {"success": True, "message": "", "status": "ok"}


def _make_request(name: str, ids: list[int], params: dict[str, Any], **names: str) -> GenerateRequest:
    sampling = SamplingParams(
        max_new_tokens=params.get(names["limit"], 16),
        temperature=params.get("temperature", 1.0),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=params.get(names["seed"]),
    )
    return GenerateRequest(request_id=name, prompt_ids=np.asarray(ids, np.int64), sampling=sampling)


def _send(record: Any, answer: Answer) -> Reply:
    body = answer.replaced_by or _encode(record)
    return Reply(body, arriving=None if answer.cut_at is None else min(answer.cut_at, len(body) - 1))


# --- vLLM


async def _vllm(server: FaultServer, call: Call) -> Any:
    process, body = server.process, call.body
    waiting = sum(not one.has_slot for one in process.running.values())
    counts = {
        "num_requests_running": len(process.running) - waiting,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": 0.5,
        "iteration_tokens_total_count": process.tokens,
        "generation_tokens_total": process.tokens,
        "prompt_tokens_total": process.prompt_tokens,
    }
    lines = [f'vllm:{name}{{engine="0"}} {float(value)}' for name, value in counts.items()]
    config = {
        "model_config": {
            "model": server.model,
            "max_model_len": process.context_length,
            "logprobs_mode": "processed_logprobs",
        },
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
    }

    async def abort() -> Any:
        await process.abort(body.get("request_ids") or list(process.running))
        return {}

    async def reload() -> Any:
        try:
            await process.load_weights(Path(body["kwargs"]["weights_path"]))
        except BadAnswer as bad:
            raise BadAnswer(500, str(bad)) from bad  # whatever a worker raises is a 500 here
        return {"results": [None]}

    async def checksum() -> Any:
        return {"checksums": {"model.weight": await process.checksum()}}

    return await _find(
        call,
        {
            "/inference/v1/generate": lambda: _generate_vllm(process, body),
            "/pause": lambda: _do(process.pause(_mode(call.query.removeprefix("mode=")))),
            "/resume": lambda: _do(process.resume()),
            "/collective_rpc": reload,
            "/update_weight_version": lambda: _do(process.set_version(str(body["new_version"]))),
            "/weight_checker": checksum,
            "/abort_requests": abort,
            "/reset_prefix_cache": lambda: _do(process.enter()),
            "/is_paused": lambda: _say({"is_paused": process.paused is not None}),
            "/weight_info": lambda: _do(process.enter(), {"weight_version": process.version_name}),
            "/server_info": lambda: _say({"vllm_config": config | server.settings}),
            "/v1/models": lambda: _say({"data": [{"id": "policy", "max_model_len": process.context_length}]}),
            "/metrics": lambda: _say(Reply("\n".join(["# HELP x", *lines, ""]).encode())),
            "/health": lambda: _say({}),
        },
    )


def _mode(text: str) -> Any:
    assert text in ("abort", "wait", "keep"), text
    return text


async def _generate_vllm(process: SimulatedProcess, body: dict[str, Any]) -> Reply:
    params, ids = body.get("sampling_params", {}), body["token_ids"]
    server_id = SERVER_PREFIX + str(body.get("request_id") or f"unnamed-{process.requests}")
    if any(not 0 <= token < process.vocab_size for token in ids):
        raise BadAnswer(400, f"Token id {max(ids)} is out of vocabulary")
    request = _make_request(server_id, ids, params, limit="max_tokens", seed="seed")
    answer = await process.answer(request, server_id)
    entries = [  # what is no number is written as −9999
        {"token_id": token, "logprob": log_prob if math.isfinite(log_prob) else -9999.0, "rank": 1}
        for token, log_prob in zip(answer.ids, answer.log_probs, strict=False)
    ]
    choice: dict[str, Any] = {
        "finish_reason": answer.finish,
        "token_ids": answer.ids,
        "logprobs": {"content": entries},
        **({} if answer.spans is None else {"weight_versions": answer.spans}),
    }
    record: dict[str, Any] = {"request_id": server_id, "choices": [choice]}
    if "prompt_logprobs" in params:
        scored = zip(ids[1:], answer.prompt_log_probs[1:], strict=True)
        record["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in scored)]
    return _send(record, answer)


# --- SGLang


async def _sglang(server: FaultServer, call: Call) -> Any:
    process, body = server.process, call.body
    waiting = sum(not one.has_slot for one in process.running.values())
    rank = {
        "num_running_reqs": len(process.running) - waiting,
        "num_waiting_reqs": waiting,
        "token_usage": 0.5,
        "total_prefill_uncached_tokens": process.prompt_tokens,
        "decode_moments": [float(process.tokens)],
    }
    info = {"version": "0.5.23", "model_path": server.model} | server.settings
    modes = {"abort": "abort", "retract": "keep"}

    async def update() -> Any:
        if process.paused is None:
            await process.wait_until(lambda: not process.running)
        await process.load_weights(Path(body["model_path"]))
        await process.set_version(str(body["weight_version"]))
        return {"success": True, "message": "Succeeded."}

    async def checksum() -> Any:
        return {"success": True, "ranks": [{"checksums": {"model.weight": await process.checksum()}}]}

    async def model_info() -> Any:
        await process.enter(process.speed.control_s)
        return {"model_path": server.model, "weight_version": process.version_name}

    return await _find(
        call,
        {
            "/generate": lambda: _generate_sglang(process, body),
            "/pause_generation": lambda: _do(process.pause(_mode(modes[body["mode"]]))),
            "/continue_generation": lambda: _do(process.resume()),
            "/abort_request": lambda: _do(process.abort([body["rid"]])),
            "/update_weights_from_disk": update,
            "/update_weight_version": lambda: _do(process.set_version(str(body["new_version"]))),
            "/weights_checker": checksum,
            "/v1/loads": lambda: _say({"loads": [rank]}),
            "/model_info": model_info,
            "/server_info": lambda: _say(info),
            "/v1/models": lambda: _say({"data": [{"id": "m", "max_model_len": process.context_length}]}),
            "/ready": lambda: _say(Reply(b"")),
        },
    )


async def _generate_sglang(process: SimulatedProcess, body: dict[str, Any]) -> Reply:
    rid, ids, params = str(body["rid"]), body["input_ids"], body["sampling_params"]
    if any(not 0 <= token < process.vocab_size for token in ids):
        process.crash()  # IndexError in the embedding
        raise ConnectionLost
    request = _make_request(rid, ids, params, limit="max_new_tokens", seed="sampling_seed")
    answer = await process.answer(request, rid)
    meta: dict[str, Any] = {"id": rid, "finish_reason": {"type": answer.finish}}
    if answer.finish != "abort" or answer.ids:
        meta["output_token_logprobs"] = [
            [log_prob if math.isfinite(log_prob) else None, token, None]
            for log_prob, token in zip(answer.log_probs, answer.ids, strict=False)
        ]
        if answer.spans is not None:
            meta["weight_versions"] = answer.spans
    if body.get("logprob_start_len") == 0:
        scored = zip([None, *answer.prompt_log_probs[1:]], ids, strict=True)
        meta["input_token_logprobs"] = [[log_prob, token, None] for log_prob, token in scored]
    return _send({"text": "", "output_ids": answer.ids, "meta_info": meta}, answer)


# --- the ways to it


class FaultTransport(httpx.AsyncBaseTransport):
    """Requests to a FaultServer in this process; raises what httpx raises over a network."""

    def __init__(self, server: FaultServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._server.process.up:
            await trio.lowlevel.checkpoint()
            raise httpx.ConnectError("connection refused")
        assert isinstance(request.stream, httpx.AsyncByteStream)
        content = b"".join([part async for part in request.stream])
        target, key = request.url.raw_path.decode(), request.headers.get("authorization")
        reply: Reply | None = None
        with trio.move_on_after(request.extensions["timeout"]["read"]) as scope:
            reply = await self._server.respond(target, key, content)
        if scope.cancelled_caught:
            raise httpx.ReadTimeout("")
        if reply is None:
            raise httpx.ReadError("connection reset")
        if reply.arriving is not None:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
        return httpx.Response(reply.status, headers=reply.headers, content=reply.body)


@asynccontextmanager
async def open_fake_server(
    dialect: DialectName,
    plan: FaultPlan = NO_FAULTS,
    *,
    listens: bool = False,
    name: str = "a",
    settings: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    model: str = "simulated",
    speed: ServerSpeed | None = None,
    vocab_size: int = 258,
    context_length: int = 4096,
    read_weights: ReadWeights | None = None,
) -> AsyncIterator[FaultServer]:
    """A server with a process of its own, which suffers the faults of `plan` that bear `name`; on a free port
    of 127.0.0.1 if it `listens`, and then only while there is a process.
    """
    async with (
        open_simulated_process(
            name,
            plan,
            speed=speed,
            vocab_size=vocab_size,
            context_length=context_length,
            read_weights=read_weights,
        ) as process,
        open_plain_nursery() as nursery,
    ):
        server = FaultServer(process, dialect, settings=settings, api_key=api_key, model=model)
        if listens:
            await nursery.start(_listen, server)
        yield server


async def _listen(server: FaultServer, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    port = 0
    while True:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        server.url = f"http://127.0.0.1:{port}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(trio.serve_listeners, partial(_serve, server), listeners, handler_nursery=nursery)
            )
            task_status.started()
            await server.process.wait_exited()
            nursery.cancel_scope.cancel()
        task_status = trio.TASK_STATUS_IGNORED
        await server.process.wait_started()


async def _serve(server: FaultServer, stream: trio.SocketStream) -> None:
    """The requests of one connection, one after the other, until either side closes it."""
    buffer = b""
    try:
        while True:
            while b"\r\n\r\n" not in buffer:
                if not (part := await stream.receive_some()):
                    return
                buffer += part
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            length = int(headers.get("content-length", 0))
            while len(buffer) < length:
                buffer += await stream.receive_some()
            content, buffer = buffer[:length], buffer[length:]
            reply: Reply | None = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_disconnect, stream, nursery.cancel_scope)
                reply = await server.respond(first.split(" ")[1], headers.get("authorization"), content)
                nursery.cancel_scope.cancel()
            if reply is None:
                return
            more = {"content-length": str(len(reply.body)), **reply.headers}
            status = [
                f"HTTP/1.1 {reply.status} X",
                *(f"{name}: {value}" for name, value in more.items()),
                "",
                "",
            ]
            await stream.send_all("\r\n".join(status).encode() + reply.body[: reply.arriving])
            if reply.arriving is not None:
                return
    except trio.BrokenResourceError:
        return  # the client is gone
    finally:
        await trio.aclose_forcefully(stream)


async def _cancel_on_disconnect(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        assert not await stream.receive_some()
    scope.cancel()

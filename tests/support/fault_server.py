"""An inference server over real sockets that speaks as vLLM or SGLang does and suffers a fault plan. It has
no model.

    client ──► 127.0.0.1 ──► Hypercorn (trio) ──► dialect ──► SimulatedProcess
                 │ closed while the process is down  what FaultyEngine stands on: a fault looks the same
                     from both
                 └ cut and broken here, below ASGI

Dialects are those of vLLM 0.32 and SGLang 0.5.23, as far as rollouts uses them, with their traits: vLLM puts
a prefix before request ids and guards only /v1 and /inference; SGLang aborts every id that begins with the
one it is given, and dies of a token id that it does not have. Needs hypercorn.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec
import numpy as np
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from rollouts.protocols import PauseMode
from rollouts.types import GenerateRequest, SamplingParams
from tests.support.fault_plan import NO_FAULTS, FaultPlan
from tests.support.simulated_process import (
    BASE_WEIGHTS,
    Answer,
    BadAnswer,
    ConnectionLost,
    ReadWeights,
    ServerSpeed,
    SimulatedProcess,
    WriteTokens,
    count_arriving,
    open_simulated_process,
    open_timers,
    read_snapshot,
    spoil_body,
)

Dialect = Literal["vllm", "sglang"]
VLLM_PREFIX = "generate-tokens-"  # vLLM puts it before the request ids that it is given
VLLM_NO_LOG_PROB = -9999.0  # what vLLM writes for a log-prob that is no finite number


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def read_json(self) -> dict[str, Any]:
        """Raises BadAnswer(400)."""
        try:
            value = msgspec.json.decode(self.body) if self.body else {}
        except msgspec.DecodeError as error:
            raise BadAnswer(400, f"the body is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadAnswer(400, "the body is no JSON object")
        return value


@dataclass(frozen=True, slots=True)
class _Reply:
    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"
    arriving: int | None = None  # bytes of the body after which the connection closes; None: it arrives whole


_Answerer = Callable[[_Call], Awaitable[_Reply]]


@asynccontextmanager
async def open_fault_server(
    plan: FaultPlan = NO_FAULTS,
    *,
    dialect: Dialect,
    vocab_size: int,
    context_length: int,
    api_key: str | None = None,
    admin_key: str | None = None,
    name: str = "a",
    model: str = "simulated",
    settings: Mapping[str, Any] | None = None,
    speed: ServerSpeed | None = None,
    write_tokens: WriteTokens | None = None,
    read_weights: ReadWeights | None = None,
    base_weights: str = BASE_WEIGHTS,
) -> AsyncIterator[FaultServer]:
    """A server on a free port of 127.0.0.1, until the block ends; it suffers the faults of `plan` that bear
    `name`.

    Keys are required of clients where the dialect requires them; `admin_key` is SGLang's. `settings` replaces
    what the server says of its own settings (vLLM: model_config; SGLang: /server_info). `model` is the path
    that it was started with: loading it gives the base weights. Snapshots are read by `read_weights`, by
    default from the directory itself. Raises OSError if no port is free, and on leaving what a defect of the
    server itself raised.
    """
    read = read_weights or read_snapshot
    opened = open_simulated_process(
        name,
        plan,
        speed=speed or ServerSpeed(token_s=0.001),
        vocab_size=vocab_size,
        context_length=context_length,
        write_tokens=write_tokens,
        read_weights=lambda path: base_weights if str(path) == model else read(path),
        base_weights=base_weights,
    )
    async with opened as process, open_timers() as nursery:
        answer: _Answerer
        if dialect == "vllm":
            answer = partial(_answer_vllm, _VLLM(process, model, api_key, dict(settings or {})))
        else:
            answer = partial(
                _answer_sglang, _SGLang(process, model, api_key, admin_key, dict(settings or {}))
            )
        server = FaultServer(process, answer)
        await nursery.start(server.serve)
        try:
            yield server
        finally:
            server.close()
    if server.defects:
        raise server.defects[0]


class FaultServer:
    """What a test sees of the server. Made by open_fault_server."""

    def __init__(self, process: SimulatedProcess, answer: _Answerer) -> None:
        self.process = process
        self.calls: list[str] = []  # "POST /generate" of every call, in order of arrival
        self.defects: list[Exception] = []
        self._answer = answer
        self._streams: dict[int, trio.SocketStream] = {}  # by the client's port
        self._port = 0
        self._connections = 0
        self._listening = trio.Event()
        self._closed = False
        self._config = Config()
        self._config.errorlog = None
        self._config.include_server_header = False

    @property
    def url(self) -> str:
        """The same over restarts."""
        return f"http://127.0.0.1:{self._port}"

    async def restart(self) -> None:
        """Another process in place of this one, listening when this returns: base weights, version "default",
        not paused.
        """
        await self.process.restart()
        await self._listening.wait()

    async def wait_exited(self) -> str:
        """Why the process ended, when it has; at once while there is none."""
        return await self.process.wait_exited()

    def crash(self, reason: str = "killed by signal 9") -> None:
        """Ends the process now: every connection breaks, later ones are refused."""
        self.process.crash(reason)
        self._break_all()

    def statistics(self) -> dict[str, float]:
        """connections open and ever opened, calls, generate requests, tokens decoded, requests in flight,
        faults that have struck.
        """
        process = self.process
        counts = {
            "open_connections": len(self._streams),
            "connections": self._connections,
            "calls": len(self.calls),
            "requests": len(process.requests),
            "tokens": process.tokens,
            "in_flight": process.in_flight,
            "faults": len(process.struck),
        }
        return {name: float(value) for name, value in counts.items()}

    # --- sockets --------------------------------------------------------------------------------------------

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listens while there is a process; connections end with it."""
        while not self._closed:
            listeners = await trio.open_tcp_listeners(self._port, host="127.0.0.1")
            self._port = listeners[0].socket.getsockname()[1]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    partial(trio.serve_listeners, self._serve_connection, listeners, handler_nursery=nursery)
                )
                self._listening.set()
                task_status.started()
                await self.process.wait_exited()
                self._listening = trio.Event()
                self._break_all()
                nursery.cancel_scope.cancel()
            task_status = trio.TASK_STATUS_IGNORED
            await self.process.wait_started()

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        port = -1
        try:
            port = stream.socket.getpeername()[1]
            self._streams[port] = stream
            self._connections += 1
            app = ASGIWrapper(self._app)  # pyright: ignore[reportArgumentType]  (its types name every ASGI event)
            await TCPServer(app, self._config, WorkerContext(None), ConnectionState({}), stream)  # pyright: ignore[reportArgumentType]  (no TLS)
        except OSError:
            return  # the client left before we looked
        finally:
            if (
                self._streams.get(port) is stream
            ):  # else we broke it, and another client may have the port by now
                del self._streams[port]
            await trio.aclose_forcefully(stream)

    def _break_all(self) -> None:
        for stream in self._streams.values():
            stream.socket.close()
        self._streams.clear()

    def close(self) -> None:
        """No connection is left."""
        self._closed = True
        self._break_all()

    # --- ASGI -----------------------------------------------------------------------------------------------

    async def _app(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        assert scope["type"] == "http", scope["type"]
        body = await _read_body(receive)
        if body is None:
            return
        query = {
            name: values[-1]
            for name, values in parse_qs(scope["query_string"].decode(), keep_blank_values=True).items()
        }
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        call = _Call(scope["method"], scope["path"], query, headers, body)
        self.calls.append(f"{call.method} {call.path}")
        try:
            async with open_timers() as nursery:
                nursery.start_soon(_cancel_on_disconnect, receive, nursery.cancel_scope)
                await self._respond(await self._find_reply(call), scope, send)
        except Exception as error:
            self.defects.append(error)
            self._break(scope)

    async def _find_reply(self, call: _Call) -> _Reply | None:
        """None where the connection breaks."""
        try:
            return await self._answer(call)
        except ConnectionLost:
            return None
        except BadAnswer as bad:
            headers = (
                () if bad.retry_after_s is None else ((b"retry-after", str(bad.retry_after_s).encode()),)
            )
            return _Reply(_encode({"error": {"message": str(bad), "code": bad.status}}), bad.status, headers)

    async def _respond(
        self, reply: _Reply | None, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if reply is None:
            self._break(scope)
            return
        length = str(len(reply.body)).encode()
        headers = [(b"content-type", reply.content_type), (b"content-length", length), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if reply.arriving is None or reply.arriving == len(reply.body):
            await send({"type": "http.response.body", "body": reply.body})
            return
        await send({"type": "http.response.body", "body": reply.body[: reply.arriving], "more_body": True})
        self._break(scope)

    def _break(self, scope: Any) -> None:
        """Closes the connection of a call."""
        stream = self._streams.pop(scope["client"][1], None)
        if stream is not None:
            stream.socket.close()


async def _read_body(receive: Callable[[], Awaitable[Any]]) -> bytes | None:
    """None if the client left meanwhile."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _cancel_on_disconnect(receive: Callable[[], Awaitable[Any]], scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


# --- vLLM ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _VLLM:
    process: SimulatedProcess
    model: str
    api_key: str | None
    settings: dict[str, Any]
    counts: dict[str, int] = field(default_factory=lambda: {"request": 0})


async def _answer_vllm(vllm: _VLLM, call: _Call) -> _Reply:
    if vllm.api_key is not None and call.path.startswith(("/v1", "/inference")):
        _check_key(call, vllm.api_key)
    if (call.method, call.path) == ("POST", "/inference/v1/generate"):
        return await _generate_vllm(vllm, call)
    reply = await (_tell_vllm(vllm, call) if call.method == "GET" else _control_vllm(vllm.process, call))
    if reply is None:
        raise BadAnswer(404, "Not Found")
    return reply


async def _control_vllm(process: SimulatedProcess, call: _Call) -> _Reply | None:
    match call.method, call.path:
        case "POST", "/pause":
            await process.pause(
                _read_mode(
                    call.query.get("mode", "abort"), {"abort": "abort", "wait": "wait", "keep": "keep"}
                )
            )
            return _reply({"status": "paused"})
        case "POST", "/resume":
            await process.resume()
            return _reply({"status": "resumed"})
        case "POST", "/collective_rpc":
            return await _collective_rpc(process, call.read_json())
        case "POST", "/update_weight_version":
            await process.set_version(str(call.read_json()["new_version"]))
            return _reply({"status": "ok"})
        case "POST", "/weight_checker":
            return _reply({"checksums": {"model.weight": await process.checksum()}})
        case "POST", "/abort_requests":
            named = call.read_json().get("request_ids") or None  # an empty list means all
            await process.abort(named)
            return _reply({"status": "aborted"})
        case "POST", "/reset_prefix_cache":
            await process.health()
            return _reply({"success": True})
    return None


async def _tell_vllm(vllm: _VLLM, call: _Call) -> _Reply | None:
    process = vllm.process
    match call.path:
        case "/is_paused":
            await process.health()
            return _reply({"is_paused": process.paused is not None})
        case "/weight_info":
            return _reply({"weight_version": await process.read_version()})
        case "/server_info":
            await process.health()
            return _reply({"vllm_config": _say_vllm_config(vllm)})
        case "/v1/models":
            await process.health()
            return _reply(
                {
                    "object": "list",
                    "data": [{"id": "policy", "object": "model", "max_model_len": process.context_length}],
                }
            )
        case "/metrics":
            return await _say_vllm_metrics(process)
        case "/health" | "/load" | "/version" | "/get_world_size":
            load = await process.load()
            said = {
                "/load": {"server_load": load.running},
                "/version": {"version": "0.32.0"},
                "/get_world_size": {"world_size": 1},
            }
            return _reply(said.get(call.path))
    return None


async def _collective_rpc(process: SimulatedProcess, body: dict[str, Any]) -> _Reply:
    if body.get("method") != "reload_weights":
        raise BadAnswer(400, f"no method {body.get('method')!r}")
    try:
        await process.load_weights(Path(body["kwargs"]["weights_path"]))
    except BadAnswer as bad:
        raise BadAnswer(500, str(bad)) from bad  # whatever a worker raises is a 500 here
    return _reply({"results": [None]})


async def _generate_vllm(vllm: _VLLM, call: _Call) -> _Reply:
    body = call.read_json()
    params = body.get("sampling_params", {})
    vllm.counts["request"] += 1
    server_id = VLLM_PREFIX + str(body.get("request_id") or f"unnamed-{vllm.counts['request']}")
    ids = body.get("token_ids", [])
    if any(not 0 <= token < vllm.process.vocab_size for token in ids):
        raise BadAnswer(400, f"Token id {max(ids)} is out of vocabulary")
    request = _make_request(
        server_id, ids, params, max_new_tokens=params.get("max_tokens", 16), seed=params.get("seed")
    )
    answer = await vllm.process.answer(request, server_id)
    entries = []
    for index, log_prob in enumerate(answer.log_probs):
        token = answer.token_ids[index] if index < len(answer.token_ids) else 0
        written = VLLM_NO_LOG_PROB if log_prob is not None and not math.isfinite(log_prob) else log_prob
        entries.append({"token_id": token, "logprob": written, "rank": 1})
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": None,
        "token_ids": answer.token_ids,
        "logprobs": {"content": entries},
    }
    if answer.spans is not None:
        choice["weight_versions"] = answer.spans
    record: dict[str, Any] = {"request_id": server_id, "choices": [choice]}
    if params.get("prompt_logprobs") is not None:
        scored = zip(ids[1:], answer.prompt_log_probs[1:], strict=True)
        record["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in scored)]
    return _send(record, answer)


def _say_vllm_config(vllm: _VLLM) -> dict[str, Any]:
    model = {
        "model": vllm.model,
        "max_model_len": vllm.process.context_length,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
    }
    return {
        "model_config": model | vllm.settings,
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
        "parallel_config": {"_api_process_count": 1},
        "weight_transfer_config": None,
    }


async def _say_vllm_metrics(process: SimulatedProcess) -> _Reply:
    load, tokens = await process.load(), process.tokens
    numbers = {
        "vllm:num_requests_running": load.running,
        "vllm:num_requests_waiting": load.waiting,
        "vllm:kv_cache_usage_perc": load.cache_usage,
        "vllm:iteration_tokens_total_count": tokens,
        "vllm:generation_tokens_total": tokens,
        "vllm:prompt_tokens_total": process.prompt_tokens,
    }
    lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
    lines += [
        f'{name}{{engine="0",model_name="policy"}} {float(value or 0)}' for name, value in numbers.items()
    ]
    return _Reply("\n".join([*lines, ""]).encode(), content_type=b"text/plain; version=0.0.4")


# --- SGLang -------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _SGLang:
    process: SimulatedProcess
    model_path: str
    api_key: str | None
    admin_key: str | None
    settings: dict[str, Any]
    incarnation: int = 0
    started_with: str = field(init=False)
    requests: int = 0

    def __post_init__(self) -> None:
        self.started_with = self.model_path


SGLANG_OPEN = ("/health", "/health_generate", "/ready", "/metrics")  # no key at all
SGLANG_NORMAL = (
    "/generate",
    "/v1/models",
    "/v1/loads",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
)


async def _answer_sglang(sglang: _SGLang, call: _Call) -> _Reply:
    process = sglang.process
    if sglang.incarnation != process.incarnation:
        sglang.incarnation, sglang.model_path = process.incarnation, sglang.started_with
    if call.path not in SGLANG_OPEN:
        key = sglang.api_key if call.path in SGLANG_NORMAL else sglang.admin_key or sglang.api_key
        if key is not None:
            _check_key(call, key)
    if call.path == "/generate" and call.method in ("POST", "PUT"):
        return await _generate_sglang(sglang, call)
    reply = await (_tell_sglang(sglang, call) if call.method == "GET" else _control_sglang(sglang, call))
    if reply is None:
        raise BadAnswer(404, "Not Found")
    return reply


async def _control_sglang(sglang: _SGLang, call: _Call) -> _Reply | None:
    process = sglang.process
    match call.method, call.path:
        case "POST", "/pause_generation":
            given = call.read_json().get("mode", "abort")
            process.aborts_frozen = given != "in_place"
            await process.pause(_read_mode(given, {"abort": "abort", "retract": "keep", "in_place": "keep"}))
            return _reply({"message": "Generation paused successfully.", "status": "ok"})
        case "POST", "/continue_generation":
            await process.resume()
            return _reply({"message": "Generation continued successfully.", "status": "ok"})
        case "POST", "/abort_request":
            body = call.read_json()
            await process.abort(None if body.get("abort_all") else [str(body.get("rid", ""))], prefixes=True)
            return _Reply()
        case "POST", "/update_weights_from_disk":
            return await _update_from_disk(sglang, call.read_json())
        case "POST", "/update_weight_version":
            body = call.read_json()
            if body.get("abort_all_requests", True):
                await process.abort()
            await process.set_version(str(body["new_version"]))
            return _reply(
                {"success": True, "message": "Weight version updated.", "new_version": body["new_version"]}
            )
        case "POST", "/weights_checker":
            sums = {"model.weight": await process.checksum()}
            return _reply({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})
        case "POST", "/flush_cache":
            await process.health()
            if process.in_flight:
                raise BadAnswer(400, "Flush cache failed.")
            return _Reply(b"Cache flushed.\n", content_type=b"text/plain")
    return None


async def _tell_sglang(sglang: _SGLang, call: _Call) -> _Reply | None:
    process = sglang.process
    match call.path:
        case "/v1/loads":
            return await _say_sglang_loads(process)
        case "/model_info" | "/get_model_info":
            version = await process.read_version()
            return _reply(
                {
                    "model_path": sglang.model_path,
                    "is_generation": True,
                    "weight_version": version,
                    "load_format": "auto",
                }
            )
        case "/server_info" | "/get_server_info":
            await process.health()
            return _reply(_say_sglang_settings(sglang))
        case "/v1/models":
            await process.health()
            model = {"id": sglang.model_path, "object": "model", "max_model_len": process.context_length}
            return _reply({"object": "list", "data": [model]})
        case "/ready" | "/health" | "/health_generate":
            await process.health()
            return _Reply()
    return None


async def _generate_sglang(sglang: _SGLang, call: _Call) -> _Reply:
    body, process = call.read_json(), sglang.process
    params = body.get("sampling_params", {})
    sglang.requests += 1
    rid = str(body.get("rid") or f"unnamed-{sglang.requests:08}")
    ids = body.get("input_ids", [])
    if any(not 0 <= token < process.vocab_size for token in ids):
        process.crash("IndexError: index out of range in the embedding")
        raise ConnectionLost
    request = _make_request(
        rid, ids, params, max_new_tokens=params.get("max_new_tokens", 128), seed=params.get("sampling_seed")
    )
    answer = await process.answer(request, rid)
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _say_sglang_finish(answer),
        "weight_version": process.version_name,
    }
    if answer.finish != "abort" or answer.token_ids:
        meta |= {"prompt_tokens": len(ids), "cached_tokens": 0, "completion_tokens": len(answer.token_ids)}
        scored = [*answer.token_ids, 0][: len(answer.log_probs)]
        finite = [
            None if log_prob is None or not math.isfinite(log_prob) else log_prob
            for log_prob in answer.log_probs
        ]
        meta["output_token_logprobs"] = [
            [log_prob, token, None] for log_prob, token in zip(finite, scored, strict=True)
        ]
        if answer.spans is not None:
            meta["weight_versions"] = answer.spans
    if body.get("logprob_start_len") == 0:
        scored = zip([None, *answer.prompt_log_probs[1:]], ids, strict=True)
        meta["input_token_logprobs"] = [[log_prob, token, None] for log_prob, token in scored]
    return _send({"text": "", "output_ids": answer.token_ids, "meta_info": meta}, answer)


def _say_sglang_finish(answer: Answer) -> dict[str, Any]:
    if answer.finish == "length":
        return {"type": "length", "length": len(answer.token_ids)}
    if answer.finish == "stop":
        return {"type": "stop", "matched": answer.token_ids[-1] if answer.token_ids else None}
    if answer.token_ids:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "abort", "message": "Abort in waiting queue"}


async def _update_from_disk(sglang: _SGLang, body: dict[str, Any]) -> _Reply:
    """Waits until nothing runs unless the server is paused. Frozen in place, a flush fails although the
    weights were replaced.
    """
    process = sglang.process
    if process.paused is None:
        await process.wait_idle()
    try:
        await process.load_weights(Path(body["model_path"]))
        if body.get("weight_version") is not None:
            await process.set_version(str(body["weight_version"]))
    except BadAnswer as bad:
        return _Reply(_encode({"success": False, "message": str(bad), "num_paused_requests": 0}), bad.status)
    sglang.model_path = str(body["model_path"])
    if process.paused == "keep" and not process.aborts_frozen and body.get("flush_cache", True):
        return _Reply(
            _encode(
                {"success": False, "message": "Flush cache failed.", "num_paused_requests": process.in_flight}
            ),
            400,
        )
    return _reply(
        {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": process.in_flight,
        }
    )


async def _say_sglang_loads(process: SimulatedProcess) -> _Reply:
    load = await process.load()
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.running,
        "token_usage": load.cache_usage,
        "total_prefill_uncached_tokens": process.prompt_tokens,
        "decode_moments": [float(process.tokens)],
    }
    return _reply({"loads": [rank]})


def _say_sglang_settings(sglang: _SGLang) -> dict[str, Any]:
    said = {
        "version": "0.5.23",
        "model_path": sglang.started_with,
        "enable_deterministic_inference": False,
        "enable_memory_saver": False,
        "speculative_algorithm": None,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
    }
    return said | sglang.settings


# --- both ---------------------------------------------------------------------------------------------------


def _make_request(
    server_id: str, ids: list[int], params: dict[str, Any], *, max_new_tokens: int, seed: int | None
) -> GenerateRequest:
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=params.get("temperature", 1.0),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=seed,
    )
    return GenerateRequest(request_id=server_id, prompt_ids=np.asarray(ids, np.int64), sampling=sampling)


def _read_mode(given: str, modes: Mapping[str, PauseMode]) -> PauseMode:
    if given not in modes:
        raise BadAnswer(400, f"mode {given!r} is none of {', '.join(modes)}")
    return modes[given]


def _check_key(call: _Call, key: str) -> None:
    if call.headers.get("authorization") != f"Bearer {key}":
        raise BadAnswer(401, "Unauthorized")


def _send(record: object, answer: Answer) -> _Reply:
    """The record, spoiled and cut as the plan says."""
    body = spoil_body(_encode(record), answer)
    return _Reply(body, arriving=count_arriving(body, answer))


def _reply(value: object) -> _Reply:
    return _Reply(_encode(value))


def _encode(value: object) -> bytes:
    return json.dumps(msgspec.to_builtins(value)).encode()

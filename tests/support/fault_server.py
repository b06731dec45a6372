"""An inference server that speaks as vLLM or SGLang does and suffers a fault plan. It has no model.

    client ──► FaultServer, a transport in this process, also in virtual time ──► SimulatedProcess

Dialects are those of vLLM 0.32 and SGLang 0.5.23, as far as rollouts uses them, with their traits: vLLM puts
a prefix before request ids, guards only /v1 and /inference and takes an empty list of aborts for all; SGLang
aborts every id that begins with the one it is given, and dies of a token id that it does not have.
"""

import json
import math
from collections.abc import Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import msgspec
import numpy as np
import trio

from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import SERVER_PREFIX, open_vllm_engine
from rollouts.engines.wire import ADAPTER_PREFIX
from rollouts.types import GenerateRequest, SamplingParams
from tests.support.simulated_process import (
    BadAnswer,
    ConnectionLost,
    open_simulated_process,
)

DialectName = Literal["vllm", "sglang"]
DIALECTS: tuple[DialectName, ...] = ("vllm", "sglang")
READS = [
    "/is_paused",
    "/server_info",
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
    "/v1/loads",
    "/model_info",
]
DONE = {"success": True, "message": "", "status": "ok"}


class Reply(NamedTuple):
    """What goes back; `arriving` bytes of the body before the connection closes, None: all."""

    body: bytes = b"{}"
    status: int = 200
    headers: Mapping[str, str] = {}
    arriving: int | None = None


class FaultServer(httpx.AsyncBaseTransport):
    """The HTTP of one process. `overrides` come before what it would answer, by path: bytes, JSON, a Reply,
    or a function of the body that returns one of them.
    """

    def __init__(
        self,
        process,
        dialect,
        *,
        settings=None,
        api_key=None,
        model="simulated",
    ):
        """`settings` replace what it says of its own: vLLM's config, SGLang's /server_info."""
        self.process = process
        self.dialect: DialectName = dialect
        self.settings = dict(settings or {})
        self.api_key = api_key
        self.model = model
        self.url = f"http://{process.name}"
        self.calls = []  # path with query, and body, in order of arrival
        self.overrides = {}

    def paths(self, *of):
        """The paths called so far; only those of `of` if some are given."""
        return [path for path, _ in self.calls if not of or path.split("?")[0] in of]

    async def respond(self, target, key, content):
        """None where the connection breaks."""
        path, _, query = target.partition("?")
        body = json.loads(content or b"{}")
        self.calls.append((target, body))
        is_vllm = self.dialect == "vllm"
        guarded = path.startswith(("/v1", "/inference")) if is_vllm else path != "/ready"
        try:
            if path in self.overrides:
                await trio.lowlevel.checkpoint()
                said = self.overrides[path]
                said = said(body) if callable(said) else said
                said = await said if isinstance(said, Awaitable) else said
            elif self.api_key and guarded and key != f"Bearer {self.api_key}":
                raise BadAnswer(401, "Unauthorized")
            else:
                if path in READS:
                    await self.process.enter(self.process.speed.control_s)
                said = await (_vllm if is_vllm else _sglang)(self, path, query, body)
        except ConnectionLost:
            return None
        except BadAnswer as bad:
            headers = {} if bad.retry_after_s is None else {"retry-after": str(bad.retry_after_s)}
            return Reply(_encode({"success": False, "message": str(bad)}), bad.status, headers)
        return said if isinstance(said, Reply) else Reply(said if isinstance(said, bytes) else _encode(said))

    async def handle_async_request(self, request):
        """Raises what httpx raises over a network."""
        if not self.process.up:
            await trio.lowlevel.checkpoint()
            raise httpx.ConnectError("connection refused")
        target, key = request.url.raw_path.decode(), request.headers.get("authorization")
        with trio.move_on_after(request.extensions["timeout"]["read"]) as scope:
            reply = await self.respond(target, key, await request.aread())
        if scope.cancelled_caught:
            raise httpx.ReadTimeout("")
        if reply is None:
            raise httpx.ReadError("connection reset")
        if reply.arriving is not None:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
        return httpx.Response(reply.status, headers=reply.headers, content=reply.body)

    def transport(self):
        return self

    def open_engine(self, *, silence_s=60.0, **options):
        """The real client of this server's dialect, over no network."""
        opened = open_vllm_engine if self.dialect == "vllm" else open_sglang_engine
        options = {"vocab_size": self.process.vocab_size, "name": self.process.name} | options
        options |= {"silence_s": silence_s, "api_key": self.api_key, "transport": self.transport}
        return opened(self.url, **options)


def _encode(value):
    return json.dumps(msgspec.to_builtins(value)).encode()


async def _common(server, path, body):
    if path == "/v1/models":
        return {"data": [{"id": "policy", "max_model_len": server.process.context_length}]}
    if path == "/update_weight_version":
        await server.process.set_version(str(body["new_version"]))
    elif path.endswith("load_lora_adapter"):
        return await _change_adapters(server, path.removeprefix("/v1"), body)
    elif path not in ("/health", "/ready"):
        raise BadAnswer(404, "Not Found")
    return DONE


async def _change_adapters(server, path, body):
    """vLLM says 500 to an adapter that it does not take, SGLang says what it has."""
    process, is_vllm, settings = server.process, server.dialect == "vllm", server.settings
    rank = settings.get("lora_config", settings).get("max_lora_rank")
    if rank is None:
        raise BadAnswer(404, "Not Found")
    name = body["lora_name"]
    if path == "/unload_lora_adapter":
        if process.adapters.pop(name, None) is None:
            raise BadAnswer(404 if is_vllm else 400, f"{name} is not loaded")
    else:
        folder = Path(body["lora_path"])
        asked = json.loads((folder / "adapter_config.json").read_bytes())["r"]
        if asked > rank:
            raise BadAnswer(
                500 if is_vllm else 400, f"LoRA rank {asked} is greater than max_lora_rank {rank}"
            )
        await process.load_adapter(name, folder)
    return b"Success" if is_vllm else DONE | {"loaded_adapters": dict.fromkeys(process.adapters, "")}


async def _vllm(server, path, query, body):
    process = server.process
    match path:
        case "/inference/v1/generate":
            return await _generate_vllm(process, body)
        case "/pause":
            await process.pause(_mode(query.removeprefix("mode=")))
        case "/resume":
            await process.resume()
        case "/collective_rpc":
            try:
                await process.load_weights(Path(body["kwargs"]["weights_path"]))
            except BadAnswer as bad:
                raise BadAnswer(500, str(bad)) from bad  # whatever a worker raises is a 500 here
            return {"results": [None]}
        case "/weight_checker":
            return {"checksums": {"model.weight": await process.checksum()}}
        case "/abort_requests":
            await process.abort(body.get("request_ids") or list(process.running))
        case "/reset_prefix_cache":
            await process.enter()
        case "/is_paused":
            return {"is_paused": process.paused is not None}
        case "/weight_info":
            await process.enter()
            return {"weight_version": process.version_name}
        case "/server_info":
            config = {
                "model_config": {
                    "model": server.model,
                    "max_model_len": process.context_length,
                    "logprobs_mode": "processed_logprobs",
                },
                "device_config": {"device": "cpu"},
                "scheduler_config": {"enable_chunked_prefill": False},
            }
            env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": server.settings.get("updating", True)}
            return {"vllm_config": config | server.settings, "vllm_env": env}
        case "/metrics":
            return _write_metrics(process)
        case _:
            return await _common(server, path, body)
    return DONE


def _write_metrics(process):
    waiting = len(process.waiting)
    counts = {
        "num_requests_running": len(process.running) - waiting,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": 0.5,
        "iteration_tokens_total_count": process.tokens,
        "generation_tokens_total": process.tokens,
        "prompt_tokens_total": process.prompt_tokens,
    }
    lines = [f'vllm:{name}{{engine="0"}} {float(value)}\n' for name, value in counts.items()]
    return "".join(["# HELP x\n", *lines]).encode()


def _mode(text):
    assert text in ("abort", "wait", "keep"), text
    return text


async def _answer(process, server_id, ids, params, adapter):
    sampling = SamplingParams(
        max_new_tokens=params.get("max_tokens", params.get("max_new_tokens", 16)),
        temperature=params.get("temperature", 1.0),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=params.get("seed", params.get("sampling_seed")),
    )
    prompt_ids = np.asarray(ids, np.int64)
    request = GenerateRequest(request_id=server_id, prompt_ids=prompt_ids, sampling=sampling)
    return await process.answer(request, server_id, adapter=adapter)


def _send(record, answer):
    body = answer.replaced_by or _encode(record)
    return Reply(body, arriving=None if answer.cut_at is None else min(answer.cut_at, len(body) - 1))


async def _generate_vllm(process, body):
    params, ids = body.get("sampling_params", {}), body["token_ids"]
    server_id = SERVER_PREFIX + str(body.get("request_id") or f"unnamed-{process.requests}")
    if any(not 0 <= token < process.vocab_size for token in ids):
        raise BadAnswer(400, f"Token id {max(ids)} is out of vocabulary")
    model = body.get("model", "")
    adapter = model if model.startswith(ADAPTER_PREFIX) else None
    if adapter is not None and adapter not in process.adapters:
        raise BadAnswer(404, f"The model `{model}` does not exist")
    answer = await _answer(process, server_id, ids, params, adapter)
    entries = [  # what is no number is written as −9999
        {"token_id": token, "logprob": log_prob if math.isfinite(log_prob) else -9999.0, "rank": 1}
        for token, log_prob in zip(answer.ids, answer.log_probs, strict=False)
    ]
    choice = {"finish_reason": answer.finish, "token_ids": answer.ids, "logprobs": {"content": entries}}
    if answer.spans is not None:
        choice["weight_versions"] = answer.spans
    record = {"request_id": server_id, "choices": [choice]}
    if "prompt_logprobs" in params:
        scored = zip(ids[1:], answer.prompt_log_probs[1:], strict=True)
        record["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in scored)]
    return _send(record, answer)


async def _sglang(server, path, query, body):
    process = server.process
    match path:
        case "/generate":
            return await _generate_sglang(process, body)
        case "/pause_generation":
            await process.pause(_mode("keep" if body["mode"] == "retract" else body["mode"]))
        case "/continue_generation":
            await process.resume()
        case "/abort_request":
            await process.abort([body["rid"]], lost=process.paused == "keep")  # what is retracted is queued
        case "/update_weights_from_disk":
            if process.paused is None:
                await process.wait_until(lambda: not process.running)
            await process.load_weights(Path(body["model_path"]))
            await process.set_version(str(body["weight_version"]))
        case "/weights_checker":
            return DONE | {"ranks": [{"checksums": {"model.weight": await process.checksum()}}]}
        case "/v1/loads":
            waiting = len(process.waiting)
            rank = {
                "num_running_reqs": len(process.running) - waiting,
                "num_waiting_reqs": waiting,
                "token_usage": 0.5,
                "total_prefill_uncached_tokens": process.prompt_tokens,
                "decode_moments": [float(process.tokens)],
            }
            return {"loads": [rank]}
        case "/model_info":
            return {"model_path": server.model, "weight_version": process.version_name}
        case "/server_info":
            return {"version": "0.5.23", "model_path": server.model} | server.settings
        case _:
            return await _common(server, path, body)
    return DONE


async def _generate_sglang(process, body):
    rid, ids = str(body["rid"]), body["input_ids"]
    if any(not 0 <= token < process.vocab_size for token in ids):
        process.crash()  # IndexError in the embedding
        raise ConnectionLost
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in process.adapters:
        raise BadAnswer(400, f"Got LoRA adapter that has never been loaded: {adapter}")
    answer = await _answer(process, rid, ids, body["sampling_params"], adapter)
    meta = {"id": rid, "finish_reason": {"type": answer.finish}}
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


@asynccontextmanager
async def open_fake_server(
    dialect,
    *,
    settings=None,
    api_key=None,
    model="simulated",
    **options,
):
    """A server with a process of its own, made with `options`."""
    async with open_simulated_process(**options) as process:
        yield FaultServer(process, dialect, settings=settings, api_key=api_key, model=model)

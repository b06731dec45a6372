"""An SGLang server as an InferenceEngine: token ids in; token ids, log-probs and each token's version out.

    generate    EngineServer (check, gate, in-flight table) ──► POST /generate under an id of fixed width
    pause       abort: gate closed, everyone answered, server paused; wait: all finish first;
                keep: server paused, "retract" computes what is in flight anew under the next weights,
                "in_place" goes on with the cache it has
    update      disk: /update_weights_from_disk; memory: see weight_sync.broadcast_sglang

The prefix cache is salted by opened engine and weight version (`extra_key`), and flushed by an update
wherever the server can: it cannot while requests are frozen in place, and would answer 400 although the
weights were replaced.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import trio

from rollouts.engines.http import HttpClient, check_key, open_http_client, split_url
from rollouts.engines.server import EngineServer, Progress, ask_watched, check_status
from rollouts.engines.snapshot import check_same_model, read_tensor_shapes
from rollouts.engines.wire import VersionSpan, decode_reply, make_completion, parse_version
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    SnapshotError,
)
from rollouts.protocols import PauseMode
from rollouts.types import (
    Completion,
    EngineFeatures,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)

if TYPE_CHECKING:
    import torch

KeepMode = Literal["retract", "in_place"]
OLDEST_VERSION = (0, 5, 20)  # the first whose answers say which version produced which token
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
SEED_MASK = 0x7FFFFFFF  # what the server's seeded sampler takes
RESERVED = 2  # tokens of its context that the server leaves empty: it lowers max_new_tokens without a word
LEAST_ANSWER = 4  # tokens that fit after a prompt of max_req_input_len
NEVER_NAMED = "default"  # the version's name in a server that was started and not updated since
IN_PIECES = (  # the version's name while weights are exchanged: no number, so whoever asks then is told −1
    "loading"
)
# to tell the server that nobody waits for an answer any more; it would find out by itself in some seconds
CANCEL_GRACE_S = 1.0
COLD = 1e-3  # a temperature at which the likeliest token is as good as certain
PROBE_PROMPTS = 3  # that are tried before the log-probs' temperature is given up as not measurable


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None
    status_code: int | None = None  # of an abort by the server itself: what is wrong


class _Meta(msgspec.Struct, frozen=True):
    id: str
    finish_reason: _Finish
    output_token_logprobs: tuple[
        tuple[float, int, str | None], ...
    ] = ()  # missing when it was aborted before it ran
    weight_versions: tuple[VersionSpan, ...] = ()
    input_token_logprobs: tuple[tuple[float | None, int, str | None], ...] = ()  # where they were asked for


class _Generated(msgspec.Struct, frozen=True):
    output_ids: tuple[int, ...]
    meta_info: _Meta


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str
    is_generation: bool = True


class _ServerInfo(msgspec.Struct, frozen=True):
    """What of the server's hundreds of settings matters here. Its keys are among the others: never show the
    body.
    """

    version: str
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    enable_watermark: bool | None = False
    speculative_algorithm: str | None = None
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _RankLoad(msgspec.Struct, frozen=True):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    total_prefill_uncached_tokens: int = 0
    decode_moments: tuple[float, ...] = ()  # sums over decode steps: they grow with every one
    token_usage: float | None = None


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[_RankLoad, ...]


class _Update(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class _RankChecksum(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct, frozen=True):
    success: bool
    ranks: tuple[_RankChecksum, ...]


def make_generate_body(request: GenerateRequest, server_id: str, *, salt: str) -> dict[str, Any]:
    """The JSON of one request. Everything that a server could fill in from its own defaults is said."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        # with it the server looks at no stop token at all, ours included
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed & SEED_MASK
    ids = [int(token) for token in request.prompt_ids]
    return {
        "rid": server_id,
        "input_ids": ids,
        "sampling_params": params,
        "return_logprob": True,
        "extra_key": salt,
    } | ({"logprob_start_len": 0} if request.score_prompt else {})


def parse_generate_reply(
    body: bytes,
    request: GenerateRequest,
    server_id: str,
    *,
    vocab_size: int,
    where: str,
    ends_at: int | None = None,
) -> Completion:
    """The completion in an answer of /generate. Raises ReplyError where it cannot be one, and for an abort
    that is the server's own failure EngineOverloaded or InfrastructureError. `ends_at`: see make_completion.
    """
    reply = decode_reply(body, _Generated, where=where)
    meta, who = reply.meta_info, f"{where}, request {request.request_id!r}"
    if meta.id != server_id:
        raise ReplyError(f"{who}: the answer is to {meta.id!r}, asked was {server_id!r}")
    finish = FINISH_REASONS.get(meta.finish_reason.type)
    if finish is None:
        raise ReplyError(
            f"{who}: unknown finish reason {meta.finish_reason.type!r}; known: {', '.join(FINISH_REASONS)}"
        )
    status = meta.finish_reason.status_code
    if finish == "abort" and status is not None:
        kind = EngineOverloaded if status in (429, 503) else InfrastructureError
        raise kind(f"{who}: the server gave it up with status {status}: {meta.finish_reason.message}")
    for index, (token, (_, scored, _)) in enumerate(
        zip(reply.output_ids, meta.output_token_logprobs, strict=False)
    ):
        if token != scored:
            raise ReplyError(f"{who}: token {index} has id {token}, its log-prob is of id {scored}")
    log_probs = [log_prob for log_prob, _, _ in meta.output_token_logprobs]
    return make_completion(
        request,
        reply.output_ids,
        log_probs,
        meta.weight_versions,
        finish,
        vocab_size=vocab_size,
        where=where,
        ends_at=ends_at,
        prompt_log_probs=[
            log_prob if scored == token else None
            for (log_prob, scored, _), token in zip(
                meta.input_token_logprobs, request.prompt_ids.tolist(), strict=False
            )
        ],
    )


class ServerFacts(NamedTuple):
    """What the handshake found out."""

    world_size: int  # processes that hold weights
    data_parallel: int
    weights_backed_up: bool  # releasing the weights' memory keeps a copy of them
    shapes: (
        Mapping[str, tuple[int, ...]] | None
    )  # of the tensors in the model's files; None: they cannot be read from here
    ends_at: int | None = (
        # tokens of prompt and answer at which the server ends an answer, some before its context is full;
        # None: unknown
        None
    )


class SGLangEngine:
    """One SGLang server. Made by `open_sglang_engine`; lives as long as its HTTP clients."""

    def __init__(
        self,
        server: EngineServer,
        admin: HttpClient,
        features: EngineFeatures,
        *,
        keep_mode: KeepMode,
        facts: ServerFacts,
        version: str,
    ) -> None:
        self._server = server
        self._admin = admin
        self._features = features
        self._keep_mode: KeepMode = keep_mode
        self._facts = facts
        self._own = uuid.uuid4().hex[
            :16
        ]  # what an earlier run cached under the same version was computed by other weights
        self._salt = self._make_salt(version)
        self._frozen_in_place = False
        self._released: list[str] = []
        self._prefilled = (
            -1
        )  # tokens of prompts that the server had computed when it was last asked for progress

    @property
    def features(self) -> EngineFeatures:
        return self._features

    @property
    def world_size(self) -> int:
        """Processes of the server that hold weights: what a process group for updates must have room for."""
        return self._facts.world_size

    @property
    def data_parallel(self) -> int:
        """Copies of the model inside the server; an update in memory reaches only one."""
        return self._facts.data_parallel

    def _make_salt(self, version: int | str) -> str:
        return f"{self._own}-v{version}"

    # --- requests -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. Cancelling the caller frees its row. Raises RequestRefused, EngineClosed,
        InfrastructureError.
        """
        return await self._server.run(request, self._features, self._ask)

    async def _ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_generate_body(request, server_id, salt=self._salt)
        try:
            answer = await self._server.call_generate("/generate", body, self._read_progress)
        except (trio.Cancelled, BaseExceptionGroup):
            with trio.move_on_after(CANCEL_GRACE_S, shield=True):
                await self._forget(server_id)
            raise
        where = f"{self._server.name}: POST /generate"
        size, ends_at = self._features.vocab_size, self._facts.ends_at
        return parse_generate_reply(answer, request, server_id, vocab_size=size, where=where, ends_at=ends_at)

    async def _forget(self, server_id: str) -> None:
        try:
            await self._send_abort([server_id])
        except EngineError:
            return  # the closed connection says the same, a little later

    async def _send_abort(self, server_ids: Sequence[str]) -> None:
        for server_id in server_ids:
            await self._call_admin("/abort_request", {"rid": server_id})

    async def _read_progress(self) -> Progress:
        loads = await self._read_loads()
        computed, self._prefilled = self._prefilled, sum(rank.total_prefill_uncached_tokens for rank in loads)
        counted = (
            computed == self._prefilled
        )  # a prompt that is being computed is neither running nor waiting
        count = sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in loads)
        return Progress(loads, requests=count if counted else None)

    async def abort_all(self) -> None:
        """Answers every request, in flight or waiting, with what it has; of one that is frozen the server
        loses up to 49 of the newest tokens.
        """
        if (
            self._frozen_in_place
        ):  # a server aborts no request that it froze in place: let it put them into its queue first
            await self._call_admin("/pause_generation", {"mode": "retract"})
            self._frozen_in_place = False
        await self._server.abort(self._send_abort)

    # --- pausing --------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Admits nothing until resume(). If it fails, the engine is as open as before."""
        self._server.check_open()
        with self._server.pausing():
            await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> None:
        server = self._server
        frozen = server.paused
        server.close_gate(frozen=mode != "wait")
        if mode == "wait":
            if frozen:  # what an earlier pause froze has to finish
                await self._call_admin("/continue_generation", {"torch_empty_cache": False})
            await server.wait_answered(server.sent())
        elif mode == "abort":
            await self.abort_all()
        server_mode = self._keep_mode if mode == "keep" else "retract"
        await self._call_admin("/pause_generation", {"mode": server_mode})
        self._frozen_in_place = server_mode == "in_place"
        server.close_gate()

    async def resume(self) -> None:
        """Requests in flight go on and waiting ones are sent, also if it fails: see EngineServer.resuming."""
        with self._server.resuming():
            await self._call_admin("/continue_generation", {"torch_empty_cache": False})
            self._frozen_in_place = False

    # --- weights --------------------------------------------------------------------------------------------

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        """What the server said. Loads a directory of safetensors, which the server must see under the same
        path. Pause first, in any mode: otherwise it waits until nothing runs. The server calls its model by
        that path from then on.

        Raises EngineError, with nothing sent, for a directory that is damaged or of another model (loading a
        cut file, the server would end), and if the server fails; EngineSetupError for a server that came back
        with settings that would falsify training.
        """
        path = path.absolute()
        try:
            shapes = await trio.to_thread.run_sync(read_tensor_shapes, path)
            if self._facts.shapes is not None:
                check_same_model(shapes, self._facts.shapes, path=path)
        except SnapshotError as error:
            raise EngineError(f"{self._server.name} was sent nothing: {error}") from error
        await self._meet_again()
        body = {
            "model_path": str(path),
            "weight_version": str(version),
            "flush_cache": not self._frozen_in_place,
            "torch_empty_cache": False,
        }
        message = await self._update("/update_weights_from_disk", body, doing=f"loading weights from {path}")
        self._salt = self._make_salt(version)
        return {"version": version, "tensors": len(shapes), "message": message}

    async def _meet_again(self) -> None:
        """A server whose weights were never named has just been started, perhaps by somebody else: its
        settings are looked at again.
        """
        if (await self._read_model_info()).weight_version == NEVER_NAMED:
            check_server_info(await read_server_info(self._server), who=self._server.name)

    async def weight_version(self) -> int:
        """The version whose weights it serves; −1 while it serves weights that were never named."""
        return parse_version((await self._read_model_info()).weight_version)

    async def checksum(self) -> str | None:
        """A fingerprint of all weights on all ranks, in the server's own names and shapes."""
        answer = await self._call_admin("/weights_checker", {"action": "checksum"})
        found = decode_reply(answer, _Checksums, where=f"{self._server.name}: POST /weights_checker")
        if not found.success or not found.ranks or not all(rank.checksums for rank in found.ranks):
            raise ReplyError(f"{self._server.name}: POST /weights_checker gave no checksums")
        lines = sorted(
            f"{index} {name} {value}"
            for index, rank in enumerate(found.ranks)
            for name, value in rank.checksums.items()
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    async def begin_update(self) -> None:
        raise EngineError(
            f"{self._server.name} takes no buckets from this process; update it from disk, or by"
            " weight_sync.broadcast"
        )

    def receive_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        raise EngineError(
            f"{self._server.name} takes no buckets from this process; update it from disk, or by"
            " weight_sync.broadcast"
        )

    async def finish_update(self, version: int) -> None:
        raise EngineError(
            f"{self._server.name} takes no buckets from this process; update it from disk, or by"
            " weight_sync.broadcast"
        )

    # --- weights in memory: the server's side of weight_sync.broadcast --------------------------------------

    async def join_group(self, *, address: str, port: int, group_name: str, backend: str) -> None:
        """Returns when the server has joined the trainer's process group: ranks 1 to world_size, the trainer
        being 0.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body, doing=f"joining process group {group_name}")

    async def leave_group(self, group_name: str) -> None:
        await self._update(
            "/destroy_weights_update_group",
            {"group_name": group_name},
            doing=f"leaving process group {group_name}",
        )

    async def begin_transfer(self) -> bool:
        """Whether the server has sessions (from 0.5.21 on). One that an update before left open is closed
        first.

        Until the last bucket names them, its weights have no version: a transfer that breaks off leaves some
        old and some new.
        """
        await self._meet_again()
        named = {"new_version": IN_PIECES, "abort_all_requests": False}
        await self._update("/update_weight_version", named, doing="taking its version back")
        path, body = "/begin_weight_update", {"selector": "all"}
        reply = await self._admin.request(
            "POST", path, body=msgspec.json.encode(body), silence_s=self._server.silence_s
        )
        if reply.status == 404:
            return False
        if reply.status == 400 and b"already open" in reply.body:
            await self.end_transfer()
            await self._update(path, body, doing="beginning a weight update")
            return True
        check_status(reply, where=f"{self._server.name}: POST {path}")
        return True

    async def receive_broadcast(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        version: int,
        last: bool,
    ) -> None:
        """Returns when the server has taken one flattened bucket out of the group and loaded it. The last one
        names the version.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": last and not self._frozen_in_place,
        }
        if last:
            body["weight_version"] = str(version)
        await self._update("/update_weights_from_distributed", body, doing="taking a bucket of weights")
        if last:
            self._salt = self._make_salt(version)

    async def end_transfer(self) -> None:
        await self._update("/end_weight_update", {}, doing="ending a weight update")

    # --- state ----------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Whether the server is ready. It is not asked to generate: that would take a second, and a row."""
        return await self._server.health("/ready")

    async def load(self) -> EngineLoad:
        loads = await self._read_loads()
        usages = [rank.token_usage for rank in loads if rank.token_usage is not None]
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in loads),
            waiting=sum(rank.num_waiting_reqs for rank in loads),
            cache_usage=sum(usages) / len(usages) if usages else None,
        )

    async def release_memory(self) -> None:
        """Gives cache memory back, and that of the weights where the server keeps a copy; only if
        features.frees_memory.

        Pause first. Raises EngineError otherwise, and while requests are frozen in place: the server would
        end on the spot, at the latest with the next request.
        """
        if self._released:
            return
        if not self._server.paused or (self._server.sent() and self._frozen_in_place):
            raise EngineError(
                f"{self._server.name} takes requests, or has some frozen in place; pause it before its memory"
                " is released"
            )
        tags = ["kv_cache", "weights"] if self._facts.weights_backed_up else ["kv_cache"]
        await self._call_admin("/release_memory_occupation", {"tags": tags})
        self._released = tags

    async def restore_memory(self) -> None:
        if not self._released:
            return
        await self._call_admin("/resume_memory_occupation", {"tags": self._released})
        self._released = []

    def statistics(self) -> Mapping[str, float]:
        return self._server.statistics()

    # --- calls ----------------------------------------------------------------------------------------------

    async def _read_model_info(self) -> _ModelInfo:
        return decode_reply(
            await self._server.call("GET", "/model_info"),
            _ModelInfo,
            where=f"{self._server.name}: GET /model_info",
        )

    async def _read_loads(self) -> tuple[_RankLoad, ...]:
        return decode_reply(
            await self._server.call("GET", "/v1/loads"), _Loads, where=f"{self._server.name}: GET /v1/loads"
        ).loads

    async def _call_admin(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The body of a 2xx answer to a control call, awaited for as long as the server says that it is
        ready. Raises as EngineServer.call.
        """
        self._server.check_open()
        server = self._server
        return await ask_watched(
            lambda: call_admin(self._admin, path, body, name=server.name, silence_s=math.inf),
            self.health,
            silence_s=server.silence_s,
            where=f"{server.name}: POST {path}",
        )

    async def _update(self, path: str, body: Mapping[str, Any], *, doing: str) -> str:
        try:
            said = await self._call_admin(path, body)
        except InfrastructureError:
            raise
        except EngineError as error:
            raise EngineError(f"{self._server.name} failed at {doing}: {error}") from error
        answer = decode_reply(said, _Update, where=f"{self._server.name}: POST {path}")
        if not answer.success:
            raise EngineError(f"{self._server.name} failed at {doing}: {answer.message}")
        return answer.message


async def call_admin(
    client: HttpClient,
    path: str,
    body: Mapping[str, Any],
    *,
    name: str,
    silence_s: float,
) -> bytes:
    """The body of a 2xx answer to a control call. Raises EngineError for a refusal, InfrastructureError as
    check_status does.
    """
    reply = await client.request("POST", path, body=msgspec.json.encode(body), silence_s=silence_s)
    try:
        check_status(reply, where=f"{name}: POST {path}")
    except RequestRefused as error:  # a control call carries no request that could be at fault
        raise EngineError(str(error)) from error
    return reply.body


@asynccontextmanager
async def open_sglang_engine(
    url: str,
    *,
    name: str = "",
    api_key: str | None = None,
    admin_key: str | None = None,
    silence_s: float = 60.0,
    vocab_size: int,
    context_length: int | None = None,
    keep_mode: KeepMode = "retract",
) -> AsyncIterator[SGLangEngine]:
    """The SGLang server at `url`, which is ours alone from now on: if somebody left it paused, it goes on.

    name: what errors and metrics call it; "sglang-host:port" unless given. api_key, admin_key: what the
    server was started with (`--api-key`, `--admin-api-key`). silence_s: seconds without a byte and without
    progress after which an answer is given up. vocab_size: the trainer's. context_length: what a request may
    need; the server's own if None. keep_mode: what pause("keep") does. Raises EngineSetupError, naming what
    to set, for a server whose answers would falsify training or that refuses the keys; InfrastructureError if
    it does not answer.
    """
    who = name or f"sglang-{split_url(url).netloc}"
    check_key(admin_key, where=who, name="admin_key")
    async with (
        open_http_client(url, api_key=api_key) as client,
        open_http_client(url, api_key=admin_key or api_key) as admin,
    ):
        server = EngineServer(client, name=who, silence_s=silence_s)
        try:
            yield await shake_hands(
                server,
                admin,
                vocab_size=vocab_size,
                context_length=context_length,
                keep_mode=keep_mode,
                has_key=bool(api_key),
            )
        finally:
            server.close()


async def shake_hands(
    server: EngineServer,
    admin: HttpClient,
    *,
    vocab_size: int,
    context_length: int | None,
    keep_mode: KeepMode,
    has_key: bool,
) -> SGLangEngine:
    """The engine of a server that passed all checks. Raises as open_sglang_engine."""
    who = server.name
    await _try_keys(server, admin, has_key=has_key)
    info = await read_server_info(server)
    model = decode_reply(await server.call("GET", "/model_info"), _ModelInfo, where=f"{who}: GET /model_info")
    models = decode_reply(await server.call("GET", "/v1/models"), _Models, where=f"{who}: GET /v1/models")
    check_server_info(info, who=who)
    if not model.is_generation:
        raise EngineSetupError(
            f"{who} serves {model.model_path} as an embedding model; start it without --is-embedding"
        )
    served = read_vocab_size(Path(model.model_path))
    if served is not None and served != vocab_size:
        raise EngineSetupError(
            f"{who} serves {model.model_path} with {served} token ids, the trainer's model has {vocab_size};"
            " serve the same model"
        )
    longest = models.data[0].max_model_len if models.data else None
    if longest is None:
        raise EngineSetupError(
            f"{who} does not say its context length at /v1/models; use SGLang 0.5.20 or later"
        )
    if context_length is not None and context_length > longest:
        raise EngineSetupError(
            f"{who} has a context of {longest} tokens, needed are {context_length}; start it with"
            f" --context-length {context_length}"
        )
    gaps = list(find_gaps(info, knows_vocab=served is not None))
    if not await _measure_temperature(server, vocab_size=vocab_size):
        gaps.append(
            "Whether log-probs are of the distribution at the request's temperature could not be measured"
            " with this model."
        )
    features = EngineFeatures(
        vocab_size=vocab_size,
        context_length=longest if context_length is None else context_length,
        in_memory_update=False,
        update_from_checkpoint=True,
        shares_weights=False,
        keep_pause=True,
        deterministic=info.enable_deterministic_inference,
        name=who,
        seeds=info.enable_deterministic_inference,
        version_spans=True,
        log_probs=True,
        checksum=True,
        frees_memory=info.enable_memory_saver,
        gaps=tuple(gaps),
    )
    facts = ServerFacts(
        world_size=info.tp_size * info.pp_size,
        data_parallel=info.dp_size,
        weights_backed_up=info.enable_memory_saver and info.enable_weights_cpu_backup,
        shapes=await trio.to_thread.run_sync(_find_shapes, Path(model.model_path)),
        ends_at=(
            longest - RESERVED if info.max_req_input_len is None else info.max_req_input_len + LEAST_ANSWER
        ),
    )
    return SGLangEngine(
        server, admin, features, keep_mode=keep_mode, facts=facts, version=model.weight_version
    )


async def _try_keys(server: EngineServer, admin: HttpClient, *, has_key: bool) -> None:
    """Raises EngineSetupError if the server does not take the keys. Lets a server go on that somebody left
    paused.
    """
    try:
        await server.call("GET", "/model_info")
    except InfrastructureError:
        raise
    except EngineError as error:
        rule = "it does not take this api_key" if has_key else "it wants an api_key"
        raise EngineSetupError(
            f"{server.name}: {rule}; give the one that it was started with (--api-key): {error}"
        ) from error
    try:
        await call_admin(
            admin,
            "/continue_generation",
            {"torch_empty_cache": False},
            name=server.name,
            silence_s=server.silence_s,
        )
    except InfrastructureError:
        raise
    except EngineError as error:
        raise EngineSetupError(
            f"{server.name}: it refuses control calls; give the admin_key that it was started with"
            f" (--admin-api-key): {error}"
        ) from error


async def read_server_info(server: EngineServer) -> _ServerInfo:
    body = await server.call("GET", "/server_info")
    return decode_reply(
        body, _ServerInfo, where=f"{server.name}: GET /server_info", show_body=False
    )  # its keys are among them


def check_server_info(info: _ServerInfo, *, who: str) -> None:
    """Raises EngineSetupError for settings that would falsify training."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", info.version)[:3])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(str(part) for part in OLDEST_VERSION)
        raise EngineSetupError(
            f"{who} runs SGLang {info.version}, which does not say which weights produced which token;"
            f" install {oldest} or later"
        )
    if info.enable_watermark:
        raise EngineSetupError(
            f"{who} watermarks what it samples, so its log-probs are of another distribution; start it"
            " without --enable-watermark"
        )
    lowest = min(info.speculative_accept_threshold_single, info.speculative_accept_threshold_acc)
    if info.speculative_algorithm and lowest < 1.0:
        raise EngineSetupError(
            f"{who} accepts speculated tokens at a threshold of {lowest}, so it does not sample from the"
            " model; start it with --speculative-accept-threshold-single 1.0"
            " --speculative-accept-threshold-acc 1.0"
        )


def find_gaps(info: _ServerInfo, *, knows_vocab: bool) -> Iterator[str]:
    """A sentence for each thing that this server cannot do."""
    yield "A request with stop tokens ends at the model's own end-of-text tokens as well."
    if not info.enable_deterministic_inference:
        yield (
            "A request's seed is ignored: the server was started without --enable-deterministic-inference,"
            " which not all backends have."
        )
    if not info.enable_memory_saver:
        yield "Releasing memory frees none: the server was started without --enable-memory-saver."
    elif not info.enable_weights_cpu_backup:
        yield (
            "Releasing memory keeps the weights: the server was started without --enable-weights-cpu-backup."
        )
    if not knows_vocab:
        yield (
            "The server does not say how many token ids its model has, and its config.json cannot be read"
            " from here; the trainer's number is taken."
        )


def read_vocab_size(model: Path) -> int | None:
    """`vocab_size` in the config.json of a model directory; None if it cannot be read from this machine."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    size = text.get("vocab_size") if isinstance(text, dict) else None
    return size if isinstance(size, int) else None


def _find_shapes(model: Path) -> dict[str, tuple[int, ...]] | None:
    try:
        return read_tensor_shapes(model)
    except SnapshotError:
        return None


async def _measure_temperature(server: EngineServer, *, vocab_size: int) -> bool:
    """Whether log-probs were seen to be of the distribution at the request's temperature; False if no prompt
    could show it.

    The likeliest token of an uncertain distribution is nearly certain when it is cold. Raises
    EngineSetupError where it is not: no reply of /server_info says so, it is an environment variable of the
    server.
    """
    for index in range(PROBE_PROMPTS):
        prompt = [
            min(index + 1, vocab_size - 1)
        ]  # small ids: an id outside a server's vocabulary ends it, and it may not say how many it has
        plain, cold = [
            await _sample_one(server, prompt, temperature, vocab_size=vocab_size)
            for temperature in (0.0, COLD)
        ]
        if plain > -0.5:
            continue  # certain as it is
        if cold < plain / 2:
            raise EngineSetupError(
                f"{server.name} gives log-probs of the unscaled distribution ({cold:.3g} at temperature"
                f" {COLD:g}, {plain:.3g} at 0), not of the one sampled from; start it without"
                " SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        return True
    return False


async def _sample_one(
    server: EngineServer, prompt: list[int], temperature: float, *, vocab_size: int
) -> float:
    """The log-prob of one token."""
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
    request = GenerateRequest(
        request_id="handshake", prompt_ids=np.asarray(prompt, np.int64), sampling=sampling
    )
    server_id = uuid.uuid4().hex
    answer = await server.call("POST", "/generate", make_generate_body(request, server_id, salt="handshake"))
    completion = parse_generate_reply(
        answer, request, server_id, vocab_size=vocab_size, where=f"{server.name}: POST /generate"
    )
    return float(completion.log_probs[0])

"""An SGLang server as an InferenceEngine: token ids in; token ids, log-probs and each token's version out.

The prefix cache is salted by opened engine and weight version (`extra_key`), and flushed by an update.
pause("keep") is "retract": what is in flight is computed anew under the next weights.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import trio

from rollouts.engines.http import open_http_client, split_url
from rollouts.engines.server import EngineServer, Progress, ask_watched
from rollouts.engines.server_engine import ServerEngine, find_shapes
from rollouts.engines.wire import VersionSpan, decode_reply, make_completion, parse_version
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    RequestRefused,
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
    pass

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


class SGLangServer:
    """The Dialect of one SGLang server, and its own calls for transfers of weights in memory."""

    health_path = "/ready"  # it is not asked to generate: that would take a second, and a row

    def __init__(
        self,
        server: EngineServer,
        *,
        vocab_size: int,
        info: _ServerInfo,
        shapes: Mapping[str, tuple[int, ...]] | None,
        ends_at: int | None,
        version: str,
    ) -> None:
        """`ends_at`: tokens of prompt and answer at which the server ends an answer, some before its context
        is full. `version`: its name for its weights.
        """
        self.name = server.name
        self.shapes = shapes
        self.world_size = info.tp_size * info.pp_size  # processes that hold weights
        self.data_parallel = info.dp_size  # copies of the model; an update in memory reaches only one
        self._weights_backed_up = info.enable_memory_saver and info.enable_weights_cpu_backup
        self._server = server
        self._vocab_size = vocab_size
        self._ends_at = ends_at
        # what an earlier run cached under the same version was computed by other weights
        self._own = uuid.uuid4().hex[:16]
        self._salt = f"{self._own}-v{version}"
        self._released: list[str] = []
        self._prefilled = -1  # tokens of prompts computed when it was last asked for progress

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_generate_body(request, server_id, salt=self._salt)
        try:
            answer = await self._server.call_generate("/generate", body, self._read_progress)
        except (trio.Cancelled, BaseExceptionGroup):
            with trio.move_on_after(CANCEL_GRACE_S, shield=True), suppress(EngineError):
                await self.abort([server_id])  # the closed connection says the same, a little later
            raise
        where = f"{self.name}: POST /generate"
        return parse_generate_reply(
            answer, request, server_id, vocab_size=self._vocab_size, where=where, ends_at=self._ends_at
        )

    async def _read_progress(self) -> Progress:
        loads = await self._read_loads()
        before, self._prefilled = self._prefilled, sum(rank.total_prefill_uncached_tokens for rank in loads)
        count = sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in loads)
        # a prompt that is being computed is neither running nor waiting
        return Progress(loads, requests=count if before == self._prefilled else None)

    async def abort(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            await self._control("/abort_request", {"rid": server_id})

    async def freeze(self, mode: PauseMode) -> None:
        """What is in flight is computed anew under the next weights."""
        await self._control("/pause_generation", {"mode": "retract"})

    async def thaw(self) -> None:
        await self._control("/continue_generation", {"torch_empty_cache": False})

    async def load(self) -> EngineLoad:
        loads = await self._read_loads()
        usages = [rank.token_usage for rank in loads if rank.token_usage is not None]
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in loads),
            waiting=sum(rank.num_waiting_reqs for rank in loads),
            cache_usage=sum(usages) / len(usages) if usages else None,
        )

    async def _read_loads(self) -> tuple[_RankLoad, ...]:
        return (await self._server.read("/v1/loads", _Loads)).loads

    # --- weights

    async def load_weights(self, path: Path, version: int) -> None:
        """The server calls its model by that path from then on."""
        await self._check_info_again()
        body = {
            "model_path": str(path),
            "weight_version": str(version),
            "flush_cache": True,
            "torch_empty_cache": False,
        }
        await self._update("/update_weights_from_disk", body, doing=f"loading weights from {path}")
        self._salt = f"{self._own}-v{version}"

    async def _check_info_again(self) -> None:
        """A server whose weights were never named has just been started, perhaps by somebody else."""
        if (await self._server.read("/model_info", _ModelInfo)).weight_version == NEVER_NAMED:
            check_server_info(await read_server_info(self._server), who=self.name)

    async def read_version(self) -> int:
        return parse_version((await self._server.read("/model_info", _ModelInfo)).weight_version)

    async def checksum(self) -> str | None:
        """A sha256 of the checksums of all ranks."""
        answer = await self._control("/weights_checker", {"action": "checksum"})
        found = decode_reply(answer, _Checksums, where=f"{self.name}: POST /weights_checker")
        if not found.success or not found.ranks or not all(rank.checksums for rank in found.ranks):
            raise ReplyError(f"{self.name}: POST /weights_checker gave no checksums")
        lines = sorted(
            f"{index} {name} {value}"
            for index, rank in enumerate(found.ranks)
            for name, value in rank.checksums.items()
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    # --- weights in memory: the server's side of weight_sync.broadcast_sglang

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
        body = {"group_name": group_name}
        await self._update("/destroy_weights_update_group", body, doing=f"leaving process group {group_name}")

    async def begin_transfer(self) -> bool:
        """Whether the server has sessions (from 0.5.21 on). One that an update before left open is closed
        first.

        Until the last bucket names them, its weights have no version: a transfer that breaks off leaves some
        old and some new.
        """
        await self._check_info_again()
        named = {"new_version": IN_PIECES, "abort_all_requests": False}
        await self._update("/update_weight_version", named, doing="taking its version back")
        path, body = "/begin_weight_update", {"selector": "all"}
        try:
            await self._control(path, body)
        except InfrastructureError:
            raise
        except EngineError as error:
            if " gave 404" in str(error):
                return False
            if "already open" not in str(error):
                raise
            await self.end_transfer()
            await self._update(path, body, doing="beginning a weight update")
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
            "flush_cache": last,
        }
        if last:
            body["weight_version"] = str(version)
        await self._update("/update_weights_from_distributed", body, doing="taking a bucket of weights")
        if last:
            self._salt = f"{self._own}-v{version}"

    async def end_transfer(self) -> None:
        await self._update("/end_weight_update", {}, doing="ending a weight update")

    # --- memory

    async def release_memory(self, *, paused: bool, in_flight: bool) -> None:
        """Gives cache memory back, and that of the weights where the server keeps a copy; only if
        features.frees_memory.
        """
        if self._released:
            return
        if not paused:
            raise EngineError(f"{self.name} takes requests; pause it before its memory is released")
        tags = ["kv_cache", "weights"] if self._weights_backed_up else ["kv_cache"]
        await self._control("/release_memory_occupation", {"tags": tags})
        self._released = tags

    async def restore_memory(self, *, paused: bool) -> None:
        if self._released:
            await self._control("/resume_memory_occupation", {"tags": self._released})
            self._released = []

    # --- calls

    async def _control(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The body of a 2xx answer to a control call, awaited for as long as the server is well. Raises as
        EngineServer.call, and EngineError for a refusal: a control call carries no request at fault.
        """
        server = self._server
        try:
            return await ask_watched(
                lambda: server.call("POST", path, body, silence_s=math.inf),
                lambda: server.health(self.health_path),
                silence_s=server.silence_s,
                where=f"{self.name}: POST {path}",
            )
        except RequestRefused as error:
            raise EngineError(str(error)) from error

    async def _update(self, path: str, body: Mapping[str, Any], *, doing: str) -> None:
        try:
            said = await self._control(path, body)
        except InfrastructureError:
            raise
        except EngineError as error:
            raise EngineError(f"{self.name} failed at {doing}: {error}") from error
        answer = decode_reply(said, _Update, where=f"{self.name}: POST {path}")
        if not answer.success:
            raise EngineError(f"{self.name} failed at {doing}: {answer.message}")


# --- opening ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_sglang_engine(
    url: str,
    *,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 60.0,
    vocab_size: int,
    context_length: int | None = None,
) -> AsyncIterator[ServerEngine]:
    """The SGLang server at `url`, which is ours alone from now on: if somebody left it paused, it goes on.

    name: what errors and metrics call it; "sglang-host:port" unless given. api_key: what the server was
    started with (`--api-key`). silence_s: seconds without an answer and without progress after which an
    answer is given up. vocab_size: the trainer's. context_length: what a request may need; the server's own
    if None. Raises EngineSetupError, naming what to set, for a server whose answers would falsify training or
    that refuses the key; InfrastructureError if it does not answer.
    """
    async with open_http_client(url, api_key=api_key) as client:
        server = EngineServer(client, name=name or f"sglang-{split_url(url).netloc}", silence_s=silence_s)
        try:
            yield await shake_hands(server, vocab_size=vocab_size, context_length=context_length)
        finally:
            server.close()


async def shake_hands(server: EngineServer, *, vocab_size: int, context_length: int | None) -> ServerEngine:
    """The engine of a server that passed all checks. Raises as open_sglang_engine."""
    who = server.name
    try:
        model = await server.read("/model_info", _ModelInfo)
        await server.call("POST", "/continue_generation", {"torch_empty_cache": False})
    except (InfrastructureError, ReplyError):
        raise
    except EngineError as error:
        raise EngineSetupError(
            f"{who} refuses calls; give the api_key that it was started with (--api-key, and no"
            f" --admin-api-key): {error}"
        ) from error
    info = await read_server_info(server)
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
    models = (await server.read("/v1/models", _Models)).data
    longest = models[0].max_model_len if models else None
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
        checksum=True,
        frees_memory=info.enable_memory_saver,
        gaps=tuple(gaps),
    )
    least = info.max_req_input_len
    dialect = SGLangServer(
        server,
        vocab_size=vocab_size,
        info=info,
        shapes=await trio.to_thread.run_sync(find_shapes, Path(model.model_path)),
        ends_at=longest - RESERVED if least is None else least + LEAST_ANSWER,
        version=model.weight_version,
    )
    return ServerEngine(server, features, dialect)


async def read_server_info(server: EngineServer) -> _ServerInfo:
    return await server.read("/server_info", _ServerInfo, show_body=False)  # its keys are among them


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

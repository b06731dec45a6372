"""A running vLLM server as an InferenceEngine: token ids in and out, over its HTTP API.

    generate   POST /inference/v1/generate     needs --enable-scale-out; each token knows its weight version
    control    /pause /resume /abort_requests  need VLLM_SERVER_DEV_MODE=1
    weights    reload_weights in place from a directory; the version's name and the caches follow before
               anything is generated

Written against vLLM 0.32. /v1/completions says no versions, so a server without these settings is refused.
The API key guards /v1 and /inference only, not the control calls: servers belong on loopback or behind a
wall.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from rollouts.engines.http import open_http_client, split_url
from rollouts.engines.server import EngineServer, Progress
from rollouts.engines.server_engine import ServerEngine, find_shapes
from rollouts.engines.wire import VersionSpan, decode_reply, make_completion, parse_version
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    RolloutsError,
    WeightVersionError,
)
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest

GENERATE = "/inference/v1/generate"
SERVER_PREFIX = "generate-tokens-"  # the server puts it before the ids that we give
NO_LOG_PROB = -9999.0  # what the server writes for NaN, −infinity and a token that it has no log-prob of
LOAD_S = 900.0  # the server says nothing while it loads weights
# the first time it is asked for its settings it looks over its whole machine: 20 s on two busy cores
INFO_S = 180.0
IN_PIECES = (  # the version's name while weights are exchanged: no number, so whoever asks then is told −1
    "loading"
)
NEVER_NAMED = "default"  # the version's name in a server that was started and not updated since
HASH_OF_NOTHING = hashlib.sha256(b"").hexdigest()
ITERATIONS, GENERATED, PREFILLED = (
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
RUNNING, WAITING, CACHE_USAGE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
NEEDED_METRICS = (GENERATED, PREFILLED, RUNNING, WAITING)


# --- the server's dialect -----------------------------------------------------------------------------------


class _LogProb(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct, frozen=True):
    content: list[_LogProb]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: _LogProbs
    weight_versions: list[VersionSpan]


class _PromptLogProb(msgspec.Struct, frozen=True):
    logprob: float


class _Generated(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _PromptLogProb] | None] | None = None  # of the prompt, by token id


class _Served(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int


class _Models(msgspec.Struct, frozen=True):
    data: list[_Served]


class _ModelConfig(msgspec.Struct, frozen=True):
    model: str
    max_model_len: int
    logprobs_mode: str
    enable_sleep_mode: bool = False
    quantization: str | None = None


class _DeviceConfig(msgspec.Struct, frozen=True):
    device: str = ""


class _SchedulerConfig(msgspec.Struct, frozen=True):
    enable_chunked_prefill: bool = True


class _ParallelConfig(msgspec.Struct, frozen=True):
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class _TransferConfig(msgspec.Struct, frozen=True):
    backend: str | None = None


class _Config(msgspec.Struct, frozen=True):
    model_config: _ModelConfig
    device_config: _DeviceConfig = _DeviceConfig()
    parallel_config: _ParallelConfig = _ParallelConfig()
    scheduler_config: _SchedulerConfig = _SchedulerConfig()
    weight_transfer_config: _TransferConfig | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _Config


class _IsPaused(msgspec.Struct, frozen=True):
    is_paused: bool


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str


class _Success(msgspec.Struct, frozen=True):
    success: bool


class _Checksums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


def make_generate_body(
    request: GenerateRequest, server_id: str, *, model: str, seeds: bool = True
) -> dict[str, Any]:
    """What /inference/v1/generate is sent. Nothing but the request's own stop tokens ends it: the model's own
    are left to the caller.

    `seeds`: whether the server may be sent one; see rewinds_generators.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    if request.score_prompt:
        params["prompt_logprobs"] = 0  # of the prompt's own tokens
    if sampling.seed is not None and seeds:
        params["seed"] = sampling.seed & (2**63 - 1)  # the server takes 64 bits, and −1 for none
    return {
        "model": model,
        "request_id": server_id,
        "token_ids": request.prompt_ids.tolist(),
        "sampling_params": params,
    }


def parse_generated(
    body: bytes, request: GenerateRequest, server_id: str, *, vocab_size: int, where: str
) -> Completion:
    """The completion in an answer of /inference/v1/generate. Raises ReplyError, naming what is wrong: nothing
    is repaired.
    """
    reply = decode_reply(body, _Generated, where=where)
    who = f"{where}, request {request.request_id!r}"
    if reply.request_id != SERVER_PREFIX + server_id:
        raise ReplyError(
            f"{who}: the answer is to {reply.request_id!r}, asked was {SERVER_PREFIX + server_id!r}"
        )
    if len(reply.choices) != 1:
        raise ReplyError(f"{who}: {len(reply.choices)} choices instead of one")
    choice = reply.choices[0]
    entries = choice.logprobs.content
    for index, (token, entry) in enumerate(
        zip(choice.token_ids, entries, strict=False)
    ):  # lengths are checked below
        if entry.token_id != token:
            raise ReplyError(f"{who}: token {index} is {token}, its log-prob is of token {entry.token_id}")
        if entry.logprob <= NO_LOG_PROB:
            raise ReplyError(
                f"{who}: the server has no log-prob of token {index}: it wrote {entry.logprob}, which stands"
                " for NaN too"
            )
    stops = request.sampling.stop_token_ids
    if (
        choice.finish_reason == "stop" and choice.token_ids and choice.token_ids[-1] not in stops
    ):  # ignore_eos is set
        raise ReplyError(
            f"{who}: finish reason 'stop' after token {choice.token_ids[-1]}, which is none of"
            f" stop_token_ids={list(stops)}"
        )
    scored = [
        entry[str(token)].logprob if entry and str(token) in entry else None
        for entry, token in zip(reply.prompt_logprobs or (), request.prompt_ids.tolist(), strict=False)
    ]
    return make_completion(
        request,
        choice.token_ids,
        [entry.logprob for entry in entries],
        choice.weight_versions,
        choice.finish_reason,
        vocab_size=vocab_size,
        where=where,
        prompt_log_probs=[None if value is None or value <= NO_LOG_PROB else value for value in scored],
    )


def parse_metrics(body: bytes, *, where: str) -> dict[str, float]:
    """Name → sum over labels of every vllm: sample in a Prometheus page. Raises ReplyError for a value that
    is no number.
    """
    totals: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        value = (
            line.rpartition("}")[2].split() if "{" in line else line.split()[1:]
        )  # a timestamp may follow the value
        try:
            number = float(value[0])
        except (ValueError, IndexError) as error:
            raise ReplyError(f"{where}: the metric line {line[:200]!r} has no number") from error
        if not math.isfinite(
            number
        ):  # NaN differs from itself: a server that stands still would seem to move
            raise ReplyError(f"{where}: the metric line {line[:200]!r} has no finite number")
        totals[name] = totals.get(name, 0.0) + number
    return totals


# --- the dialect --------------------------------------------------------------------------------------------


class VLLMServer:
    """The Dialect of one vLLM server, and its own calls for transfers of weights in memory."""

    health_path = "/health"

    def __init__(
        self,
        server: EngineServer,
        features: EngineFeatures,
        *,
        model: str,
        loaded: Path,
        shapes: Mapping[str, tuple[int, ...]] | None,
        transfer_backend: str | None,
    ) -> None:
        """`model`: its name on the wire. `loaded`: where the weights come from."""
        self.shapes = shapes
        self.transfer_backend = transfer_backend  # None: transfer in memory is off
        self.name = server.name
        self._features = features
        self._server = server
        self._model = model
        self._started_with = loaded
        self._loaded = loaded  # where weights that failed to be replaced are loaded from again
        # of what lies there; None: unknown, or it is not what the server has
        self._loaded_version: int | None = None

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_generate_body(request, server_id, model=self._model, seeds=self._features.seeds)
        reply = await self._server.call_generate(GENERATE, body, self._read_progress)
        return parse_generated(
            reply, request, server_id, vocab_size=self._features.vocab_size, where=self.name
        )

    async def _read_progress(self) -> Progress:
        metrics = await self._read_metrics()
        work = tuple(metrics.get(name, 0.0) for name in (ITERATIONS, GENERATED, PREFILLED))
        return Progress(work, requests=int(metrics.get(RUNNING, 0) + metrics.get(WAITING, 0)))

    async def _read_metrics(self) -> dict[str, float]:
        return parse_metrics(await self._server.call("GET", "/metrics"), where=self.name)

    async def abort(self, server_ids: list[str]) -> None:
        assert server_ids, "an empty list aborts everybody's requests"
        ids = [SERVER_PREFIX + server_id for server_id in server_ids]
        await self._server.call("POST", "/abort_requests", {"request_ids": ids})

    async def freeze(self, mode: PauseMode) -> None:
        await self._server.call("POST", f"/pause?mode={mode}")

    async def thaw(self) -> None:
        await self._server.call("POST", "/resume")

    async def load(self) -> EngineLoad:
        metrics = await self._read_metrics()
        return EngineLoad(
            running=int(metrics.get(RUNNING, 0)),
            waiting=int(metrics.get(WAITING, 0)),
            cache_usage=metrics.get(CACHE_USAGE),
        )

    # --- weights

    async def read_version(self) -> int:
        return parse_version(await self._read_version_name())

    async def _read_version_name(self) -> str:
        return (await self._server.read("/weight_info", _WeightInfo)).weight_version

    async def checksum(self) -> str | None:
        """A sha256 over those of all parameters that the server can read; those it keeps packed, on a CPU,
        are left out.
        """
        body = await self._server.call("POST", "/weight_checker", {"action": "checksum"}, silence_s=LOAD_S)
        sums = decode_reply(body, _Checksums, where=self.name).checksums
        seen = sorted((name, digest) for name, digest in sums.items() if digest != HASH_OF_NOTHING)
        if not seen:
            raise EngineError(
                f"{self.name} has no checksum of any of its {len(sums)} parameters: it keeps them packed"
            )
        return hashlib.sha256(msgspec.json.encode(seen)).hexdigest()

    async def load_weights(self, path: Path, version: int) -> None:
        """If the server fails, what was loaded before is loaded again, under its version only if that is
        known to be its own.
        """
        await self._check_paused()
        before = await self._read_version_name()
        if before == NEVER_NAMED:
            await self._check_config_again()
        await self._name_weights(IN_PIECES)
        try:
            await self._load_from(path)
        except (InfrastructureError, RequestRefused) as error:
            now = await self._load_again(parse_version(before), error)
            raise EngineError(f"{self.name} could not load {path} and {now}: {error}") from error
        await self._commit(version)
        self._loaded, self._loaded_version = path, version

    async def _check_config_again(self) -> None:
        """A server whose weights were never named has just been started, perhaps by somebody else."""
        self._loaded, self._loaded_version = self._started_with, None
        config = await _read_config(self._server)
        check_config(config, name=self.name, context_length=self._features.context_length)

    async def _load_from(self, path: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._server.call("POST", "/collective_rpc", body, silence_s=LOAD_S)

    async def _load_again(self, before: int, error: RolloutsError) -> str:
        """What the server has now."""
        source, version = self._loaded, self._loaded_version
        if source != self._started_with and not source.is_dir():  # pruned meanwhile
            source, version = self._started_with, None
        try:
            await self._load_from(source)
            if version is not None and version == before:
                await self._commit(version)
                return f"has its version {version} back"
            await self._reset_cache()
        except EngineError as second:
            raise EngineError(
                f"{self.name} has its weights in pieces and must be restarted: {error}; loading"
                f" {source} again failed too: {second}"
            ) from error
        self._loaded, self._loaded_version = source, None
        return (
            f"has the weights of {source}, which are not of version {before} that it had: they bear no"
            " version; update it again, or restart it"
        )

    async def _reset_cache(self) -> None:
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        if not decode_reply(await self._server.call("POST", path), _Success, where=self.name).success:
            raise EngineError(
                f"{self.name} did not reset its prefix cache: keys and values of older weights would be used"
            )

    async def _commit(self, version: int) -> None:
        """Nothing computed by other weights is used again, and what follows carries `version`."""
        await self._reset_cache()
        await self._name_weights(str(version))
        reported = await self.read_version()
        if reported != version:
            raise WeightVersionError(
                f"{self.name} was given version {version} and says {reported}; is someone else updating it?"
            )

    async def _name_weights(self, name: str) -> None:
        await self._server.call("POST", "/update_weight_version", {"new_version": name})

    async def _check_paused(self) -> None:
        if not (await self._server.read("/is_paused", _IsPaused)).is_paused:
            raise EngineError(f"{self.name} generates; call pause() before its weights are exchanged")

    # --- weights in memory: the server's own calls, for weight_sync.broadcast_vllm

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Joins the server's workers to a process group; `info` is the backend's (address, port, rank offset,
        world size).
        """
        if self.transfer_backend is None:
            raise EngineSetupError(
                f"""{self.name} was started without --weight-transfer-config '{{"backend": "nccl"}}'"""
            )
        if self.transfer_backend == "ipc":
            raise EngineSetupError(
                f"""{self.name}: backend "ipc" wants pickles over HTTP; start it with "nccl" instead"""
            )
        await self._send_slowly("/init_weight_transfer_engine", {"init_info": dict(info)})

    async def start_weight_update(self) -> None:
        """The server expects tensors from now on, and its version has no number. Pause first."""
        await self._check_paused()
        if await self._read_version_name() == NEVER_NAMED:
            await self._check_config_again()
        self._loaded_version = None  # what lies there is not what the server will have
        await self._name_weights(IN_PIECES)
        await self._send_slowly("/start_weight_update", None)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Receives the tensors that `info` lists (names, dtypes, shapes). Returns when they have come: send
        them meanwhile.
        """
        await self._send_slowly("/update_weights", {"update_info": dict(info)})

    async def finish_weight_update(self, version: int) -> None:
        """What came is in use as `version`. Raises WeightVersionError if the server names another one."""
        await self._send_slowly("/finish_weight_update", {})
        await self._commit(version)

    async def get_world_size(self) -> int:
        """Number of the server's workers, each a rank of the process group."""
        return (await self._server.read("/get_world_size", _WorldSize)).world_size

    async def _send_slowly(self, path: str, body: Mapping[str, Any] | None) -> None:
        await self._server.call("POST", path, body, silence_s=LOAD_S)

    # --- memory

    async def release_memory(self, *, paused: bool, in_flight: bool) -> None:
        """The weights wait in the host's memory, the cache is gone."""
        self._check_frees_memory()
        if not paused or in_flight:
            raise EngineError(
                f"{self.name}: release_memory with requests in flight or admitted; pause('wait') or"
                " pause('abort') first"
            )
        await self._send_slowly("/sleep?level=1&mode=wait", None)

    async def restore_memory(self, *, paused: bool) -> None:
        self._check_frees_memory()
        await self._send_slowly("/wake_up", None)
        if paused:
            await self.freeze("keep")  # waking up resumes the scheduler

    def _check_frees_memory(self) -> None:
        if not self._features.frees_memory:
            raise EngineError(f"{self.name} keeps its memory: start it on a GPU with --enable-sleep-mode")


class _WorldSize(msgspec.Struct, frozen=True):
    world_size: int


# --- opening ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_vllm_engine(
    url: str,
    *,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 60.0,
    vocab_size: int,
    context_length: int | None = None,
) -> AsyncIterator[ServerEngine]:
    """The engine behind `url`, checked and not paused, until the block ends; the server goes on.

    `vocab_size`: the trainer's; ids outside it are refused both ways. `context_length`: at least this many
    tokens must fit; None: what the server has. Raises EngineSetupError naming the flag for settings that
    would falsify training; EngineUnreachable, EngineSilent.
    """
    name = name or f"vllm-{split_url(url).netloc}"
    async with open_http_client(url, api_key=api_key) as client:
        server = EngineServer(client, name=name, silence_s=silence_s)
        try:
            yield await _shake_hands(server, vocab_size=vocab_size, context_length=context_length)
        finally:
            server.close()


async def _shake_hands(server: EngineServer, *, vocab_size: int, context_length: int | None) -> ServerEngine:
    served = await _read_served_model(server)
    config = await _read_config(server)
    check_config(config, name=server.name, context_length=context_length)
    metrics = parse_metrics(await server.call("GET", "/metrics"), where=server.name)
    missing = [metric for metric in NEEDED_METRICS if metric not in metrics]
    if missing:
        raise EngineSetupError(
            f"{server.name} does not count {missing[0]}; start it without --disable-log-stats"
        )
    frees_memory = config.model_config.enable_sleep_mode and config.device_config.device != "cpu"
    features = EngineFeatures(
        vocab_size=vocab_size,
        context_length=context_length or min(served.max_model_len, config.model_config.max_model_len),
        in_memory_update=False,
        update_from_checkpoint=True,
        shares_weights=False,
        keep_pause=True,
        deterministic=False,
        name=server.name,
        seeds=rewinds_generators(config),
        checksum=True,
        frees_memory=frees_memory,
        gaps=list_gaps(config, frees_memory=frees_memory),
    )
    await server.call("POST", "/resume")  # whoever used it before may have left it paused
    await _check_generates(server, features, served.id)
    model = Path(config.model_config.model)
    # packed weights have other shapes than the trainer's
    packed = config.model_config.quantization is not None
    dialect = VLLMServer(
        server,
        features,
        model=served.id,
        loaded=model,
        shapes=None if packed else await trio.to_thread.run_sync(find_shapes, model),
        transfer_backend=config.weight_transfer_config.backend if config.weight_transfer_config else None,
    )
    return ServerEngine(server, features, dialect)


async def _read_served_model(server: EngineServer) -> _Served:
    try:
        body = await server.call("GET", "/v1/models")
    except InfrastructureError:
        raise
    except EngineError as error:
        raise EngineSetupError(
            f"{server.name} does not tell its models: {error}; is the API key the one of --api-key or"
            " VLLM_API_KEY?"
        ) from error
    models = decode_reply(body, _Models, where=server.name).data
    if not models:
        raise EngineSetupError(f"{server.name} serves no model")
    return models[0]


async def _read_config(server: EngineServer) -> _Config:
    try:
        body = await server.call(
            "GET", "/server_info?config_format=json", silence_s=max(server.silence_s, INFO_S)
        )
    except InfrastructureError:
        raise
    except EngineError as error:
        raise EngineSetupError(
            f"{server.name} has no control calls: {error}; start it with VLLM_SERVER_DEV_MODE=1 in its"
            " environment"
        ) from error
    try:
        return decode_reply(
            body, _ServerInfo, where=f"{server.name}: GET /server_info", show_body=False
        ).vllm_config  # its key is among them
    except ReplyError as error:
        raise EngineSetupError(
            f"{error}; what its settings are cannot be told, and vLLM 0.32 tells it"
        ) from error


def check_config(config: _Config, *, name: str, context_length: int | None) -> None:
    """Raises EngineSetupError naming the flag to set."""
    model = config.model_config
    if model.logprobs_mode != "processed_logprobs":
        raise EngineSetupError(
            f"{name} has --logprobs-mode {model.logprobs_mode}: log-probs that leave temperature and top-p"
            " out falsify every ratio; start it with --logprobs-mode processed_logprobs"
        )
    if context_length is not None and model.max_model_len < context_length:
        raise EngineSetupError(
            f"{name} holds {model.max_model_len} tokens, the context is to hold {context_length}; start it"
            f" with --max-model-len {context_length}"
        )
    if config.parallel_config.api_processes > 1:
        raise EngineSetupError(
            f"{name} has {config.parallel_config.api_processes} API processes, and an abort reaches one of"
            " them; start it with --api-server-count 1"
        )


def rewinds_generators(config: _Config) -> bool:
    """Whether requests may carry seeds.

    A prompt that is computed in parts is sampled from after each part, and all but the last draw are taken
    back. vLLM 0.32 takes them back by setting the generator's offset, which one on a CPU does not have: the
    first such request with a seed would end the server.
    """
    return config.device_config.device != "cpu" or not config.scheduler_config.enable_chunked_prefill


def list_gaps(config: _Config, *, frees_memory: bool) -> tuple[str, ...]:
    """A sentence for each thing that the server cannot do."""
    gaps = [
        (
            "no buckets in memory: weights come from a directory that the server sees, or by a transport of"
            " its own"
        )
    ]
    if not frees_memory:
        gaps.append("memory is not given back: that takes a GPU and --enable-sleep-mode")
    if not rewinds_generators(config):
        gaps.append(
            "no seeds: on a CPU they end the server where prompts are computed in parts; start it with"
            " --no-enable-chunked-prefill"
        )
    if config.device_config.device == "cpu":
        gaps.append(
            "the checksum leaves out parameters that a CPU keeps packed: prove an update by log-probs too"
        )
    return tuple(gaps)


async def _check_generates(server: EngineServer, features: EngineFeatures, model: str) -> None:
    """One token after the last id of the vocabulary: shows that it is in the server's, and that the answer
    says what training needs.
    """
    body = {
        "model": model,
        "token_ids": [features.vocab_size - 1],
        "sampling_params": {"max_tokens": 1, "logprobs": 0, "detokenize": False},
    }
    try:
        reply = await server.call("POST", GENERATE, body)
    except InfrastructureError:
        raise
    except RequestRefused as error:
        raise EngineSetupError(
            f"{server.name} refuses token {features.vocab_size - 1}, the last of the trainer's vocabulary of"
            f" {features.vocab_size}: does --model name the same model? {error}"
        ) from error
    except EngineError as error:
        raise EngineSetupError(
            f"{server.name} takes no token ids: {error}; start it with --enable-scale-out"
        ) from error
    try:
        decode_reply(reply, _Generated, where=server.name)
    except ReplyError as error:
        raise EngineSetupError(
            f"{error}; vLLM 0.32 or later says log-probs and weight_versions there"
        ) from error

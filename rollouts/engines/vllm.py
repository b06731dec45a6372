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
from collections.abc import Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import trio

from rollouts.engines.calls import Server
from rollouts.engines.http import Transport
from rollouts.engines.server import (
    LOADING,
    NEVER_NAMED,
    Dialect,
    ServerEngine,
    find_shapes,
    open_server_engine,
    refuse_settings,
    setup_errors,
)
from rollouts.engines.vllm_wire import (
    SERVER_PREFIX,
    Config,
    Generated,
    Served,
    make_generate_body,
    parse_generated,
    parse_metrics,
)
from rollouts.engines.wire import decode_field, decode_reply, parse_version
from rollouts.errors import EngineError, EngineSetupError, RequestRefused, WeightVersionError
from rollouts.protocols import PauseMode
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest

GENERATE = "/inference/v1/generate"
# the first time it is asked for its settings it looks over its whole machine: 20 s on two busy cores
INFO_S = 180.0
HASH_OF_NOTHING = hashlib.sha256(b"").hexdigest()
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
WORK = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")


class VLLMServer(Dialect):
    """The Dialect of one vLLM server, and its own calls for transfers of weights in memory."""

    def __init__(
        self,
        server: Server,
        features: EngineFeatures,
        *,
        model: str,
        shapes: Mapping[str, tuple[int, ...]] | None,
        transfer_backend: str | None,
    ) -> None:
        """`model`: its name on the wire. `transfer_backend` None: transfer in memory is off."""
        self.name = server.name
        self.shapes = shapes
        self._features = features
        self._server = server
        self._model = model
        self._transfer_backend = transfer_backend

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        body = make_generate_body(request, server_id, model=self._model, seeds=self._features.seeds)
        reply = await self._server.call("POST", GENERATE, body, silence_s=math.inf)
        return parse_generated(
            reply, request, server_id, vocab_size=self._features.vocab_size, where=self.name
        )

    async def read_work(self) -> Hashable:
        metrics = await self._read_metrics()
        return tuple(metrics.get(name) for name in WORK)

    async def _read_metrics(self) -> dict[str, float]:
        return parse_metrics(await self._server.call("GET", "/metrics"), where=self.name)

    async def abort(self, server_ids: list[str]) -> None:
        ids = [SERVER_PREFIX + server_id for server_id in server_ids]
        if ids:  # an empty list aborts everybody's requests
            await self._server.control("/abort_requests", {"request_ids": ids})

    async def freeze(self, mode: PauseMode) -> None:
        await self._server.control(f"/pause?mode={mode}")

    async def thaw(self) -> None:
        await self._server.control("/resume")

    async def load(self) -> EngineLoad:
        metrics = await self._read_metrics()
        running, waiting = int(metrics.get(RUNNING, 0)), int(metrics.get(WAITING, 0))
        return EngineLoad(running, waiting, cache_usage=metrics.get("vllm:kv_cache_usage_perc"))

    # --- weights

    async def read_version_name(self) -> str:
        return await self._server.read_field("/weight_info", "weight_version", str)

    async def checksum(self) -> str | None:
        """A sha256 over those of all parameters that the server can read; those it keeps packed, on a CPU,
        are left out.
        """
        body = await self._server.control("/weight_checker", {"action": "checksum"})
        sums = decode_field(body, "checksums", dict[str, str], where=self.name)
        seen = sorted((name, digest) for name, digest in sums.items() if digest != HASH_OF_NOTHING)
        if not seen:
            raise EngineError(
                f"{self.name} has no checksum of any of its {len(sums)} parameters: it packs them"
            )
        return hashlib.sha256(msgspec.json.encode(seen)).hexdigest()

    async def load_weights(self, path: Path, version: int) -> None:
        await self._begin()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            await self._server.control("/collective_rpc", body)
        except EngineError as error:
            raise EngineError(
                f"{self.name} could not load {path} and may have its weights in pieces: they bear no version;"
                f" update it again, or restart it: {error}"
            ) from error
        await self._commit(version)

    async def _begin(self) -> None:
        """From now on its weights have no version. A server whose weights were never named has just been
        started, perhaps by somebody else, so its settings are checked again.
        """
        if not await self._server.read_field("/is_paused", "is_paused", bool):
            raise EngineError(f"{self.name} generates; call pause() before its weights are exchanged")
        if await self.read_version_name() == NEVER_NAMED:
            await read_config(self._server, self._features.context_length)
        await self._name_weights(LOADING)

    async def _commit(self, version: int) -> None:
        """Nothing computed by other weights is used again, and what follows carries `version`."""
        reply = await self._server.control(
            "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        )
        if not decode_field(reply, "success", bool, where=self.name):
            raise EngineError(
                f"{self.name} did not reset its prefix cache: keys and values of older weights would be used"
            )
        await self._name_weights(str(version))
        reported = parse_version(await self.read_version_name())
        if reported != version:
            raise WeightVersionError(
                f"{self.name} was given version {version} and says {reported}; is someone else updating it?"
            )

    async def _name_weights(self, name: str) -> None:
        await self._server.control("/update_weight_version", {"new_version": name})

    # --- weights in memory: the server's own calls, for weight_sync.broadcast_vllm

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Joins the server's workers to a process group; `info` is the backend's (address, port, rank offset,
        world size).
        """
        if self._transfer_backend in (None, "ipc"):  # "ipc" wants pickles over HTTP
            raise EngineSetupError(
                f"{self.name} has the transfer backend {self._transfer_backend}; start it with"
                """ --weight-transfer-config '{"backend": "nccl"}'"""
            )
        await self._server.control("/init_weight_transfer_engine", {"init_info": dict(info)})

    async def start_weight_update(self) -> None:
        """The server expects tensors from now on, and its version has no number. Pause first."""
        await self._begin()
        await self._server.control("/start_weight_update")

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Receives the tensors that `info` lists (names, dtypes, shapes). Returns when they have come: send
        them meanwhile.
        """
        await self._server.control("/update_weights", {"update_info": dict(info)})

    async def finish_weight_update(self, version: int) -> None:
        """What came is in use as `version`. Raises WeightVersionError if the server names another one."""
        await self._server.control("/finish_weight_update", {})
        await self._commit(version)

    async def get_world_size(self) -> int:
        """Number of the server's workers, each a rank of the process group."""
        return await self._server.read_field("/get_world_size", "world_size", int)

    # --- memory

    async def release_memory(self) -> None:
        """The weights wait in the host's memory, the cache is gone."""
        await self._server.control("/sleep?level=1&mode=wait")

    async def restore_memory(self) -> None:
        await self._server.control("/wake_up")


VLLMEngine = ServerEngine


# --- opening ------------------------------------------------------------------------------------------------


def open_vllm_engine(
    url: str,
    *,
    name: str = "",
    api_key: str | None = None,
    silence_s: float = 60.0,
    vocab_size: int,
    context_length: int | None = None,
    transport: Transport | None = None,
) -> AbstractAsyncContextManager[VLLMEngine]:
    """The engine behind `url`, checked and not paused, until the block ends; the server goes on.

    `name`: what errors and metrics call it; "vllm-host:port" unless given. `vocab_size`: the trainer's; ids
    outside it are refused both ways. `context_length`: at least this many tokens must fit; None: what the
    server has. Raises EngineSetupError naming the flag for settings that would falsify training;
    EngineUnreachable, EngineSilent.
    """
    return open_server_engine(
        url,
        lambda server: _shake_hands(server, vocab_size, context_length),
        kind="vllm",
        name=name,
        health_path="/health",
        api_key=api_key,
        silence_s=silence_s,
        transport=transport,
    )


async def _shake_hands(
    server: Server, vocab_size: int, context_length: int | None
) -> tuple[EngineFeatures, VLLMServer]:
    with setup_errors("is the API key the one of --api-key or VLLM_API_KEY?"):
        models = await server.read_field("/v1/models", "data", list[Served])
    refuse_settings(server.name, {"serves no model": not models})
    config = await read_config(server, context_length)
    metrics = parse_metrics(await server.call("GET", "/metrics"), where=server.name)
    missing = [metric for metric in (*WORK[:2], RUNNING, WAITING) if metric not in metrics]
    refuse_settings(server.name, {f"does not count {missing}; start it without --disable-log-stats": missing})
    frees_memory = config.model_config.enable_sleep_mode and config.device_config.device != "cpu"
    features = EngineFeatures(
        vocab_size=vocab_size,
        context_length=context_length or min(models[0].max_model_len, config.model_config.max_model_len),
        name=server.name,
        seeds=rewinds_generators(config),
        checksum=True,
        frees_memory=frees_memory,
        gaps=list_gaps(config, frees_memory=frees_memory),
    )
    await server.control("/resume")  # whoever used it before may have left it paused
    await _check_generates(server, vocab_size, models[0].id)
    model = Path(config.model_config.model)
    is_packed = config.model_config.quantization is not None  # other shapes than the trainer's
    dialect = VLLMServer(
        server,
        features,
        model=models[0].id,
        shapes=None if is_packed else await trio.to_thread.run_sync(find_shapes, model),
        transfer_backend=config.weight_transfer_config.backend if config.weight_transfer_config else None,
    )
    return features, dialect


async def read_config(server: Server, context_length: int | None) -> Config:
    """The server's settings. Raises EngineSetupError naming the flag to set."""
    with setup_errors("start vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1 in its environment"):
        silence_s = max(server.silence_s, INFO_S)
        body = await server.call("GET", "/server_info?config_format=json", silence_s=silence_s)
        config = decode_field(body, "vllm_config", Config, where=f"{server.name}: GET /server_info")
    model, processes = config.model_config, config.parallel_config.api_processes
    refuse_settings(
        server.name,
        {
            f"has --logprobs-mode {model.logprobs_mode}: log-probs that leave temperature and top-p out"
            " falsify every ratio; start it with --logprobs-mode processed_logprobs": (
                model.logprobs_mode != "processed_logprobs"
            ),
            f"holds {model.max_model_len} tokens, the context is to hold {context_length}; start it with"
            f" --max-model-len {context_length}": model.max_model_len < (context_length or 0),
            f"has {processes} API processes, and an abort reaches one of them; start it with"
            " --api-server-count 1": processes > 1,
        },
    )
    return config


def rewinds_generators(config: Config) -> bool:
    """Whether requests may carry seeds.

    A prompt that is computed in parts is sampled from after each part, and all but the last draw are taken
    back. vLLM 0.32 takes them back by setting the generator's offset, which one on a CPU does not have: the
    first such request with a seed would end the server.
    """
    return config.device_config.device != "cpu" or not config.scheduler_config.enable_chunked_prefill


def list_gaps(config: Config, *, frees_memory: bool) -> tuple[str, ...]:
    """A sentence for each thing that the server cannot do."""
    gaps = {
        "no buckets in memory: weights come from a directory that the server sees, or by a transport of its"
        " own": True,
        "memory is not given back: that takes a GPU and --enable-sleep-mode": not frees_memory,
        "no seeds: on a CPU they end the server where prompts are computed in parts; start it with"
        " --no-enable-chunked-prefill": not rewinds_generators(config),
        "the checksum leaves out parameters that a CPU keeps packed: prove an update by log-probs too": (
            config.device_config.device == "cpu"
        ),
    }
    return tuple(gap for gap, is_there in gaps.items() if is_there)


async def _check_generates(server: Server, vocab_size: int, model: str) -> None:
    """One token after the last id of the vocabulary: shows that it is in the server's, and that the answer
    says what training needs.
    """
    params = {"max_tokens": 1, "logprobs": 0, "detokenize": False}
    body = {"model": model, "token_ids": [vocab_size - 1], "sampling_params": params}
    with setup_errors("start vLLM 0.32 or later with --enable-scale-out"):
        try:
            reply = await server.call("POST", GENERATE, body)
        except RequestRefused as error:
            raise EngineSetupError(
                f"{server.name} refuses token {vocab_size - 1}, the last of the trainer's vocabulary of"
                f" {vocab_size}: does --model name the same model? {error}"
            ) from error
        decode_reply(reply, Generated, where=server.name)

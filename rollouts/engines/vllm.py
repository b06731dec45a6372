"""A running vLLM server as an InferenceEngine: token ids in and out, over its HTTP API.

    generate   POST /inference/v1/generate     needs --enable-scale-out; each token knows its weight version
    control    /pause /resume /abort_requests  need VLLM_SERVER_DEV_MODE=1
    weights    reload_weights in place from a directory; the version's name and the caches follow before
               anything is generated

Written against vLLM 0.32. /v1/completions says no versions, so a server without these settings is refused.
The API key guards /v1 and /inference only, not the control calls: servers belong on loopback or behind a
wall.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
import trio
from msgspec import Struct

from rollouts.engines.server import (
    LOADING,
    NEVER_NAMED,
    Dialect,
    ServerEngine,
    ServerOptions,
    list_true,
    make_adapter_name,
    open_server_engine,
    refuse_settings,
    setup_errors,
)
from rollouts.engines.wire import (
    ServedModel,
    Server,
    VersionSpan,
    decode_reply,
    find_tensor_shapes,
    make_completion,
    parse_version,
)
from rollouts.errors import EngineError, EngineSetupError, ReplyError, WeightVersionError
from rollouts.types import Completion, EngineFeatures, GenerateRequest

GENERATE = "/inference/v1/generate"
SERVER_PREFIX = "generate-tokens-"  # the server puts it before the ids that we give
HASH_OF_NOTHING = hashlib.sha256(b"").hexdigest()
# a counter of work in a Prometheus page: its name, its labels, and its value
WORK = re.compile(
    r"^vllm:(?:generation|prompt|iteration)_tokens_total(?:_count)?(?:\{.*\})? \S+", re.MULTILINE
)


class LogProb(Struct):
    logprob: float
    token_id: int = -1  # of an answer; those of a prompt are keyed by it


class LogProbs(Struct):
    content: list[LogProb]


class Choice(Struct):
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: LogProbs
    weight_versions: list[VersionSpan]


class Generated(Struct):
    request_id: str
    choices: list[Choice]
    prompt_logprobs: list[dict[str, LogProb] | None] | None = None  # of the prompt, by token id


class ModelConfig(Struct):
    model: str
    max_model_len: int
    logprobs_mode: str
    enable_sleep_mode: bool = False
    quantization: str | None = None


class LoRAConfig(Struct):
    max_lora_rank: int


class Config(Struct):
    model_config: ModelConfig
    device_config: dict[str, Any] = {}
    parallel_config: dict[str, Any] = {}
    scheduler_config: dict[str, Any] = {}
    weight_transfer_config: dict[str, Any] | None = None
    lora_config: LoRAConfig | None = None


class ServerInfo(Struct):
    vllm_config: Config
    vllm_env: dict[str, Any] = {}


@dataclass(eq=False)
class VLLMServer(Dialect):
    """The Dialect of one vLLM server, and its own calls for transfers of weights in memory."""

    model: str  # its name on the wire
    transfer_backend: str | None = None  # None: transfer in memory is off

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """Nothing but the request's own stop tokens ends it: the model's own are left to the caller."""
        sampling, prompt = request.sampling, request.prompt_ids.tolist()
        params = {
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
        if sampling.seed is not None and self.features.seeds:
            params["seed"] = sampling.seed & (2**63 - 1)  # the server takes 64 bits, and −1 for none
        body = {
            "model": self.adapter or self.model,
            "request_id": server_id,
            "token_ids": prompt,
            "sampling_params": params,
        }
        answer = await self.server.call("POST", GENERATE, body, silence_s=math.inf)
        reply = decode_reply(answer, Generated, where=self.name)
        who = f"{self.name}, request {request.request_id!r}"
        if reply.request_id != SERVER_PREFIX + server_id or len(reply.choices) != 1:
            raise ReplyError(
                f"{who}: {len(reply.choices)} choices for {reply.request_id!r}; asked was one for"
                f" {SERVER_PREFIX + server_id!r}"
            )
        (choice,), stops = reply.choices, sampling.stop_token_ids
        if choice.finish_reason == "stop" and choice.token_ids and choice.token_ids[-1] not in stops:
            raise ReplyError(f"{who}: stopped by {choice.token_ids[-1]}, none of stop_token_ids={stops}")
        scored = zip(reply.prompt_logprobs or (), map(str, prompt), strict=False)
        return make_completion(
            request,
            choice.token_ids,
            [(entry.token_id, entry.logprob) for entry in choice.logprobs.content],
            choice.weight_versions,
            choice.finish_reason,
            vocab_size=self.features.vocab_size,
            where=self.name,
            prompt_log_probs=[of[token].logprob if of and token in of else None for of, token in scored],
        )

    async def read_work(self) -> Sequence[str]:
        return WORK.findall((await self.server.call("GET", "/metrics")).decode(errors="replace"))

    async def abort(self, server_ids: Sequence[str]) -> None:
        ids = [SERVER_PREFIX + server_id for server_id in server_ids]  # an empty list aborts everybody's
        await self.server.control("/abort_requests", {"request_ids": ids}, repeats=True)

    async def freeze(self) -> None:
        await self.server.control("/pause?mode=keep", repeats=True)

    async def thaw(self) -> None:
        await self.server.control("/resume", repeats=True)

    # --- weights

    async def read_version_name(self) -> str:
        return await self.server.read("/weight_info", str, "weight_version")

    async def checksum(self) -> str | None:
        """A sha256 over those of all parameters that the server can read; those it keeps packed, on a CPU,
        are left out.
        """
        path, body = "/weight_checker", {"action": "checksum"}
        sums = await self.server.control(path, body, dict[str, str], "checksums", repeats=True)
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
            await self.server.control("/collective_rpc", body)
        except EngineError as error:
            raise EngineError(
                f"{self.name} could not load {path} and may have its weights in pieces: they bear no version;"
                f" update it again, or restart it: {error}"
            ) from error
        await self._commit(version)

    async def load_adapter(self, path: Path, version: int) -> None:
        """Not by vLLM's load_inplace: its requests name the directory that they came with, and load it again
        at each step, so that those of the version before would go on with their own adapter.
        """
        name = make_adapter_name(version)
        await self.server.control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        await self._begin()
        await self._commit(version, name)

    async def _begin(self) -> None:
        """From now on its weights have no version. A server whose weights were never named has just been
        started, perhaps by somebody else, so its settings are checked again.
        """
        if not await self.server.read("/is_paused", bool, "is_paused"):
            raise EngineError(f"{self.name} generates; call pause() before its weights are exchanged")
        if await self.read_version_name() == NEVER_NAMED:
            self.server.cold = True
            await read_info(self.server, self.features.context_length)
        await self._name_weights(LOADING)

    async def _commit(self, version: int, adapter: str | None = None) -> None:
        """Nothing computed by other weights is used again, and what follows carries `version`."""
        before, self.adapter = self.adapter, adapter
        if before is not None:
            with suppress(EngineError):  # a server that was started again has lost it
                await self.server.control("/v1/unload_lora_adapter", {"lora_name": before})
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        if not await self.server.control(path, None, bool, "success", repeats=True):
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
        await self.server.control("/update_weight_version", {"new_version": name}, repeats=True)

    # --- weights in memory: the server's own calls, for weight_sync.broadcast_vllm

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Joins the server's workers to a process group; `info` is the backend's (address, port, rank offset,
        world size).
        """
        if self.transfer_backend in (None, "ipc"):  # "ipc" wants pickles over HTTP
            raise EngineSetupError(
                f"{self.name} has the transfer backend {self.transfer_backend}; start it with"
                """ --weight-transfer-config '{"backend": "nccl"}'"""
            )
        await self.server.control("/init_weight_transfer_engine", {"init_info": info})

    async def start_weight_update(self) -> None:
        """The server expects tensors from now on, and its version has no number. Pause first."""
        await self._begin()
        await self.server.control("/start_weight_update")

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Receives the tensors that `info` lists (names, dtypes, shapes). Returns when they have come: send
        them meanwhile.
        """
        await self.server.control("/update_weights", {"update_info": info})

    async def finish_weight_update(self, version: int) -> None:
        """What came is in use as `version`. Raises WeightVersionError if the server names another one."""
        await self.server.control("/finish_weight_update", {})
        await self._commit(version)

    async def get_world_size(self) -> int:
        """Number of the server's workers, each a rank of the process group."""
        return await self.server.read("/get_world_size", int, "world_size")

    # --- memory

    async def release_memory(self) -> None:
        """The weights wait in the host's memory, the cache is gone."""
        await self.server.control("/sleep?level=1&mode=wait")

    async def restore_memory(self) -> None:
        await self.server.control("/wake_up")


VLLMEngine = ServerEngine


# --- opening ------------------------------------------------------------------------------------------------


def open_vllm_engine(
    url: str, *, vocab_size: int, context_length: int | None = None, **options: Unpack[ServerOptions]
) -> AbstractAsyncContextManager[VLLMEngine]:
    """The engine behind `url`, checked and not paused, until the block ends; the server goes on.

    `vocab_size`: the trainer's; ids outside it are refused both ways. `context_length`: at least this many
    tokens must fit; None: what the server has. Raises EngineSetupError naming the flag for settings that
    would falsify training; EngineUnreachable, EngineSilent.
    """

    async def shake_hands(server: Server) -> VLLMServer:
        with setup_errors("is the API key the one of --api-key or VLLM_API_KEY?"):
            models = await server.read("/v1/models", list[ServedModel], "data")
        refuse_settings(server.name, {"serves no model": not models})
        info = await read_info(server, context_length)
        config = info.vllm_config
        model, lora, transfer = config.model_config, config.lora_config, config.weight_transfer_config or {}
        on_cpu = config.device_config.get("device") == "cpu"
        # A prompt that is computed in parts is sampled from after each part, and all but the last draw are
        # taken back. vLLM 0.32 takes them back by setting the generator's offset, which one on a CPU does not
        # have: the first such request with a seed would end the server.
        seeds = not on_cpu or not config.scheduler_config.get("enable_chunked_prefill", True)
        frees_memory = model.enable_sleep_mode and not on_cpu
        updates = info.vllm_env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is True
        adapter_rank = lora.max_lora_rank if lora and updates else 0
        gaps = {
            "memory is not given back: that takes a GPU and --enable-sleep-mode": not frees_memory,
            "no seeds: on a CPU they end the server where prompts are computed in parts; start it with"
            " --no-enable-chunked-prefill": not seeds,
            "the checksum lacks parameters that a CPU keeps packed: prove an update by log-probs too": on_cpu,
            "no adapters: they take --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": not adapter_rank,
        }
        features = EngineFeatures(
            vocab_size=vocab_size,
            context_length=context_length or model.max_model_len,
            name=server.name,
            seeds=seeds,
            checksum=True,
            partial_checksum=on_cpu,
            max_adapter_rank=adapter_rank,
            frees_memory=frees_memory,
            gaps=list_true(gaps),
        )
        dialect = VLLMServer(server, features, models[0].id, transfer_backend=transfer.get("backend"))
        if model.quantization is None:  # else its shapes are not the trainer's
            dialect.shapes = await trio.to_thread.run_sync(find_tensor_shapes, Path(model.model))
        await dialect.thaw()  # whoever used it before may have left it paused
        counted = await dialect.read_work()
        refuse_settings(
            server.name, {"does not count its work; start it without --disable-log-stats": not counted}
        )
        # the token is in the server's vocabulary, and the answer says what training needs
        with setup_errors(
            "start vLLM 0.32 or later with --enable-scale-out, and with the trainer's model: asked was token"
            f" {vocab_size - 1}, the last of its vocabulary of {vocab_size}, of the same model"
        ):
            await dialect.ask_first(vocab_size - 1)
        return dialect

    return open_server_engine(url, shake_hands, kind="vllm", health_path="/health", **options)


async def read_info(server: Server, context_length: int | None) -> ServerInfo:
    """The server's settings. Raises EngineSetupError naming the flag to set."""
    with setup_errors("start vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1 in its environment"):
        # a cold one looks over its whole machine: 20 s on two busy cores
        info = await server.read("/server_info?config_format=json", ServerInfo)
    config = info.vllm_config
    model, processes = config.model_config, config.parallel_config.get("_api_process_count", 1)
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
    return info

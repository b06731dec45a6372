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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from rollouts.engines.server import LOADING, NEVER_NAMED, Calls, Dialect, open_server_engine
from rollouts.engines.wire import (
    ServedModel,
    Server,
    VersionSpan,
    decode_reply,
    find_tensor_shapes,
    list_true,
    make_adapter_name,
    make_completion,
    parse_version,
    refuse_settings,
    setup_errors,
)
from rollouts.errors import EngineError, ReplyError, RequestRefused, WeightVersionError
from rollouts.types import Completion, EngineFeatures, Fields, GenerateRequest, live

NO_ADAPTERS = (
    "no adapters: they take --enable-lora --lora-target-modules and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)
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
    top_logprobs: list["LogProb"] = []  # of as many as were asked for, the sampled one first


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
    device_config: Fields = {}
    parallel_config: Fields = {}
    scheduler_config: Fields = {}
    weight_transfer_config: Fields | None = None
    lora_config: LoRAConfig | None = None


class ServerInfo(Struct):
    vllm_config: Config
    vllm_env: Fields = {}


@live
class VLLMServer(Dialect):
    """The Dialect of one vLLM server."""

    model: str  # its name on the wire
    transfer_backend: str | None = None  # None: transfer in memory is off
    adapter_calls = "/v1"

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """Nothing but the request's own stop tokens ends it: the model's own are left to the caller."""
        sampling, prompt = request.sampling, request.prompt_ids.tolist()
        who = f"{self.server.name}, request {request.request_id!r}"
        params = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # 0: of the sampled token alone, else it comes first, in the place of one of the likeliest
            "logprobs": request.top_log_probs and request.top_log_probs + 1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "detokenize": bool(sampling.stop_texts),
            "stop": list(sampling.stop_texts),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if request.asks_of_prompt:
            params["prompt_logprobs"] = request.prompt_top  # and of the prompt's own tokens
        if sampling.seed is not None and self.features.seeds:
            params["seed"] = sampling.seed & (2**63 - 1)  # the server takes 64 bits, and −1 for none
        name = self.named.get(request.adapter, self.adapter)
        if name is None and self.named and self.features.partial_checksum:
            raise RequestRefused(
                f"{who} names no adapter while the server has some: on a CPU, vLLM 0.32 may then answer by"
                " one of them; update the server to an adapter of zeros"
            )
        body = {
            "model": name or self.model,
            "request_id": server_id,
            "token_ids": prompt,
            "sampling_params": params,
        }
        answer = await self.server.call("POST", GENERATE, body, silence_s=math.inf)
        reply = decode_reply(answer, Generated, where=self.server.name)
        if reply.request_id != SERVER_PREFIX + server_id or len(reply.choices) != 1:
            raise ReplyError(
                f"{who}: {len(reply.choices)} choices for {reply.request_id!r}; asked was one for"
                f" {SERVER_PREFIX + server_id!r}"
            )
        (choice,), stops = reply.choices, sampling.stop_token_ids
        by_token = choice.finish_reason == "stop" and choice.token_ids and not sampling.stop_texts
        if by_token and choice.token_ids[-1] not in stops:
            raise ReplyError(f"{who}: stopped by {choice.token_ids[-1]}, none of stop_token_ids={stops}")
        of_prompt = reply.prompt_logprobs or []
        scored = zip(of_prompt, map(str, prompt), strict=False)
        return make_completion(
            request,
            choice.token_ids,
            [(entry.token_id, entry.logprob) for entry in choice.logprobs.content],
            choice.weight_versions,
            choice.finish_reason,
            vocab_size=self.features.vocab_size,
            where=self.server.name,
            prompt_log_probs=[of[token].logprob if of and token in of else None for of, token in scored],
            top=[[(one.logprob, one.token_id) for one in at.top_logprobs] for at in choice.logprobs.content],
            prompt_top=[[(one.logprob, int(key)) for key, one in (at or {}).items()] for at in of_prompt[1:]],
        )

    async def read_work(self) -> Sequence[str]:
        return WORK.findall((await self.server.call("GET", "/metrics")).decode(errors="replace"))

    async def abort(self, server_ids: Sequence[str]) -> None:
        ids = [SERVER_PREFIX + server_id for server_id in server_ids]  # an empty list aborts everybody's
        await self.server.control("/abort_requests", {"request_ids": ids}, repeats=True)

    @property
    def calls(self) -> Calls:
        """With its memory released the weights wait in the host's, and the cache is gone."""
        return {
            "freeze": ("/pause?mode=keep", None),
            "thaw": ("/resume", None),
            "release": ("/sleep?level=1&mode=wait", None),
            "restore": ("/wake_up", None),
        }

    # --- weights

    async def read_version_name(self) -> str:
        return await self.server.read("/weight_info", str, "weight_version")

    async def checksum(self) -> str | None:
        """A sha256 over those of all parameters that the server can read; those it keeps packed, on a CPU,
        are left out.
        """
        sums = await self.server.control(
            "/weight_checker", {"action": "checksum"}, dict[str, str], "checksums", repeats=True
        )
        seen = sorted((name, digest) for name, digest in sums.items() if digest != HASH_OF_NOTHING)
        if not seen:
            raise EngineError(
                f"{self.server.name} has no checksum of any of its {len(sums)} parameters: it packs them"
            )
        return hashlib.sha256(msgspec.json.encode(seen)).hexdigest()

    async def load_weights(self, path: Path, version: int) -> None:
        await self.begin()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            await self.server.control("/collective_rpc", body)
        except EngineError as error:
            raise EngineError(
                f"{self.server.name} could not load {path} and may have its weights in pieces: they bear no"
                f" version; update it again, or restart it: {error}"
            ) from error
        await self.commit(version)

    async def load_adapter(self, path: Path, version: int) -> None:
        """Not by vLLM's load_inplace: its requests name the directory that they came with, and load it again
        at each step, so that those of the version before would go on with their own adapter.
        """
        name = make_adapter_name(version)
        await self.send_adapter(name, path)
        await self.begin()
        await self.commit(version, name)

    async def begin(self) -> None:
        """From now on its weights have no version. Pause first. A server whose weights were never named has
        just been started, perhaps by somebody else, so its settings are checked again.
        """
        if not await self.server.read("/is_paused", bool, "is_paused"):
            raise EngineError(f"{self.server.name} generates; call pause() before its weights are exchanged")
        if await self.read_version_name() == NEVER_NAMED:
            self.server.cold = True
            await read_info(self.server, self.features.context_length)
        await self._name_weights(LOADING)

    async def commit(self, version: int, adapter: str | None = None) -> None:
        """Nothing computed by other weights is used again, and what follows carries `version`. Raises
        WeightVersionError if the server names another one.
        """
        before, self.adapter = self.adapter, adapter
        if before:
            await self.drop_adapter(before)
        path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        if not await self.server.control(path, None, bool, "success", repeats=True):
            raise EngineError(
                f"{self.server.name} did not reset its prefix cache: keys and values of older weights would"
                " be used"
            )
        await self._name_weights(str(version))
        reported = parse_version(await self.read_version_name())
        if reported != version:
            raise WeightVersionError(
                f"{self.server.name} was given version {version} and says {reported}; is someone else"
                " updating it?"
            )

    async def _name_weights(self, name: str) -> None:
        await self.server.control("/update_weight_version", {"new_version": name}, repeats=True)


# --- opening ------------------------------------------------------------------------------------------------


async def shake_hands(server: Server, vocab_size: int, context_length: int | None) -> VLLMServer:
    """The server, checked and not paused. Raises EngineSetupError naming the flag for settings that would
    falsify training; EngineUnreachable, EngineSilent.
    """
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
        NO_ADAPTERS: not adapter_rank,
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
        dialect.shapes = await find_tensor_shapes(model.model)
    await dialect.tell("thaw")  # whoever used it before may have left it paused
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


open_vllm_engine = partial(open_server_engine, shake_hands, "vllm", "/health")
"""The vLLM server at a url as an engine; it goes on when the block ends. See open_server_engine, and what
shake_hands raises.
"""


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

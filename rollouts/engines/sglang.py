"""An SGLang server as an InferenceEngine: token ids in; token ids, log-probs and each token's version out.

The prefix cache is salted (`extra_key`) anew by each opened engine and each update, and flushed by an update.
pause("keep") is "retract": what is in flight is computed anew under the next weights.
"""

import hashlib
import json
import math
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import trio
from msgspec import Struct

from rollouts.engines.server import LOADING, NEVER_NAMED, Calls, Dialect, open_server_engine
from rollouts.engines.wire import (
    ADAPTER_PREFIX,
    Server,
    VersionSpan,
    decode_reply,
    find_tensor_shapes,
    list_true,
    make_adapter_name,
    make_completion,
    refuse_settings,
    setup_errors,
)
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.types import Completion, EngineFeatures, Fields, GenerateRequest, SamplingParams, live

OLDEST_VERSION = (0, 5, 20)  # the first whose answers say which version produced which token
RESERVED = 2  # tokens of its context that the server leaves empty: it lowers max_new_tokens without a word
LEAST_ANSWER = 4  # tokens that fit after a prompt of max_req_input_len
# to tell the server that nobody waits for an answer any more; it would find out by itself in some seconds
CANCEL_GRACE_S = 1.0
SPELLED_BESIDE = 8  # tokens before a text's, which may begin within a character
COLD = 1e-3  # a temperature at which the likeliest token is as good as certain
SEED_MASK = 0x7FFFFFFF  # what the server's seeded sampler takes


ListedToken = tuple[float | None, int, str | None]  # None: a log-prob of −infinity, or of no token; no text


class Finish(Struct):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None  # of an abort by the server itself: what is wrong


class Meta(Struct):
    id: str
    finish_reason: Finish
    # missing when it was aborted before it ran
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[VersionSpan] = []
    # where they were asked for, as the next two
    input_token_logprobs: list[ListedToken] = []
    input_top_logprobs: list[list[ListedToken] | None] = []
    output_top_logprobs: list[list[ListedToken] | None] = []


class Generated(Struct):
    output_ids: list[int]
    meta_info: Meta


class ModelInfo(Struct):
    model_path: str
    weight_version: str
    is_generation: bool = True


class ServerInfo(Struct):
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
    enable_lora: bool | None = False
    max_lora_rank: int | None = None


class Model(Struct):
    max_model_len: int | None  # None: an adapter


class RankWork(Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    total_prefill_uncached_tokens: int = 0
    decode_moments: list[float] = []  # sums over decode steps: they grow with every one


class RankChecksum(Struct):
    checksums: dict[str, str]


class Loaded(Struct):
    loaded_adapters: dict[str, str]  # by name their paths


class Update(Struct):
    success: bool
    message: str = ""


@live
class SGLangServer(Dialect):
    """The Dialect of one SGLang server, and its own calls for transfers of weights in memory."""

    info: ServerInfo
    # tokens of prompt and answer at which the server ends an answer, some before its context is full
    ends_at: int | None = None

    def __post_init__(self) -> None:
        self._set_salt()

    def _set_salt(self) -> None:
        """What other weights computed, also for an earlier run, is not used again."""
        self._salt = uuid.uuid4().hex

    # --- requests

    async def ask(self, request: GenerateRequest, server_id: str) -> Completion:
        """Raises EngineOverloaded or InfrastructureError also for an abort that is the server's failure."""
        prompt = request.prompt_ids.tolist()
        body = {
            "rid": server_id,
            "input_ids": prompt,
            "sampling_params": make_params(request.sampling),
            "return_logprob": True,
            "extra_key": self._salt,
        }
        if request.asks_of_prompt:
            body["logprob_start_len"] = 0
        body["top_logprobs_num"] = max(request.top_log_probs, request.prompt_top)
        if adapter := self.named.get(request.adapter, self.adapter):
            body["lora_path"] = adapter  # by name
        try:
            answer = await self.server.call("POST", "/generate", body, silence_s=math.inf)
        except trio.Cancelled:
            with trio.move_on_after(CANCEL_GRACE_S, shield=True), suppress(EngineError):
                await self.abort([server_id])  # the closed connection says the same, a little later
            raise
        except RequestRefused as error:
            if not adapter or "LoRA" not in str(error):
                raise
            raise EngineError(f"the server has lost its adapter, was it started again? {error}") from error
        where = f"{self.server.name}: POST /generate"
        reply = decode_reply(answer, Generated, where=where)
        meta, who = reply.meta_info, f"{where}, request {request.request_id!r}"
        finish, status = meta.finish_reason, meta.finish_reason.status_code
        if meta.id != server_id:
            raise ReplyError(f"{who}: the answer is to {meta.id!r}, asked was {server_id!r}")
        if finish.type == "abort" and status is not None:
            kind = EngineOverloaded if status in (429, 503) else InfrastructureError
            raise kind(f"{who}: the server gave it up with status {status}: {finish.message}")
        scored = zip(meta.input_token_logprobs, prompt, strict=False)
        return make_completion(
            request,
            reply.output_ids,
            [(token, log_prob) for log_prob, token, _ in meta.output_token_logprobs],
            meta.weight_versions,
            finish.type,
            vocab_size=self.features.vocab_size,
            where=where,
            ends_at=self.ends_at,
            prompt_log_probs=[log_prob if of == token else None for (log_prob, of, _), token in scored],
            top=meta.output_top_logprobs,
            prompt_top=meta.input_top_logprobs[1:],
        )

    async def read_work(self) -> Sequence[RankWork]:
        return await self.server.read("/v1/loads", list[RankWork], "loads")

    async def abort(self, server_ids: Sequence[str]) -> None:
        for server_id in server_ids:
            await self.server.control("/abort_request", {"rid": server_id}, repeats=True)

    @property
    def calls(self) -> Calls:
        """The weights too give their memory back where the server keeps a copy of them."""
        tags = {"tags": ["kv_cache", "weights"] if self.info.enable_weights_cpu_backup else ["kv_cache"]}
        return {
            # what is in flight is computed anew under the next weights
            "freeze": ("/pause_generation", {"mode": "retract"}),
            "thaw": ("/continue_generation", {"torch_empty_cache": False}),
            "release": ("/release_memory_occupation", tags),
            "restore": ("/resume_memory_occupation", tags),
        }

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
        await self.update("/update_weights_from_disk", body)
        self._set_salt()
        self.adapter = None  # it stays in the server until the next one comes

    async def load_adapter(self, path: Path, version: int) -> None:
        """The one before is unloaded, and what a trainer before this one left. The server reads an adapter
        again, from its path, when a request names one that was unloaded: none does.
        """
        await self._check_info_again()
        name = make_adapter_name(version)
        loaded = await self.send_adapter(name, path, Loaded)
        await self._name_weights(LOADING)
        self.adapter = name
        self._set_salt()
        await self._name_weights(str(version))
        for other in loaded.loaded_adapters.keys() - {name, *self.named.values()}:
            if other.startswith(ADAPTER_PREFIX):  # waits for those who use it: nobody does
                await self.drop_adapter(other)

    async def _name_weights(self, name: str) -> None:
        named = {"new_version": name, "abort_all_requests": False}
        await self.update("/update_weight_version", named, repeats=True)

    async def _check_info_again(self) -> None:
        """A server whose weights were never named has just been started, perhaps by somebody else."""
        if await self.read_version_name() == NEVER_NAMED:
            self.server.cold = True
            await read_server_info(self.server)

    async def read_version_name(self) -> str:
        return (await self.server.read("/model_info", ModelInfo)).weight_version

    async def checksum(self) -> str | None:
        """A sha256 of the checksums of all ranks."""
        path, body = "/weights_checker", {"action": "checksum"}
        found = await self.server.control(path, body, list[RankChecksum], "ranks", repeats=True)
        ranks = [rank.checksums for rank in found]
        if not ranks or not all(ranks):
            raise ReplyError(f"{self.server.name}: POST {path} gave no checksums")
        return hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest()

    # --- weights in memory: the server's side of weight_sync.broadcast

    async def begin_transfer(self) -> bool:
        """Whether the server has sessions (from 0.5.21 on). One that an update before left open is closed
        first.

        Until the last bucket names them, its weights have no version: a transfer that breaks off leaves some
        old and some new.
        """
        await self._check_info_again()
        await self._name_weights(LOADING)
        with suppress(EngineError):  # there is none to close
            await self.update("/end_weight_update", {})
        try:
            await self.server.control("/begin_weight_update", {"selector": "all"})
        except EngineError as error:
            if " gave 404" not in str(error):
                raise
            return False
        return True

    async def receive_broadcast(self, info: Fields, *, version: int, last: bool) -> None:
        """Returns when the server has taken one flattened bucket out of the group and loaded it; `info` lists
        its tensors (names, dtypes, shapes) and names the group. The last one names the version.
        """
        body = {**info, "load_format": "flattened_bucket", "flush_cache": last}
        if last:
            body["weight_version"] = str(version)
        await self.update("/update_weights_from_distributed", body)
        if last:
            self._set_salt()

    async def update(self, path: str, body: Fields, *, repeats: bool = False) -> None:
        """A call that answers whether it was carried out. Raises EngineError if it was not."""
        answer = await self.server.control(path, body, Update, repeats=repeats)
        if not answer.success:
            raise EngineError(f"{self.server.name}: POST {path} failed: {answer.message}")


def make_params(sampling: SamplingParams) -> Fields:
    """How a request is sampled, in the server's words. Everything that it could fill in from its own defaults
    is said.
    """
    params: Fields = {
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop_texts),
        # with it the server looks at no stop token at all, ours included
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed & SEED_MASK
    if sampling.stop_texts:
        # The server decodes as many of the last tokens as it would encode the text in, or an expression might
        # match: this one matches nothing, and is longer than any tokens that spell the text.
        longest = max(len(text.encode()) for text in sampling.stop_texts) + SPELLED_BESIDE
        params["stop_regex"] = f"\\Z.{{{longest}}}"
    return params


# --- opening ------------------------------------------------------------------------------------------------


async def shake_hands(server: Server, vocab_size: int, context_length: int | None) -> SGLangServer:
    """The server is ours alone from now on: if somebody left it paused, it goes on.

    Raises EngineSetupError, naming what to set, for a server whose answers would falsify training or that
    refuses the key; InfrastructureError if it does not answer.
    """
    with setup_errors("is it SGLang 0.5.20 or later, and api_key its --api-key, without --admin-api-key?"):
        model = await server.read("/model_info", ModelInfo)
        await server.control("/continue_generation", {"torch_empty_cache": False})
        models = await server.read("/v1/models", list[Model], "data")
    info = await read_server_info(server)
    served = None  # its vocabulary, where that can be read from this machine
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads(Path(model.model_path, "config.json").read_bytes())
        served = config.get("text_config", config).get("vocab_size")
    longest = max([one.max_model_len or 0 for one in models], default=0)
    needed = context_length or longest
    refuse_settings(
        server.name,
        {
            f"serves {model.model_path} as an embedding model; start it without --is-embedding": (
                not model.is_generation
            ),
            f"serves {model.model_path} with {served} token ids, the trainer's model has {vocab_size};"
            " serve the same model": served not in (None, vocab_size),
            f"has a context of {longest} tokens, needed are {needed}; start it with"
            f" --context-length {needed}": needed > longest,
        },
    )
    features = _describe_features(server.name, info, vocab_size, needed)
    least = info.max_req_input_len
    ends_at = longest - RESERVED if least is None else least + LEAST_ANSWER
    shapes = await find_tensor_shapes(model.model_path)
    dialect = SGLangServer(server, features, info, ends_at, shapes=shapes)
    # No reply says whether log-probs leave the temperature out, as a variable of the server's environment
    # has it. Cold, the likeliest token is nearly certain, unless some are equally likely, as in 16 bits.
    (log_prob,) = (await dialect.ask_first(1, COLD)).log_probs
    unscaled = (
        f"gives log-probs of the unscaled distribution ({log_prob:.3g} at temperature {COLD:g}), not of"
        " the one sampled from; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    )
    refuse_settings(server.name, {unscaled: log_prob < -1.5})
    return dialect


open_sglang_engine = partial(open_server_engine, shake_hands, "sglang", "/ready")
"""The SGLang server at a url as an engine: see open_server_engine, and what shake_hands raises."""


def _describe_features(name: str, info: ServerInfo, vocab_size: int, context_length: int) -> EngineFeatures:
    seeds, frees_memory = info.enable_deterministic_inference, info.enable_memory_saver
    adapter_rank = info.max_lora_rank or 0 if info.enable_lora else 0
    gaps = {
        "A request with stop tokens ends at the model's own end-of-text tokens as well.": True,
        "A request's seed is ignored: the server was started without --enable-deterministic-inference,"
        " which not all backends have.": not seeds,
        "Memory is not given back: the server was started without --enable-memory-saver.": not frees_memory,
        "It serves no adapters: they take --enable-lora, --max-lora-rank and --lora-target-modules.": (
            not adapter_rank
        ),
    }
    return EngineFeatures(
        vocab_size=vocab_size,
        context_length=context_length,
        deterministic=seeds,
        name=name,
        seeds=seeds,
        checksum=True,
        max_adapter_rank=adapter_rank,
        frees_memory=frees_memory,
        gaps=list_true(gaps),
    )


async def read_server_info(server: Server) -> ServerInfo:
    """The server's settings. Raises EngineSetupError for those that would falsify training."""
    info = await server.read("/server_info", ServerInfo)
    numbers = tuple(map(int, re.findall(r"\d+", info.version)[:3]))
    lowest = min(info.speculative_accept_threshold_single, info.speculative_accept_threshold_acc)
    refuse_settings(
        server.name,
        {
            f"runs SGLang {info.version}, which does not say which weights produced which token; install"
            f" {'.'.join(map(str, OLDEST_VERSION))} or later": numbers < OLDEST_VERSION,
            "watermarks what it samples, so its log-probs are of another distribution; start it without"
            " --enable-watermark": info.enable_watermark,
            f"accepts speculated tokens at a threshold of {lowest}, so it does not sample from the"
            " model; start it with --speculative-accept-threshold-single 1.0"
            " --speculative-accept-threshold-acc 1.0": info.speculative_algorithm and lowest < 1.0,
        },
    )
    return info

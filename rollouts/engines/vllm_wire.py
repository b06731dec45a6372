"""What vLLM servers are sent and answer, over HTTP."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from rollouts.engines.wire import Record, VersionSpan, decode_reply, make_completion
from rollouts.errors import ReplyError
from rollouts.types import Completion, GenerateRequest

SERVER_PREFIX = "generate-tokens-"  # the server puts it before the ids that we give


class LogProb(Record, frozen=True):
    token_id: int
    logprob: float


class LogProbs(Record, frozen=True):
    content: list[LogProb]


class Choice(Record, frozen=True):
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: LogProbs
    weight_versions: list[VersionSpan]


class PromptLogProb(Record, frozen=True):
    logprob: float


class Generated(Record, frozen=True):
    request_id: str
    choices: list[Choice]
    prompt_logprobs: list[dict[str, PromptLogProb] | None] | None = None  # of the prompt, by token id


class Served(Record, frozen=True):
    id: str
    max_model_len: int


class ModelConfig(Record, frozen=True):
    model: str
    max_model_len: int
    logprobs_mode: str
    enable_sleep_mode: bool = False
    quantization: str | None = None


class DeviceConfig(Record, frozen=True):
    device: str = ""


class SchedulerConfig(Record, frozen=True):
    enable_chunked_prefill: bool = True


class ParallelConfig(Record, frozen=True):
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class TransferConfig(Record, frozen=True):
    backend: str | None = None


class Config(Record, frozen=True):
    model_config: ModelConfig
    device_config: DeviceConfig = DeviceConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    weight_transfer_config: TransferConfig | None = None


def make_generate_body(
    request: GenerateRequest, server_id: str, *, model: str, seeds: bool
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
    ids = request.prompt_ids.tolist()
    return {"model": model, "request_id": server_id, "token_ids": ids, "sampling_params": params}


def parse_generated(
    body: bytes, request: GenerateRequest, server_id: str, *, vocab_size: int, where: str
) -> Completion:
    """The completion in an answer of /inference/v1/generate. Raises ReplyError, naming what is wrong: nothing
    is repaired.
    """
    reply = decode_reply(body, Generated, where=where)
    where_request = f"{where}, request {request.request_id!r}"
    if reply.request_id != SERVER_PREFIX + server_id or len(reply.choices) != 1:
        raise ReplyError(
            f"{where_request}: {len(reply.choices)} choices for {reply.request_id!r}; asked was one for"
            f" {SERVER_PREFIX + server_id!r}"
        )
    choice, stops = reply.choices[0], request.sampling.stop_token_ids
    if choice.finish_reason == "stop" and choice.token_ids and choice.token_ids[-1] not in stops:
        raise ReplyError(
            f"{where_request}: stopped by {choice.token_ids[-1]}, none of stop_token_ids={stops}"
        )
    scored = zip(reply.prompt_logprobs or (), request.prompt_ids.tolist(), strict=False)
    return make_completion(
        request,
        choice.token_ids,
        [(entry.token_id, entry.logprob) for entry in choice.logprobs.content],
        choice.weight_versions,
        choice.finish_reason,
        vocab_size=vocab_size,
        where=where,
        prompt_log_probs=[
            entry[str(token)].logprob if entry and str(token) in entry else None for entry, token in scored
        ],
    )


def parse_metrics(body: bytes, *, where: str) -> dict[str, float]:
    """Name → sum over labels of every vllm: sample in a Prometheus page. Raises ReplyError for a value that
    is no finite number: NaN differs from itself, so that a server that stands still would seem to move.
    """
    totals: dict[str, float] = {}
    for name, value in re.findall(
        r"^(vllm:\w+)(?:\{.*\})? *(\S*)", body.decode(errors="replace"), re.MULTILINE
    ):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ReplyError(f"{where}: the metric {name} is {value[:100]!r}, no finite number")
        totals[name] = totals.get(name, 0.0) + number
    return totals

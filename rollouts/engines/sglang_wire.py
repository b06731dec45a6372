"""What SGLang servers are sent and answer, over HTTP."""

from __future__ import annotations

from typing import Any, Literal

from rollouts.engines.wire import Record, VersionSpan, decode_reply, make_completion
from rollouts.errors import EngineOverloaded, InfrastructureError, ReplyError
from rollouts.types import Completion, GenerateRequest

SEED_MASK = 0x7FFFFFFF  # what the server's seeded sampler takes


class Finish(Record, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None  # of an abort by the server itself: what is wrong


class Meta(Record, frozen=True):
    id: str
    finish_reason: Finish
    # missing when it was aborted before it ran
    output_token_logprobs: tuple[tuple[float, int, str | None], ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    input_token_logprobs: tuple[tuple[float | None, int, str | None], ...] = ()  # where they were asked for


class Generated(Record, frozen=True):
    output_ids: tuple[int, ...]
    meta_info: Meta


class ModelInfo(Record, frozen=True):
    model_path: str
    weight_version: str
    is_generation: bool = True


class ServerInfo(Record, frozen=True):
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


class Model(Record, frozen=True):
    id: str
    max_model_len: int


class RankLoad(Record, frozen=True):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    total_prefill_uncached_tokens: int = 0
    decode_moments: tuple[float, ...] = ()  # sums over decode steps: they grow with every one
    token_usage: float | None = None


class Update(Record, frozen=True):
    success: bool
    message: str = ""


class RankChecksum(Record, frozen=True):
    checksums: dict[str, str]


class Checksums(Record, frozen=True):
    success: bool
    ranks: tuple[RankChecksum, ...]


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
    reply = decode_reply(body, Generated, where=where)
    meta, who = reply.meta_info, f"{where}, request {request.request_id!r}"
    finish, status = meta.finish_reason, meta.finish_reason.status_code
    if meta.id != server_id:
        raise ReplyError(f"{who}: the answer is to {meta.id!r}, asked was {server_id!r}")
    if finish.type == "abort" and status is not None:
        kind = EngineOverloaded if status in (429, 503) else InfrastructureError
        raise kind(f"{who}: the server gave it up with status {status}: {finish.message}")
    scored = zip(meta.input_token_logprobs, request.prompt_ids.tolist(), strict=False)
    return make_completion(
        request,
        reply.output_ids,
        [(token, log_prob) for log_prob, token, _ in meta.output_token_logprobs],
        meta.weight_versions,
        finish.type,
        vocab_size=vocab_size,
        where=where,
        ends_at=ends_at,
        prompt_log_probs=[log_prob if of == token else None for (log_prob, of, _), token in scored],
    )

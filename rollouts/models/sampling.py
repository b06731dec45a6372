"""Completions from a torch model in the calling thread, without an engine: token ids in, token ids and
log-probs out.

requests ──► prompts in one padded forward pass ──► draw a token per row ──► one step of the cache ──► …
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollouts.errors import ModelError, RequestRefused
from rollouts.models.draws import make_draw, sample_tokens, stream_key
from rollouts.models.layers import evaluation_mode
from rollouts.models.limits import check_request, find_context_limit, find_rotary_limit
from rollouts.types import Completion, FinishReason, GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = 2**62  # the context of a model that states none
# kinds of layers that a mask over the padding is enough for
ATTENTION = {"full_attention", "sliding_attention"}


def sample_completions(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    *,
    seed: int = 0,
    weight_version: int = 0,
) -> list[Completion]:
    """One completion per request, in their order: token ids (the stop token included) and log-probs in nats
    of the distribution drawn from.

    The temperature, then top-k, then top-p shape that distribution; temperature 0 takes the likeliest token,
    with log-probs at temperature 1. Draw t of a request depends on (seed, its own seed or else its id, t)
    alone, so neither its order nor its neighbours change it, but for rounding. `weight_version` is written
    beside every token. The requests are one padded batch, decoded until the last row ends. The model's
    dropout is off meanwhile and no gradient is kept.

    Keys and values are kept where the model can; else every step computes everything again. Raises
    RequestRefused for an empty or too long prompt, an id outside the vocabulary, two requests of one id,
    wrong settings, and for a row that may outgrow the length up to which the model's rotary frequencies are
    fixed; ModelError if the model's distribution is not finite.
    """
    if not requests:
        return []
    _check_requests(model, requests)
    draws = np.stack(
        [make_draw(stream_key(seed, one.request_id, one.sampling.seed), one.sampling) for one in requests]
    )
    token_ids: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    reasons: list[FinishReason | None] = [None] * len(requests)
    with evaluation_mode(model), torch.no_grad():
        steps = _step(model, requests)
        logits = next(steps)
        while not all(reasons):
            sampled = sample_tokens(logits, draws)
            draws["drawn"] += np.uint64(1)
            for row, request in enumerate(requests):
                if reasons[row] is not None:
                    continue
                token_ids[row].append(int(sampled.token_ids[row]))
                log_probs[row].append(float(sampled.log_probs[row]))
                reasons[row] = _find_end(request, token_ids[row], log_probs[row][-1])
            if not all(reasons):
                logits = steps.send(torch.from_numpy(sampled.token_ids).to(logits.device))
    return [
        Completion(
            request_id=request.request_id,
            token_ids=np.asarray(ids, np.int64),
            log_probs=np.asarray(values, np.float32),
            weight_versions=np.full(len(ids), weight_version, np.int64),
            finish_reason=reason or "length",
        )
        for request, ids, values, reason in zip(requests, token_ids, log_probs, reasons, strict=True)
    ]


def _find_end(request: GenerateRequest, token_ids: list[int], log_prob: float) -> FinishReason | None:
    """Why the row ends with its newest token, or None. Raises ModelError for a log-prob that is no number."""
    if not np.isfinite(log_prob):
        raise ModelError(
            f"request {request.request_id!r}: the model's distribution of token {len(token_ids) - 1} is not"
            " finite; look for NaN in its weights, or lower the learning rate that made them"
        )
    if token_ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(token_ids) == request.sampling.max_new_tokens else None


def _step(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> Generator[Tensor, Tensor, None]:
    """Yields logits [B, V] of the next token; takes the tokens [B] that were drawn.

    With a cache prompts are padded on the left, so all end together. Without one rows are padded on the
    right, where no token of a causal model sees the padding: exact for all of them.
    """
    rows = [torch.from_numpy(np.asarray(one.prompt_ids, np.int64)).to(model.device) for one in requests]
    pad = torch.nn.utils.rnn.pad_sequence
    if not _has_cache(model):
        while True:
            ends = torch.tensor([len(row) - 1 for row in rows], device=model.device)
            logits = model(input_ids=pad(rows, batch_first=True), use_cache=False).logits
            drawn = yield logits[torch.arange(len(rows), device=model.device), ends]
            rows = [torch.cat([row, token[None]]) for row, token in zip(rows, drawn, strict=True)]
    ids = pad(rows, batch_first=True, padding_side="left")
    attention = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    cache = None
    while True:
        inputs: Any = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
        output: Any = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        drawn = yield output.logits[:, -1]
        ids, positions = drawn[:, None], positions[:, -1:] + 1
        attention = torch.cat([attention, attention.new_ones((len(rows), 1))], dim=1)


def _has_cache(model: PreTrainedModel) -> bool:
    """Whether padding on the left with a cache is exact: every layer attends, under a mask that hides the
    padding, to keys that are handed back, and none sums up what came before, padding included.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    needed = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    accepted = needed <= inspect.signature(model.forward).parameters.keys()
    return accepted and kinds <= ATTENTION and not getattr(model, "_is_stateful", False)


def _check_requests(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> None:
    embeddings: Any = model.get_input_embeddings()
    context, rotary = find_context_limit(model.config) or UNLIMITED, find_rotary_limit(model.config)
    seen = set[str]()
    for request in requests:
        limit = context if rotary is None else min(context, rotary.tokens)
        check_request(request, vocab_size=len(embeddings.weight), max_context=limit)
        if request.request_id in seen:
            raise RequestRefused(
                f"request {request.request_id!r} is there twice; both would draw the same tokens: give every"
                " request its own id"
            )
        seen.add(request.request_id)

"""What a request must satisfy before a model or a server takes it."""

from __future__ import annotations

import math

import numpy as np

from rollouts.errors import RequestRefused
from rollouts.types import GenerateRequest, SamplingParams


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises RequestRefused naming the field, its value and the rule."""
    name = f"request {request.request_id!r}"
    ids = np.asarray(request.prompt_ids)
    if ids.ndim != 1 or len(ids) == 0:
        raise RequestRefused(
            f"{name}: prompt_ids has shape {ids.shape}; it must be one-dimensional with at least one token"
        )
    if ids.dtype.kind not in "iu":
        raise RequestRefused(f"{name}: prompt_ids has dtype {ids.dtype}; token ids are integers")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise RequestRefused(
            f"{name}: prompt_ids holds {wrong}; the vocabulary is 0..{vocab_size - 1}: is this the model's"
            " own tokenizer?"
        )
    _check_sampling(name, request.sampling, vocab_size=vocab_size)
    total = len(ids) + request.sampling.max_new_tokens
    if total > max_context:
        raise RequestRefused(
            f"{name}: {len(ids)} prompt tokens and max_new_tokens={request.sampling.max_new_tokens} make"
            f" {total}; the context is {max_context}: shorten the prompt or lower max_new_tokens"
        )


def _check_sampling(name: str, sampling: SamplingParams, *, vocab_size: int) -> None:
    if (
        isinstance(sampling.max_new_tokens, bool)
        or not isinstance(sampling.max_new_tokens, int)
        or sampling.max_new_tokens < 1
    ):
        raise RequestRefused(
            f"{name}: sampling.max_new_tokens={sampling.max_new_tokens!r}; it must be an integer of at"
            " least 1"
        )
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise RequestRefused(
            f"{name}: sampling.temperature={sampling.temperature}; it must be finite, above 0, or 0 for"
            " greedy"
        )
    if not 0 < sampling.top_p <= 1:
        raise RequestRefused(
            f"{name}: sampling.top_p={sampling.top_p}; it must be above 0 and at most 1 (1: all tokens)"
        )
    if isinstance(sampling.top_k, bool) or not isinstance(sampling.top_k, int) or sampling.top_k < 0:
        raise RequestRefused(
            f"{name}: sampling.top_k={sampling.top_k!r}; it must be an integer, 0 (all tokens) or more"
        )
    for token in sampling.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestRefused(
                f"{name}: sampling.stop_token_ids has {token!r}; the vocabulary is 0..{vocab_size - 1}"
            )

"""What a request must satisfy before a model or a server takes it."""

from __future__ import annotations

import math

import numpy as np

from rollouts.errors import RequestRefused
from rollouts.types import GenerateRequest


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises RequestRefused naming the field, its value and the rule."""

    def require(holds: bool, what: str, rule: str) -> None:
        if not holds:
            raise RequestRefused(f"request {request.request_id!r}: {what}; {rule}")

    ids, sampling = np.asarray(request.prompt_ids), request.sampling
    vocabulary = f"the vocabulary is 0..{vocab_size - 1}"
    shape = f"prompt_ids has shape {ids.shape}"
    require(ids.ndim == 1 and len(ids) > 0, shape, "it must be one-dimensional with at least one token")
    require(ids.dtype.kind in "iu", f"prompt_ids has dtype {ids.dtype}", "token ids are integers")
    for token in (int(ids.min()), int(ids.max())):
        own = f"{vocabulary}: is this the model's own tokenizer?"
        require(0 <= token < vocab_size, f"prompt_ids holds {token}", own)
    integers = {
        "max_new_tokens": (sampling.max_new_tokens, 1, "an integer of at least 1"),
        "top_k": (sampling.top_k, 0, "an integer, 0 (all tokens) or more"),
    }
    for name, (value, least, rule) in integers.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= least, f"sampling.{name}={value!r}", f"it must be {rule}")
    require(
        math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        f"sampling.temperature={sampling.temperature}",
        "it must be finite, above 0, or 0 for greedy",
    )
    top_p = f"sampling.top_p={sampling.top_p}"
    require(0 < sampling.top_p <= 1, top_p, "it must be above 0 and at most 1 (1: all tokens)")
    for token in sampling.stop_token_ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        require(whole and 0 <= token < vocab_size, f"sampling.stop_token_ids has {token!r}", vocabulary)
    total = len(ids) + sampling.max_new_tokens
    require(
        total <= max_context,
        f"{len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} make {total}",
        f"the context is {max_context}: shorten the prompt or lower max_new_tokens",
    )

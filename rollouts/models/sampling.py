"""Completions from a torch model in the calling thread, without an engine: token ids in, token ids and
log-probs out.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.models.decoding.batch import Row, open_decoder
from rollouts.models.draws import make_draw
from rollouts.models.limits import check_new, check_request, find_context_limit, find_rotary_limit
from rollouts.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = 2**62  # the context of a model that states none


def sample_completions(
    model: "PreTrainedModel", requests: Sequence[GenerateRequest], *, seed: int = 0, weight_version: int = 0
) -> list[Completion]:
    """One completion per request, in their order: token ids (the stop token included) and log-probs in nats
    of the distribution drawn from.

    The temperature, then top-k, then top-p shape that distribution; temperature 0 takes the likeliest token,
    with log-probs at temperature 1. Draw t of a request depends on (seed, its own seed or else its id, t)
    alone, so neither its order nor its neighbours change it, but for rounding. `weight_version` is written
    beside every token. The requests are decoded together, each until it ends. The model's dropout is off
    meanwhile and no gradient is kept.

    Each call finds the fastest way to run the model that agrees with its own forward, by decoding a few
    tokens (rollouts.models.decoding.batch). Raises RequestRefused for an empty or too long prompt, an id
    outside the vocabulary, two requests of one id, wrong settings, and for a row that may outgrow the length
    up to which the model's rotary frequencies are fixed; ModelError for a model that cannot be run exactly,
    such as one whose logits are not finite.
    """
    if not requests:
        return []
    context, rotary = find_context_limit(model.config) or UNLIMITED, find_rotary_limit(model.config)
    limit = context if rotary is None else min(context, rotary.tokens)
    seen = set[str]()
    for request in requests:
        check_request(request, vocab_size=model.config.get_text_config().vocab_size, max_context=limit)
        check_new(request, seen, ())
        seen.add(request.request_id)
    longest = max(len(one.prompt_ids) + one.sampling.max_new_tokens for one in requests)
    batch = open_decoder(model, max_context=longest, max_rows=len(requests), compiled=False)
    batch.kept_bytes = 0  # no row comes later
    rows = [Row(request, make_draw(seed, request)) for request in requests]
    with batch.whole.computing():
        batch.admit(rows, weight_version)
        batch.take_ended()
        while batch.rows:
            batch.step(weight_version)
            batch.take_ended()
    return [row.completion() for row in rows]

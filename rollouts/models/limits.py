"""What a model or a server can take: requests, their context, and how long a row may be before its length
changes what the model says of its first tokens. No torch.
"""

import math
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import numpy as np

from rollouts.errors import EngineError, RequestRefused
from rollouts.types import GenerateRequest

DEFAULT_CONTEXT = 8192  # tokens, for a config that sets no limit
CONTEXT_NAMES = (
    "max_position_embeddings n_positions max_seq_len max_sequence_length seq_length context_length"
)


class RotaryLimit(NamedTuple):
    """Rotary frequencies of every position are fixed in rows of at most `tokens`; in a longer row all of them
    change.
    """

    tokens: int
    kind: str  # rope_type of the config: "dynamic" or "longrope"
    field: str  # of the config, where `tokens` stands

    def __str__(self) -> str:
        return (
            f"rope_type={self.kind!r} changes the frequencies of every position in rows beyond"
            f" {self.tokens} tokens (config.{self.field}={self.tokens})"
        )


def find_context_limit(config: Any) -> int | None:
    """Positions that the config allows, or None where it sets no limit (recurrent models, relative
    positions).
    """
    config = config.get_text_config()
    stated = [getattr(config, name, None) for name in CONTEXT_NAMES.split()]
    return next((value for value in stated if isinstance(value, int) and value > 0), None)


def find_rotary_limit(config: Any) -> RotaryLimit | None:
    """The shortest limit of a Hugging Face config's rotary embeddings; None where frequencies do not depend
    on the length.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, field = str(part.get("rope_type", "")), "max_position_embeddings"
        tokens = getattr(config, field, None)
        if kind == "longrope":  # a dynamic one never looks at the original length
            name = "original_max_position_embeddings"
            if original := part.get(name) or getattr(config, name, None):
                field, tokens = name, original
        if kind == "longrope" or "dynamic" in kind:
            found.append(RotaryLimit(int(tokens or 0), kind, field))
    return min(found, default=None)


def choose_context(config: Any, max_context: int | None) -> int:
    """Tokens of a row at most: the model's own limit, or fewer. Raises EngineError."""
    limit = find_context_limit(config)
    context = (limit or DEFAULT_CONTEXT) if max_context is None else max_context
    if not 1 < context <= (limit or context):
        at_most = "" if limit is None else f" and at most the model's max_position_embeddings={limit}"
        raise EngineError(f"max_context={context}; it must be above 1{at_most}")
    return context


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises RequestRefused naming the field, its value and the rule."""
    ids, sampling = np.asarray(request.prompt_ids), request.sampling
    count, new, are_ids = ids.size, sampling.max_new_tokens, ids.dtype.kind in "iu"
    outside = ids[(ids < 0) | (ids >= vocab_size)].tolist() if are_ids else []
    stops = [token for token in sampling.stop_token_ids if not (_is_whole(token, 0) and token < vocab_size)]
    needed = count + new if _is_whole(new, 1) else 0
    vocabulary = f"the vocabulary is 0..{vocab_size - 1}"
    counts = request.top_log_probs, request.prompt_top, request.prompt_draws
    targets = request.prompt_targets
    rules = {
        f"prompt_ids has shape {ids.shape}; it must be one-dimensional with at least one token": (
            ids.ndim != 1 or not count
        ),
        f"prompt_ids has dtype {ids.dtype}; token ids are integers": not are_ids,
        f"prompt_ids holds {outside[:3]}; {vocabulary}: is this the model's own tokenizer?": outside,
        f"sampling.max_new_tokens={new!r}; it must be an integer of at least 1": not needed,
        f"sampling.top_k={sampling.top_k!r}; it must be an integer, 0 (all tokens) or more": (
            not _is_whole(sampling.top_k, 0)
        ),
        f"sampling.temperature={sampling.temperature}; it must be finite, above 0, or 0 for greedy": (
            not 0 <= sampling.temperature < math.inf
        ),
        f"sampling.top_p={sampling.top_p}; it must be above 0 and at most 1 (1: all tokens)": (
            not 0 < sampling.top_p <= 1
        ),
        f"sampling.stop_token_ids has {stops[:3]}; {vocabulary}": stops,
        f"sampling.stop_texts={sampling.stop_texts}; one is empty": "" in sampling.stop_texts,
        f"top_log_probs, prompt_top, prompt_draws are {counts}; each is an integer from 0 to {vocab_size}": (
            not all(_is_whole(asked, 0) and asked <= vocab_size for asked in counts)
        ),
        f"prompt_targets must be integers [{count - 1}, K], a row for each token of the prompt but its first,"
        f" each −1 or in the vocabulary; {vocabulary}": targets is not None
        and not (
            targets.shape[:-1] == (count - 1,)
            and targets.dtype.kind in "iu"
            and ((targets >= -1) & (targets < vocab_size)).all()
        ),
        f"{count} prompt tokens and max_new_tokens={new} make {needed}; the context is {max_context}: shorten"
        " the prompt or lower max_new_tokens": needed > max_context,
    }
    for rule, broken in rules.items():
        if broken:
            raise RequestRefused(f"request {request.request_id!r}: {rule}")


def check_new(request: GenerateRequest, in_flight: Container[str], adapters: Iterable[str]) -> None:
    """Raises RequestRefused for an id that is in flight, and for an adapter that is none of those."""
    who = f"request {request.request_id!r}"
    if request.request_id in in_flight:
        raise RequestRefused(
            f"{who} is there twice, or in flight already: both would draw the same tokens; give every request"
            " its own id"
        )
    if request.adapter and request.adapter not in adapters:
        raise RequestRefused(
            f"{who}: adapter={request.adapter!r}; the engine has {sorted(adapters)}: add_adapter() first"
        )


def check_unused(name: str, names: Iterable[str], requests: Iterable[GenerateRequest]) -> None:
    """Raises EngineError for an adapter that is none of those, and for one that a request names."""
    users = [request.request_id for request in requests if request.adapter == name]
    if users or name not in names:
        raise EngineError(
            f"remove_adapter({name!r}): the engine has {sorted(names)}, and {users[:3]} in flight use it;"
            " abort them first"
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

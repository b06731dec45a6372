"""What a model's config says of the shortcuts that a probe of a few tokens cannot see: windows, distances,
capacities, lengths.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollouts.models.limits import CONTEXT_NAMES, find_rotary_limit
from rollouts.models.log_probs import NO_LIMIT, ForwardPlan, MaskForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_WINDOW = 2  # of layers with a window, while they are probed: shorter than the rows
# settings of attention that looks further than a probe; the exceptions are about which layers, not about how
# far
DISTANCE = re.compile(r"window|chunk|local|index_topk|stride|compress|(?<!decoder_)sparse|block_size")
NOT_DISTANCE = re.compile(
    r"^sliding_window$|^max_window_layers$|pattern|^chunk_size_feed_forward$|^use_|rope|theta|experts"
)


def find_window(model: PreTrainedModel) -> tuple[int | None, list[MaskForm]]:
    """Tokens that layers with a window see, and the forms in which their masks may be handed over; None
    without such layers.
    """
    config: Any = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if (
        not window
        or getattr(config, "use_sliding_window", True) is False
        or (kinds and "sliding_attention" not in kinds)
    ):
        return None, ["one"]
    return int(window), ["by_kind"] if len(kinds) > 1 else ["by_kind", "windowed"]


def forbids_tries(model: PreTrainedModel) -> str:
    """Why tries cannot be proved by a few tokens, or ""."""
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"tries need attention in every layer, and this model has {', '.join(sorted(map(str, kinds)))}"
    far = find_distances(model)
    return f"{far[0][1]}={far[0][0]} reaches beyond what a probe can see" if far else ""


def _is_distance(key: str, value: object) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
        and bool(DISTANCE.search(key))
        and not NOT_DISTANCE.search(key)
    )


def forbids_padding(model: PreTrainedModel) -> str:
    """Why rows must not share a forward pass, or "": experts with a capacity drop tokens by what else is in
    the batch.
    """
    settings = model.config.get_text_config().to_dict()
    capacity = sorted(key for key, value in settings.items() if "capacity" in key and value)
    return (
        f"{capacity[0]}={settings[capacity[0]]}: experts drop tokens by what else is in the batch"
        if capacity
        else ""
    )


def apply_length_limit(plan: ForwardPlan, model: PreTrainedModel) -> ForwardPlan:
    """`plan` within the length up to which rotary frequencies are fixed. Beyond it a longrope row is exact by
    itself; a dynamic one keeps the frequencies of the longest row that ever ran, and so has no log-probs of
    its own.
    """
    limit = find_rotary_limit(model.config)
    if limit is None:
        return plan
    setting = f"(config.{limit.field}={limit.tokens})"
    if limit.kind != "longrope":
        refusal = (
            f"rope_type={limit.kind!r} changes the frequencies of every position, in later rows too, with the"
            f" longest row so far {setting}"
        )
        return refuse_above(plan, limit.tokens, refusal)
    reason = f"positions of type {limit.kind} change with the longest row of a batch {setting}"
    return dataclasses.replace(
        plan,
        packed_up_to=min(plan.packed_up_to, limit.tokens),
        tries_up_to=min(plan.tries_up_to, limit.tokens),
        rows_up_to=min(plan.rows_up_to, limit.tokens),
        reason="; ".join(filter(None, (plan.reason, reason))),
    )


def refuse_above(plan: ForwardPlan, tokens: int, refusal: str) -> ForwardPlan:
    """`plan` without rows of more than `tokens`, unless it refuses shorter ones already; `refusal` says why,
    and names the setting.
    """
    return (
        plan
        if plan.refused_above <= tokens
        else dataclasses.replace(plan, refused_above=tokens, refusal=refusal)
    )


def find_distances(model: PreTrainedModel) -> list[tuple[int, str]]:
    """Settings that reach further than a probe of a few tokens and that no mask of ours follows, nearest
    first: tokens, name.
    """
    settings = model.config.get_text_config().to_dict()
    return sorted((int(value), key) for key, value in settings.items() if _is_distance(key, value))


def longest_probe(model: PreTrainedModel) -> int:
    """Tokens that a probe may have without leaving the model's positions, or the length up to which their
    frequencies are fixed.
    """
    config: Any = model.config.get_text_config()
    rotary = find_rotary_limit(config)
    stated = [
        value for name in CONTEXT_NAMES if isinstance(value := getattr(config, name, None), int) and value > 0
    ]
    return min([NO_LIMIT, *stated, *([rotary.tokens] if rotary else [])])


@contextmanager
def smaller_window(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers with a window see PROBE_WINDOW tokens, so that a probe of a few shows it."""
    config: Any = model.config.get_text_config()
    window = config.sliding_window
    config.sliding_window = PROBE_WINDOW
    try:
        yield
    finally:
        config.sliding_window = window

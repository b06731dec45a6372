"""Advantages by name. numpy only. A function takes AdvantageInputs and plain numbers, and answers with one
number per row [B].

Axes: B rows, T_i tokens of row i. With a critic the answer is a GAEResult; in self-play
`compute_role_advantages`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.advantages.gae import (
    GAEResult,
    compute_discounted_returns,
    compute_explained_variance,
    compute_gae,
    compute_gae_advantages,
    compute_length_adaptive_lambda,
    whiten_advantages,
)
from rollouts.advantages.group import (
    compute_centred_advantages,
    compute_gdpo_advantages,
    compute_grpo_advantages,
    compute_maxrl_advantages,
    compute_opo_advantages,
    compute_pass_at_k_advantages,
    compute_reinforce_pp_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
    use_raw_rewards,
    whiten_over_tokens,
)
from rollouts.advantages.inputs import AdvantageFn, AdvantageInputs, merge_segments
from rollouts.advantages.kl_rewards import compute_token_rewards, subtract_kl
from rollouts.advantages.roles import RoleAdvantages, compute_role_advantages
from rollouts.errors import ConfigError
from rollouts.types import BoolArray, FloatArray

__all__ = [
    "ADVANTAGES",
    "AdvantageFn",
    "AdvantageInputs",
    "GAEResult",
    "RoleAdvantages",
    "broadcast_advantages",
    "check_advantage_params",
    "compute_advantages",
    "compute_discounted_returns",
    "compute_explained_variance",
    "compute_gae",
    "compute_group_advantages",
    "compute_length_adaptive_lambda",
    "compute_role_advantages",
    "compute_token_rewards",
    "merge_segments",
    "subtract_kl",
    "whiten_advantages",
    "whiten_over_tokens",
]

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": compute_grpo_advantages,
    "centred": compute_centred_advantages,
    "rloo": compute_rloo_advantages,
    "reinforce_pp": compute_reinforce_pp_advantages,
    "reinforce_pp_baseline": compute_reinforce_pp_baseline_advantages,
    "maxrl": compute_maxrl_advantages,
    "opo": compute_opo_advantages,
    "pass_at_k": compute_pass_at_k_advantages,
    "gdpo": compute_gdpo_advantages,
    "remax": compute_remax_advantages,
    "raw": use_raw_rewards,
    "gae": compute_gae_advantages,
}


def compute_group_advantages(
    rewards: ArrayLike,
    group_indices: ArrayLike,
    kind: str = "grpo",
    *,
    lengths: ArrayLike | None = None,
    named_rewards: Mapping[str, ArrayLike] | None = None,
    trajectories: ArrayLike | None = None,
    **params: Any,
) -> FloatArray:
    """One advantage per row [B] by a name of ADVANTAGES; rows of equal `group_indices` [B] are compared, in
    any order of the rows.

    lengths [B] (tokens that train) and named_rewards are needed by some kinds; params are the kind's own.
    Rows of equal `trajectories` [B] are segments of one, which counts once. Computed in float64. Raises
    ValueError on an unknown kind, on lengths that differ, and naming the row whose reward is not finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"kind={kind!r} is not known; advantages are {', '.join(ADVANTAGES)}")
    given: Any = {"lengths": lengths, "named_rewards": named_rewards or {}, "trajectories": trajectories}
    given_inputs: Any = {"rewards": rewards, "group_indices": group_indices, **given}
    inputs = AdvantageInputs(**given_inputs)
    advantages = compute_advantages(inputs, ADVANTAGES[kind], **params)
    assert isinstance(advantages, np.ndarray), kind
    return advantages


def compute_advantages(
    inputs: AdvantageInputs, function: AdvantageFn, **params: Any
) -> FloatArray | tuple[FloatArray, ...] | GAEResult:
    """What the function answers, checked: float32 [B], or one float32 array per row when it answers with
    arrays per token; a GAEResult with both.

    Raises ValueError, naming the function, unless it is an array, list or tuple of one finite number, or one
    array of them, per row.
    """
    answer = function(inputs, **params)
    name, rows = getattr(function, "__name__", "the advantage function"), len(inputs.rewards)
    if not isinstance(answer, GAEResult):
        return _check_answer(answer, name, rows)
    parts = [_check_answer(part, f"{name}, {field}:", rows) for field, part in answer._asdict().items()]
    if any(isinstance(part, np.ndarray) for part in parts):
        raise ValueError(f"{name} answered with a GAEResult of numbers; give one array [T] per row")
    return GAEResult(*parts)  # pyright: ignore[reportArgumentType]  (tuples, as was just seen)


def _check_answer(answer: Any, name: str, rows: int) -> FloatArray | tuple[FloatArray, ...]:
    rule = "an advantage is one finite number per row, or one array [T] of finite numbers per row"
    if (
        not isinstance(answer, np.ndarray | list | tuple)
        or getattr(answer, "ndim", 1) == 0
        or len(answer) != rows
    ):
        found = (
            f"{len(answer)} advantages"
            if isinstance(answer, list | tuple) or getattr(answer, "ndim", 0)
            else type(answer).__name__
        )
        raise ValueError(f"{name} answered with {found} for {rows} rows; {rule}")
    per_token = rows > 0 and np.ndim(answer[0]) == 1
    values = [np.asarray(row, np.float64) for row in answer]
    for index, row in enumerate(values):
        if row.ndim != per_token or not np.isfinite(row).all():
            found = row if row.ndim == 0 else f"shape {row.shape}"
            raise ValueError(f"{name} answered for row {index} with {found}; {rule}")
    return tuple(row.astype(np.float32) for row in values) if per_token else np.asarray(values, np.float32)


def broadcast_advantages(
    advantages: NDArray[Any] | Sequence[float] | Sequence[ArrayLike], loss_masks: Sequence[BoolArray]
) -> tuple[FloatArray, ...]:
    """Each row's advantage on every token that trains, 0 elsewhere: one array [T_i] per row. Raises
    ValueError if the lengths differ.

    Takes one number per row [B], or one array [T_i] per row, of which only the trained tokens are kept.
    """
    if len(advantages) != len(loss_masks):
        raise ValueError(
            f"advantages have {len(advantages)} rows for {len(loss_masks)} loss masks; there must be one"
            " per row"
        )
    rows = []
    for index, (value, mask) in enumerate(zip(advantages, loss_masks, strict=True)):
        values = np.asarray(value, np.float32)
        if values.ndim and values.shape != mask.shape:
            raise ValueError(
                f"advantages[{index}] has shape {values.shape} and its loss mask {mask.shape}; one value per"
                " token, or one per row"
            )
        rows.append(np.where(mask, values, np.float32(0.0)).astype(np.float32))
    return tuple(rows)


def check_advantage_params(name: str, function: AdvantageFn, params: Mapping[str, object]) -> None:
    """Raises ConfigError if the function cannot be called with these parameters, naming the nearest one and
    all that it takes.
    """
    signature = inspect.signature(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    accepted = [
        key for key, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for key in params:
        if key not in accepted:
            nearest = difflib.get_close_matches(key, accepted, n=1, cutoff=0.6)
            question = f"did you mean {nearest[0]!r}? It" if nearest else "it"
            hint = f"{question} takes {', '.join(accepted)}" if accepted else "it takes none"
            raise ConfigError(f"advantage {name!r} has no parameter {key!r}; {hint}")

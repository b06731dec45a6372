"""Advantages by name. numpy only. A function takes AdvantageInputs and plain numbers, and answers with one
number per row [B].

Axes: B rows, T_i tokens of row i. With a critic the answer is a GAEResult; in self-play
`compute_role_advantages`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.advantages.gae import (
    compute_discounted_returns,
    compute_explained_variance,
    compute_gae,
    compute_length_adaptive_lambda,
    compute_token_rewards,
    subtract_kl,
    whiten_advantages,
)
from rollouts.advantages.group import ADVANTAGES, whiten_over_tokens
from rollouts.advantages.inputs import (
    AdvantageFn,
    AdvantageInputs,
    FloatRows,
    GAEResult,
    Masks,
    RoleAdvantages,
    Rows,
    compute_role_advantages,
    merge_segments,
    require,
    split_segments,
)
from rollouts.errors import check_keywords
from rollouts.types import FloatArray

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
    "split_segments",
    "subtract_kl",
    "whiten_advantages",
    "whiten_over_tokens",
]

LARGEST = float(np.finfo(np.float32).max)


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
    require(kind in ADVANTAGES, f"kind={kind!r} is not known; advantages are {', '.join(ADVANTAGES)}")
    inputs = {
        "rewards": rewards,
        "group_indices": group_indices,
        "lengths": lengths,
        "named_rewards": named_rewards or {},
        "trajectories": trajectories,
    }
    advantages = compute_advantages(AdvantageInputs(**inputs), ADVANTAGES[kind], **params)
    assert isinstance(advantages, np.ndarray), kind
    return advantages


def compute_advantages(
    inputs: AdvantageInputs, function: AdvantageFn, **params: Any
) -> FloatArray | FloatRows | GAEResult:
    """What the function answers, checked: float32 [B], or one float32 array per row when it answers with
    arrays per token; a GAEResult with both.

    Raises ValueError, naming the function, unless it is an array, list or tuple of one finite number, or one
    array of them, per row; TypeError for what are no real numbers.
    """
    answer = function(inputs, **params)
    name, rows = getattr(function, "__name__", "the advantage function"), len(inputs.rewards)
    if not isinstance(answer, GAEResult):
        return _check_answer(answer, name, rows)
    parts = {
        field: _check_answer(part, f"{name}, {field}:", rows) for field, part in answer._asdict().items()
    }
    for part in parts.values():
        require(isinstance(part, tuple), f"{name} answered with a GAEResult of numbers; give arrays [T]")
    return GAEResult(**parts)  # pyright: ignore[reportArgumentType]


def _check_answer(answer: Any, name: str, rows: int) -> FloatArray | FloatRows:
    rule = "an advantage is one finite number (float32) per row, or one array [T] of them per row"
    countable = isinstance(answer, list | tuple) or getattr(answer, "ndim", 0)
    found = f"{len(answer)} advantages" if countable else type(answer).__name__
    require(countable and len(answer) == rows, f"{name} answered with {found} for {rows} rows; {rule}")
    values = [np.asarray(row).astype(np.float64, casting="same_kind") for row in answer]  # nothing complex
    per_token = rows > 0 and values[0].ndim == 1
    for index, row in enumerate(values):
        found = f"shape {row.shape}" if row.ndim else row
        require(
            row.ndim == per_token and (np.abs(row) <= LARGEST).all(),
            f"{name} answered for row {index} with {found}; {rule}",
        )
    return tuple(row.astype(np.float32) for row in values) if per_token else np.asarray(values, np.float32)


def broadcast_advantages(advantages: NDArray[Any] | Sequence[float] | Rows, loss_masks: Masks) -> FloatRows:
    """Each row's advantage on every token that trains, 0 elsewhere: one array [T_i] per row. Raises
    ValueError if the lengths differ.

    Takes one number per row [B], or one array [T_i] per row, of which only the trained tokens are kept.
    """
    require(
        len(advantages) == len(loss_masks),
        f"advantages have {len(advantages)} rows for {len(loss_masks)} loss masks; one per row",
    )
    rows = []
    for index, (value, mask) in enumerate(zip(advantages, loss_masks, strict=True)):
        values = np.asarray(value, np.float32)
        shapes = f"advantages[{index}] has shape {values.shape} and its loss mask {mask.shape}"
        require(values.shape in ((), mask.shape), f"{shapes}; one value per token, or one per row")
        rows.append(np.where(mask, values, np.float32(0.0)))
    return tuple(rows)


def check_advantage_params(name: str, function: AdvantageFn, params: Mapping[str, object]) -> None:
    """Raises ConfigError if the function cannot be called with these parameters, naming the nearest one and
    all that it takes.
    """
    check_keywords(f"advantage {name!r}", function, params, beside=("inputs", "rewards"))

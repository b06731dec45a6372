"""Advantages of samples against the other samples of their prompt. numpy only. Axes: B rows, T_i tokens of row i, G rows of one group.

Failed samples must leave the batch before these functions see it: a zero in their place would move the mean of every other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.types import BoolArray, FloatArray

STD_EPSILON = 1e-6  # of 2402.03300; keeps a nearly constant group from dividing by nothing


def compute_grpo_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r − mean) / (std + 1e-6) of one group [G], G at least 2, std with G − 1 in its denominator. Paper: GRPO, 2402.03300."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON)


def compute_centred_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r − mean of one group [G]: no division, so hard and easy prompts keep their scale. Paper: Dr. GRPO, 2503.20783."""
    return rewards - rewards.mean()


def compute_rloo_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r − mean of the others of one group [G], G at least 2. Paper: RLOO, 2402.14740."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


ADVANTAGES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "grpo": compute_grpo_advantages,
    "centred": compute_centred_advantages,
    "rloo": compute_rloo_advantages,
}


def compute_group_advantages(rewards: ArrayLike, group_indices: ArrayLike, kind: str = "grpo") -> FloatArray:
    """One advantage per row [B], computed inside each group of equal `group_indices` [B]; the order of the rows does not matter.

    A group of one row, or of equal rewards, gets exactly 0: there is nothing to compare with. Computed in float64.
    Raises ValueError on an unknown kind, on lengths that differ, and naming the row whose reward is not finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"kind={kind!r} is not known; advantages are {', '.join(ADVANTAGES)}")
    values = np.asarray(rewards, np.float64)
    groups = np.asarray(group_indices)
    if values.ndim != 1 or values.shape != groups.shape:
        raise ValueError(f"rewards have shape {values.shape} and group_indices {groups.shape}; both must be [B]")
    _check_finite(values)
    advantages = np.zeros(len(values), np.float64)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        if len(rows) > 1 and np.ptp(values[rows]) > 0:
            advantages[rows] = ADVANTAGES[kind](values[rows])
    return advantages.astype(np.float32)


def broadcast_advantages(advantages: ArrayLike, loss_masks: Sequence[BoolArray]) -> tuple[FloatArray, ...]:
    """Each row's advantage [B] on every token that trains, 0 elsewhere: one array [T_i] per row. Raises ValueError if the lengths differ."""
    values = np.asarray(advantages, np.float32)
    if values.shape != (len(loss_masks),):
        raise ValueError(f"advantages have shape {values.shape} for {len(loss_masks)} loss masks; there must be one per row")
    return tuple(np.where(mask, value, np.float32(0.0)).astype(np.float32) for value, mask in zip(values, loss_masks, strict=True))


def subtract_kl(
    rewards: ArrayLike,
    log_probs: Sequence[FloatArray],
    ref_log_probs: Sequence[FloatArray],
    loss_masks: Sequence[BoolArray],
    beta: float,
) -> tuple[FloatArray, FloatArray]:
    """(rewards − beta·kl [B], kl [B]) with kl = Σ over the row's trained tokens of log_prob − ref_log_prob: k1, nats per sample.

    InstructGPT (2203.02155) puts −beta·(lp_t − ref_t) into the reward of token t. Here a sample has one advantage for all its tokens, so
    the sum goes into its one reward, before the group statistics: the same objective, reward − beta·KL(policy || reference) of the
    sequence, with the group as its baseline. Under "grpo" the group's std then includes the KL term. Positions outside the masks are
    never read. Raises ValueError on lengths that differ and naming the row whose result is not finite.
    """
    values = np.asarray(rewards, np.float64)
    rows = list(zip(log_probs, ref_log_probs, loss_masks, strict=True))
    if values.shape != (len(rows),):
        raise ValueError(f"rewards have shape {values.shape} for {len(rows)} rows of log-probs; there must be one per row")
    for row, (policy, reference, mask) in enumerate(rows):
        if not len(policy) == len(reference) == len(mask):
            raise ValueError(f"row {row} has {len(policy)} log-probs, {len(reference)} reference log-probs and {len(mask)} mask values")
    kl = np.asarray([(np.float64(policy[mask]) - np.float64(reference[mask])).sum() for policy, reference, mask in rows], np.float64)
    result = values - beta * kl
    _check_finite(result)
    return result.astype(np.float32), kl.astype(np.float32)


def _check_finite(rewards: NDArray[np.float64]) -> None:
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise ValueError(f"rewards[{bad[0]}] is {rewards[bad[0]]}; a reward must be finite: one bad row would spoil its whole group")

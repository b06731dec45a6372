"""The KL term inside the reward: once per trajectory, or on every token. k1, detached: numbers in, numbers
out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rollouts.advantages.inputs import Floats, check_finite
from rollouts.types import BoolArray, FloatArray


def subtract_kl(
    rewards: ArrayLike,
    log_probs: Sequence[FloatArray],
    ref_log_probs: Sequence[FloatArray],
    loss_masks: Sequence[BoolArray],
    beta: float,
    *,
    trajectories: ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(rewards − beta·kl [B], kl [B]) with kl = Σ over the trained tokens of the row's trajectory of log_prob
    − ref_log_prob: k1, nats.

    Rows of equal `trajectories` [B] are segments of one, and each gets the KL of all; None: every row is one
    by itself.

    InstructGPT (2203.02155) puts −beta·(lp_t − ref_t) into the reward of token t. Here a sample has one
    advantage for all its tokens, so the sum goes into its one reward, before the group statistics: the same
    objective, reward − beta·KL(policy || reference) of the sequence, with the group as its baseline. Under
    "grpo" the group's std then includes the KL term. Positions outside the masks are never read. Raises
    ValueError on lengths that differ and naming the row whose result is not finite.
    """
    values = _one_per_row(rewards, len(log_probs))
    kl = np.asarray([row.sum() for row in _token_kl(log_probs, ref_log_probs, loss_masks)], np.float64)
    if trajectories is not None:
        numbers = np.asarray(trajectories, np.int64)
        if numbers.shape != kl.shape:
            raise ValueError(
                f"trajectories have shape {numbers.shape} for {len(kl)} rows; there must be one per row"
            )
        _, places = np.unique(numbers, return_inverse=True)
        kl = np.bincount(places, weights=kl, minlength=0)[places]
    result = values - beta * kl
    check_finite(result, "rewards")
    return result.astype(np.float32), kl.astype(np.float32)


def compute_token_rewards(
    rewards: ArrayLike,
    log_probs: Sequence[FloatArray],
    ref_log_probs: Sequence[FloatArray],
    loss_masks: Sequence[BoolArray],
    beta: float,
) -> tuple[FloatArray, ...]:
    """Per row [T_i]: −beta·(log_prob − ref_log_prob) on every trained token, with the row's reward added on
    the last one. 0 elsewhere.

    What `compute_gae` and `compute_discounted_returns` take: a token then answers for the KL of the tokens
    after it and not for those before. Used with the policy gradient, the coefficient of a token's ∇log π
    holds −beta·log(π/ref) of itself and its future. A row without trained tokens has nowhere to put its
    reward and gets zeros. Paper: InstructGPT, 2203.02155. Raises as `subtract_kl`.
    """
    values = _one_per_row(rewards, len(log_probs))
    check_finite(values, "rewards")
    token_rewards = []
    for row, (kl, mask) in enumerate(
        zip(_token_kl(log_probs, ref_log_probs, loss_masks), loss_masks, strict=True)
    ):
        trained = -beta * kl
        if len(trained):
            trained[-1] += values[row]
        if not np.isfinite(trained).all():
            raise ValueError(
                f"row {row} has a log-prob on a trained token that is not finite, so its token rewards would"
                " not be"
            )
        full = np.zeros(len(mask), np.float32)
        full[mask] = trained
        token_rewards.append(full)
    return tuple(token_rewards)


def _one_per_row(rewards: ArrayLike, rows: int) -> Floats:
    values = np.asarray(rewards, np.float64)
    if values.shape != (rows,):
        raise ValueError(
            f"rewards have shape {values.shape} for {rows} rows of log-probs; there must be one per row"
        )
    return values


def _token_kl(
    log_probs: Sequence[FloatArray], ref_log_probs: Sequence[FloatArray], loss_masks: Sequence[BoolArray]
) -> list[Floats]:
    """log_prob − ref_log_prob of the trained tokens of each row."""
    found = []
    for row, (policy, reference, mask) in enumerate(zip(log_probs, ref_log_probs, loss_masks, strict=True)):
        if not len(policy) == len(reference) == len(mask):
            raise ValueError(
                f"row {row} has {len(policy)} log-probs, {len(reference)} reference log-probs and {len(mask)}"
                " mask values"
            )
        found.append(np.asarray(policy, np.float64)[mask] - np.asarray(reference, np.float64)[mask])
    return found

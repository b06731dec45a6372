"""The KL term inside the reward: once per trajectory, or on every token. k1, detached: numbers in, numbers
out.
"""

import numpy as np
from numpy.typing import ArrayLike

from rollouts.advantages.inputs import (
    FloatRows,
    Floats,
    Masks,
    Rows,
    check_finite,
    require,
    scatter_trained,
    take_trained,
)
from rollouts.types import FloatArray


def subtract_kl(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
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
    ValueError on lengths that differ and naming the row with a number that is not finite.
    """
    values, kls = _token_kl(rewards, log_probs, ref_log_probs, loss_masks)
    kl = np.asarray([row.sum() for row in kls], np.float64)
    if trajectories is not None:
        numbers = np.asarray(trajectories, np.int64)
        require(
            numbers.shape == kl.shape,
            f"trajectories have shape {numbers.shape} for {len(kl)} rows; one per row",
        )
        _, places = np.unique(numbers, return_inverse=True)
        kl = np.bincount(places, weights=kl)[places]
    return (values - beta * kl).astype(np.float32), kl.astype(np.float32)


def compute_token_rewards(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
    beta: float,
) -> FloatRows:
    """Per row [T_i]: −beta·(log_prob − ref_log_prob) on every trained token, with the row's reward added on
    the last one. 0 elsewhere.

    What `compute_gae` and `compute_discounted_returns` take: a token then answers for the KL of the tokens
    after it and not for those before. Used with the policy gradient, the coefficient of a token's ∇log π
    holds −beta·log(π/ref) of itself and its future. A row without trained tokens has nowhere to put its
    reward and gets zeros. Paper: InstructGPT, 2203.02155. Raises as `subtract_kl`.
    """
    values, kls = _token_kl(rewards, log_probs, ref_log_probs, loss_masks)
    rows = [-beta * kl for kl in kls]
    for row, reward in zip(rows, values, strict=True):
        row[-1:] += reward
    return tuple(map(scatter_trained, rows, loss_masks))


def _token_kl(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
) -> tuple[Floats, list[Floats]]:
    """The rewards [B], and log_prob − ref_log_prob of the trained tokens of each row."""
    values = np.asarray(rewards, np.float64)
    require(
        values.shape == (len(log_probs),),
        f"rewards have shape {values.shape} for {len(log_probs)} rows; there must be one per row",
    )
    check_finite(values, "rewards")
    policy = take_trained("log_probs", log_probs, loss_masks)
    reference = take_trained("ref_log_probs", ref_log_probs, loss_masks)
    return values, [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]

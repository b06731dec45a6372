"""The KL term inside the reward: once per trajectory, or on every token. k1, detached: numbers in, numbers
out.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.advantages.inputs import (
    FloatRows,
    Floats,
    Masks,
    Rows,
    check_rows,
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
    places = _find_places(trajectories, len(kls))
    kl = np.bincount(places, [row.sum() for row in kls])[places]
    return (values - beta * kl).astype(np.float32), kl.astype(np.float32)


def compute_token_rewards(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
    beta: float,
    *,
    trajectories: ArrayLike | None = None,
    turn_rewards: Rows | None = None,
) -> FloatRows:
    """Per row [T_i]: −beta·(log_prob − ref_log_prob) on every trained token, with its turn's reward, if any,
    and on the last one with what those leave of the row's reward. 0 elsewhere.

    Of rows with equal `trajectories` [B], which share a reward, the last one that trains gets that.

    What `compute_gae` and `compute_discounted_returns` take: a token then answers for the KL of the tokens
    after it and not for those before. Used with the policy gradient, the coefficient of a token's ∇log π
    holds −beta·log(π/ref) of itself and its future. A row without trained tokens has nowhere to put its
    reward and gets zeros; so has a turn whose last token does not train, and its reward stays with what is
    left. Paper: InstructGPT, 2203.02155. Raises as `subtract_kl`.
    """
    values, kls = _token_kl(rewards, log_probs, ref_log_probs, loss_masks)
    rows = [-beta * kl for kl in kls]
    places = _find_places(trajectories, len(rows))
    left = values[np.unique(places, return_index=True)[1]]
    if turn_rewards is not None:
        turns = take_trained("turn_rewards", turn_rewards, loss_masks)
        rows = [row + own for row, own in zip(rows, turns, strict=True)]
        left -= np.bincount(places, [own.sum() for own in turns])
    ends = {place: row for place, row in zip(places, rows, strict=True) if len(row)}
    for place, row in ends.items():
        row[-1] += left[place]
    return tuple(map(scatter_trained, rows, loss_masks))


def _find_places(trajectories: ArrayLike | None, count: int) -> NDArray[np.intp]:
    """[B] which trajectory each row belongs to, numbered from 0; None: every row is one."""
    numbers = np.arange(count) if trajectories is None else np.asarray(trajectories, np.int64)
    check_rows(numbers, "trajectories", count)
    return np.unique(numbers, return_inverse=True)[1]


def _token_kl(
    rewards: ArrayLike, log_probs: Rows, ref_log_probs: Rows, loss_masks: Masks
) -> tuple[Floats, list[Floats]]:
    """The rewards [B], and log_prob − ref_log_prob of the trained tokens of each row."""
    values = np.asarray(rewards, np.float64)
    check_rows(values, "rewards", len(log_probs))
    policy = take_trained("log_probs", log_probs, loss_masks)
    reference = take_trained("ref_log_probs", ref_log_probs, loss_masks)
    return values, [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]

"""Advantages in self-play: each role against a running mean of its own rewards. The caller keeps the running
means.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rollouts.advantages.inputs import check_finite, require
from rollouts.types import FloatArray


class RoleAdvantages(NamedTuple):
    """Advantages and what to pass as `baselines` next time."""

    advantages: FloatArray  # [B]
    baselines: dict[str, float]  # running mean reward of each role seen so far


def compute_role_advantages(
    rewards: ArrayLike, roles: Sequence[str], baselines: Mapping[str, float], *, decay: float = 0.95
) -> RoleAdvantages:
    """A = r − b[role], and then b[role] ← decay·b[role] + (1 − decay)·r, row by row in the order given: A is
    taken before r moves b.

    Roles of an unfair game (who moves first) have different means; one baseline for all would reward the
    role. An unknown role starts at 0. The same rewards in another order give other advantages, so keep the
    order fixed. Paper: SPIRAL's role-conditioned advantage estimation, 2506.24119. Raises ValueError on
    lengths that differ, a decay outside 0 to 1 (1 excluded), a reward or baseline not finite.
    """
    values = np.asarray(rewards, np.float64)
    require(
        values.shape == (len(roles),),
        f"rewards have shape {values.shape} for {len(roles)} roles; there must be one per row",
    )
    require(0 <= decay < 1, f"decay={decay}; it must be at least 0 and below 1, 0.95 is usual")
    check_finite(values, "rewards")
    means = {role: float(mean) for role, mean in baselines.items()}
    for role, mean in means.items():
        require(math.isfinite(mean), f"baselines[{role!r}] is {mean}; it must be finite")
    advantages = np.zeros(len(values))
    for row, (role, reward) in enumerate(zip(roles, values.tolist(), strict=True)):
        mean = means.get(role, 0.0)
        advantages[row] = reward - mean
        means[role] = decay * mean + (1.0 - decay) * reward
    return RoleAdvantages(advantages.astype(np.float32), means)

"""Rewards brought to mean 0 and deviation 1, by all that were seen or by one batch."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from rollouts.advantages.inputs import Floats, check_rows
from rollouts.types import FloatArray, Numbers


@dataclass
class RewardNormaliser:
    """A function from rewards [B] to (r − mean) / (deviation + 1e-8), of all rewards that it was ever given,
    these included. A new one normalises by its first batch alone.

    Batches are merged as Chan, Golub and LeVeque (1979) do, without the loss of precision of sums of squares.
    """

    count: float = 0
    mean: float = 0.0
    squares: float = 0.0  # Σ (r − mean)²

    def __call__(self, rewards: ArrayLike) -> FloatArray:
        """Raises ValueError naming a reward that is not finite, and then counts none."""
        values = np.asarray(rewards, np.float64)
        check_rows(values, "rewards", len(values))
        if len(values):
            total, shift = self.count + len(values), float(values.mean()) - self.mean
            self.squares += len(values) * (float(values.var()) + shift**2 * self.count / total)
            self.mean += shift * len(values) / total
            self.count = total
        deviation = (self.squares / max(self.count, 1)) ** 0.5
        return ((values - self.mean) / (deviation + 1e-8)).astype(np.float32)

    def scale(self, rewards: ArrayLike) -> Floats:
        """By those before alone, which these do not join; not divided where there were none, or all alike but
        for rounding.
        """
        deviation = (self.squares / max(self.count, 1)) ** 0.5
        if deviation <= 1e-6 * max(1.0, abs(self.mean)):
            deviation = 1.0
        return (np.asarray(rewards, np.float64) - self.mean) / deviation

    def state_dict(self) -> Numbers:
        """RewardNormaliser(**state) goes on from it."""
        return asdict(self)

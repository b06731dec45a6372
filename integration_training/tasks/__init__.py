"""Tasks to train on: a dataset, a reward, a filter and a check of the gold answers on one page each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup

Row = dict[str, Any]


def make_each(task: str, size: int, seed: int, make_row: Callable[[random.Random], Row]) -> list[Row]:
    """`size` rows. Row i depends on (task, seed, i) alone."""
    return [make_row(random.Random(f"{task}/{seed}/{index}")) for index in range(size)]


def keep_mixed(group: SampleGroup) -> FilterDecision:
    """Keeps a group whose samples do not all have the same reward: with equal rewards every advantage is
    0.
    """
    if group.rewards.min() < group.rewards.max():
        return FilterDecision(keep=True)
    return FilterDecision(False, "same_reward", f"every sample has {group.rewards[0]:g}")


def check_gold(rows: Sequence[Row], *rewards: Callable[[Sample], RewardResult]) -> None:
    """Raises AssertionError, showing the row, if a row's own answer does not earn the full reward."""
    for row in rows:
        sample = Sample(id="gold", prompt=row["prompt"], response=row["answer"], metadata=row)
        for reward in rewards:
            assert reward(sample).reward == 1.0, (row, reward(sample))

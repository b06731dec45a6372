"""Tasks to train on: a dataset, a reward and a filter on one page each."""

import random
from collections.abc import Callable
from typing import Any

from rollouts.types import FilterDecision, SampleGroup

Row = dict[str, Any]
ALIKE = 1e-6  # rewards nearer than this are equal: a model's scores of the same response are


def make_task(task: str, make_row: Callable[..., Row]) -> Callable[..., list[Row]]:
    """A function that makes `size` rows of a task by calling `make_row` with a source of random numbers and
    its parameters. Row i depends on (task, seed, i) alone.
    """

    def make_rows(*, size: int, seed: int, **params: Any) -> list[Row]:
        draws = (random.Random(f"{task}/{seed}/{index}") for index in range(size))
        return [make_row(draw, **params) for draw in draws]

    return make_rows


def keep_mixed(group: SampleGroup) -> FilterDecision:
    """Keeps a group whose samples do not all have the same reward: with equal rewards every advantage is 0.
    With a critic such a group teaches too: then leave this out.
    """
    if group.rewards.max() - group.rewards.min() > ALIKE:
        return FilterDecision(keep=True)
    return FilterDecision(False, "same_reward", f"every sample has {group.rewards[0]:g}")

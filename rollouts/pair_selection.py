"""Pairs for a preference loss out of a scored group: which sample is chosen over which. Plain functions."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from rollouts.errors import ConfigError, find_by_name
from rollouts.types import Sample, SampleGroup


class SamplePair(NamedTuple):
    """Two samples of one group."""

    chosen: Sample  # the one of the higher reward
    rejected: Sample

    @property
    def margin(self) -> float:
        """Reward of the chosen less that of the rejected."""
        return (self.chosen.reward or 0.0) - (self.rejected.reward or 0.0)


ROUNDING = 1e-9  # 0.3 and 0.2 differ by 0.1, though not in binary
PairSelector = Callable[[SampleGroup], list[SamplePair]]


def select_best_worst(group: SampleGroup) -> list[SamplePair]:
    """The sample of the highest reward over that of the lowest, of equal ones the first; no pair where all
    rewards are equal.

    A trajectory of several segments counts once, as its last segment. Raises ValueError if a sample has no
    reward.
    """
    return _order_pairs(group)[:1]


def make_margin_selector(min_margin: float) -> PairSelector:
    """Every two samples whose rewards differ by `min_margin` or more, the widest margin first: up to G·(G −
    1)/2 pairs of a group, and a sample may be in several.

    Segments and errors as in `select_best_worst`. Raises ConfigError unless min_margin is a number above 0.
    """
    if not 0 < min_margin < math.inf:
        raise ConfigError(
            f"min_margin={min_margin} of pairs must be a number above 0, in units of the reward"
        )

    enough = min_margin * (1 - ROUNDING)
    return lambda group: [pair for pair in _order_pairs(group) if pair.margin >= enough]


def _order_pairs(group: SampleGroup) -> list[SamplePair]:
    """Every two samples of different rewards, the widest margin first, in launch order where margins are
    equal.
    """
    len(group.rewards)  # raises for a sample without one
    pairs = (SamplePair(*two) for two in itertools.permutations(group.ends, 2))
    return sorted((pair for pair in pairs if pair.margin > 0), key=lambda pair: -pair.margin)


PAIR_SELECTORS = {"best_worst": lambda: select_best_worst, "margin": make_margin_selector}
"""Name -> the function that binds a selector's settings."""


def find_pair_selector(selector: str | PairSelector) -> PairSelector:
    """The selector that "best_worst" or "margin(min_margin=0.5)" names; a function is one already. Raises
    ConfigError as find_by_name.
    """
    return find_by_name("pair selector", selector, PAIR_SELECTORS)

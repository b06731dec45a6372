"""Pairs out of a scored group: who is chosen over whom, by which rule."""

import pytest

from rollouts.errors import ConfigError
from rollouts.pair_selection import find_pair_selector
from rollouts.types import Sample, SampleGroup
from tests.support.text_tables import cases


def select(selector, rewards):
    """The ids of each pair, together."""
    samples = (Sample(id=name, prompt="q", reward=reward) for name, reward in rewards.items())
    pairs = find_pair_selector(selector)(SampleGroup(0, "row-0", tuple(samples)))
    return [f"{chosen.id}{rejected.id}" for chosen, rejected in pairs]


@cases("""
selector               | rewards   | pairs          | …
best_worst             | 0.5 1 0 1 | bc
best_worst             | 0 0 1 0   | ca             | of equal ones the first
best_worst             | 1 1 1 1   |
best_worst             |           |
margin(min_margin=0.5) | 0.5 1 0 1 | bc dc ac ba da
margin(min_margin=0.6) | 0.5 1 0 1 | bc dc
margin(min_margin=0.1) | 0.3 0.2   | ab             | 0.09999999999999998
""")
def test_the_pairs_of_a_group(selector, rewards: list[float], pairs):
    assert select(selector, dict(zip("abcd", rewards, strict=False))) == pairs.split()


def test_a_function_of_ones_own_selects_pairs():
    assert select(lambda group: [(group.samples[0], group.samples[1])], {"a": 0.0, "b": 1.0}) == ["ab"]


def test_a_trajectory_of_several_segments_is_in_a_pair_once():
    assert select("margin(min_margin=1)", {"a": 1.0, "b": 0.0, "a.1": 1.0}) == ["a.1b"]


def test_a_sample_without_a_reward_is_named_by_its_group():
    with pytest.raises(ValueError, match="group 0 has samples without a reward"):
        select("best_worst", {"a": 1.0, "b": None})


@cases("""
selector               | message
worst_best             | pair selector='worst_best': 'worst_best'; there are best_worst, margin, as name or
margin(0.5)            | not of the form name or name
margin                 | missing 1 required positional argument: 'min_margin'
margin(min_margin=nan) | min_margin=nan of pairs must be a number above 0
""")
def test_a_selector_that_is_none_is_refused(selector, message):
    with pytest.raises(ConfigError, match=message):
        find_pair_selector(selector)

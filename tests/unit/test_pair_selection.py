"""Pairs out of a scored group: who is chosen over whom, by which rule."""

from dataclasses import replace

import pytest

from rollouts.errors import ConfigError, PlugInError
from rollouts.pair_selection import find_pair_selector
from rollouts.types import Sample, SampleGroup


def make_group(*rewards: float | None, ids: str = "abcd") -> SampleGroup:
    samples = (Sample(id=name, prompt="q", reward=reward) for name, reward in zip(ids, rewards, strict=False))
    return SampleGroup(0, "row-0", tuple(samples))


@pytest.mark.parametrize(
    ("selector", "rewards", "pairs"),
    [
        ("best_worst", (0.5, 1, 0, 1), ["bc"]),
        ("best_worst", (0, 0, 1, 0), ["ca"]),  # of equal ones the first
        ("best_worst", (1, 1, 1, 1), []),
        ("best_worst", (), []),
        ("margin(min_margin=0.5)", (0.5, 1, 0, 1), ["bc", "dc", "ac", "ba", "da"]),
        ("margin(min_margin=0.6)", (0.5, 1, 0, 1), ["bc", "dc"]),
        ("margin(min_margin=0.1)", (0.3, 0.2), ["ab"]),  # 0.09999999999999998
        (lambda group: [(group.samples[0], group.samples[1])], (0, 1), ["ab"]),
    ],
)
def test_the_pairs_of_a_group(selector, rewards, pairs):
    found = find_pair_selector(selector)(make_group(*rewards))
    assert [chosen.id + rejected.id for chosen, rejected in found] == pairs


def test_a_trajectory_of_several_segments_is_in_a_pair_once():
    group = make_group(1.0, 0.0, 1.0)
    first, other, last = group.samples
    group = replace(group, samples=(first, other, replace(last, id="a.1")))
    assert [(good.id, bad.id) for good, bad in find_pair_selector("margin(min_margin=1)")(group)] == [
        ("a.1", "b")
    ]


@pytest.mark.parametrize(
    ("selector", "error", "message"),
    [
        ("worst_best", PlugInError, "'worst_best' is none of best_worst, margin"),
        ("margin(0.5)", PlugInError, "write name or name"),
        ("margin", ConfigError, "min_margin"),
        ("best_worst(min_margin=1)", ConfigError, "min_margin"),
        ("margin(min_margin=0)", ConfigError, "min_margin=0.0 of pairs must be a number above 0"),
        ("margin(min_margin=nan)", ConfigError, "min_margin=nan of pairs"),
    ],
)
def test_a_selector_that_is_none_is_refused(selector: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        find_pair_selector(selector)


def test_a_sample_without_a_reward_is_named_by_its_group():
    with pytest.raises(ValueError, match="group 0 has samples without a reward"):
        find_pair_selector("best_worst")(make_group(1.0, None))

"""Group filters: what they drop, under which name, with which numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollouts.errors import ConfigError, PlugInError
from rollouts.filters import FILTERS, RANKERS, make_filter
from rollouts.types import FilterDecision, Sample, SampleGroup, Status
from tests.support.text_tables import cases


def make_group(
    rewards: Sequence[float], responses: Sequence[str] = "abcd", lengths: Sequence[int] = (3,) * 4
):
    rows = zip(rewards, responses, lengths, strict=False)
    samples = [
        Sample(
            id=f"s{index}",
            prompt="q",
            response=response,
            tokens=[5] * (2 + length),
            loss_mask=[0, 0] + [1] * length,
            reward=reward,
            rewards={"r": reward},
        )
        for index, (reward, response, length) in enumerate(rows)
    ]
    return SampleGroup(0, "row-0", tuple(samples))


# ~ is white space; 1.0000001: a sum of parts may miss 1 by its rounding
@cases("""
name | rewards | responses | thresholds | reason | detail
reward_nonzero_std | .1 .1 .1 | | | zero_variance | 3 rewards around 0.1
reward_nonzero_std | 0 0 1 | | | |
min_reward | 0 1 | | min_reward = 0.5 | |
min_reward | 0 0 1 | | min_reward = 0.5 | low_reward | 0.3333 of 3 samples is below
mixed_accuracy | 0 1 1 | | | |
mixed_accuracy | 1 1 | | | too_easy | 1 of 2 samples (the reward) is not below 1
mixed_accuracy | 0 0 | | part = "r" | too_hard | (r) is not above 0
mixed_accuracy | 0 1 1 1 | | high = 0.75 | too_easy |
mixed_accuracy | 0 1.0000001 | | | |
response_diversity | 0 0 0 0 | a,a~,a,b | min_unique_fraction = 0.5 | |
response_diversity | 0 0 0 0 | a,a,~a,a~ | min_unique_fraction = 0.5 | low_diversity | 1 of 4 responses
reasonable_length | 0 0 0 0 | | min_tokens = 2, max_tokens = 9 | |
reasonable_length | 0 0 0 0 | | min_tokens = 3, max_tokens = 9 | unreasonable_length | shortest 1, longest 10
quality_and_diversity | 0 1 | a,a | min_reward = 0.6 | low_reward |
quality_and_diversity | 1 1 | a,a | | zero_variance |
quality_and_diversity | 0 1 | a,a | min_unique_fraction = 0.6 | low_diversity |
quality_and_diversity | 0 1 | | | |
""")
def test_what_is_dropped_and_why(name, rewards: list[float], responses, thresholds: dict, reason, detail):
    texts = responses.replace("~", "\n ").split(",") if responses else "abcd"
    group = make_group(rewards, texts, [1, 2, 9, 10])
    decision = make_filter(f"check_{name}", **thresholds)(group)
    assert (decision.keep, decision.reason) == (not reason, reason)
    assert detail in decision.detail


def test_a_trajectory_of_several_segments_counts_once():
    group = make_group([1, 1, 1, 0])
    names = ("s0", "s0.1", "s0.2", "s1")
    samples = [replace(sample, id=name) for sample, name in zip(group.samples, names, strict=True)]
    group = replace(group, samples=tuple(samples))
    assert [sample.id for sample in group.ends] == ["s0.2", "s1"]
    for name, thresholds in (
        ("check_mixed_accuracy", {"high": 0.75}),
        ("check_mixed_accuracy", {"high": 0.75, "part": "r"}),
        ("check_reward_nonzero_std", {"min_std": 0.49}),
    ):
        assert FILTERS[name](group, **thresholds) == FilterDecision(keep=True)
    assert FILTERS["check_min_reward"](group, min_reward=0.6).detail.startswith(
        "mean reward 0.5 of 2 samples"
    )
    assert RANKERS["reward_std"](group) == 0.5
    long = FILTERS["check_reasonable_length"](group, max_tokens=8, max_outside_fraction=0.4)
    alike = FILTERS["check_response_diversity"](group, min_unique_fraction=1.1)
    assert long.detail.startswith("1 of 2 responses") and alike.detail.startswith("2 of 2 responses")


def test_a_group_of_truncated_samples_alone_is_dropped():
    group = make_group([0, 1])
    cut = tuple(replace(sample, status=Status.TRUNCATED) for sample in group.samples)
    reasons = [
        FILTERS["check_some_complete"](replace(group, samples=samples)).reason
        for samples in (cut, (cut[0], group.samples[1]))
    ]
    assert reasons == ["truncated", ""]


@cases("""
name                 | thresholds | rewards | message
check_mixed_accuracy |           | 1 -1 | the reward of a sample of group 0 is -1
check_mixed_accuracy | part="acc"| 1    | needs the part 'acc'
check_min_reward     |           |      | group 0 has samples
check_min            |           | 1    | 'check_min' is not one of check_reward_nonzero_std
check_min_reward     | min=1     | 1    | no parameter 'min'; it takes min_reward
check_min_reward     | group=1   | 1    | no parameter 'group'
""")
def test_what_cannot_be_judged_is_named(name, thresholds: dict, rewards: list[float], message):
    group = make_group(rewards)
    if not rewards:
        group = replace(group, samples=(Sample(id="s", prompt="q"),))
    with pytest.raises((ValueError, PlugInError, ConfigError), match=message):
        make_filter(name, **thresholds)(group)

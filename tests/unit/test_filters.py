"""Group filters: what they drop, under which name, with which numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollouts.errors import PlugInError
from rollouts.filters import (
    check_min_reward,
    check_mixed_accuracy,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    make_filter,
)
from rollouts.types import FilterDecision, Sample, SampleGroup

KEPT = FilterDecision(keep=True)


def make_group(
    rewards: list[float], responses: list[str] | None = None, lengths: list[int] | None = None
) -> SampleGroup:
    responses = responses or [f"answer {index}" for index in range(len(rewards))]
    lengths = lengths or [3] * len(rewards)
    samples = [
        Sample(
            id=f"s{index}",
            prompt="q",
            response=response,
            tokens=[5] * (2 + length),
            loss_mask=[0, 0] + [1] * length,
            reward=reward,
        )
        for index, (reward, response, length) in enumerate(zip(rewards, responses, lengths, strict=True))
    ]
    return SampleGroup(0, "row-0", tuple(samples))


def test_rewards_that_are_all_alike_are_dropped_as_zero_variance():
    decision = check_reward_nonzero_std(make_group([0.1, 0.1, 0.1]))
    assert (decision.keep, decision.reason) == (False, "zero_variance")
    assert "3 rewards around 0.1" in decision.detail
    assert check_reward_nonzero_std(make_group([0, 0, 1])) == KEPT


def test_the_mean_reward_decides_and_the_bound_itself_is_enough():
    assert check_min_reward(make_group([0, 1]), min_reward=0.5) == KEPT
    decision = check_min_reward(make_group([0, 0, 1]), min_reward=0.5)
    assert decision == FilterDecision(False, "low_reward", "mean reward 0.3333 of 3 samples is below 0.5")
    assert check_min_reward(make_group([-1, 0])).reason == "low_reward"


def test_groups_that_are_always_or_never_right_are_dropped_by_name():
    assert check_mixed_accuracy(make_group([0, 1, 1])) == KEPT
    easy = check_mixed_accuracy(make_group([1, 1]))
    assert easy == FilterDecision(False, "too_easy", "accuracy 1 of 2 samples (the reward) is not below 1")
    assert check_mixed_accuracy(make_group([0, 0])).reason == "too_hard"
    assert check_mixed_accuracy(make_group([0, 1, 1, 1]), high=0.75).reason == "too_easy", (
        "the bounds are outside"
    )
    assert check_mixed_accuracy(make_group([0, 0, 0, 1]), low=0.25).reason == "too_hard"


def test_a_trajectory_of_several_segments_counts_once():
    group = make_group([1, 1, 1, 0])
    names = ("s0", "s0.1", "s0.2", "s1")
    group = replace(
        group,
        samples=tuple(
            replace(s, id=name, rewards={"r": s.reward or 0})
            for s, name in zip(group.samples, names, strict=True)
        ),
    )
    assert check_mixed_accuracy(group, high=0.75) == KEPT, "one of two is right, not three of four"
    assert check_mixed_accuracy(group, part="r", high=0.75) == KEPT
    assert check_reward_nonzero_std(group, min_std=0.49) == KEPT
    assert check_min_reward(group, min_reward=0.6).detail == "mean reward 0.5 of 2 samples is below 0.6"
    assert [sample.id for sample in group.ends] == ["s0.2", "s1"]


@pytest.mark.parametrize("rewards", [[1, 1, -1, -1], [0, 1.1]])
def test_rewards_whose_mean_is_no_accuracy_are_refused(rewards: list[float]):
    with pytest.raises(
        ValueError,
        match=rf"the reward of a sample of group 0 is {min(rewards) or max(rewards)}; an accuracy is a mean",
    ):
        check_mixed_accuracy(make_group(rewards))
    assert check_mixed_accuracy(make_group([0, 1.0000001])) == KEPT, (
        "a sum of parts may miss 1 by its rounding"
    )


def test_accuracy_is_read_from_its_part_when_the_reward_is_shaped():
    group = make_group([1.0, 0.6])  # both right, one of them too long
    parts = ({"right": 1.0, "overlong": 0.0}, {"right": 1.0, "overlong": -0.4})
    samples = tuple(
        replace(sample, rewards=rewards) for sample, rewards in zip(group.samples, parts, strict=True)
    )
    shaped = replace(group, samples=samples)
    assert check_mixed_accuracy(shaped) == KEPT
    assert check_mixed_accuracy(shaped, part="right").reason == "too_easy"
    assert make_filter("check_mixed_accuracy", part="right")(shaped).reason == "too_easy"
    with pytest.raises(ValueError, match="check_mixed_accuracy needs the part 'acc' of the reward"):
        check_mixed_accuracy(shaped, part="acc")


def test_responses_that_differ_in_white_space_alone_are_the_same():
    assert (
        check_response_diversity(make_group([0, 0, 0, 0], ["a", "a", " a\n", "b"]), min_unique_fraction=0.5)
        == KEPT
    )
    decision = check_response_diversity(
        make_group([0, 0, 0, 0], ["a", "a", " a\n", "a "]), min_unique_fraction=0.5
    )
    assert decision.reason == "low_diversity"
    assert decision.detail == "1 of 4 responses are distinct, a share of 0.25, below 0.5"


def test_lengths_are_counted_in_trained_tokens():
    group = make_group([0, 0, 0, 0], lengths=[1, 2, 9, 10])
    assert (
        check_reasonable_length(group, min_tokens=2, max_tokens=9) == KEPT
    )  # half are outside, which is allowed
    decision = check_reasonable_length(group, min_tokens=3, max_tokens=9)
    assert decision.reason == "unreasonable_length"
    assert (
        "3 of 4 responses have a length outside 3 to 9 tokens (shortest 1, longest 10), a share of 0.75,"
        " above 0.5" in decision.detail
    )
    assert not check_reasonable_length(group, min_tokens=2, max_tokens=9, max_outside_fraction=0.4).keep


def test_quality_and_diversity_gives_the_first_objection():
    assert check_quality_and_diversity(make_group([-1, -1], ["a", "a"])).reason == "low_reward"
    assert check_quality_and_diversity(make_group([1, 1], ["a", "a"])).reason == "zero_variance"
    assert (
        check_quality_and_diversity(make_group([0, 1], ["a", "a"]), min_unique_fraction=0.6).reason
        == "low_diversity"
    )
    assert check_quality_and_diversity(make_group([0, 1])) == KEPT


def test_a_group_without_rewards_is_refused():
    group = SampleGroup(4, "row-0", (Sample(id="s", prompt="q"),))
    with pytest.raises(ValueError, match="group 4 has samples without a reward"):
        check_min_reward(group)


def test_make_filter_replaces_thresholds():
    strict = make_filter("check_min_reward", min_reward=0.9)
    assert strict(make_group([0.8, 0.9])).reason == "low_reward"
    assert make_filter("check_min_reward")(make_group([0.8, 0.9])) == KEPT


@pytest.mark.parametrize(
    ("name", "thresholds", "message"),
    [
        ("check_min", {}, "'check_min' is not one of check_reward_nonzero_std, check_min_reward"),
        ("check_min_reward", {"min": 1}, "check_min_reward has no threshold 'min'; it has min_reward"),
        ("check_min_reward", {"group": 1}, "has no threshold 'group'"),
    ],
)
def test_make_filter_names_what_there_is(name: str, thresholds: dict[str, float], message: str):
    with pytest.raises(PlugInError, match=message):
        make_filter(name, **thresholds)

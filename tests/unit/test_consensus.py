"""Votes of a group as rewards: who agrees with whom, ties, and what no consensus is."""

from __future__ import annotations

import pytest

from rollouts.errors import ConfigError
from rollouts.filters import check_consensus, check_reward_nonzero_std
from rollouts.rewards.check import check_group_rewards
from rollouts.rewards.consensus import compute_consensus, make_consensus_reward
from rollouts.types import Sample, SampleGroup


def test_the_majority_is_the_label_and_no_answer_has_no_vote():
    consensus = compute_consensus(["7", "7", "8", "7", None])
    assert (consensus.label, consensus.rewards) == ("7", (1.0, 1.0, 0.0, 1.0, 0.0))
    assert (consensus.votes, consensus.num_valid, consensus.ratio) == (3, 4, 0.75)
    assert compute_consensus(["7", "7", "8", "7", None], of="all").ratio == 0.6


@pytest.mark.parametrize(
    ("answers", "rules", "label"),
    [
        (["7", "8"], {}, None),
        (["8", "7", "7", "8"], {"ties": "first"}, "8"),
        (["8", "7", "7"], {"ties": "none"}, "7"),
        (["9", "8", "8", "7", "7"], {}, None),  # the tie is of the most votes, wherever it stands
        ([None, None], {}, None),
        ([], {}, None),
        ([None, "3"], {}, "3"),
        (["7", "7", "8", "7", None], {"min_ratio": 0.75}, "7"),  # the bound itself is enough
        (["7", "7", "8", "7", None], {"min_ratio": 0.76}, None),
        (["7", "7", "8", "7", None], {"min_ratio": 0.6, "of": "all"}, "7"),
        (["7", "7", "8", "7", None], {"min_ratio": 0.61, "of": "all"}, None),
        ([0, 0, 1], {}, 0),  # a label that is false is a label
    ],
)
def test_ties_and_ratios_follow_their_rules(answers, rules, label):
    consensus = compute_consensus(answers, **rules)
    assert consensus.label == label
    assert list(consensus.rewards) == [float(label is not None and answer == label) for answer in answers]


def group_of(*answers: str) -> SampleGroup:
    return SampleGroup(
        0,
        "row-0",
        tuple(Sample(id=f"s{index}", prompt="q", response=answer) for index, answer in enumerate(answers)),
    )


def score(group: SampleGroup, **rules) -> SampleGroup:
    reward = make_consensus_reward(lambda sample: sample.response or None, **rules)
    results = check_group_rewards(reward(group.samples), len(group.samples), "consensus")
    scored = (
        Sample(id=sample.id, prompt="q", response=sample.response, reward=result.reward, rewards=result.parts)
        for sample, result in zip(group.samples, results, strict=True)
    )
    return SampleGroup(0, "row-0", tuple(scored))


def test_a_group_is_rewarded_with_its_parts():
    group = score(group_of("7", "7", "8", ""), min_ratio=0.5)
    assert group.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert [sample.rewards["has_answer"] for sample in group.samples] == [1.0, 1.0, 1.0, 0.0]
    assert {(sample.rewards["vote_ratio"], sample.rewards["has_label"]) for sample in group.samples} == {
        (2 / 3, 1.0)
    }
    results = make_consensus_reward(lambda sample: sample.response)(group_of("7", "7").samples)
    assert results[0].note == "label '7'"


def test_a_group_without_consensus_is_dropped_by_name():
    divided = score(group_of("7", "8"))
    decision = check_consensus(divided)
    assert (decision.keep, decision.reason) == (False, "no_consensus")
    assert "vote ratio 0.5" in decision.detail
    assert check_reward_nonzero_std(divided).reason == "zero_variance"
    assert check_consensus(score(group_of("7", "7", "8"))).keep
    weak = check_consensus(score(group_of("7", "7", "8")), min_ratio=0.7)
    assert weak.reason == "no_consensus" and "below 0.7" in weak.detail
    with pytest.raises(ValueError, match="needs the part 'has_label' of the reward"):
        check_consensus(group_of("7"))


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        ({"min_ratio": 1.1}, "min_ratio=1.1"),
        ({"ties": "last"}, "ties='last'; it must be one of none, first"),
        ({"of": "some"}, "of='some'"),
    ],
)
def test_rules_that_make_no_sense_are_refused_when_made(rules, wrong):
    with pytest.raises(ConfigError, match=wrong):
        make_consensus_reward(lambda sample: None, **rules)

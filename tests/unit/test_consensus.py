"""Votes of a group as rewards: who agrees with whom, ties, and what no consensus is."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.filters import check_consensus, check_reward_nonzero_std
from rollouts.rewards.check import apply_reward, check_group_rewards
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


def score(*answers: str, **rules: Any) -> SampleGroup:
    """A group of these answers, "" for none, with the reward of each."""
    samples = [Sample(id=f"s{at}", prompt="q", response=answer) for at, answer in enumerate(answers)]
    reward: Any = make_consensus_reward(lambda sample: sample.response or None, **rules)
    results = check_group_rewards(reward(samples), len(samples), "consensus")
    scored = [apply_reward(sample, result) for sample, result in zip(samples, results, strict=True)]
    return SampleGroup(0, "row-0", tuple(scored))


def test_a_group_is_rewarded_with_its_parts():
    group = score("7", "7", "8", "", min_ratio=0.5)
    assert group.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    for sample, agrees, has_answer in zip(group.samples, [1, 1, 0, 0], [1, 1, 1, 0], strict=True):
        parts = {"agrees": agrees, "has_answer": has_answer, "vote_ratio": 2 / 3, "has_label": 1}
        assert sample.rewards == parts
    assert group.samples[0].metadata["reward_note"] == "label '7'"


def test_a_group_without_consensus_is_dropped_by_name():
    divided, majority = score("7", "8"), score("7", "7", "8")
    for group, rules, says in ((divided, {}, "vote ratio 0.5"), (majority, {"min_ratio": 0.7}, "below 0.7")):
        decision = check_consensus(group, **rules)
        assert (decision.keep, decision.reason) == (False, "no_consensus") and says in decision.detail
    assert check_reward_nonzero_std(divided).reason == "zero_variance"
    assert check_consensus(majority).keep
    with pytest.raises(ValueError, match="needs the part 'has_label' of the reward"):
        check_consensus(SampleGroup(0, "row-0", (Sample(id="s", prompt="q", response="7"),)))


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

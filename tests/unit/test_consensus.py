"""Votes of a group as rewards: who agrees with whom, ties, and what no consensus is."""

import pytest

from rollouts.errors import ConfigError
from rollouts.filters import check_consensus, check_reward_nonzero_std
from rollouts.rewards.check import apply_reward, check_group_rewards
from rollouts.rewards.consensus import compute_consensus, make_consensus_reward
from rollouts.types import Sample, SampleGroup
from tests.support.text_tables import cases


# answers in launch order, - for none | rules | label | votes of valid answers
@cases("""
given      | rules                        | label | votes
7 7 8 7 -  |                              | 7 | 3 of 4
7 8        |                              | - | 1 of 2
8 7 7 8    | ties = "first"               | 8 | 2 of 4
8 7 7      | ties = "none"                | 7 | 2 of 3
9 8 8 7 7  |                              | - | 2 of 5
- -        |                              | - | 0 of 0
           |                              | - | 0 of 0
- 3        |                              | 3 | 1 of 1
7 7 8 7 -  | min_ratio = 0.75             | 7 | 3 of 4
7 7 8 7 -  | min_ratio = 0.76             | - | 3 of 4
7 7 8 7 -  | min_ratio = 0.6, of = "all"  | 7 | 3 of 4
7 7 8 7 -  | min_ratio = 0.61, of = "all" | - | 3 of 4
""")
def test_votes_follow_their_rules(given, rules: dict, label, votes):
    answers = [None if answer == "-" else answer for answer in given.split()]
    consensus = compute_consensus(answers, **rules)
    assert (consensus.label or "-", f"{consensus.votes} of {consensus.num_valid}") == (label, votes)
    assert list(consensus.rewards) == [float(answer == label) for answer in answers]


def test_a_label_that_is_false_is_a_label():
    assert compute_consensus([0, 0, 1]).label == 0


def score(*answers: str, **rules) -> SampleGroup:
    """A group of these answers, "" for none, with the reward of each."""
    samples = [Sample(id=f"s{at}", prompt="q", response=answer) for at, answer in enumerate(answers)]
    reward = make_consensus_reward(lambda sample: sample.response or None, **rules)
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


@cases("""
rules           | wrong
min_ratio = 1.1 | min_ratio=1.1
ties = "last"   | ties='last'; it must be one of none, first
of = "some"     | of='some'
""")
def test_rules_that_make_no_sense_are_refused_when_made(rules: dict, wrong):
    with pytest.raises(ConfigError, match=wrong):
        make_consensus_reward(lambda sample: None, **rules)

"""Group filters: what they drop, under which name, with which numbers. Votes of a group as rewards: who
agrees with whom, ties, and what no consensus is.
"""

from dataclasses import replace

import pytest

from rollouts.errors import ConfigError, PlugInError
from rollouts.filters import FILTERS, RANKERS, check_consensus, check_reward_nonzero_std, make_filter
from rollouts.rewards.check import apply_reward, check_group_rewards
from rollouts.rewards.consensus import compute_consensus, make_consensus_reward
from rollouts.types import FilterDecision, Sample, SampleGroup, Status
from tests.support.text_tables import cases, read_cells, read_params


def make_group(rewards, responses="abcd", lengths=(3,) * 4):
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
    pairs = zip(group.samples, ("s0", "s0.1", "s0.2", "s1"), strict=True)
    group = replace(group, samples=tuple(replace(sample, id=name) for sample, name in pairs))
    assert [sample.id for sample in group.ends] == ["s0.2", "s1"]
    assert RANKERS["reward_std"](group) == 0.5
    for name, thresholds, detail in read_cells("""
check_mixed_accuracy     | high = 0.75              |
check_mixed_accuracy     | high = 0.75, part = "r"  |
check_reward_nonzero_std | min_std = 0.49           |
check_min_reward         | min_reward = 0.6         | mean reward 0.5 of 2 samples
check_reasonable_length  | max_tokens = 8, max_outside_fraction = 0.4 | 1 of 2 responses
check_response_diversity | min_unique_fraction = 1.1 | 2 of 2 responses
"""):
        decision = FILTERS[name](group, **read_params(thresholds))
        assert decision == FilterDecision(keep=True) if not detail else decision.detail.startswith(detail)


def test_a_group_of_truncated_samples_alone_is_dropped():
    group = make_group([0, 1])
    cut = tuple(replace(sample, status=Status.TRUNCATED) for sample in group.samples)
    for samples, reason in ((cut, "truncated"), ((cut[0], group.samples[1]), "")):
        assert FILTERS["check_some_complete"](replace(group, samples=samples)).reason == reason


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


# --- votes --------------------------------------------------------------------------------------------------


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


def score(*answers, **rules):
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

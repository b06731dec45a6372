"""Summaries of a given length, scored as preferences: each sample of a group is compared with every other
one.

[rl.data]
kind = "python"
function = "integration_training.tasks.summary_length:make_rows"
size = 2000
seed = 1

[rl.rollout]
group_reward = "integration_training.tasks.summary_length:win_rates"
filters = ["integration_training.tasks.summary_length:keep_decided"]

[eval]
reward = "integration_training.tasks.summary_length:fits"
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup

WORD = re.compile(r"[a-z']+")
ANIMALS = ("otter", "heron", "badger", "lynx", "marten", "stork", "beaver", "falcon")
PLACES = ("river", "harbour", "orchard", "meadow", "quarry", "canal")
DISCOVERIES = ("lantern", "letter", "compass", "coin", "violin", "map")
HELPERS = ("fisher", "farmer", "teacher", "child", "painter", "sailor")
STORY = (
    "Early in the morning the {animal} left its home near the {place}. It had rained all night, and"
    " everything was wet and quiet. After a long search it found a {discovery} that somebody must have lost"
    " there years ago. A {helper} who came along the path stopped and watched for a while. In the end the"
    " {helper} took the {discovery} home, and the {animal} went back to sleep."
)
SUMMARIES = {  # words: a summary of so many
    8: "{animal} finds {discovery} near {place}; {helper} takes it.",
    10: "By the {place}, {animal} finds {discovery}; the {helper} takes it.",
    12: "The {animal} found a {discovery} near the {place}; a {helper} took it.",
    14: "One morning the {animal} found a {discovery} near the {place}; a {helper} took it.",
    16: "One wet morning the {animal} found a {discovery} near the {place}, and a {helper} took it.",
}


def make_rows(*, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` stories, each to be told in a given number of words; `answer` is one such summary. Row i depends
    on (seed, i) alone.
    """
    return [_make_row(random.Random(f"summary/{seed}/{index}")) for index in range(size)]


def _make_row(draw: random.Random) -> dict[str, Any]:
    facts = {
        "animal": draw.choice(ANIMALS),
        "place": draw.choice(PLACES),
        "discovery": draw.choice(DISCOVERIES),
        "helper": draw.choice(HELPERS),
    }
    target = draw.choice(list(SUMMARIES))
    prompt = f"{STORY.format(**facts)}\n\nTell this story in {target} words."
    return {
        "prompt": prompt,
        "answer": SUMMARIES[target].format(**facts),
        "target_words": target,
        "facts": sorted(facts.values()),
    }


def fits(sample: Sample) -> RewardResult:
    """coverage · length: the share of the story's four facts that are named, times max(0, 1 − |words −
    target| / target).
    """
    words = WORD.findall(sample.response.lower())
    facts, target = sample.metadata["facts"], sample.metadata["target_words"]
    coverage = sum(fact in words for fact in facts) / len(facts)
    length = max(0.0, 1.0 - abs(len(words) - target) / target)
    return RewardResult(coverage * length, {"coverage": coverage, "length": length})


def win_rates(samples: Sequence[Sample]) -> list[RewardResult]:
    """Of each sample, the share of the others that it is preferred to (`fits` decides; a tie is half a win).
    Parts are those of `fits`.
    """
    scores = [fits(sample) for sample in samples]
    others = len(samples) - 1
    if others < 1:
        raise ValueError("a preference needs at least two samples")
    rates = []
    for index, mine in enumerate(scores):
        wins = (
            sum(
                1.0 if mine.reward > other.reward else 0.5 if mine.reward == other.reward else 0.0
                for other in scores
            )
            - 0.5
        )  # not against itself
        rates.append(
            RewardResult(
                wins / others,
                mine.parts,
                note=f"fits {mine.reward:.2f}, sample {index + 1} of {len(samples)}",
            )
        )
    return rates


def keep_decided(group: SampleGroup) -> FilterDecision:
    """Keeps a group in which some sample is preferred to another; if all tie, nothing is learnt."""
    if group.rewards.min() < group.rewards.max():
        return FilterDecision(keep=True)
    return FilterDecision(False, "all_tie", f"{len(group.samples)} samples are as good as each other")


def check_gold_answers(size: int = 200, seed: int = 0) -> None:
    """Raises AssertionError, showing the row, if a row's own summary does not earn the full reward or loses
    against an empty one.
    """
    for row in make_rows(size=size, seed=seed):
        gold = Sample(id="gold", prompt=row["prompt"], response=row["answer"], metadata=row)
        empty = Sample(id="empty", prompt=row["prompt"], response="", metadata=row)
        assert fits(gold).reward == 1.0, (row, fits(gold))
        assert [result.reward for result in win_rates([gold, empty])] == [1.0, 0.0], row

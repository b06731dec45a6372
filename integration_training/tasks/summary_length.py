"""Summaries of a given length, scored as preferences: each sample of a group is compared with every other
one.

[rl.data]
kind = "python"
function = "integration_training.tasks.summary_length:make_rows"
size = 2000
seed = 1

[rl.rollout]
group_reward = "integration_training.tasks.summary_length:win_rates"
filters = ["integration_training.tasks.summary_length:keep_mixed"]

[eval]
reward = "integration_training.tasks.summary_length:fits"
"""

import random
import re
from collections.abc import Sequence

from integration_training.tasks import Row, keep_mixed, make_task
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

WORD = re.compile(r"[a-z']+")
ANIMALS = "otter heron badger lynx marten stork beaver falcon".split()  # noqa: SIM905
PLACES = "river harbour orchard meadow quarry canal".split()  # noqa: SIM905
DISCOVERIES = "lantern letter compass coin violin map".split()  # noqa: SIM905
HELPERS = "fisher farmer teacher child painter sailor".split()  # noqa: SIM905
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


def _make_row(draw: random.Random) -> Row:
    """A story, to be told in a given number of words; `answer` is one such summary."""
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


make_rows = make_task("summary", _make_row)


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
    others = len(scores) - 1
    if others < 1:
        raise ValueError("a preference needs at least two samples")
    wins = [
        sum((mine.reward > other.reward) + 0.5 * (mine.reward == other.reward) for other in scores)
        for mine in scores
    ]
    return [RewardResult((won - 0.5) / others, mine.parts) for won, mine in zip(wins, scores, strict=True)]

"""The rewards that a config names without a module, and parts of a reward that need no answer."""

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

from rollouts.errors import DataError
from rollouts.rewards.check import require_choice
from rollouts.rewards.consensus import RatioOf, TieRule, compute_consensus, make_consensus_reward
from rollouts.rewards.curiosity import Samples, curiosity, halve
from rollouts.rewards.exact import exact_match
from rollouts.rewards.fuzzy import f1_match, fuzzy_match
from rollouts.rewards.math import find_final_number, math_match, numeric_match
from rollouts.rewards.multiple_choice import find_choice, multiple_choice_match
from rollouts.types import TRAJECTORY, Function, RewardResult, Sample

TOO_ALIKE = 0.8  # share of a step's trigrams that an earlier step has: it repeats that step
STEP = re.compile(r"\n+|(?<=[.!?])\s+")
TERM = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]{4,}")  # numbers, and words that are mostly no particles
Against = Literal["answer", "consensus"]
OneLabel = Literal["none", "first"]  # of TieRule: what divides no reward
WINDOW = 20  # steps before one that it may repeat


# --- votes --------------------------------------------------------------------------------------------------


def read_json(text: str) -> str | None:
    """The JSON value that the whole text is, with sorted keys; None if it is none."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return None


EXTRACTS: Mapping[str, Callable[[str], Hashable | None]] = {
    "number": find_final_number,
    "choice": lambda text: find_choice(text)[0],
    "json": read_json,
    "text": lambda text: " ".join(text.lower().split()) or None,
}
"""Answers of responses, by which they vote: the final number, the chosen letter, the JSON value, or the text
in lower case. None has no vote.
"""


def consensus(
    samples: Samples,
    *,
    extract: str = "number",
    min_ratio: float = 0.0,
    ties: TieRule = "none",
    of: RatioOf = "all",
    min_voters: int = 1,
) -> list[RewardResult]:
    """A group reward of 1 for each sample whose answer is the group's label, otherwise 0: that of
    make_consensus_reward, on the answers of EXTRACTS.

    A gate (min_ratio) keeps groups that agree, also where they agree on something wrong. Raises ConfigError.
    """
    require_choice("extract", extract, EXTRACTS)
    read = EXTRACTS[extract]
    rules = {"min_ratio": min_ratio, "ties": ties, "of": of, "min_voters": min_voters}
    return make_consensus_reward(lambda sample: read(sample.response), **rules)(samples)


def final(
    samples: Samples,
    *,
    match: str = "numeric_match",
    against: Against = "answer",
    extract: str = "number",
    min_ratio: float = 0.0,
    ties: OneLabel = "none",
    min_voters: int = 1,
) -> list[RewardResult]:
    """A group reward: how each response matches metadata["answer"], or with against="consensus" the label
    that most answers of the group agree on, without any answer in the data.

    match: exact_match, numeric_match, math_match, fuzzy_match, f1_match or multiple_choice_match. With a
    label it compares what `extract` reads in the responses; without one all get 0. Notes and parts are those
    of `match`. Raises ConfigError, and what `match` raises.
    """
    require_choice("match", match, MATCHES)
    require_choice("against", against, Against)
    require_choice("extract", extract, EXTRACTS)
    require_choice("ties", ties, OneLabel)
    if against == "answer":
        return [MATCHES[match](sample) for sample in samples]
    answers = [EXTRACTS[extract](sample.response) for sample in samples]
    vote = compute_consensus(answers, min_ratio=min_ratio, ties=ties, of="all", min_voters=min_voters)
    if vote.label is None:
        return [RewardResult(0.0, {}, "no label") for _ in samples]
    metadata, results = {"answer": str(vote.label)}, []
    for sample, answer in zip(samples, answers, strict=True):
        said = "" if answer is None else str(answer)
        results.append(MATCHES[match](replace(sample, response=said, metadata=metadata)))
    return results


# --- without an answer --------------------------------------------------------------------------------------


def coherence(sample: Sample) -> RewardResult:
    """The share of the response's steps (lines, sentences) after the first that follow from what was said: 0
    to 1; 0 for fewer than two steps.

    A step follows if it has a number or a word of four letters or more in common with the prompt or an
    earlier step, and repeats none of the WINDOW steps before: TOO_ALIKE or more of its trigrams of words in
    one of them are a repetition, or the same words where it has fewer than three. It sees topics, no
    contradictions. Parts: `steps`, `repeated` (share).
    """
    steps = [step.lower().split() for step in STEP.split(sample.response) if step.strip()]
    asked = (
        [sample.prompt] if isinstance(sample.prompt, str) else [one.get("content") for one in sample.prompt]
    )
    said = {*TERM.findall(" ".join(map(str, asked)).lower())}
    before, follows, repeated = list[set[tuple[str, ...]]](), 0, 0
    for words in steps:
        size = min(3, len(words))
        grams = {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}
        terms = {*TERM.findall(" ".join(words))}
        again = any(len(grams & other) >= TOO_ALIKE * len(grams) for other in before[-WINDOW:])
        repeated += again
        follows += bool(before) and not again and not said.isdisjoint(terms)
        said |= terms
        before.append(grams)
    pairs = max(1, len(steps) - 1)
    parts = {"steps": float(len(steps)), "repeated": repeated / pairs}
    return RewardResult(follows / pairs, parts)


async def coherence_scored(
    samples: Samples, *, reference: Any = None, cap: float = 1.0, min_tokens: int = 4
) -> list[Any]:
    """A group reward of min(cap, max(0, lift)) · (1 − `repeated` of coherence); 0 without a reference.

    lift: the mean over the second half of the sampled tokens of log p(token | all before it) − log p(token |
    all before it but the first half of the sampled tokens), in nats, of the reference; 0 where the second
    half has fewer than min_tokens. Part: `lift`.
    """
    if not reference:
        return [0.0] * len(samples)
    scores = await reference.score(halve(samples, alone=True))
    results = []
    for sample, alone, whole in zip(samples, scores[::2], scores[1::2], strict=True):
        half = sample.response_length // 2
        lift = (whole.sum() - alone.sum()) / half if half >= min_tokens else 0.0
        reward = min(cap, max(0.0, lift)) * (1 - coherence(sample).parts["repeated"])
        results.append(RewardResult(reward, {"lift": lift}))
    return results


async def novelty(
    samples: Samples,
    *,
    state: Any = None,
    learn: bool = False,
    extract: str = "number",
    cap: float = 1.0,
    capacity: int = 100_000,
) -> list[float]:
    """A group reward of min(cap, 1/√n), n the samples of this prompt with this answer, of EXTRACTS, in
    batches that trained, itself included; 0 without an answer. Of more than `capacity` answers those are
    forgotten that were not given for longest.
    """
    require_choice("extract", extract, EXTRACTS)
    keys = [f"{one.metadata.get('prompt_id')} {EXTRACTS[extract](one.response)}" for one in samples]
    rewards = [
        0.0 if key.endswith(" None") else min(cap, (state.get(key, 0) + 1) ** -0.5)  # no answer reads so
        for key in keys
    ]
    if learn:
        for key in keys:
            state[key] = state.pop(key, 0) + 1
        for key in [*state][:-capacity]:
            del state[key]
    return rewards


MISUSED = ("unreadable", "unknown", "arguments", "failed")  # outcomes of calls that are the model's doing


def tool_penalty(
    samples: Samples,
    *,
    misuse: float = 0.1,
    excess: float = 0.1,
    max_calls: int = 8,
    right: str = "",
) -> list[RewardResult]:
    """A group reward of −(misuse · m + excess · e) for trajectories with tools.

    m: calls that could not be read, of no tool, with wrong arguments, or that the tool refused, and 1 for a
    trajectory that a limit ended. e: calls beyond max_calls, and calls with the arguments of an earlier one;
    with `right`, the name of a part of the reward that stands before, only where that is above 0: a wrong
    answer is not paid for calling less. Calls of rl.rollout.agent's programs are not seen. Parts: `misuse`
    and `excess`, counts. Raises DataError for a sample that is no trajectory, or lacks that part.
    """
    results = []
    for sample in samples:
        record = sample.metadata.get(TRAJECTORY)
        if record is None or (right and right not in sample.rewards):
            raise DataError(
                f"sample {sample.id} has {'no part ' + repr(right) if record else 'no tools or environment'};"
                f" tool_penalty is about trajectories, and right={right!r} names a part that stands before it"
            )
        outcomes = [call["outcome"] for turn in record["turns"] for call in turn.get("calls", ())]
        asked = 1 if isinstance(sample.prompt, str) else len(sample.prompt)  # messages of the prompt
        made = Counter(
            json.dumps(call["function"], sort_keys=True)
            for message in sample.metadata["messages"][asked:]
            for call in message.get("tool_calls", ())
        )
        wrong = sum(outcome in MISUSED for outcome in outcomes) + (record["end"] != "done")
        beyond = max(0, len(outcomes) - max_calls) + made.total() - len(made)
        counts = not right or sample.rewards[right] > 0
        results.append(
            RewardResult(-(misuse * wrong + excess * beyond * counts), {"misuse": wrong, "excess": beyond})
        )
    return results


MATCHES: Mapping[str, Callable[[Sample], RewardResult]] = {
    one.__name__: one
    for one in (exact_match, f1_match, fuzzy_match, math_match, multiple_choice_match, numeric_match)
}
LIBRARY: Mapping[str, Mapping[str, Function]] = {  # by role
    "reward": {**MATCHES, "coherence": coherence},
    "group_reward": {
        one.__name__: one for one in (coherence_scored, consensus, curiosity, final, novelty, tool_penalty)
    },
}
"""What a config names by a single word."""

"""The response has a form."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollouts.errors import ConfigError, require
from rollouts.messages import parse_json
from rollouts.rewards.check import PlainReward, check_reward, function_name
from rollouts.types import RewardResult, Sample

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
ANSWER_TAG = r"<answer>((?:(?!</?answer>).)*)</answer>"
TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r} is not a regular expression: {error}") from error


def make_format_reward(pattern: str, *, weight: float = 1.0) -> PlainReward:
    """A reward of `weight` where the whole response matches the regular expression (a dot matches newlines
    too), otherwise 0.

    Part `format` is the reward itself. Raises ConfigError naming the pattern and the place where it is wrong.
    """
    compiled = _compile(pattern)

    def format_reward(sample: Sample) -> RewardResult:
        matched = weight * float(compiled.fullmatch(sample.response) is not None)
        return RewardResult(matched, {"format": matched})

    return format_reward


think_answer_format = make_format_reward(THINK_ANSWER)
"""1 where the response is <think>…</think> followed by <answer>…</answer> and nothing else."""


def make_tags_reward(tags: Sequence[str], *, partial: bool = False) -> PlainReward:
    """A reward of 1 where the response is <tag>…</tag> of each tag, in this order and with nothing but white
    space between, otherwise 0.

    With `partial` it is the fraction of the opening and closing tags that stand in the response exactly once,
    in any order and with any text. Part `format` is the reward itself. Raises ConfigError for no tags, a tag
    twice or a name that is no tag's.
    """
    names = [tags] if isinstance(tags, str) else list(tags)
    require(
        0 < len(set(names)) == len(names) and all(map(TAG_NAME.fullmatch, names)),
        f"tags={tags!r}; they must be names such as 'think' and 'answer', at least one and each once",
    )
    inside = "|".join(f"</?{name}>" for name in names)
    if not partial:
        whole = r"\s*".join(rf"<{name}>(?:(?!{inside}).)*</{name}>" for name in names)
        return make_format_reward(rf"\s*{whole}\s*")
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]

    def tags_reward(sample: Sample) -> RewardResult:
        matched = sum(sample.response.count(mark) == 1 for mark in marks) / len(marks)
        return RewardResult(matched, {"format": matched})

    return tags_reward


def make_json_reward(required_keys: Sequence[str]) -> PlainReward:
    """A reward of 1 where the whole response is a JSON object with these keys, otherwise 0; without keys any
    JSON value will do.

    White space around it is allowed; NaN, Infinity and a key twice in one object are not JSON here. Parts:
    `format`, the reward itself, and `json`, 1 if the response is JSON of any kind. The note says what is
    wrong. Raises ConfigError for a key that is no text, or a bare text of keys.
    """
    require(
        not isinstance(required_keys, str) and all(isinstance(key, str) for key in required_keys),
        f"required_keys={required_keys!r}; it must be a list of texts",
    )

    def json_format(sample: Sample) -> RewardResult:
        try:
            value = parse_json(sample.response)
        except (ValueError, RecursionError) as error:
            return RewardResult(0.0, {"format": 0.0, "json": 0.0}, f"not JSON: {error}")
        missing = [key for key in required_keys if not isinstance(value, dict) or key not in value]
        note = f"JSON without the keys {', '.join(missing)}" if missing else None
        return RewardResult(float(not missing), {"format": float(not missing), "json": 1.0}, note)

    return json_format


json_format = make_json_reward(())
"""1 where the whole response is one JSON value, otherwise 0."""


def make_extracted(
    reward: Callable[[Sample], Any], pattern: str = ANSWER_TAG, *, pick: str = "last"
) -> PlainReward:
    """`reward` of the sample with its response cut down to what the pattern's group holds, the <answer> tag's
    text unless told otherwise.

    The group is the first one, or the whole match of a pattern without groups; of several matches the last,
    or with pick="first" the first, or with pick="only" none of them. White space around it is left out, a dot
    matches newlines too. Tokens and metadata stay those of the whole sample. Parts: those of `reward` and
    `extracted`, 1; without a match the reward is 0, `extracted` 0 and a note says so, and `reward` is not
    called, so its parts are missing. Raises ConfigError for a wrong pattern or pick.
    """
    compiled = _compile(pattern)
    require(pick in ("first", "last", "only"), f"pick={pick!r}; it must be first, last or only")
    require(
        compiled.groups < 2,
        f"pattern={pattern!r} has {compiled.groups} groups; mark what to extract with one and write the"
        " others (?:…)",
    )

    def extracted_reward(sample: Sample) -> RewardResult:
        found = [match for match in compiled.finditer(sample.response) if match[compiled.groups] is not None]
        if not found or (pick == "only" and len(found) > 1):
            return RewardResult(0.0, {"extracted": 0.0}, f"{len(found)} matches of {pattern}")
        match = found[0 if pick == "first" else -1]
        inner = replace(sample, response=match[compiled.groups].strip())
        result = check_reward(reward(inner), f"reward function {function_name(reward)} on sample {sample.id}")
        return RewardResult(result.reward, {**result.parts, "extracted": 1.0}, result.note)

    return extracted_reward

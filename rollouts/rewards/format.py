"""The response has a form."""

from __future__ import annotations

import re
from collections.abc import Callable

from rollouts.errors import ConfigError
from rollouts.types import RewardResult, Sample

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


def make_format_reward(pattern: str, *, weight: float = 1.0) -> Callable[[Sample], RewardResult]:
    """A reward of `weight` where the whole response matches the regular expression (a dot matches newlines too), otherwise 0.

    Part `format` is the reward itself. Raises ConfigError naming the pattern and the place where it is wrong.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r} is not a regular expression: {error}") from error

    def format_reward(sample: Sample) -> RewardResult:
        matched = weight * float(compiled.fullmatch(sample.response) is not None)
        return RewardResult(matched, {"format": matched})

    return format_reward


think_answer_format = make_format_reward(THINK_ANSWER)
"""1 where the response is <think>…</think> followed by <answer>…</answer> and nothing else."""

"""How long the response is."""

import math
from typing import Literal

from rollouts.errors import require
from rollouts.rewards.check import PlainReward, require_choice
from rollouts.types import RewardResult, Sample

LengthUnit = Literal["tokens", "words", "characters"]


def measure_length(sample: Sample, unit: LengthUnit) -> int:
    """Tokens that train, words between white space, or characters of the response."""
    if unit == "tokens":
        return sample.response_length
    return len(sample.response.split()) if unit == "words" else len(sample.response)


def make_soft_overlong_punishment(*, max_tokens: int, buffer_tokens: int, weight: float = 1.0) -> PlainReward:
    """A punishment from 0 down to -weight over the last `buffer_tokens` before `max_tokens`; n is the number
    of tokens that train.

    weight · 0 if n <= max - buffer; weight · ((max - buffer) - n) / buffer if n <= max; weight · -1 above.
    Part `overlong` is the reward itself. Paper: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement
    Learning System at Scale", arXiv:2503.14476, equation 13, with max_tokens = L_max and buffer_tokens =
    L_cache. Raises ConfigError unless 0 < buffer_tokens <= max_tokens and weight is a number above 0.
    """
    require(
        0 < buffer_tokens <= max_tokens,
        f"buffer_tokens={buffer_tokens} and max_tokens={max_tokens}; the buffer is part of the maximum: 0 <"
        " buffer <= max",
    )
    require(0 < weight < math.inf, f"weight={weight}; it must be a number above 0")

    def soft_overlong_punishment(sample: Sample) -> RewardResult:
        over = sample.response_length - (max_tokens - buffer_tokens)
        punishment = -weight * min(1.0, over / buffer_tokens) if over > 0 else 0.0
        return RewardResult(punishment, {"overlong": punishment})

    return soft_overlong_punishment


def make_length_target(*, target: int, width: int, unit: LengthUnit = "words") -> PlainReward:
    """A reward of max(0, 1 - |length - target| / width): 1 at the target, 0 from `width` away on. Part
    `length` is the reward itself.

    Raises ConfigError if target is negative, width is not above 0, or the unit is unknown.
    """
    require_choice("unit", unit, LengthUnit)
    require(0 <= target < math.inf, f"target={target}; it must be a number of at least 0")
    require(0 < width < math.inf, f"width={width}; it must be a number above 0")

    def length_target(sample: Sample) -> RewardResult:
        closeness = max(0.0, 1.0 - abs(measure_length(sample, unit) - target) / width)
        return RewardResult(closeness, {"length": closeness})

    return length_target


def make_length_cutoff(*, most: int, least: int = 0, unit: LengthUnit = "tokens") -> PlainReward:
    """A reward of 1 where least <= length <= most, otherwise 0. Part `length` is the reward itself.

    Raises ConfigError unless 0 <= least <= most, or if the unit is unknown.
    """
    require_choice("unit", unit, LengthUnit)
    require(0 <= least <= most, f"least={least} and most={most}; they must be 0 <= least <= most")

    def length_cutoff(sample: Sample) -> RewardResult:
        within = float(least <= measure_length(sample, unit) <= most)
        return RewardResult(within, {"length": within})

    return length_cutoff

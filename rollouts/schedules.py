"""Settings that change with the step: pure functions of its number. Steps count from 1, as in metrics and
checkpoints.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def choose_at_step(schedule: Mapping[int, T], step: int) -> T:
    """The entry of the largest key that is not above `step`: piecewise constant, each piece from its key on.

    An entry is anything: a number, or a whole table of settings such as {1: grpo, 60: dapo}. Nothing is
    interpolated or merged. Raises ValueError for a schedule that says nothing about the first step, and for a
    step below 1.
    """
    if not schedule or min(schedule) > 1:
        raise ValueError(
            f"the schedule begins at {min(schedule, default='nothing')}; it must say what holds from step"
            " 1 on"
        )
    if step < 1:
        raise ValueError(f"step={step}; steps count from 1")
    return schedule[max(begin for begin in schedule if begin <= step)]


def interpolate_linear(step: int, *, first: float, last: float, begin: int, end: int) -> float:
    """`first` up to step `begin`, `last` from step `end` on, a straight line between. Raises ValueError
    unless 1 <= begin < end.
    """
    progress = _progress(step, begin, end)
    return first * (1.0 - progress) + last * progress  # exact at both ends


def interpolate_cosine(step: int, *, first: float, last: float, begin: int, end: int) -> float:
    """As `interpolate_linear` along half a cosine, flat at both ends: last + (first − last)·(1 +
    cos(π·progress))/2.
    """
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, begin, end)))


def _progress(step: int, begin: int, end: int) -> float:
    if not 1 <= begin < end:
        raise ValueError(f"begin={begin}, end={end}; the rule is 1 <= begin < end")
    return min(1.0, max(0.0, (step - begin) / (end - begin)))

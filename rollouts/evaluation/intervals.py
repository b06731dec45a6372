"""Means with bootstrap intervals, and two policies compared on the same prompts. numpy only. Axes: P
prompts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 10_000
CHUNK = 2**22  # resampled indices held at a time


class Interval(NamedTuple):
    """A mean and how far it may be off."""

    mean: float
    low: float  # percentile bootstrap
    high: float
    confidence: float  # share of such intervals that hold the true mean, about, for large P


class PolicyComparison(NamedTuple):
    """Two policies on the same prompts."""

    first: Interval
    second: Interval
    difference: Interval  # second − first, resampled by prompt with both values together
    # share of resamples with a positive difference, an equal one counted as one half; 0.5: nothing is known
    second_is_better: float
    num_prompts: int


def compute_bootstrap_interval(values: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """The mean of values [P] with its percentile bootstrap interval. The same seed gives the same interval.

    Values must be independent: with several samples a prompt give one mean per prompt, for samples of one
    prompt are alike. One value gives an interval of width 0, which says nothing. Source: Efron 1979. Raises
    ValueError if there is no value, one is not finite, or confidence is not inside (0, 1).
    """
    return _resample([values], seed, confidence)[0][0]


def compare_policies(
    first: ArrayLike, second: ArrayLike, *, seed: int, confidence: float = 0.95
) -> PolicyComparison:
    """Mean rewards (or any measure) of two policies with intervals, and that of their difference, from values
    [P] on the same P prompts.

    Prompts are resampled with both values together: what makes a prompt hard for both cancels, which makes
    the interval of the difference much narrower than those of the means suggest. Raises ValueError on lengths
    that differ and what `compute_bootstrap_interval` raises.
    """
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != other.shape:
        raise ValueError(
            f"{one.size} values of the first policy, {other.size} of the second; both must be on the same"
            " prompts, in the same order"
        )
    intervals, means = _resample([one, other, other - one], seed, confidence)
    is_better = float((means[2] > 0).mean() + 0.5 * (means[2] == 0).mean())
    return PolicyComparison(*intervals, second_is_better=is_better, num_prompts=len(one))


def _resample(
    values: Sequence[ArrayLike], seed: int, confidence: float
) -> tuple[list[Interval], NDArray[np.float64]]:
    """The interval of each of the values [R, P], and the means [R, NUM_RESAMPLES] that it is of, each over P
    columns drawn with replacement, the same ones for all rows.
    """
    rows = np.asarray(values, np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"values have shape {rows.shape[1:]}; they must be [P] with P at least 1")
    for row, column in np.argwhere(~np.isfinite(rows)):
        raise ValueError(
            f"values[{column}] is {rows[row, column]}; every value must be finite: leave out what failed, and"
            " say how much it was"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}; the rule is 0 < confidence < 1")
    generator, count = np.random.default_rng(seed), rows.shape[1]
    step = max(CHUNK // count, 1)
    parts = [
        rows[:, generator.integers(0, count, (min(step, NUM_RESAMPLES - start), count))].mean(axis=-1)
        for start in range(0, NUM_RESAMPLES, step)
    ]
    means = np.concatenate(parts, axis=1)
    bounds = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=1).T.tolist()
    pairs = zip(rows.mean(axis=1).tolist(), bounds, strict=True)
    return [Interval(at, low, high, confidence) for at, (low, high) in pairs], means

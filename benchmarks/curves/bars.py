"""Jobs, the bars that their runs must clear, and the arithmetic of a verdict.

    rises   mean of the last quarter of steps - mean of the first >= `errors` standard errors of that
            difference
    near    |mean of the last third of steps - target| <= tolerance, and so are three quarters of these steps
    beyond  mean of the last third of steps > target + tolerance
    ends    mean of the last quarter of steps, or the last evaluation, >= least
    gains   last - first >= `by`, and not 0; `falls`: last < first: means of quarters, or single evaluations
    below   every value, or every evaluation, <= target
    like    in each quarter of steps the mean lies within the means of the runs of the job `of`, its lowest
            and highest widened by two standard errors; step `lag` + 1 is compared with their step 1, for
            rewards are those of the weights that generated

Metrics that begin with eval/ are read from evaluations.jsonl, of all stages; the others from the rows of one
stage of metrics.jsonl.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollouts.inspect.record import Record

LEAST_STEPS = 8  # two in a quarter, or it has no standard error


@dataclass(frozen=True, slots=True)
class Bar:
    """What a metric of a run must do."""

    metric: str
    kind: Literal["rises", "near", "beyond", "ends", "gains", "falls", "below", "like"]
    stage: str = "rl"  # whose steps are read
    errors: float = 3.0  # of rises: standard errors
    target: float = math.nan  # of near and beyond, in the metric's unit, as the next two
    tolerance: float = math.nan
    least: float = math.nan  # of ends
    by: float = 0.0  # of gains
    of: str = ""  # of like: a job
    lag: int = 0  # of like: by how many steps the weights that generated are older


@dataclass(frozen=True, slots=True)
class Job:
    """A run of train.py, once for each seed."""

    name: str
    group: str  # jobs of a group share a table and a picture
    about: str  # a sentence for the report
    config: str  # a file of benchmarks/curves, or of integration_training/configs
    mode: str
    bars: tuple[Bar, ...] = ()
    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    start: str = (
        ""  # a job with one seed, from whose last checkpoint this one starts; empty: from the config's model
    )
    always: bool = True  # False: only when named

    def run_names(self) -> list[str]:
        """One name per seed."""
        return [f"{self.name}-{seed}" for seed in self.seeds] if len(self.seeds) > 1 else [self.name]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a bar asked for and what was measured."""

    bar: str
    first: float  # mean of the first quarter, or the first evaluation
    last: float  # mean of the part that the bar looks at, or the last evaluation
    errors: float  # last - first of quarters in standard errors; NaN where the bar does not ask
    met: bool


def compute_mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, s/√n with n − 1 in s, as if the values were independent. At least two
    values.
    """
    assert len(values) >= 2, values
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def compute_rise(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the first and the last quarter, and their difference in standard errors √(e₁² + e₂²).

    A quarter is len(values) // 4 steps. Where both are constant the difference is ±inf, or 0. Raises
    ValueError for less than LEAST_STEPS.
    """
    if len(values) < LEAST_STEPS:
        raise ValueError(f"{len(values)} steps; a quarter has a standard error from {LEAST_STEPS} steps on")
    quarter = len(values) // 4
    first, first_error = compute_mean_and_error(values[:quarter])
    last, last_error = compute_mean_and_error(values[-quarter:])
    rise, error = last - first, math.hypot(first_error, last_error)
    return first, last, rise / error if error else math.copysign(math.inf, rise) if rise else 0.0


def judge(bar: Bar, values: Sequence[float], others: Sequence[Sequence[float]] = ()) -> Verdict:
    """The verdict on the values of the bar's metric, in the order of steps. `others`: the values of each run
    of the job `bar.of`.

    Raises ValueError if there are too few of them, if one is not finite, or if the bar does not suit
    evaluations.
    """
    if not np.isfinite(values).all():
        raise ValueError(
            f"{bar.metric} is not finite in {int((~np.isfinite(values)).sum())} of {len(values)} steps"
        )
    if bar.metric.startswith("eval/"):
        return judge_evaluations(bar, values)
    first, last, errors = compute_rise(values)
    thirds = np.asarray(values[-(len(values) // 3) :])
    third = float(thirds.mean())
    match bar.kind:
        case "rises":
            return Verdict(
                f"`{bar.metric}` rises by {bar.errors:g} standard errors",
                first,
                last,
                errors,
                errors >= bar.errors,
            )
        case "near":
            inside = int((abs(thirds - bar.target) <= bar.tolerance).sum())
            met = abs(third - bar.target) <= bar.tolerance and inside >= 0.75 * len(thirds)
            text = (
                f"`{bar.metric}` within {bar.tolerance:g} of {bar.target:g}, last third ({inside} of"
                f" {len(thirds)} steps)"
            )
            return Verdict(text, first, third, math.nan, met)
        case "beyond":
            most = bar.target + bar.tolerance
            return Verdict(f"`{bar.metric}` above {most:g}, last third", first, third, math.nan, third > most)
        case "like":
            inside = count_like_quarters(values[bar.lag :], others)
            late = f", {bar.lag} later" if bar.lag else ""
            text = f"`{bar.metric}` like the {len(others)} runs of {bar.of}{late}: {inside} of 4 quarters"
            return Verdict(text, first, last, math.nan, inside == 4)
        case _:
            return judge_change(bar, first, last, max(values))


def count_like_quarters(values: Sequence[float], others: Sequence[Sequence[float]]) -> int:
    """Quarters of the steps in which the mean of `values` is within the means of `others` and two of its own
    standard errors.
    """
    if len(others) < 2:
        raise ValueError(f"{len(others)} runs to compare with; a spread needs two: make those first")
    size = min(len(values), *(len(other) for other in others)) // 4
    inside = 0
    for start in range(0, 4 * size, size):
        mean, error = compute_mean_and_error(values[start : start + size])
        means = [float(np.mean(other[start : start + size])) for other in others]
        inside += min(means) - 2 * error <= mean <= max(means) + 2 * error
    return inside


def judge_evaluations(bar: Bar, values: Sequence[float]) -> Verdict:
    """The verdict on single evaluations, which have no quarters. Raises ValueError."""
    if len(values) < 2:
        raise ValueError(f"{bar.metric} was evaluated {len(values)} times; a change needs two")
    if bar.kind not in ("ends", "gains", "falls", "below"):
        raise ValueError(
            f"{bar.metric} cannot be judged by {bar.kind!r}; evaluations take 'ends', 'gains', 'falls' and"
            " 'below'"
        )
    return judge_change(bar, values[0], values[-1], max(values))


def judge_change(bar: Bar, first: float, last: float, most: float) -> Verdict:
    """The verdict on two numbers, or on the largest of all."""
    if bar.kind == "below":
        text = f"`{bar.metric}` at most {bar.target:g} in every step"
        return Verdict(text, first, most, math.nan, most <= bar.target)
    if bar.kind == "ends":
        return Verdict(
            f"`{bar.metric}` at least {bar.least:g} at the end", first, last, math.nan, last >= bar.least
        )
    higher = bar.kind == "gains"
    return Verdict(
        f"`{bar.metric}` {'higher' if higher else 'lower'}{f' by {bar.by:g}' if bar.by else ''} at the end",
        first,
        last,
        math.nan,
        last > first and last - first >= bar.by if higher else last < first,
    )


def read_values(record: Record, bar: Bar) -> tuple[list[int], list[float]]:
    """Steps and values of the bar's metric; of an evaluation those of all stages, in the order in which they
    ran.
    """
    found = record.rows(
        "SELECT step, value FROM points WHERE name = ? AND (stage = ? OR starts_with(name, 'eval/'))"
        " ORDER BY if(starts_with(name, 'eval/'), place, step)",
        [bar.metric, bar.stage],
    )
    return [row["step"] for row in found], [row["value"] for row in found]


def load_jobs(path: Path) -> dict[str, Job]:
    """The jobs of a TOML file, by name, in its order."""
    jobs = [make_job(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["jobs"]]
    return {job.name: job for job in jobs}


def make_job(table: dict[str, Any]) -> Job:
    """The job that a TOML table describes."""
    lists = {key: tuple(table[key]) for key in ("flags", "seeds") if key in table}
    return Job(**{**table, **lists, "bars": tuple(Bar(**bar) for bar in table.get("bars", ()))})

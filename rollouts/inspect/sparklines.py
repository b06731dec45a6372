"""A dozen metrics of a stage, each as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from rollouts.inspect.read import RunRecord
from rollouts.inspect.table import make_plain_table

BLOCKS = "▁▂▃▄▅▆▇█"
HEADINGS = ("first", "last", "min", "max")
FORMS = (
    (4, 4),
    (3, 4),
    (2, 4),
    (3, 2),
    (3, 1),
)  # digits and how many of HEADINGS (of one the last): the first that leaves COURSE columns
COURSE = 12  # columns of a course, at least
SHOWN = 12  # metrics of a stage
TELLING = (  # the first SHOWN that a stage has and that are not 0 throughout
    "reward/mean",
    "loss/total",
    "rewards/accuracies",
    "rewards/margins",
    "loss/nll",
    "entropy/mean",
    "response_length/mean",
    "truncated/frac",
    "optim/grad_norm",
    "kl/ref",
    "mismatch_kl/mean",
    "clip_ratio",
    "off_policy/mean",
    "groups/zero_std_frac",
    "value/explained_variance",
    "importance_weight/ess",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
    "time/step",
    "optim/lr",
)


def make_sparkline_table(record: RunRecord, stage: str, *, width: int) -> Table | None:
    """The telling metrics of a stage: course, first, last, lowest and highest value, fewer in a narrow
    terminal. None for fewer than two steps.
    """
    chosen = [(name, *record.series(stage, name)) for name in TELLING]
    shown = [(name, steps, values) for name, steps, values in chosen if len(values) > 1 and values.any()][
        :SHOWN
    ]
    if not shown:
        return None
    begin, end = min(steps[0] for _, steps, _ in shown), max(steps[-1] for _, steps, _ in shown)
    names, columns, room = fit_columns(
        [name for name, _, _ in shown], [values for _, _, values in shown], width
    )
    table = make_plain_table(f"{stage}, steps {begin} to {end}")
    table.add_column("metric", no_wrap=True)
    table.add_column("course", no_wrap=True, style="cyan")
    for heading in names:
        table.add_column(heading, justify="right", no_wrap=True)
    for (name, steps, values), row in zip(shown, zip(*columns, strict=True), strict=True):
        table.add_row(name, draw_sparkline(steps, values, first=int(begin), last=int(end), width=room), *row)
    return table


def fit_columns(
    metrics: Sequence[str], values: Sequence[np.ndarray], width: int
) -> tuple[Sequence[str], list[list[str]], int]:
    """Which of HEADINGS there is room for, the numbers below each, and how wide a course may be."""
    found: tuple[Sequence[str], list[list[str]], int] = ((), [], 0)
    for digits, count in FORMS:
        names = HEADINGS[:count] if count > 1 else ("last",)
        numbers = {"first": lambda row: row[0], "last": lambda row: row[-1], "min": np.min, "max": np.max}
        columns = [[format_number(float(numbers[name](row)), digits) for row in values] for name in names]
        taken = (
            max(map(len, metrics))
            + 4
            + sum(max(map(len, [name, *column])) + 2 for name, column in zip(names, columns, strict=True))
        )
        found = names, columns, max(4, min(60, width - taken))
        if width - taken >= COURSE:
            break
    return found


def draw_sparkline(steps: np.ndarray, values: np.ndarray, *, first: int, last: int, width: int) -> str:
    """`width` characters from step `first` to step `last`: the height of each is the mean of the values that
    fall into it, of the range of these means; a blank where there is none, half height where all are equal.
    """
    means = mean_by_range(steps, values, first=first, last=last, ranges=width)
    held = means[~np.isnan(means)]
    low, high = held.min(), held.max()
    text = ""
    for mean in means:
        share = (mean - low) / (high - low) if high > low else 0.5
        text += " " if math.isnan(mean) else BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]
    return text


def mean_by_range(steps: np.ndarray, values: np.ndarray, *, first: int, last: int, ranges: int) -> np.ndarray:
    """The mean of the values in each of up to `ranges` equal ranges of the steps from `first` to `last`; NaN
    where there is none.
    """
    count = min(ranges, last - first + 1)
    places = (steps - first) * count // (last - first + 1)
    sums, held = np.bincount(places, weights=values, minlength=count), np.bincount(places, minlength=count)
    return np.divide(sums, held, out=np.full(count, math.nan), where=held > 0)


def format_number(value: float, digits: int = 4) -> str:
    """A number with so many digits that count: 12.35, 0.0012, 1.2e-05, 12346 where the whole part is longer."""
    if 10**digits <= abs(value) < 10**7:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"

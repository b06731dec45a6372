"""Every metric that a run can log: name, unit, meaning, read from names.tsv. docs/run_directory.md shows it.

A name may have parts in braces: `{k}` is a whole number, any other one segment of lower_snake. A user's own
loss may log more.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple


class MetricName(NamedTuple):
    """One metric, or all of one pattern."""

    name: str
    unit: str  # "" for a number without one: a loss, a ratio, a reward
    stages: str  # whose rows may have it
    meaning: str


METRICS = tuple(
    MetricName(*line.split("\t"))
    for line in Path(__file__).with_suffix(".tsv").read_text("utf-8").splitlines()[1:]
)


@cache
def find_metric(name: str) -> MetricName | None:
    """The metric that a name falls under, the one with the fewest braces; None for a name not ours."""
    for metric in sorted(METRICS, key=lambda metric: metric.name.count("{")):
        pattern = re.sub(r"\{[a-z]+\}", "[a-z0-9_]+", metric.name.replace("{k}", "[0-9]+"))
        if re.fullmatch(pattern, name):
            return metric
    return None

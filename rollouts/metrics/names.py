"""Every metric that a run can log: name, unit, meaning, read from names.tsv. docs/run_directory.md shows it.

A name may have parts in braces: `{k}` is a whole number, any other one segment of lower_snake. A user's own
loss may log more.
"""

from __future__ import annotations

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
    for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[1:]
)


def find_metric(name: str) -> MetricName | None:
    """The metric that a name falls under, the one with the fewest braces; None for a name not ours."""
    found = [(len(pattern.groupindex), metric) for pattern, metric in _patterns() if pattern.fullmatch(name)]
    return min(found, key=lambda pair: pair[0])[1] if found else None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricName], ...]:
    """What each name matches; its parts in braces are groups."""
    patterns: list[tuple[re.Pattern[str], MetricName]] = []
    for metric in METRICS:
        pieces = re.split(r"\{([a-z]+)\}", metric.name)
        pieces[::2] = [re.escape(piece) for piece in pieces[::2]]
        pieces[1::2] = [f"(?P<{part}_>{'[0-9]+' if part == 'k' else '[a-z0-9_]+'})" for part in pieces[1::2]]
        patterns.append((re.compile("".join(pieces)), metric))
    return tuple(patterns)


def make_table() -> str:
    """The table as Markdown, one line a metric."""
    lines = [
        f"| `{metric.name}` | {metric.unit or '–'} | {metric.stages} | {metric.meaning} |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | unit | stage | meaning |", "|---|---|---|---|", *lines]) + "\n"

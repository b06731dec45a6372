"""Metrics of a stage as curves of bounded length, and the time of its steps by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.inspect.columns import Columns

Floats = NDArray[np.float64]
DIGITS = 5  # of a number in the file
PHASES = 6  # of which each has a colour; the rest of the step has the seventh
NOT_PHASES = frozenset({"time/step", "time/weight_sync_pause"})  # the whole, and a part of another phase


class Buckets(NamedTuple):
    """Values of consecutive rows taken together: NaN where no row of a bucket has one."""

    mean: Floats
    low: Floats
    high: Floats


def bucket_size(rows: int, points: int) -> int:
    """How many consecutive rows make a point, so that there are at most `points`; at least 1."""
    return max(1, -(-rows // points))


def downsample(values: Floats, size: int) -> Buckets:
    """Mean, least and greatest of every `size` values; the last bucket may have fewer. NaN values count for
    nothing.
    """
    buckets = -(-len(values) // size)
    padded = np.full(buckets * size, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(buckets, size)
    held = ~np.isnan(table)
    some = held.any(axis=1)
    counts = np.maximum(1, held.sum(axis=1))
    mean = np.where(some, np.where(held, table, 0.0).sum(axis=1) / counts, np.nan)
    low = np.where(some, np.where(held, table, np.inf).min(axis=1, initial=np.inf), np.nan)
    high = np.where(some, np.where(held, table, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    return Buckets(mean, low, high)


def shorten(values: Sequence[float] | Floats, digits: int = DIGITS) -> list[float | None]:
    """Plain numbers of a few digits, None for what is not finite, as JSON takes them."""
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    short = (float(f"{value:.{digits}g}") for value in listed)
    return [
        None
        if value != value or value in (float("inf"), float("-inf"))
        else int(value)
        if value.is_integer()
        else value
        for value in short
    ]


def make_curves(
    columns: Columns, rows: NDArray[np.int64], *, points: int, begin_unix: float
) -> dict[str, Any]:
    """The curves of a stage's rows (numbers of them in the columns, by step), for the page."""
    size = bucket_size(len(rows), points)
    attempts = columns.column("attempt")[rows]
    resumed = np.flatnonzero(np.diff(attempts) > 0) + 1
    metrics: dict[str, Any] = {}
    for name in columns.metrics:
        values = columns.column(name)[rows]
        if np.isnan(values).all():
            continue
        mean, low, high = downsample(values, size)
        metrics[name] = {"mean": shorten(mean)} | (
            {"low": shorten(low), "high": shorten(high)} if size > 1 else {"low": None, "high": None}
        )
    return {
        "rows": len(rows),
        "step": columns.column("step")[rows][::size].tolist(),
        "time": shorten(columns.column("time_unix")[rows][::size] - begin_unix, 7),
        "resumed": sorted({int(place) // size for place in resumed}),
        "metrics": metrics,
    }


def make_phases(columns: Columns, rows: NDArray[np.int64], *, points: int) -> dict[str, Any] | None:
    """Seconds of each phase per step, the longest phases first and the rest of the step last; None if no
    phase was measured.

    A step that did not enter a phase spent 0 seconds in it.
    """
    size = bucket_size(len(rows), points)

    def seconds(name: str) -> Floats:
        return np.nan_to_num(columns.column(name)[rows])

    totals = {
        name: float(seconds(name).sum())
        for name in columns.metrics
        if name.startswith("time/") and name not in NOT_PHASES
    }
    names = [name for name in sorted(totals, key=lambda name: -totals[name]) if totals[name] > 0][:PHASES]
    if not names:
        return None
    found = {name.removeprefix("time/"): seconds(name) for name in names}
    step = seconds("time/step") if "time/step" in columns.metrics else np.zeros(len(rows))
    rest = step - np.sum(list(found.values()), axis=0)
    ahead = rest.sum() < -0.02 * step.sum()
    if not ahead and rest.sum() > 0:
        found["rest of the step"] = np.maximum(0.0, rest)
    return {
        "names": list(found),
        "seconds": {name: shorten(downsample(values, size).mean) for name, values in found.items()},
        "total": {name: float(values.sum()) for name, values in found.items()},
        "rows": len(rows),
        "ahead": bool(ahead),
    }

"""Curves, phases and distributions of a run as numbers of bounded length, for the page of a report."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rollouts.inspect.record import Stage
from rollouts.inspect.report.samples import round_numbers

NOT_PHASES = ("time/step", "time/weight_sync_pause")  # the whole, and a part of another phase
PHASES = 6  # of which each has a colour; the rest of the step has the seventh
RANGES = 24  # of steps, at most
BINS = 20
LAG_BINS = 12  # the last one takes all that is staler


def split_buckets(values: np.ndarray, points: int) -> np.ndarray:
    """[at most points, size] the values, consecutive ones in a row, filled up with NaN."""
    size = max(1, -(-len(values) // points))
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, size)


def make_curves(stage: Stage, *, points: int, begin_unix: float) -> dict[str, Any]:
    """The curves of a stage: of each metric mean, least and greatest of so many consecutive steps as a point
    takes.
    """
    size = split_buckets(stage.columns["step"], points).shape[1]
    resumed = np.flatnonzero(np.diff(stage.columns["attempt"]) > 0) + 1
    metrics: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without values is NaN
        for name in stage.metrics:
            table = split_buckets(stage.columns[name], points)
            curve = {"mean": np.nanmean, "low": np.nanmin, "high": np.nanmax}
            metrics[name] = {
                what: round_numbers(reduce(table, axis=1)) if size > 1 or what == "mean" else None
                for what, reduce in curve.items()
            }
    return {
        "rows": len(stage),
        "step": stage.columns["step"][::size].tolist(),
        "time": round_numbers(stage.columns["time_unix"][::size] - begin_unix, 7),
        "resumed": sorted({int(place) // size for place in resumed}),
        "metrics": metrics,
    }


def make_phases(stage: Stage, *, points: int) -> dict[str, Any] | None:
    """Seconds of each phase per step, the longest first and the rest of the step last; None if none."""
    totals = {f"time/{name}": total for name, total in stage.sum_below("time/").items()}
    names = sorted((name for name in totals if name not in NOT_PHASES), key=lambda name: -totals[name])[
        :PHASES
    ]
    if not names:
        return None
    found = {name.removeprefix("time/"): np.nan_to_num(stage.columns[name]) for name in names}
    step = np.nan_to_num(stage.columns.get("time/step", np.zeros(len(stage))))
    rest = step - np.sum(list(found.values()), axis=0)
    ahead = bool(rest.sum() < -0.02 * step.sum())
    if not ahead and rest.sum() > 0:
        found["rest of the step"] = np.maximum(0.0, rest)
    return {
        "names": list(found),
        "seconds": {
            name: round_numbers(np.nanmean(split_buckets(values, points), axis=1))
            for name, values in found.items()
        },
        "total": {name: float(values.sum()) for name, values in found.items()},
        "rows": len(stage),
        "ahead": ahead,
    }


def make_spreads(facts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Of each stage with samples: counts by range of steps and bin of `reward`, `length` and `lag`, those it
    has.
    """
    spreads: dict[str, Any] = {}
    for stage in dict.fromkeys(facts["stage"].tolist()):
        own = {name: np.asarray(values[facts["stage"] == stage]) for name, values in facts.items()}
        found: dict[str, Any] = {}
        for name in ("reward", "length", "lag"):
            values = own[name].astype(np.float64)
            held = np.isfinite(values)
            if not held.any() or (name == "lag" and stage.startswith("eval-")):
                continue
            values, most = values[held], values[held].max()
            top = max(1.0, float(np.percentile(values, 99.5))) if name == "length" else most
            if name == "lag" or (name == "length" and top <= BINS):  # a bin for each whole number
                edges = np.arange(min(int(top), LAG_BINS - 1 if name == "lag" else BINS) + 2) - 0.5
            elif name == "length":
                edges = np.linspace(0.0, top, BINS + 1)
            else:
                flat = 0.5 * (values.min() == most)
                edges = np.linspace(values.min() - flat, most + flat, BINS + 1)
            found[name] = make_spread(own["step"][held], values, edges)
            if name != "reward":
                found[name]["more"] = bool(most >= LAG_BINS if name == "lag" else most > top)
        if found:
            spreads[stage] = found
    return spreads


def make_spread(steps: np.ndarray, values: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    """Counts [ranges][bins] and the mean of each range of steps. What is outside is in the bin next to it."""
    distinct = np.unique(steps)
    ranges = min(RANGES, len(distinct))
    bounds = np.arange(ranges + 1) * len(distinct) // ranges
    place = np.searchsorted(distinct[bounds[:-1]], steps, side="right") - 1
    column = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    counts = np.zeros((ranges, len(edges) - 1), dtype=np.int64)
    np.add.at(counts, (place, column), 1)
    sums = np.bincount(place, weights=values, minlength=ranges)
    return {
        "steps": [[int(distinct[begin]), int(distinct[end - 1])] for begin, end in pairwise(bounds)],
        "edges": round_numbers(edges, 7),
        "counts": counts.tolist(),
        "means": round_numbers(sums / counts.sum(axis=1)),
    }

"""How rewards, response lengths and staleness of the logged samples are spread over the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.inspect.columns import Columns
from rollouts.inspect.report.curves import shorten

Floats = NDArray[np.float64]
RANGES = 24  # of steps, at most
BINS = 20
LAG_BINS = 12  # the last one takes all that is staler
OUTLIERS = 99.5  # percentile of lengths above which the top bin takes all


def make_spreads(columns: Columns, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Of each stage with samples: counts by step range and bin of `reward`, `length` and `lag`, those that it
    has.
    """
    stages = columns.column("stage")[rows]
    found: dict[str, Any] = {}
    for code in dict.fromkeys(stages.tolist()):
        name = columns.texts("stage")[code]
        spreads = make_stage_spreads(columns, rows[stages == code], with_lag=not name.startswith("eval-"))
        if spreads:
            found[name] = spreads
    return found


def make_stage_spreads(columns: Columns, rows: NDArray[np.int64], *, with_lag: bool) -> dict[str, Any]:
    """Without `with_lag`, or where no sample says by which weights it was made, there is no `lag`."""
    steps = columns.column("step")[rows]
    rewards = columns.column("reward")[rows]
    lengths = columns.column("response_length")[rows].astype(np.float64)
    lengths[lengths < 0] = np.nan
    version, oldest = columns.column("policy_version")[rows], columns.column("weight_version_min")[rows]
    lag = np.where((version >= 0) & (oldest >= 0), version - oldest, np.nan).astype(np.float64)
    spreads: dict[str, Any] = {}
    if not np.isnan(rewards).all():
        spreads["reward"] = make_spread(steps, rewards, edges_of(rewards))
    if not np.isnan(lengths).all():
        top = max(1.0, float(np.nanpercentile(lengths, OUTLIERS)))
        edges = whole_edges(int(top)) if top <= BINS else np.linspace(0.0, top, BINS + 1)
        spreads["length"] = make_spread(steps, lengths, edges) | {"more": bool(np.nanmax(lengths) > top)}
    if with_lag and not np.isnan(lag).all():
        most = int(np.nanmax(lag))
        spreads["lag"] = make_spread(steps, lag, whole_edges(min(most, LAG_BINS - 1))) | {
            "more": most >= LAG_BINS
        }
    return spreads


def whole_edges(most: int) -> Floats:
    """A bin for each whole number from 0 to `most`, with the number in its middle."""
    return np.arange(most + 2, dtype=np.float64) - 0.5


def edges_of(values: Floats) -> Floats:
    """Limits of BINS bins of equal width over the values; of equal values, half a unit to each side."""
    first, last = float(np.nanmin(values)), float(np.nanmax(values))
    return (
        np.linspace(first - 0.5, last + 0.5, BINS + 1)
        if first == last
        else np.linspace(first, last, BINS + 1)
    )


def make_spread(steps: NDArray[np.int64], values: Floats, edges: Floats) -> dict[str, Any]:
    """Counts [ranges][bins] and the mean of each range of steps. What lies outside the edges is in the bin
    next to it.
    """
    held = ~np.isnan(values)
    steps, values = steps[held], values[held]
    distinct = np.unique(steps)
    ranges = min(RANGES, len(distinct))
    begins = distinct[np.arange(ranges) * len(distinct) // ranges]
    place = np.searchsorted(begins, steps, side="right") - 1
    column = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    counts = np.zeros((ranges, len(edges) - 1), dtype=np.int64)
    np.add.at(counts, (place, column), 1)
    sums = np.bincount(place, weights=values, minlength=ranges)
    ends = [int(distinct[(index + 1) * len(distinct) // ranges - 1]) for index in range(ranges)]
    return {
        "steps": [[int(begin), end] for begin, end in zip(begins, ends, strict=True)],
        "edges": shorten(edges, 7),
        "counts": counts.tolist(),
        "means": shorten(sums / counts.sum(axis=1)),
    }

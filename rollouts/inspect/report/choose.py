"""Which of a run's logged samples a report shows, within a number of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.inspect.columns import Columns
from rollouts.metrics.jsonl import Row

Indices = NDArray[np.int64]
TEXT_CHARS = 20_000  # of a prompt's message, a response or another text; a longer one is cut
LONG_ROW = 2 * TEXT_CHARS  # bytes that a longer row counts as, for prompt and response are cut
GROWTH = 1.1  # a row takes about so much more in the page than in its file
FIRST_SHARE = 0.25  # of the bytes, at most, for what was asked for first
SHARES = (
    ("newest steps", 0.25),
    ("failed", 0.15),
    ("best rewards", 0.1),
    ("worst rewards", 0.1),
)  # of the bytes; evenly chosen steps take the rest
LEFT_OUT = frozenset({"schema", "attempt", "time_unix"})  # of a row, in the page


class Choice(NamedTuple):
    """Samples in the order of preference, and in words what was preferred; empty words: all."""

    rows: Indices
    how: str


def choose_samples(columns: Columns, rows: Indices, limit_bytes: int, *, first: Sequence[int] = ()) -> Choice:
    """All of the rows if they fit, else `first`, the newest steps of each stage, failed ones, best and worst
    rewards, and whole steps evenly.

    What a row takes is estimated by its bytes in the file, as the page cuts it: who reads it knows, and keeps
    the limit.
    """
    costs = np.minimum(columns.column("length")[rows], LONG_ROW) * GROWTH
    if costs.sum() <= limit_bytes:
        return Choice(rows, "")
    finders = {
        "newest steps": find_newest(columns, rows),
        "failed": spread_out(np.flatnonzero(columns.match_text("status", "failed")[rows])),
        "best rewards": order_rewards(columns, rows, best=True),
        "worst rewards": order_rewards(columns, rows, best=False),
    }
    taken = np.zeros(len(rows), dtype=bool)
    chosen = [
        take(np.searchsorted(rows, np.array(first, dtype=np.int64)), taken, costs, FIRST_SHARE * limit_bytes)
    ]
    left = limit_bytes - costs[chosen[0]].sum()
    for name, share in SHARES:
        chosen.append(take(finders[name], taken, costs, share * limit_bytes))
        left -= costs[chosen[-1]].sum()
    chosen.append(take(order_steps(columns, rows, costs, left), taken, costs, left))
    names = ", ".join(name for (name, _), found in zip(SHARES, chosen[1:], strict=False) if len(found))
    return Choice(rows[np.concatenate(chosen)], f"{names}, and steps evenly over the run")


def take(places: Indices, taken: NDArray[np.bool_], costs: NDArray[np.float64], limit: float) -> Indices:
    """The places that are not taken yet, in their order as long as they cost no more than the limit together;
    marks them as taken.

    One that costs more than is left is passed over: a huge row keeps no other one out.
    """
    found = [np.empty(0, dtype=np.int64)]
    free = places[~taken[places]]
    while len(free := free[costs[free] <= limit]):
        ends = np.cumsum(costs[free])
        count = int(np.searchsorted(ends, limit, side="right"))
        found.append(free[:count])
        free, limit = free[count:], limit - ends[count - 1]
    fits = np.concatenate(found)
    taken[fits] = True
    return fits


def spread_out(places: Indices) -> Indices:
    """The places in an order of which every beginning is spread over all of them: by the reversed bits of
    their numbers.
    """
    bits = max(1, len(places) - 1).bit_length()
    numbers = np.arange(len(places))
    reversed_bits = sum(
        (((numbers >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros_like(numbers)
    )
    return places[np.argsort(reversed_bits, kind="stable")]


def find_newest(columns: Columns, rows: Indices) -> Indices:
    """Places of the rows from the last step of every stage backwards, stages in turn."""
    stages, steps = columns.column("stage")[rows], columns.column("step")[rows]
    age = np.zeros(len(rows), dtype=np.int64)
    for code in np.unique(stages):
        own = stages == code
        _, place = np.unique(-steps[own], return_inverse=True)
        age[own] = place
    return np.argsort(age, kind="stable")


def order_rewards(columns: Columns, rows: Indices, *, best: bool) -> Indices:
    """Places of the rows that have a reward, the best (or the worst) first; of equal ones the newer first."""
    rewards = columns.column("reward")[rows]
    held = np.flatnonzero(~np.isnan(rewards))[::-1]
    return held[np.argsort(-rewards[held] if best else rewards[held], kind="stable")]


def order_steps(columns: Columns, rows: Indices, costs: NDArray[np.float64], limit: float) -> Indices:
    """Places of the rows of whole steps, as many steps as fit, evenly over all."""
    keys = columns.column("stage")[rows].astype(np.int64) << 40 | columns.column("step")[rows]
    distinct, place = np.unique(keys, return_inverse=True)
    mean = np.bincount(place, weights=costs).mean()
    wanted = max(1, min(len(distinct), int(limit / mean)))
    rank = np.full(len(distinct), len(distinct))
    rank[np.arange(wanted) * len(distinct) // wanted] = np.argsort(spread_out(np.arange(wanted)))
    found = np.flatnonzero(rank[place] < len(distinct))
    return found[np.argsort(rank[place[found]], kind="stable")]


def shorten_row(row: Row) -> Row:
    """The row as the page shows it: without what it does not show, long texts cut, numbers that are not
    finite as null.
    """
    return {name: shorten_value(value) for name, value in row.items() if name not in LEFT_OUT}


def shorten_value(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value if len(value) <= TEXT_CHARS else f"{value[:TEXT_CHARS]}… ({len(value):,} characters in all)"
        )
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: shorten_value(inner) for name, inner in value.items()}
    return [shorten_value(inner) for inner in value] if isinstance(value, list | tuple) else value


def encode_page_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever texts are in it: without `<`, and without what
    JavaScript takes for an end of line.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

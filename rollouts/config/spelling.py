"""Which known name a misspelt one means: edit distance that counts two swapped characters, and a slip to the
neighbouring key, as small.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache

KEYBOARD = ("1234567890-", "qwertyuiop", "asdfghjkl", "zxcvbnm")
SLIP = 0.75  # cost of a neighbouring key; any other edit costs 1


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that looks most like `name`, None if none does."""
    found = nearest_names(name, candidates)
    return found[0] if found else None


def nearest_names(name: str, candidates: Sequence[str]) -> list[str]:
    """The candidates that look most like `name`: several only if they are equally near; none if nothing looks
    like it.

    Near is up to a third of the characters edited, or else what difflib calls close (a word left out).
    """
    wanted = _normalise(name)
    allowed = {candidate: max(1, max(len(wanted), len(candidate)) // 3) for candidate in candidates}
    likely = [candidate for candidate, limit in allowed.items() if abs(len(wanted) - len(candidate)) <= limit]
    scored = [(edit_distance(wanted, _normalise(candidate)), candidate) for candidate in likely]
    near = [(distance, candidate) for distance, candidate in scored if distance <= allowed[candidate]]
    if near:
        least = min(distance for distance, _ in near)
        return [candidate for distance, candidate in near if distance == least]
    return difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)


def edit_distance(first: str, second: str) -> float:
    """The least cost of characters inserted, deleted, replaced or swapped with their neighbour (1 each; a
    neighbouring key 0.75).

    No character is edited twice (optimal string alignment).
    """
    before: list[float] = []
    row: list[float] = [float(column) for column in range(len(second) + 1)]
    for i, a in enumerate(first, start=1):
        above, row = row, [float(i)]
        for j, b in enumerate(second, start=1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + _replacement_cost(a, b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]


def _replacement_cost(first: str, second: str) -> float:
    if first == second:
        return 0.0
    return SLIP if frozenset((first, second)) in _neighbours() else 1.0


@cache
def _neighbours() -> frozenset[frozenset[str]]:
    places = {key: (line, column) for line, keys in enumerate(KEYBOARD) for column, key in enumerate(keys)}
    pairs = (
        (a, b)
        for a, (x, y) in places.items()
        for b, (u, v) in places.items()
        if a < b and abs(x - u) <= 1 and abs(y - v) <= 1
    )
    return frozenset(frozenset(pair) for pair in pairs)


def _normalise(name: str) -> str:
    return name.lower().replace("-", "_")

"""Which known name a misspelt one means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that looks most like `name`, None if none does. Capitals and dashes do not matter."""
    found = nearest_names(name, candidates, count=1)
    return found[0] if found else None


def nearest_names(name: str, candidates: Iterable[str], *, count: int = 3) -> list[str]:
    """At most `count` candidates that look like `name`, the nearest first."""
    plain = name.lower().replace("-", "_")
    return difflib.get_close_matches(plain, list(candidates), n=count, cutoff=0.6)

"""Which known name a misspelt one means."""

import difflib
from collections.abc import Iterable


def nearest_names(
    name: str, candidates: Iterable[str], *, count: int = 3, at_least: float = 0.6
) -> list[str]:
    """At most `count` candidates that look like `name`, the nearest first; `at_least` from 0 to 1 (equal).
    Capitals and dashes do not matter.
    """
    return difflib.get_close_matches(name.lower().replace("-", "_"), list(candidates), count, at_least)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message that names the candidate most like `name`; empty if none is."""
    close = nearest_names(name, candidates, count=1)
    return f"; did you mean {close[0]}?" if close else ""

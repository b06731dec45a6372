"""Seconds of a step by phase, under `time/`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class PhaseTimer:
    """Seconds spent in named phases since construction. A phase entered several times adds up; overlapping phases each count in full."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds inside the block under `time/{name}`, also when the block raises."""
        assert PHASE_NAME.fullmatch(name) and name != "step", f"phase {name!r} must be lower_snake and not 'step', which is the whole"
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere."""
        assert seconds >= 0, (name, seconds)
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of a phase that was entered. Raises KeyError for one that was not."""
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        """`time/{phase}` in order of first entry, and `time/step`: seconds since construction. A phase not entered is absent."""
        return {**{f"time/{name}": seconds for name, seconds in self._seconds.items()}, "time/step": self._clock() - self._start}

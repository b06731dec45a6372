"""When work was done: seconds of a step by phase, under `time/`, and the spans of spans.jsonl.

    PhaseTimer ──► phases of a step ──────────────────────────────────┐
    SpanRecorder ◄── requests and rewards, updates of engines,        ├──► log_spans ──► spans.jsonl
                     checkpoints, evaluations ── take() once a step ──┘

A span begins at a wall-clock time, so that those of several processes can be laid side by side, and its
duration is of a clock that no one sets.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from rollouts.messages import drop_none

PHASE_NAME = re.compile(r"[a-z][a-z0-9_]*")
# tracks; the others are called as their engines
TRAINER, REWARDS, CHECKPOINTS = "trainer", "rewards", "checkpoints"
HELD_IDS = 1 << 16  # samples whose spans are held until their batch is known; the oldest make room
HELD_SPANS = 1 << 16  # other spans held until the next row is written


class Span(NamedTuple):
    """One timed piece of work."""

    name: str  # lower_snake: generate, reward, train, …
    # who did it: trainer, rewards, checkpoints (written beside training), or the name of an engine
    track: str
    start_unix: float  # seconds since 1970, of this machine's wall clock
    duration_s: float  # of a clock that no one sets
    id: str | None = None  # of the sample it was done for; None: of none
    tokens: int | None = None  # that it made; None: it makes none

    def fields(self) -> dict[str, Any]:
        """What its row says after the head; times to the microsecond."""
        times = {"start_unix": round(self.start_unix, 6), "duration_s": round(self.duration_s, 6)}
        return drop_none(self._asdict() | times)


class PhaseTimer:
    """Seconds spent in named phases since construction. A phase entered several times adds up; overlapping
    phases each count in full.
    """

    def __init__(self) -> None:
        self._start, self._recorder = time.perf_counter(), SpanRecorder()
        # counts the seconds inside the block under `time/{name}`, also when the block raises
        self.phase = self._recorder.measure

    def seconds(self, name: str) -> float:
        """Seconds of a phase, 0 of one that was not entered."""
        return sum(span.duration_s for span in self.spans() if span.name == name)

    def metrics(self) -> dict[str, float]:
        """`time/{phase}` in order of the first end, and `time/step`: seconds since construction. A phase not
        entered is absent.
        """
        whole = {f"time/{span.name}": self.seconds(span.name) for span in self.spans()}
        return whole | {"time/step": time.perf_counter() - self._start}

    def spans(self) -> list[Span]:
        """Each time a phase was entered and left, in the order in which they ended."""
        return list(self._recorder.spans)


class SpanRecorder:
    """Holds spans until the row of a step is written. Of the spans of samples those are given out that `keep`
    has named; memory is bounded.

    One for a run, used by one thread.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []  # that the next take() gives out
        self._of_samples = OrderedDict[str, list[Span]]()

    def add(
        self,
        name: str,
        track: str,
        ago_s: float,
        duration_s: float,
        *,
        id: str | None = None,  # noqa: A002
        tokens: int | None = None,
    ) -> None:
        """Work that began `ago_s` seconds before now. Of a sample if it has an `id`."""
        assert PHASE_NAME.fullmatch(name) and duration_s >= 0, (name, duration_s)
        held = self.spans if id is None else self._of_samples.setdefault(id, [])
        held.append(Span(name, track, time.time() - ago_s, duration_s, id, tokens))
        if len(self._of_samples) > HELD_IDS:
            self._of_samples.popitem(last=False)
        del self.spans[:-HELD_SPANS]

    @contextmanager
    def measure(self, name: str, track: str = TRAINER) -> Iterator[None]:
        """The block as a span, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.add(name, track, seconds, seconds)

    def keep(self, ids: Iterable[str], rest: Iterable[str] = ()) -> None:
        """The spans of these samples are given out by the next take(); those of the `rest` are dropped."""
        for id_ in ids:
            self.spans.extend(self._of_samples.pop(id_, ()))
        for id_ in rest:
            self._of_samples.pop(id_, None)

    def take(self) -> list[Span]:
        """What was recorded since the last call, of samples only what was kept."""
        spans, self.spans = self.spans, []
        return spans


# --- who answers a request ----------------------------------------------------------------------------------


class Answered(NamedTuple):
    """A request that an engine has answered."""

    engine: str
    start: float  # of trio's clock
    duration_s: float
    tokens: int


_ANSWERED: ContextVar[list[Answered] | None] = ContextVar("answered", default=None)


@contextmanager
def listing_answers() -> Iterator[list[Answered]]:
    """The list to which every request made inside the block is added by the fleet that had it answered.

    A user's generate function stands between who asks here and the fleet that knows the engine, so no
    argument can carry it.
    """
    answers = []
    token = _ANSWERED.set(answers)
    try:
        yield answers
    finally:
        _ANSWERED.reset(token)


def note_answer(answered: Answered) -> None:
    """Adds a request to the list. Nothing where nobody lists answers."""
    answers = _ANSWERED.get()
    if answers is not None:
        answers.append(answered)

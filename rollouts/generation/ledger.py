"""The account of every prompt drawn. Each draw is one attempt, named by its group index, and is in exactly
one place:

    open ──► in flight ──► trained
                 │    └──► dropped with a reason      filtered:REASON, surplus, stale, aborted
                 │  └─► failed with a class  generate, reward, reward_timeout, reward_crashed, engine,
                     infrastructure, data
                 └───────► held ──► trained, or dropped; in flight again if it was held unfinished

A prompt that is returned to the DataBuffer closes its attempt; drawing it again opens another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollouts.types import JSONValue

SURPLUS = "surplus"  # the batch was full without it
STALE = "stale"  # older than max_staleness
ABORTED = "aborted"  # the call that drew it was cancelled or failed
FILTERED = "filtered:"  # and the filter's reason


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What became of the attempts so far."""

    drawn: int
    trained: int
    dropped: Mapping[str, int]  # by reason
    failed: Mapping[str, int]  # by class
    held: int
    in_flight: int


class Ledger:
    """Moves attempts between the places above and refuses every other move."""

    def __init__(self) -> None:
        self._place: dict[int, Literal["in_flight", "held"]] = {}  # attempts that are not closed
        self._num_held = 0
        self._drawn = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def open(self, group_index: int) -> None:
        assert group_index not in self._place, f"attempt {group_index} is open already"
        self._place[group_index] = "in_flight"
        self._drawn += 1

    def hold(self, group_index: int) -> None:
        assert group_index in self._place, f"attempt {group_index} is not open"
        self._num_held += self._place[group_index] != "held"
        self._place[group_index] = "held"

    def resume(self, group_index: int) -> None:
        assert self._place.get(group_index) == "held", f"attempt {group_index} is not held"
        self._num_held -= 1
        self._place[group_index] = "in_flight"

    def train(self, group_index: int) -> None:
        self._close(group_index)
        self._trained += 1

    def drop(self, group_index: int, reason: str) -> None:
        self._close(group_index)
        self._dropped[reason] += 1

    def fail(self, group_index: int, failure_class: str) -> None:
        self._close(group_index)
        self._failed[failure_class] += 1

    def counts(self) -> LedgerCounts:
        """A snapshot."""
        in_flight = len(self._place) - self._num_held
        return LedgerCounts(
            self._drawn, self._trained, dict(self._dropped), dict(self._failed), self._num_held, in_flight
        )

    def check(self) -> None:
        """Asserts that every prompt drawn is in exactly one place."""
        counts = self.counts()
        closed = counts.trained + sum(counts.dropped.values()) + sum(counts.failed.values())
        assert closed + counts.held + counts.in_flight == counts.drawn, f"a prompt was lost: {counts}"

    def state_dict(self) -> dict[str, JSONValue]:
        """The counts of closed attempts, as JSON. Open ones are the manager's to save: it knows their
        prompts.
        """
        return {"trained": self._trained, "dropped": dict(self._dropped), "failed": dict(self._failed)}

    def load_state_dict(self, state: Mapping[str, JSONValue]) -> None:
        """Starts from these counts, with no attempt open."""
        self._place, self._num_held = {}, 0
        self._trained, self._dropped, self._failed = (
            int(state["trained"]),
            Counter(state["dropped"]),
            Counter(state["failed"]),
        )
        self._drawn = self._trained + self._dropped.total() + self._failed.total()

    def _close(self, group_index: int) -> None:
        assert group_index in self._place, f"attempt {group_index} is not open"
        self._num_held -= self._place.pop(group_index) == "held"

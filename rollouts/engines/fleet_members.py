"""What a fleet keeps of its members and of its callers. Its life is drawn in rollouts.engines.fleet."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from rollouts.engines.fleet_state import EngineState, Ticket
from rollouts.errors import EngineError, EngineSetupError
from rollouts.protocols import InferenceEngine
from rollouts.types import EngineFeatures, GenerateRequest

NO_TICKET = Ticket(0, 0)  # of a call that has no seat


@dataclass(frozen=True)
class Member:
    """An engine and what can be done for its server."""

    engine: InferenceEngine
    restart: Callable[[], Awaitable[None]] | None = (
        None  # brings the server up again under the same address; None: only its owner can
    )
    wait_exited: Callable[[], Awaitable[str]] | None = (
        None  # returns, saying why, when the server's process is gone
    )


@dataclass(slots=True, eq=False)
class LiveMember:
    """A member and what is going on for it."""

    member: Member
    state: EngineState
    calls: set[Call] = field(default_factory=set)
    changed: trio.Event = field(
        default_factory=trio.Event
    )  # replaced when set: duty, condition or calls are others
    working: trio.CancelScope = field(
        default_factory=trio.CancelScope
    )  # around a supervisor's question to the engine
    watching: trio.CancelScope = field(default_factory=trio.CancelScope)  # around wait_exited
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around its tasks

    @property
    def engine(self) -> InferenceEngine:
        return self.member.engine

    def wake(self) -> None:
        changed, self.changed = self.changed, trio.Event()
        changed.set()


@dataclass(slots=True, eq=False)
class Call:
    """A caller of generate()."""

    request: GenerateRequest
    arrival: int
    event: trio.Event = field(default_factory=trio.Event)  # ends its wait: seated, failed or aborted
    waiting: bool = False  # in the queue
    seat: LiveMember | None = None  # taken for it
    ticket: Ticket = NO_TICKET  # of that seat
    avoid: str | None = None  # who failed it last
    error: EngineError | None = None
    aborted: bool = False
    quarantined: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around its stay on an engine


class CallQueue:
    """Callers that wait, by arrival. Those that no longer do stay in the heap for a while, and are swept out
    when they prevail.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._entries: list[tuple[int, Call]] = []

    def __len__(self) -> int:
        """Entries of the heap, also of those that no longer wait."""
        return len(self._entries)

    def put(self, call: Call) -> None:
        call.waiting = True
        self.waiting += 1
        heapq.heappush(self._entries, (call.arrival, call))

    def find_first(self) -> Call | None:
        """Who has waited longest."""
        while self._entries and not self._entries[0][1].waiting:
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def list_waiting(self) -> list[Call]:
        return [call for _, call in self._entries if call.waiting]

    def remove(self, call: Call) -> None:
        """Nothing for a call that does not wait."""
        if not call.waiting:
            return
        call.waiting = False
        self.waiting -= 1
        if self._entries[0][1] is call:
            heapq.heappop(self._entries)
        if len(self._entries) > 2 * self.waiting + 64:
            self._entries = [entry for entry in self._entries if entry[1].waiting]
            heapq.heapify(self._entries)


def unite_features(all_features: Sequence[EngineFeatures]) -> EngineFeatures:
    """What a fleet of such engines supports: the least of each, every gap once. Raises EngineSetupError where
    they do not fit together.
    """
    for features in all_features:
        if features.vocab_size != all_features[0].vocab_size:
            raise EngineSetupError(
                f"{features.name} has a vocabulary of {features.vocab_size}, {all_features[0].name} of"
                f" {all_features[0].vocab_size}; the engines of a fleet serve one model"
            )
        if features.shares_weights:
            raise EngineSetupError(
                f"{features.name} generates with the trainer's own parameters and needs no fleet; use it as"
                " it is"
            )
    return replace(
        all_features[0],
        name="fleet",
        context_length=min(features.context_length for features in all_features),
        in_memory_update=False,  # of the members, by weight_sync
        checksum=False,
        update_from_checkpoint=all(features.update_from_checkpoint for features in all_features),
        keep_pause=all(features.keep_pause for features in all_features),
        deterministic=all(features.deterministic for features in all_features),
        seeds=all(features.seeds for features in all_features),
        version_spans=all(features.version_spans for features in all_features),
        log_probs=all(features.log_probs for features in all_features),
        frees_memory=all(features.frees_memory for features in all_features),
        gaps=tuple(dict.fromkeys(gap for features in all_features for gap in features.gaps)),
    )

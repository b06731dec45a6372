"""One batch in the making, what is left of it, and what a manager knew at a moment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from rollouts.data.data_buffer import PromptRow
from rollouts.errors import EngineError, RolloutsError
from rollouts.generation.group import ClosedGroup, GroupWork
from rollouts.generation.pacing import Pace
from rollouts.generation.staleness import (
    HeldGroup,
    UnfinishedGroup,
    encode_held_group,
    encode_unfinished_group,
)
from rollouts.types import JSONValue, Sample

Report = ClosedGroup | int | None
"""A group that has closed; the group index of a member that generates no longer; or None: look for room."""


@dataclass(eq=False)
class Draw:
    """What one collector works on: the batch in the making, and what goes on into the next."""

    pace: Pace | None = None  # where groups are decided as they finish
    undecided: dict[int, PromptRow] = field(
        default_factory=dict
    )  # by group index, in launch order: running, or closed and waiting their turn
    work: dict[int, GroupWork] = field(default_factory=dict)  # how far those have come
    closed: dict[int, ClosedGroup] = field(default_factory=dict)  # those of them that have finished
    kept: dict[int, HeldGroup] = field(
        default_factory=dict
    )  # of the batch; paced: may be more, of which the batch is chosen
    decided: list[ClosedGroup] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)  # of the decided
    failed_groups: dict[int, tuple[PromptRow, str]] = field(
        default_factory=dict
    )  # decided, but in the ledger only when the batch is delivered
    drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    generating: int = 0  # samples
    is_stopping: bool = False
    failure: RolloutsError | None = None  # that ended the collector
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the collector's tasks
    changed: trio.Event = field(default_factory=trio.Event)  # set and replaced after each report
    ended: trio.Event = field(default_factory=trio.Event)  # every task has ended

    def __post_init__(self) -> None:
        # never more than the groups and samples in flight, and one for each call
        self.reports, self.received = trio.open_memory_channel[Report](math.inf)

    def notify(self) -> None:
        """Wakes those who wait for `changed`."""
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def begin_next(self) -> None:
        """The batch has left; what it did not take belongs to the next one."""
        self.decided, self.failed, self.failed_groups, self.drawn, self.dropped = [], [], {}, 0, Counter()


class Carried(NamedTuple):
    """What is left of a draw."""

    held: dict[int, HeldGroup]
    unfinished: dict[int, UnfinishedGroup]
    returned: dict[int, PromptRow]  # in launch order


def carry(draw: Draw, is_stale: Callable[[Sequence[Sample]], bool]) -> Carried:
    """What is held, and which prompts are returned, if the draw ends now; nothing if it has ended.

    Prompts of groups that failed are returned: what failed them may be what stopped the batch, and mended
    before they are drawn again. So are, unless the batch was full, those of groups that have not begun.
    """
    failed = {group_index: prompt for group_index, (prompt, _) in draw.failed_groups.items()}
    if draw.pace is None:
        kept = {group_index: held.prompt for group_index, held in draw.kept.items()}
        returned = kept | failed | draw.undecided
        return Carried({}, {}, {group_index: returned[group_index] for group_index in sorted(returned)})
    held, unfinished, returned = dict(draw.kept), {}, dict(failed)
    for group_index, work in draw.work.items():
        closed = draw.closed.get(group_index)
        if (
            closed is not None
            and closed.error is None
            and closed.decision.keep
            and not is_stale(closed.samples)
        ):
            held[group_index] = HeldGroup(closed.group, work.prompt)
        elif (closed is None or isinstance(closed.error, EngineError)) and (
            draw.is_stopping or work.has_begun
        ):
            unfinished[group_index] = UnfinishedGroup(group_index, work.prompt, tuple(work.members))
        else:
            returned[group_index] = work.prompt
    return Carried(held, unfinished, {group_index: returned[group_index] for group_index in sorted(returned)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSnapshot:
    """What a manager knew at a moment. It stays so while the manager goes on: groups and samples are records
    that nobody changes.
    """

    next_group_index: int
    ledger: Mapping[str, JSONValue]
    failures: Mapping[str, int]  # samples by class
    held: tuple[HeldGroup, ...]  # in launch order, like the next two
    unfinished: tuple[UnfinishedGroup, ...]
    in_flight: tuple[tuple[int, PromptRow], ...]  # by group index, prompts to return

    def encode(self) -> dict[str, JSONValue]:
        """As JSON, for load_state_dict. Takes time: every token of every held group is in it."""
        return {
            "next_group_index": self.next_group_index,
            "ledger": dict(self.ledger),
            "failures": dict(self.failures),
            "held": [encode_held_group(group) for group in self.held],
            "unfinished": [encode_unfinished_group(group) for group in self.unfinished],
            "in_flight": [[index, prompt.prompt_id, prompt.epoch] for index, prompt in self.in_flight],
        }

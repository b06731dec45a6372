"""What generation that goes on between calls of generate_batch consists of."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from rollouts.errors import RolloutsError
from rollouts.generation.group import ClosedGroup

Report = ClosedGroup | int | None
"""A group that has closed; the group index of a member that generates no longer; or None: launch what there is room for."""


@dataclass(slots=True, eq=False)
class Ahead:
    """Generation that goes on between calls."""

    nursery: trio.Nursery  # of the collector
    engines_follow: bool  # whether launching waits for engines that are too far behind
    changed: trio.Event = field(
        default_factory=trio.Event
    )  # set and replaced when a group was decided, or collecting has ended
    collecting: trio.CancelScope | None = None  # of the collector that runs
    reports: trio.MemorySendChannel[Report] | None = None  # to it
    failure: RolloutsError | None = None  # that ended it, until a call has raised it
    is_awaited: bool = False  # by a call

    def notify(self) -> None:
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def wake(self) -> None:
        """The collector looks whether there is room."""
        if self.reports is not None:
            self.reports.send_nowait(None)

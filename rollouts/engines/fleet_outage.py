"""Since when nobody of a fleet serves, and what is done meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import trio

from rollouts.engines import fleet_state
from rollouts.engines.fleet_state import EngineState, FleetSettings


class Outage:
    """The moment since which nobody serves: that of the loss or, before the first update, of the first
    request.

    An update of engines that served is no outage, however long, nor is the first of all. One that begins in
    an outage does not end it: only an engine that serves again does.
    """

    def __init__(self) -> None:
        self.since: float | None = None  # None: there is none
        self.changed = trio.Event()  # replaced when set: one has begun or ended
        self._served = False  # ever

    def note(self, states: Sequence[EngineState], *, is_asked: bool) -> None:
        """`is_asked`: requests wait."""
        since = self.since
        if any(fleet_state.in_service(state) for state in states):
            self._served, since = True, None
        elif any(fleet_state.may_serve(state) for state in states):
            since = since if self._served else None
        elif since is None and (self._served or is_asked):
            since = trio.current_time()
        if since != self.since:
            self.since = since
            changed, self.changed = self.changed, trio.Event()
            changed.set()


async def watch_outages(
    outage: Outage, settings: FleetSettings, warn: Callable[[float], None], refuse: Callable[[], None]
) -> None:
    """For ever. In an outage calls `warn` with its beginning every warn_every_s, and `refuse`, which answers
    all who wait, once at down_limit_s.
    """
    while True:
        changed = outage.changed
        if outage.since is None:
            await changed.wait()
        else:
            await watch_outage(outage.since, changed, settings, warn, refuse)


async def watch_outage(
    since: float,
    ended: trio.Event,
    settings: FleetSettings,
    warn: Callable[[float], None],
    refuse: Callable[[], None],
) -> None:
    warnings, limit_at = 1, since + settings.down_limit_s
    while not ended.is_set():
        warn_at = since + warnings * settings.warn_every_s
        with trio.move_on_at(min(warn_at, limit_at)):
            await ended.wait()
            return
        if trio.current_time() >= warn_at:
            warnings += 1
            warn(since)
        if trio.current_time() >= limit_at:
            limit_at = math.inf
            refuse()

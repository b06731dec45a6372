"""Weights on their way to the engines while the next step trains: one update at a time.

loop ──► start(version) ─► update ─► released: the trainer may change its weights ──► the loop goes on
                              └────► engines serve the version ─► on_updated ─► its metrics wait for the next row
                              └────► fails: whoever is guarded is cancelled, and the next call raises it
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import trio

UpdateEngines = Callable[[int, trio.Event | None], Awaitable[Mapping[str, float]]]
"""Brings every engine to a version; sets the event, if given, once the trainer may change its weights."""


@asynccontextmanager
async def open_weight_push(
    update: UpdateEngines, *, beside: bool, on_updated: Callable[[int], None]
) -> AsyncIterator[WeightPush]:
    """Updates that go on beside training, or, unless `beside`, that start() waits for. One that is under way
    when the block is left is cancelled.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield WeightPush(update, nursery, beside=beside, on_updated=on_updated)
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class WeightPush:
    """Made by open_weight_push."""

    def __init__(
        self, update: UpdateEngines, nursery: trio.Nursery, *, beside: bool, on_updated: Callable[[int], None]
    ) -> None:
        self._update = update
        self._nursery = nursery
        self._beside = beside
        self._on_updated = on_updated
        self._ended: trio.Event | None = None  # of the update under way
        self._guarded = trio.CancelScope()
        self._failure: Exception | None = None
        self._metrics: dict[str, float] = {}

    async def start(self, version: int) -> None:
        """Returns when the trainer may go on. Waits for the update before, and raises what that, or this one,
        came to.
        """
        if not self._beside:
            metrics = await self._update(version, None)
            self._metrics |= metrics
            self._on_updated(version)
            return
        await self.wait()
        released, self._ended = trio.Event(), trio.Event()
        self._nursery.start_soon(self._push, version, released, self._ended)
        await released.wait()
        self._raise_failure()

    async def wait(self) -> None:
        """Until no update is under way. Raises what the last one failed with."""
        if self._ended is not None:
            await self._ended.wait()
        self._raise_failure()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """What waits inside for engines is cancelled when the update under way fails, and that is raised in
        its place; what has ended by then has, and the next call raises it.
        """
        self._raise_failure()
        with trio.CancelScope() as self._guarded:
            yield
        if self._guarded.cancelled_caught:
            self._raise_failure()

    def take_metrics(self) -> dict[str, float]:
        """Of updates that have ended since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _push(self, version: int, released: trio.Event, ended: trio.Event) -> None:
        try:
            metrics = await self._update(version, released)
            # not in one line: |= reads its left side before it waits, and take_metrics may come in between
            self._metrics |= metrics
            self._on_updated(version)
        except Exception as error:  # raised where the loop asks next
            self._failure = error
            self._guarded.cancel()
        finally:
            self._ended = None
            released.set()
            ended.set()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

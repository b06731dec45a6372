"""A requested stop: what it cuts, and how the process ends in time.

    first signal ──► Stop.request() ──► the innermost Stop.scope() is cancelled, then the one around it, …
                                        what is inside Stop.completing() goes on to its end
    22 s later ──► end_overdue ends the process with 0; the newest complete checkpoint counts
    second signal ──► the process ends at once

In a loop the innermost scope is around the step under way (see rollouts.loops.steps), which saves the last
complete step when it was cut. Everywhere else it is the one around the whole run.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import trio

GRACE_S = 22.0  # from the first signal until the process is ended by force; 25 are promised
TELL_S = 2.0  # at most, for the other ranks to be told of that
CONNECT_S = 4.0  # from the first signal, for ranks that are being connected
LAST_COUNTS = "the newest complete checkpoint counts"


class Stop:
    """Whether a stop was requested, and the scopes that it cancels. One for a run."""

    def __init__(self, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.say = say  # writes a line for the user
        self.tell_others: Callable[[], Awaitable[None]] | None = None  # tells other ranks of an end by force
        self._requested = trio.Event()
        self._scopes: list[trio.CancelScope | None] = []  # innermost last; None: not to be cancelled

    def is_requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        """Begins the stop. Later calls change nothing."""
        self._requested.set()
        self._cancel_innermost()

    async def wait_requested(self) -> None:
        await self._requested.wait()

    @contextmanager
    def scope(self) -> Iterator[trio.CancelScope]:
        """A scope that a stop cancels, once every scope inside it has ended."""
        with trio.CancelScope() as scope, self._stacked(scope):
            self._cancel_innermost()
            yield scope

    @contextmanager
    def completing(self) -> Iterator[None]:
        """A stop cancels scopes inside this block, and what is around it only when the block has ended."""
        with trio.CancelScope(shield=self.is_requested()), self._stacked(None):
            yield

    @contextmanager
    def _stacked(self, scope: trio.CancelScope | None) -> Iterator[None]:
        self._scopes.append(scope)
        try:
            yield
        finally:
            self._scopes.pop()
            self._cancel_innermost()

    def _cancel_innermost(self) -> None:
        if self.is_requested() and self._scopes and (scope := self._scopes[-1]) is not None:
            scope.cancel()


# --- the process --------------------------------------------------------------------------------------------


async def watch_signals(stop: Stop, *, launched: bool) -> None:
    """Requests the stop at the first SIGINT or SIGTERM; the second ends the process at once. Checkpoints are
    atomic, so nothing durable breaks.

    `launched`: under torchrun, which forwards a SIGTERM that a scheduler may have sent to this process too: a
    second SIGTERM is ignored there.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if not stop.is_requested():
                stop.say("stopping: the last complete step is saved; once more to stop at once")
                stop.request()
            elif not (launched and number == signal.SIGTERM):
                os._exit(128 + number)


def exit_now() -> NoReturn:
    """Ends the process with 0; the guards of servers and workers end those that are left."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(0)


async def end_overdue(stop: Stop) -> None:
    """Ends the process when a stop takes longer than GRACE_S, because something cannot be cancelled."""
    await stop.wait_requested()
    await trio.sleep(GRACE_S)
    stop.say(f"stopped by force: something did not end in time; {LAST_COUNTS}")
    if stop.tell_others is not None:
        with trio.move_on_after(TELL_S):
            await stop.tell_others()
    exit_now()


async def end_unconnected(stop: Stop, scope: trio.CancelScope) -> None:
    """Ends the process CONNECT_S after a stop was requested, unless `scope` was cancelled before because the
    ranks are connected. Waiting for ranks cannot be cancelled, and one that has died never comes.
    """
    with scope:
        await stop.wait_requested()
        await trio.sleep(CONNECT_S)
        stop.say("stopped while the other ranks were awaited; nothing was trained")
        exit_now()

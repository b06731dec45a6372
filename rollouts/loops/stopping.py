"""A requested stop: what it cuts, and how the process ends in time.

    first signal ──► Stop.request() ──► the innermost Stop.scope() is cancelled, then the one around it, …
                                        what is inside Stop.completing() goes on to its end
    21 s later ──► the process ends with 0; the newest complete checkpoint counts
    second signal ──► the process ends at once

In a loop the innermost scope is around the step under way (see rollouts.loops.steps), which saves the last
complete step when it was cut. Everywhere else it is the one around the whole run. A function that holds the
event loop delays the first arrow alone: signals are answered by their handler, and the time is kept by a
thread, which names that function too.
"""

import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Event, Thread, get_ident
from types import FrameType
from typing import NoReturn

import trio

from rollouts.protocols import Say

TICK_S = 1.0
HELD_TICKS = 4  # of an event loop that does not answer, before it is said; said again each time these double
GRACE_TICKS = 21  # from the first signal to the end by force; with 3 s to tell others, 25 s are promised
CONNECT_S = 4.0  # from the first signal, for ranks that are being connected
LAST_COUNTS = "the newest complete checkpoint counts"
FRAMES = 8  # of what holds the event loop
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Stop:
    """Whether a stop was requested, and the scopes that it cancels. One for a run."""

    def __init__(self, *, say: Say = lambda text: None) -> None:
        self.say = say  # writes a line for the user
        self.tell_others: Callable[[], object] = lambda: None  # tells other ranks of an end by force
        self.is_near = False  # at once where a signal asks for it; it is requested when the event loop can
        self._requested = trio.Event()
        self._scopes: list[trio.CancelScope | None] = []  # innermost last; None: not to be cancelled

    def is_requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        """Begins the stop. Later calls change nothing."""
        self.is_near = True
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


@asynccontextmanager
async def open_stop(say: Say, *, launched: bool = False) -> AsyncIterator[Stop]:
    """What the first SIGINT, SIGTERM or SIGHUP requests; the second ends the process at once. Checkpoints are
    atomic, so nothing durable breaks. While it is open, an event loop that is held is said with what holds
    it.

    `launched`: under torchrun, which forwards a SIGTERM that a scheduler may have sent to this process too: a
    second SIGTERM is ignored there. SIGHUP stays ignored where it is (nohup).
    """
    stop, closing, loop = Stop(say=say), Event(), trio.lowlevel.current_trio_token()

    def begin() -> None:
        say("stopping: the last complete step is saved; once more to stop at once")
        stop.request()

    def answer(number: int, frame: FrameType | None) -> None:
        if not stop.is_near:
            stop.is_near = True
            loop.run_sync_soon(begin)
        elif number != signal.SIGHUP and not (launched and number == signal.SIGTERM):
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, answer)
    try:
        async with trio.open_nursery() as nursery:
            watch = partial(watch_loop, stop, loop, get_ident(), closing)
            nursery.start_soon(partial(trio.to_thread.run_sync, watch, abandon_on_cancel=True))
            try:
                yield stop
            finally:
                closing.set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_loop(stop: Stop, loop: trio.lowlevel.TrioToken, thread: int, closing: Event) -> None:
    """Until `closing`: says what holds the event loop of `thread`, and ends the process when a stop takes
    longer than GRACE_TICKS. In seconds by this process's own count, for a machine may sleep.
    """
    answered, held, stopping, told = Event(), 0, 0, HELD_TICKS
    answered.set()
    while not closing.wait(TICK_S):
        held = 0 if answered.is_set() else held + 1
        if not held:
            answered.clear()
            told = HELD_TICKS
            loop.run_sync_soon(answered.set)
        elif held == told:
            told *= 2
            frame = sys._current_frames()[thread]
            where = "".join(traceback.format_stack(frame, FRAMES))
            call_in_time(
                stop.say,
                f"the event loop has been held for {held} s, in which nothing else can go on, by"
                f" {frame.f_code.co_qualname}; await what takes long, or make the function sync:\n{where}",
            )
        stopping += stop.is_near
        if stopping == GRACE_TICKS:
            call_in_time(stop.say, f"stopped by force: something did not end in time; {LAST_COUNTS}")
            stop.tell_others()
            exit_now()


def call_in_time(write: Callable[..., object], *text: str) -> None:
    """Calls it, and waits no longer than TICK_S: of a stream, the reader may be gone, or asleep."""

    def work() -> None:
        with suppress(OSError, ValueError):
            write(*text)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(TICK_S)


def exit_now() -> NoReturn:
    """Ends the process with 0; the guards of servers and workers end those that are left."""
    for stream in (sys.stdout, sys.stderr):
        call_in_time(stream.flush)
    os._exit(0)


async def end_unconnected(stop: Stop, scope: trio.CancelScope) -> None:
    """Ends the process CONNECT_S after a stop was requested, unless `scope` was cancelled before because the
    ranks are connected. Waiting for ranks cannot be cancelled, and one that has died never comes.
    """
    with scope:
        await stop.wait_requested()
        await trio.sleep(CONNECT_S)
        stop.say("stopped while the other ranks were awaited; nothing was trained")
        exit_now()

"""A requested stop: how long there is, what still fits, and what is cut.

    first signal ──► StopControl.request(): deadline = now + 25 s
                       ├─ a phase is under way ── its step is expected to end in time ──► goes on, for as long as that holds and leaves time to save
                       │                       └─ it is not, or nobody knows ──► cut now
                       └─ no stage trains (start-up) ──► all of it is cancelled
    loop ──► with stop.phase(name) as scope ──► scope.cancelled_caught: the step is given up, and the one before it is saved
    a little before the deadline, whatever hangs ──► end_overdue ends the process; the newest complete checkpoint counts

A cut is a cancelled scope, so it stops what waits: requests, rewards, updates of engines. A job of the device
thread cannot be cancelled: it is told by backend.interrupt() and ends at its next micro-batch. Nothing here
decides for other ranks: what reaches them is the interrupt alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import trio

GRACE_S = 25.0  # from the signal to the end of the process; torchrun kills after 30
CLOSE_S = 7.0  # of those, for what follows the checkpoint: workers and servers end, the interpreter leaves
OVERDUE_S = 3.0  # before the deadline: who is still here then is ended without more ado
TELL_S = 2.0  # of those, at most, for others to be told
CONNECT_S = (
    4.0  # after a stop, for ranks that are being connected to be: then they end as after a finished run
)
SAFETY = 1.5  # what took so long the last time may take so many times as long
SLACK_S = 1.0  # between the last moment of a phase and the last moment to save
PATIENCE, PATIENCE_S = (
    3.0,
    2.0,
)  # a step that takes so many times as long as expected, and so much more, is not the step that was expected
UNKNOWN_SAVE_S = 8.0  # kept free for a save as long as none was measured
STEP_PHASES = (
    "generate",
    "log_probs",
    "values",
    "train_critic",
    "train",
    "weight_sync",
)  # of a step, in order


def estimate_rest(measured: Mapping[str, float], phase: str, elapsed_s: float) -> float | None:
    """Seconds until the step is expected to end whose `phase` began `elapsed_s` ago, by what each phase took
    the last time.

    A phase outside of steps is alone. None: unknown, because the phase was never measured, or takes twice as
    long as the last time already.
    """
    if phase not in measured or elapsed_s > 2 * measured[phase]:
        return None
    later = STEP_PHASES[STEP_PHASES.index(phase) + 1 :] if phase in STEP_PHASES else ()
    return max(measured[phase] - elapsed_s, 0.0) + sum(measured.get(name, 0.0) for name in later)


def choose_cut(*, now: float, deadline: float, rest_s: float | None, save_s: float, piece_s: float) -> float:
    """When a phase must end, on the clock of `now` and `deadline`: `now`, unless its step is expected to end
    in time.

    Else when it has taken far longer than was expected, and at the last moment at latest: that leaves time
    for what cannot be stopped (`piece_s`, a micro-batch), a save and the end of the process.
    """
    latest = deadline - CLOSE_S - SLACK_S - SAFETY * (piece_s + save_s)
    if rest_s is None or now + SAFETY * rest_s > latest:
        return now
    return min(latest, now + PATIENCE * rest_s + PATIENCE_S)


def no_piece() -> float:
    """The seconds of work that cannot be stopped, where all can."""
    return 0.0


def say_nothing(text: str) -> None:
    """The user who need not know."""


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    began: float  # trio's clock
    scope: trio.CancelScope
    piece_s: Callable[[], float]


class StopControl:
    """Whether a stop was requested, until when, and the seconds that things took. One for a run."""

    def __init__(self, *, grace_s: float = GRACE_S, say: Callable[[str], None] = say_nothing) -> None:
        self.say = say
        self._grace_s = grace_s
        self._requested = trio.Event()
        self._deadline = float("inf")  # trio's clock
        self._startup = trio.CancelScope()
        self._training = False
        self._phase: _Phase | None = None  # under way
        self._measured: dict[str, float] = {}  # seconds, by phase, of the last time
        self._save_s: float | None = None
        self._tell: Callable[[], Awaitable[None]] | None = None

    def is_requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        """Begins the stop. Later calls change nothing."""
        if self.is_requested():
            return
        self._deadline = trio.current_time() + self._grace_s
        self._requested.set()
        if self._phase is not None:
            self._phase.scope.deadline = self._choose(self._phase)
        elif not self._training:
            self._startup.cancel()

    async def wait_overdue(self) -> None:
        """Until a stop was requested and its time is all but over."""
        await self._requested.wait()
        await trio.sleep_until(self._deadline - OVERDUE_S)

    @contextmanager
    def telling(self, tell: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Inside, `tell` is awaited before the process is ended by force: other ranks end too then."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    async def tell_others(self) -> None:
        """Whoever is to be told that the process is ended by force has been, or TELL_S are over."""
        if self._tell is not None:
            with trio.move_on_after(TELL_S):
                await self._tell()

    async def wait_unconnected(self) -> None:
        """Until a stop was requested and CONNECT_S are over: whoever is still to be connected then is waited
        for no longer.
        """
        await self._requested.wait()
        await trio.sleep(CONNECT_S)

    # --- what a stop may cut

    @contextmanager
    def startup(self) -> Iterator[trio.CancelScope]:
        """Around everything of a run. A stop that comes while no stage trains cancels it: nothing is in it
        then that is not saved.
        """
        with self._startup:
            yield self._startup

    @contextmanager
    def training(self) -> Iterator[None]:
        """A stage trains: a stop cuts phases alone. What the phases of another stage took says nothing of
        this one's.
        """
        for name in STEP_PHASES:
            self._measured.pop(name, None)
        self._training = True
        try:
            yield
        finally:
            self._training = False

    @contextmanager
    def phase(self, name: str, *, piece_s: Callable[[], float] = no_piece) -> Iterator[trio.CancelScope]:
        """A scope that is cancelled when a stop leaves no time for what is inside; how long it took is kept
        for the next time.

        `piece_s` answers the seconds of work that goes on after the cut, because nothing can stop it.
        """
        phase = self._phase = _Phase(name, trio.current_time(), trio.CancelScope(), piece_s)
        if self.is_requested():
            phase.scope.deadline = self._choose(phase)
        try:
            with phase.scope:
                yield phase.scope
                self._measured[name] = trio.current_time() - phase.began
        finally:
            self._phase = None
        if phase.scope.cancelled_caught:
            self.say(f"stopping: {name} does not fit into the time that is left, and is cut")
            if not self._training:
                self._startup.cancel()

    def _choose(self, phase: _Phase) -> float:
        now = trio.current_time()
        rest_s = estimate_rest(self._measured, phase.name, now - phase.began)
        return choose_cut(
            now=now,
            deadline=self._deadline,
            rest_s=rest_s,
            save_s=self._expected_save_s,
            piece_s=phase.piece_s(),
        )

    # --- saving

    @property
    def _expected_save_s(self) -> float:
        return UNKNOWN_SAVE_S if self._save_s is None else self._save_s

    def until_save(self) -> trio.CancelScope:
        """A scope that is cancelled when a save must have begun to be done in time."""
        return trio.CancelScope(deadline=self._deadline - CLOSE_S - self._expected_save_s)

    async def save(self, write: Callable[[], Awaitable[float | None]], *, what: str) -> bool:
        """Writes, and learns how long that takes. False, with nothing written, if a stop leaves less time
        than the last save took.

        `write` answers the seconds that a whole save takes where it goes on beside training after it
        returned; None: it does not.
        """
        began = trio.current_time()
        left_s = self._deadline - OVERDUE_S - began
        if self._save_s is not None and self._save_s > left_s:
            left = f"{self._save_s:.1f} s the last time, and {max(left_s, 0):.1f} s are left"
            self.say(f"stopping: {what} is not saved: that took {left}; {LAST_COUNTS}")
            return False
        whole_s = await write()
        self._save_s = max(trio.current_time() - began, whole_s or 0.0)
        return True


LAST_COUNTS = "the newest complete checkpoint counts"


# --- the process --------------------------------------------------------------------------------------------


async def watch_signals(stop: StopControl, *, launched: bool) -> None:
    """Requests the stop at the first SIGINT or SIGTERM; the second ends the process at once. Checkpoints are
    atomic, so nothing durable breaks.

    `launched`: under torchrun, which passes SIGTERM on to a process that a scheduler may have told already: a
    second one is an echo.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if not stop.is_requested():
                stop.request()
                stop.say(
                    "stopping after this step, if time allows, and its checkpoint; once more to stop now"
                )
            elif not (launched and number == signal.SIGTERM):
                os._exit(128 + number)


def exit_now() -> NoReturn:
    """Ends the process with 0; whoever guards its servers and workers ends those that are left."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it may be gone
            stream.flush()
    os._exit(0)


async def end_overdue(stop: StopControl, *, end_process: Callable[[], None] = exit_now) -> None:
    """Ends the process when a stop takes longer than it may: something hangs that cannot be cancelled."""
    await stop.wait_overdue()
    stop.say(f"stopped by force: something did not end in time; {LAST_COUNTS}")
    await stop.tell_others()
    end_process()


async def end_unconnected(
    stop: StopControl, scope: trio.CancelScope, *, end_process: Callable[[], None] = exit_now
) -> None:
    """Ends the process soon after a stop was requested, unless `scope` was cancelled before: the ranks are
    connected.

    What waits for ranks to come cannot be cancelled, and one that has died never comes: a launcher asks the
    others to stop because of that.
    """
    with scope:
        await stop.wait_unconnected()
        stop.say("stopped while the other ranks were awaited; nothing was trained")
        end_process()

"""Which async user function keeps the event loop from everybody else: told once per function, by name.

call.py marks what it awaits with running_in_loop; a trio instrument notes when each step of a task began. The
time that a function held the loop is looked at when a step ends inside it, and when it ends inside a step.
Without a watcher neither costs anything to speak of.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import trio


@dataclass(frozen=True, slots=True)
class Running:
    """A user function that a task is in."""

    kind: str  # "reward", "group reward", "generate", "filter"
    name: str
    entered_s: float  # of the watcher's clock


_running: ContextVar[Running | None] = ContextVar(
    "rollouts_running_user_function", default=None
)  # tasks that a function starts inherit it
_watchers: list[BlockingWatch] = []


@contextlib.contextmanager
def watch_blocking(
    warn: Callable[[str], None], *, threshold_s: float = 0.1, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """While open, `warn` gets a sentence about each async user function that held the event loop longer than
    `threshold_s` in one step.

    To be opened inside trio. Seconds are of `clock`, wall time, so a machine that is very busy can blame a
    function that did little.
    """
    watch = BlockingWatch(warn, threshold_s, clock)
    trio.lowlevel.add_instrument(watch)
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
        trio.lowlevel.remove_instrument(watch)


@contextlib.contextmanager
def running_in_loop(kind: str, name: str) -> Iterator[None]:
    """Marks the current task as being in a user function."""
    if not _watchers:
        yield
        return
    running = Running(kind, name, _watchers[-1].clock())
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        for watch in _watchers:
            watch.look(running)


class BlockingWatch(trio.abc.Instrument):
    """The instrument of watch_blocking."""

    def __init__(self, warn: Callable[[str], None], threshold_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._warn = warn
        self._threshold_s = threshold_s
        self._step_began_s = 0.0
        self._told: set[tuple[str, str]] = set()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._step_began_s = self.clock()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        running = task.context.get(_running)
        if running is not None:
            self.look(running)

    def look(self, running: Running) -> None:
        """Warns if the step that is being made, as far as the function was in it, is too long already."""
        held_s = self.clock() - max(self._step_began_s, running.entered_s)
        key = (running.kind, running.name)
        if held_s <= self._threshold_s or key in self._told:
            return
        self._told.add(key)
        self._warn(
            f"async {running.kind} function {running.name} blocked the event loop for {held_s:.2f} s"
            f" {_way_out(running.kind)}"
        )


def _way_out(kind: str) -> str:
    if kind in ("reward", "group reward"):
        return (
            "in one step, in which nothing else could go on; make it sync, so that it runs in a worker"
            " process, or await"
        )
    return (
        "in one step, in which nothing else could go on; await what takes long, or run it with"
        " trio.to_thread.run_sync"
    )

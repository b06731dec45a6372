"""Waiting on a thread for a broadcast to end, or to be broken off."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import trio

POLL_S = 0.002


def device_context(device: torch.device) -> torch.device | torch.cuda.device:
    """Makes `device` current on this thread, which may not be the one that owns it."""
    return torch.cuda.device(device) if device.type == "cuda" else device


class Signal:
    """Wakes the thread that waits for a broadcast, whether it has ended or was broken off."""

    def __init__(self) -> None:
        self.broken = False
        self._woken = threading.Event()

    def set(self) -> None:
        """Broken off, for good."""
        self.broken = True
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Returns when woken, or after `timeout_s`. Raises RuntimeError if broken off."""
        self._woken.wait(timeout_s)
        if self.broken:
            raise RuntimeError("the broadcast was broken off")
        self._woken.clear()


def wait_work(work: Any, signal: Signal, timeout_s: float) -> None:
    """Returns when a broadcast over gloo has ended. Raises RuntimeError if it failed, was broken off, or
    takes longer than `timeout_s`.

    Its memory stays with it until its group's own deadline: a broadcast that was left alone does no harm.
    """
    future = work.get_future()
    future.add_done_callback(lambda _: signal.wake())
    signal.wait(timeout_s)
    if not future.done():
        raise RuntimeError(f"a broadcast did not end within {timeout_s:g} s")
    future.wait()  # raises what went wrong


def record_stream() -> Any:
    """An event after everything that was put on the current CUDA stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def wait_stream(signal: Signal, event: Any, timeout_s: float) -> None:
    """As wait_work, for what `event` comes after. CUDA has no wait with a deadline, and a broadcast to a
    server that died never ends.
    """
    deadline = time.monotonic() + timeout_s
    while not event.query():
        signal.wait(POLL_S)
        if time.monotonic() > deadline:
            raise RuntimeError(f"a broadcast did not end within {timeout_s:g} s")


async def run_both(one: Callable[[], Awaitable[None]], other: Callable[[], Awaitable[None]]) -> None:
    """Both at once; the first that fails cancels the other, and its error is raised as it is."""
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def guard(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        nursery.start_soon(guard, one)
        nursery.start_soon(guard, other)
    if errors:
        raise errors[0]

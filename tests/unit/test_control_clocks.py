"""Silence on the control channel is judged by time that this process was awake: one that was stopped, or gets
no time, blames nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from rollouts.distributed.commands import Command
from rollouts.distributed.connection import Connection, Kind, wait_silent
from tests.unit.control_rig import (
    SILENCE_S,
    Rig,
    follow,
    frame,
)


@pytest.mark.parametrize("order", range(20))  # in which trio wakes tasks is drawn by lot
async def test_a_process_that_was_stopped_itself_blames_nobody(
    order: int, autojump_clock: trio.testing.MockClock
):
    rig, told = Rig(2), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, rig, 1, told)
        async with rig.hub() as hub:
            for _ in range(3):
                await trio.sleep(2.9)
                autojump_clock.jump(1000.0)
            hub.send(Command("go"))
    assert told == ["go"]
    assert rig.named() == {}


async def test_a_rank_that_died_while_this_process_was_stopped_is_named_soon_after(
    autojump_clock: trio.testing.MockClock,
):
    ours, theirs = trio.testing.memory_stream_pair()
    connection = Connection(ours)
    autojump_clock.jump(1000.0)
    with trio.fail_after(2 * SILENCE_S):
        await wait_silent(connection, SILENCE_S)
    del theirs


@asynccontextmanager
async def hear_later(time_s: float) -> AsyncIterator[Connection]:
    """A connection over which one byte comes at that time, and nothing else does."""
    ours, theirs = trio.testing.memory_stream_pair()
    connection = Connection(ours)

    async def speak() -> None:
        await trio.sleep_until(time_s)
        await theirs.send_all(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.receive)
        await theirs.send_all(frame(Kind.BEAT, b"x" * 100)[:5])
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(speak)
        yield connection
        nursery.cancel_scope.cancel()


async def test_ranks_that_were_all_stopped_at_once_blame_nobody(autojump_clock: trio.testing.MockClock):
    """As when a computer sleeps: nothing has arrived meanwhile, and the others' heartbeats come when they
    come round themselves.
    """

    async def stop() -> None:
        await trio.sleep(1.0)
        autojump_clock.jump(1000.0)

    async with trio.open_nursery() as nursery, hear_later(1002.5) as connection:
        nursery.start_soon(stop)
        with trio.move_on_at(1005.0) as scope:
            await wait_silent(connection, SILENCE_S)
    assert scope.cancelled_caught


@pytest.mark.parametrize("order", range(20))  # in which trio wakes tasks is drawn by lot
async def test_what_comes_in_the_last_moment_is_read_before_anybody_is_blamed(
    order: int, autojump_clock: trio.testing.MockClock
):
    async with hear_later(SILENCE_S) as connection:
        with trio.move_on_after(SILENCE_S + 2.0) as scope:
            await wait_silent(connection, SILENCE_S)
    assert scope.cancelled_caught


async def test_a_process_that_comes_round_late_every_time_still_notices(
    autojump_clock: trio.testing.MockClock,
):
    connection = Connection(trio.testing.memory_stream_pair()[0])

    async def slow_down() -> None:
        while True:
            await trio.sleep(0.01)
            autojump_clock.jump(2.0)  # with which every tick is late

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_down)
        with trio.fail_after(SILENCE_S * 10):
            await wait_silent(connection, SILENCE_S)
        nursery.cancel_scope.cancel()

"""Futures that are done from the start, and groups of futures: order, failures, cancellation."""

from typing import Any

import pytest
import trio

from rollouts.errors import BackendError
from rollouts.futures import FutureGroup, ImmediateTrainFuture
from rollouts.testing.fakes import FakeFuture


def fake(value: str, done_at: float, failure: BackendError | None = None) -> Any:
    return FakeFuture(value, failure, done_at, lambda: None, False)


async def test_an_immediate_future_gives_its_value_or_its_error_each_time():
    value, failure = ImmediateTrainFuture(3), ImmediateTrainFuture(None, BackendError("no"))
    for _ in range(2):
        assert (await value, await value.result(), value.done(), failure.done()) == (3, 3, True, True)
        with pytest.raises(BackendError, match="no"):
            await failure


async def test_a_group_answers_in_its_own_order_once_all_are_done(autojump_clock):
    group = FutureGroup([fake("a", 3), fake("b", 1), ImmediateTrainFuture("c"), fake("d", 2)])
    assert not group.done()
    assert await group == await group.result() == ["a", "b", "c", "d"]
    assert trio.current_time() == 3 and group.done()
    assert await FutureGroup([]) == []
    assert await FutureGroup([group, FutureGroup([])]) == [["a", "b", "c", "d"], []]


async def test_values_can_be_had_as_they_come(autojump_clock):
    group = FutureGroup([fake("a", 3), fake("b", 1), fake("c", 2)])
    seen = []
    async with group.open_completed() as completed:
        async for index, future in completed:
            seen.append((index, await future, trio.current_time()))
    assert seen == [(1, "b", 1), (2, "c", 2), (0, "a", 3)]


async def test_the_first_failure_in_time_is_raised_at_once_and_says_which_it_was(autojump_clock):
    error = BackendError("out of memory")
    group = FutureGroup([fake("a", 9), fake("b", 8, BackendError("later")), fake("c", 1, error)])
    with pytest.raises(BackendError) as raised:
        await group
    assert raised.value is error and trio.current_time() == 1
    assert error.__notes__ == ["raised by future 2 of a group of 3"]


async def test_leaving_the_block_early_ends_the_waiting(autojump_clock):
    group = FutureGroup([fake("a", 9), fake("b", 1)])
    async with group.open_completed() as completed:
        assert (await completed.receive())[0] == 1
    assert trio.current_time() == 1


async def test_an_error_of_the_block_is_raised_as_it_is(autojump_clock):
    async def break_off() -> None:
        async with FutureGroup([fake("a", 9)]).open_completed():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await break_off()


async def test_of_failures_at_one_time_the_first_in_the_group_is_raised(autojump_clock):
    for _ in range(20):  # trio runs tasks that wake together in any order
        failures = [fake("", 1, BackendError(f"{index}")) for index in range(4)]
        with pytest.raises(BackendError, match="0"):
            await FutureGroup(failures)

"""Futures that are done from the start, and groups of futures: order and failures."""

import pytest
import trio

from rollouts.errors import BackendError
from rollouts.futures import FutureGroup, ImmediateTrainFuture
from rollouts.testing.fakes import FakeFuture


def make_group(*done_at: float, failing: int = 9) -> FutureGroup[int]:
    """Futures whose values are their places; those from `failing` on fail with theirs."""

    def fake(place, time):
        failure = BackendError(f"{place}") if place >= failing else None
        return FakeFuture(place, failure, time, lambda: None, False)

    return FutureGroup([fake(*each) for each in enumerate(done_at)])


async def test_an_immediate_future_gives_its_value_or_its_error_each_time():
    value, failure = ImmediateTrainFuture(3), ImmediateTrainFuture(None, BackendError("no"))
    for _ in range(2):
        assert (await value, value.done(), failure.done()) == (3, True, True)
        with pytest.raises(BackendError, match="no"):
            await failure


async def test_a_group_answers_in_its_own_order_once_all_are_done(autojump_clock):
    group = make_group(3, 1, 2)
    assert not group.done()
    assert await FutureGroup([group, FutureGroup([]), ImmediateTrainFuture(7)]) == [[0, 1, 2], [], 7]
    assert trio.current_time() == 3 and group.done()


async def test_futures_can_be_had_as_they_are_done(autojump_clock):
    seen = []
    async with make_group(3, 1, 2).open_completed() as completed:
        async for index, future in completed:
            seen.append((index, await future, trio.current_time()))
    assert seen == [(1, 1, 1), (2, 2, 2), (0, 0, 3)]


async def test_leaving_the_block_early_ends_the_waiting(autojump_clock):
    async with make_group(9, 1).open_completed() as completed:
        assert (await completed.receive())[0] == 1
    assert trio.current_time() == 1


async def test_the_first_failure_is_raised_at_once_and_says_which_it_was(autojump_clock):
    for start in range(
        20
    ):  # trio runs tasks that wake together in any order; then the first in the group counts
        with pytest.raises(BackendError, match="1") as raised:
            await make_group(start + 9, start + 1, start + 1, start + 1, failing=1)
        assert raised.value.__notes__ == ["raised by future 1 of a group of 4"]
        assert trio.current_time() == start + 1

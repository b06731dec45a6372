"""The device thread: jobs in order on one thread, failures that reach who waits, work that ends when it
should. Futures that are done from the start, and groups of futures: order and failures.
"""

import threading
from functools import partial

import pytest
import torch
import trio

from rollouts.device_thread import open_device_thread
from rollouts.errors import BackendClosed, BackendError, StepInterrupted
from rollouts.futures import FutureGroup, ImmediateTrainFuture
from rollouts.testing.fakes import FakeFuture
from tests.support.text_tables import cases

SOON = 10  # seconds; a test that takes longer hangs
open_device = partial(open_device_thread, name="device")


class Gate:
    """A job that runs until it is let go."""

    def __init__(self):
        self.started = threading.Event()
        self.let_go = threading.Event()
        self.ended = False

    def __call__(self):
        self.started.set()
        assert self.let_go.wait(SOON)
        self.ended = True
        return "through"

    async def wait_started(self):
        assert await trio.to_thread.run_sync(self.started.wait, SOON)


def fail(text):
    raise ValueError(text)


async def test_jobs_run_in_submission_order_on_one_thread_that_is_not_trios():
    order, threads = [], set()

    def job(number):
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    async with open_device() as device:
        futures = [device.submit(partial(job, number)) for number in range(20)]
        assert [-await future for future in futures] == order == [*range(20)]
    assert len(threads) == 1 and threading.get_ident() not in threads


async def test_a_failure_reaches_every_waiter_and_is_then_not_raised_again_on_leaving():
    async with open_device() as device:
        future = device.submit(lambda: fail("bad"))
        for _ in range(3):
            with pytest.raises(ValueError, match="bad") as caught:
                await future
        # here, result(), the thread's loop, the lambda and fail(): the traceback must not grow with every
        # waiter
        assert len(caught.traceback) == 5


async def test_several_unheard_failures_are_raised_as_a_group():
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with open_device() as device:
            device.submit(lambda: fail("one"))
            device.submit(lambda: fail("two"))
    assert [str(error) for error in caught.value.exceptions] == ["one", "two"]


@cases("pieces: no yes")
async def test_leaving_by_an_exception_waits_for_the_running_job_or_its_next_piece_and_drops_the_rest(
    pieces: bool,
):
    gate, ran, futures = Gate(), [], []

    def job():
        device.check_open()
        said = gate()
        if pieces:
            device.check_open()
        return said

    with pytest.raises(KeyError):  # noqa: PT012
        async with open_device() as device:
            futures += device.submit(job), device.submit(lambda: ran.append(1))
            await gate.wait_started()
            trio.lowlevel.current_trio_token().run_sync_soon(gate.let_go.set)
            raise KeyError("mine")
    assert gate.ended and ran == []
    if pieces:
        with pytest.raises(BackendClosed, match="stopped between two pieces"):
            await futures[0]
    else:
        assert await futures[0] == "through"
    with pytest.raises(BackendClosed, match="closed by an exception"):
        await futures[1]


async def test_submitting_after_the_end_or_from_another_thread_is_refused():
    async with open_device() as device:
        with pytest.raises(BackendClosed, match="trio's thread only"):
            await trio.to_thread.run_sync(device.submit, lambda: None)
        inside = device.submit(lambda: device.submit(lambda: None))
        with pytest.raises(BackendClosed, match="trio's thread only"):
            await inside
    with pytest.raises(BackendClosed, match="is closed"):
        device.submit(lambda: None)


async def test_torch_uses_the_number_of_threads_that_was_asked_for():
    async with open_device(torch_threads=1) as device:
        assert await device.submit(torch.get_num_threads) == 1


async def test_an_interrupt_ends_the_running_job_at_its_next_boundary_and_those_queued_before_it_alone():
    gate, log = Gate(), []

    def pieces(name):
        for piece in range(3):
            device.check_open()
            log.append((name, piece))
            if name == "running" and piece == 0:
                gate()
        return name

    async with open_device() as device:
        running, queued = device.submit(lambda: pieces("running")), device.submit(lambda: pieces("queued"))
        whole = device.submit(lambda: "has no boundary")
        await gate.wait_started()
        device.interrupt()
        later = device.submit(lambda: pieces("later"))
        gate.let_go.set()
        for future in (running, queued):
            with pytest.raises(StepInterrupted):
                await future
        assert (await whole, await later) == ("has no boundary", "later")
    assert log == [("running", 0), ("later", 0), ("later", 1), ("later", 2)]


async def test_an_interrupted_job_that_nobody_awaits_is_no_failure():
    async with open_device() as device:
        gate = Gate()
        device.submit(gate)
        device.submit(device.check_open)
        device.interrupt()
        gate.let_go.set()


# --- futures ------------------------------------------------------------------------------------------------


def make_group(*done_at, failing=9):
    """Futures whose values are their places; those from `failing` on fail with theirs."""
    failures = [BackendError(f"{place}") if place >= failing else None for place in range(len(done_at))]
    each = zip(range(len(done_at)), failures, done_at, strict=True)
    return FutureGroup([FakeFuture(*one, None, False) for one in each])


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

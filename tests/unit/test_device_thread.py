"""The device thread: jobs in order on one thread, failures that reach who waits, work that ends when it
should.
"""

import threading
from functools import partial

import pytest
import torch
import trio

from rollouts.device_thread import open_device_thread
from rollouts.errors import BackendClosed, StepInterrupted

SOON = 10  # seconds; a test that takes longer hangs
open_device = partial(open_device_thread, name="device")


class Gate:
    """A job that runs until it is let go."""

    def __init__(self):
        self.started = threading.Event()
        self.let_go = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.started.set()
        assert self.let_go.wait(SOON)
        self.ended = True
        return "through"

    async def wait_started(self):
        assert await trio.to_thread.run_sync(self.started.wait, SOON)


def fail(text: str):
    raise ValueError(text)


async def test_jobs_run_in_submission_order_on_one_thread_that_is_not_trios():
    order = []
    async with open_device() as device:
        futures = [
            device.submit(lambda n=n: order.append((n, threading.get_ident())) or n * n) for n in range(20)
        ]
        assert [await future for future in futures] == [n * n for n in range(20)]
    assert [n for n, _ in order] == list(range(20))
    assert len({thread for _, thread in order}) == 1
    assert order[0][1] != threading.get_ident()


async def test_a_failure_reaches_every_waiter_and_is_then_not_raised_again_on_leaving():
    async with open_device() as device:
        future = device.submit(lambda: fail("bad"))
        for _ in range(3):
            with pytest.raises(ValueError, match="bad") as caught:
                await future
        assert len(caught.traceback) == 5, (
            "here, result(), the thread's loop, the lambda and fail(): the traceback must not grow with every"
            " waiter"
        )


async def test_several_unheard_failures_are_raised_as_a_group():
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with open_device() as device:
            device.submit(lambda: fail("one"))
            device.submit(lambda: fail("two"))
    assert [str(error) for error in caught.value.exceptions] == ["one", "two"]


async def test_leaving_by_an_exception_waits_for_the_running_job_and_drops_the_rest():
    gate, ran, futures = Gate(), [], []
    with pytest.raises(KeyError):  # noqa: PT012
        async with open_device() as device:
            futures += device.submit(gate), device.submit(lambda: ran.append(1))
            await gate.wait_started()
            trio.lowlevel.current_trio_token().run_sync_soon(gate.let_go.set)
            raise KeyError("mine")
    assert gate.ended
    assert ran == []
    assert await futures[0] == "through"
    with pytest.raises(BackendClosed, match="closed by an exception"):
        await futures[1]


async def test_a_long_job_learns_between_two_pieces_of_work_that_it_should_stop():
    gate = Gate()

    def long_job():
        device.check_open()
        gate()
        device.check_open()

    with pytest.raises(KeyError):  # noqa: PT012
        async with open_device() as device:
            future = device.submit(long_job)
            await gate.wait_started()
            trio.lowlevel.current_trio_token().run_sync_soon(gate.let_go.set)
            raise KeyError("mine")
    with pytest.raises(BackendClosed, match="stopped between two pieces"):
        await future


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

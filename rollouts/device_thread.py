"""One thread that owns every torch call, and futures of the work it was given.

trio task ─ submit(job) ─► queue, first in first out ─► the thread runs one job at a time
    ─► DeviceFuture ─► any number of waiters
                                                                                                    │
leaving the context: normally, everything queued runs first; by an exception, the running job ends and the
queued ones are dropped.
Either way no job is left behind running, and a failure that nobody awaited is raised (unless something else
is being raised).
"""

import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch
import trio

from rollouts.errors import BackendClosed, EarlierStepFailed, StepInterrupted
from rollouts.types import Numbers

T = TypeVar("T")


class DeviceFuture(Generic[T]):
    """What a job will return. May be awaited many times, by many tasks; cancelling a waiter does not cancel
    the job.
    """

    def __init__(self, thread: "DeviceThread") -> None:
        self._thread = thread
        self._finished = trio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._finished.is_set()

    async def result(self) -> T:
        """What the job returned. Raises what it raised; BackendClosed if it was dropped because its context
        was left by an exception.
        """
        await self._finished.wait()
        if self._error is None:
            return cast(T, self._value)
        self._thread._unheard.pop(self, None)
        raise self._error.with_traceback(self._traceback)  # the job's own; it would grow with every waiter

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()


Job = tuple[int, Callable[[], Any], DeviceFuture[Any]]  # with its number, from 1


class DeviceThread:
    """A queue of jobs and the thread that runs them. Made by `open_device_thread`."""

    def __init__(self, name: str, torch_threads: int | None) -> None:
        self.name = name
        self._torch_threads = torch_threads
        self._jobs = queue.SimpleQueue[Job | None]()  # None: no more jobs
        self._token = trio.lowlevel.current_trio_token()
        self._home = threading.get_ident()
        self._unheard: dict[DeviceFuture[Any], BaseException] = {}  # failures that nobody awaited yet
        # of ranks that work together: what this one alone has met; no job may meet the others again
        self.out_of_step: BaseException | None = None
        self._open = True
        self._dropping = False
        self._running = 0  # number of the job that runs, or ran last
        self._interrupted = 0  # jobs up to this number end at their next boundary
        self._submitted = 0
        self._completed = 0

    def submit(self, job: Callable[[], T]) -> DeviceFuture[T]:
        """A future of `job`, which runs on the thread after everything submitted before it. Returns at once.

        Raises BackendClosed after the context was left, and from any thread but trio's own.
        """
        if threading.get_ident() != self._home:
            raise BackendClosed(
                f"device thread {self.name!r} takes jobs from trio's thread only; go through"
                " trio.from_thread.run_sync"
            )
        if not self._open:
            raise BackendClosed(f"device thread {self.name!r} is closed; submit inside its `async with`")
        future = DeviceFuture(self)
        self._submitted += 1
        self._jobs.put((self._submitted, job, future))
        return future

    def interrupt(self) -> None:
        """Every job submitted so far that has boundaries ends at its next one, with StepInterrupted; jobs
        submitted later run.
        """
        self._interrupted = self._submitted

    def has_queued(self) -> bool:
        """For jobs: whether others wait behind the running one."""
        return not self._jobs.empty()

    def check_open(self) -> None:
        """For long jobs, at each boundary between two pieces of work. Raises StepInterrupted after
        interrupt(), and BackendClosed if the context is being left by an exception.
        """
        self._check_dropping()
        if self._running <= self._interrupted:
            raise StepInterrupted(
                "the step was interrupted between two micro-batches, as a stop had asked; its gradients are"
                " discarded"
            )

    def _check_dropping(self) -> None:
        if self._dropping:
            raise BackendClosed(
                f"device thread {self.name!r} is being closed by an exception; the job was stopped between"
                " two pieces of work"
            )

    def statistics(self) -> Numbers:
        """Jobs that are not finished (`queued`)."""
        return {"queued": float(self._submitted - self._completed)}

    def _run_jobs(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        while (entry := self._jobs.get()) is not None:
            self._running, job, future = entry
            value = error = None
            try:
                self._check_dropping()
                value = job()
            except BaseException as raised:  # whatever it is belongs to whoever awaits the future
                error = raised
            self._token.run_sync_soon(self._deliver, future, value, error)
            del entry, job, future, value, error  # a job's tensors must not live until the next job comes

    def _deliver(self, future: DeviceFuture[Any], value: Any, error: BaseException | None) -> None:
        self._completed += 1
        future._value, future._error = value, error
        if error is not None:
            future._traceback = error.__traceback__
            self._unheard[future] = error
        future._finished.set()


@asynccontextmanager
async def open_device_thread(*, name: str, torch_threads: int | None = None) -> AsyncIterator[DeviceThread]:
    """A thread that runs jobs in submission order for as long as the context is open.

    `torch_threads` is what torch may use inside one operation on this thread; None leaves torch's own choice.
    Leaving normally waits for all jobs and then raises failures that nobody awaited: one as it is, several as
    a group. Leaving by an exception or a cancellation waits only for the running job (shielded, for nothing
    can interrupt it) and drops the rest, whose futures raise BackendClosed.
    """
    thread = DeviceThread(name, torch_threads)
    stopped = trio.Event()
    # not to_thread.run_sync in a nursery: the nursery would wrap every exception of the body in a group
    trio.lowlevel.start_thread_soon(
        thread._run_jobs, lambda ended: thread._token.run_sync_soon(stopped.set), name
    )
    drop_queued = True
    try:
        yield thread
        drop_queued = False
    finally:
        thread._open, thread._dropping = False, drop_queued
        thread._jobs.put(None)
        with trio.CancelScope(shield=True):
            await stopped.wait()
    # a step that did not run because of an earlier failure adds nothing to that failure, which was heard or
    # is in here too; and an interrupt is what somebody asked for
    known = EarlierStepFailed | StepInterrupted
    errors = [error for error in thread._unheard.values() if not isinstance(error, known)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(f"jobs of device thread {name!r} failed, unawaited", errors)

"""Reward functions in processes that can be killed: what one of them does costs its own sample and nobody
else's.

    a call ──► takes a free worker ──► request ──► worker: the function runs ──► answer, checked ──► worker is free again
               (waits for one)                       │
                                                     └─ too long · cancelled · signal · exit · memory · output · fork · no sense
                                                        ──► SIGKILL to it and to all below it ──► the sample fails
                                                        ──► another worker takes its place at once

    trainer ── guard (one thread; worker_guard.py) ─┬─ worker ── what its function starts
                                                    ├─ worker
                                                    └─ …          trainer gone, however: the guard kills everything and ends

A worker that answers, but whose call changed its process (working directory, signal handlers, a thread …), is
replaced too; its answer stands. A slot is a task that keeps one worker alive: it asks for it, offers it to
calls, and when it is dropped lets the next slot begin. Only if the guard itself dies (a function killed it)
do all calls fail that run at that moment; a new guard is started.

On Linux nothing escapes: orphans, sessions of their own and ignored signals included; but where a function
kills the guard, what has left its worker and is not swept yet goes on without one. Elsewhere there is no
subreaper and no parent-death signal: a process that left its worker's process group is not found, and a guard
that is killed leaves its workers to end at their next request. Limits are for mistakes: a function that means
harm has the trainer's user and could kill the trainer.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from rollouts.errors import ConfigError, RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.protocols import GroupRewardFn, RewardFn
from rollouts.rewards.worker_messages import (
    Answer,
    BadAnswer,
    Crashed,
    Loaded,
    Raised,
    RaisedInWorker,
    Refused,
    Rewards,
    encode_request,
    parse_reply,
)
from rollouts.rewards.worker_pool import End, GuardClient, Worker, open_guard
from rollouts.rewards.worker_process import EXIT_LOST_CHANNEL
from rollouts.types import RewardResult, Sample

LOAD_TIMEOUT_S = (
    120.0  # importing a function's module, at its first call in each worker; it may well load torch
)
LEAST_MEMORY_BYTES = 128 << 20  # a worker needs some itself
LEAST_OUTPUT_BYTES = 4096
BACK_OFF_S = 0.2  # before the next worker if one ended without having been called, or could not be forked
FATAL = "Fatal Python error"  # with which faulthandler begins
TAIL_CHARS = 400  # of a function's output that a message quotes


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A user function as it crosses to a worker."""

    name: str  # module:function or path/file.py:function
    base_dir: str
    role: str  # reward or group_reward
    combine: str = ""  # another function, which makes the reward from the parts

    @property
    def short_name(self) -> str:
        return self.name.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Request:
    """One frame to a worker."""

    id: str  # drawn anew: an answer to another request, or to none, is not taken for this one's
    frame: bytes
    count: int | None  # of samples; None: to load
    where: str


def make_request(function: NamedFunction, samples: tuple[Sample, ...] | None, where: str) -> Request:
    """The request to call a function; without samples, only to load it."""
    request_id = secrets.token_hex(16)
    frame = encode_request(
        request_id=request_id,
        name=function.name,
        base_dir=function.base_dir,
        role=function.role,
        combine=function.combine,
        where=where,
        samples=samples,
    )
    return Request(request_id, frame, None if samples is None else len(samples), where)


@asynccontextmanager
async def open_reward_workers(
    *, count: int, timeout_s: float, memory_bytes: int, output_bytes: int = 1 << 20
) -> AsyncIterator[RewardWorkers]:
    """`count` worker processes for as long as the context is open; when it is left they and all that they
    started are gone.

    `timeout_s` of one call, from when its worker has it; `memory_bytes` that a worker, and each process that
    it starts, may allocate; `output_bytes` that a call may print, and that its answer may have. Raises
    ConfigError for a limit that makes no sense, RewardCrashed if the processes cannot be started.
    """
    _check_limits(count=count, timeout_s=timeout_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    workers = RewardWorkers(
        count=count, timeout_s=timeout_s, memory_bytes=memory_bytes, output_bytes=output_bytes
    )
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(workers._run)
            yield workers
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            workers._close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _check_limits(*, count: int, timeout_s: float, memory_bytes: int, output_bytes: int) -> None:
    if count < 1:
        raise ConfigError(f"count={count} reward workers; there must be at least 1")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s} of the reward workers must be above 0")
    for name, value, least in (
        ("memory_bytes", memory_bytes, LEAST_MEMORY_BYTES),
        ("output_bytes", output_bytes, LEAST_OUTPUT_BYTES),
    ):
        if value < least:
            raise ConfigError(
                f"{name}={value} of the reward workers is too little; it must be at least {least}"
            )


class RewardWorkers:
    """Worker processes that call reward functions by name. Made by open_reward_workers."""

    def __init__(self, *, count: int, timeout_s: float, memory_bytes: int, output_bytes: int) -> None:
        self._count = count
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._guard: GuardClient | None = None
        self._offer, self._free = trio.open_memory_channel[Worker](math.inf)
        self._counters = dict.fromkeys(
            ("calls", "failed", "timeouts", "crashes", "retired", "workers_started", "guards_started"), 0
        )
        self._digests: dict[
            str, str
        ] = {}  # path of a file with functions: that of the first worker that imported it
        self._waiting = 0
        self._busy = 0
        self._closed = False

    def reward(self, name: str, base_dir: Path, *, combine: str = "") -> RewardFn:
        """An async reward function that calls the plain function which `name` means, in a worker. It raises
        what call_reward raises.

        A function named by `combine` makes the reward from the parts, in the same worker and within the same
        limits.
        """
        function = NamedFunction(name, str(base_dir.resolve()), "reward", combine)

        async def call(sample: Sample) -> RewardResult:
            (result,) = await self._call(
                function, (sample,), f"reward function {function.short_name} on sample {sample.id}"
            )
            return result

        return _dress(call, function)

    def group_reward(self, name: str, base_dir: Path) -> GroupRewardFn:
        """Like `reward`, for a function that scores the samples of a group together."""
        function = NamedFunction(name, str(base_dir.resolve()), "group_reward")

        async def call(samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
            where = f"group reward function {function.short_name} on the group of sample {samples[0].id}"
            return await self._call(function, tuple(samples), where)

        return _dress(call, function)

    def statistics(self) -> Mapping[str, float]:
        """Totals since the start (calls, failed, timeouts, crashes, retired, workers_started, guards_started)
        and busy and waiting calls now.

        retired: workers that answered but were replaced, since their call had left something behind.
        """
        return {**self._counters, "busy": self._busy, "waiting": self._waiting}

    # --- one call ---

    async def _call(
        self, function: NamedFunction, samples: tuple[Sample, ...], where: str
    ) -> tuple[RewardResult, ...]:
        self._counters["calls"] += 1
        try:
            return await self._call_somewhere(function, samples, where)
        except UserFunctionError as error:
            self._counters["failed"] += 1
            self._counters["timeouts"] += isinstance(error, RewardTimeout)
            self._counters["crashes"] += isinstance(error, RewardCrashed)
            raise

    async def _call_somewhere(
        self, function: NamedFunction, samples: tuple[Sample, ...], where: str
    ) -> tuple[RewardResult, ...]:
        request = make_request(function, samples, where)  # before there is a worker to keep
        worker, guard = await self._take_worker(where)
        self._busy += 1
        try:
            if function not in worker.loaded:
                late = (
                    f"{where} took longer than {LOAD_TIMEOUT_S:g} s to import; do less when the module is"
                    " imported"
                )
                answer = await self._exchange(
                    guard, worker, make_request(function, None, where), timeout_s=LOAD_TIMEOUT_S, late=late
                )
                if isinstance(answer, Refused):
                    raise UserFunctionError(_with_output(answer.message, worker))
                self._check_files(answer, guard, worker, where)
                worker.loaded.add(function)
            late = (
                f"{where} took longer than {self._timeout_s:g} s; make it faster or raise"
                " rl.rollout.reward_timeout_s"
            )
            answer = await self._exchange(guard, worker, request, timeout_s=self._timeout_s, late=late)
            return _unpack(answer, where, worker)
        finally:
            self._busy -= 1
            if not worker.dropped.is_set():
                self._offer.send_nowait(worker)

    def _check_files(self, answer: Answer, guard: GuardClient, worker: Worker, where: str) -> None:
        assert isinstance(answer, Loaded), answer
        for path, digest in answer.digests.items():
            if self._digests.setdefault(path, digest) != digest:
                self._retire(guard, worker)
                raise UserFunctionError(
                    f"{where} cannot be called: {path} was changed during the run, and workers that began"
                    " earlier have the old one; put it back, or stop and go on with --resume to take the"
                    " new one"
                )

    async def _take_worker(self, where: str) -> tuple[Worker, GuardClient]:
        self._waiting += 1
        try:
            while not self._is_fit(worker := await self._free.receive()):
                pass
        except trio.ClosedResourceError:
            raise RewardCrashed(f"{where} was called after the reward workers had been closed") from None
        finally:
            self._waiting -= 1
        assert self._guard is not None, "a worker without a guard"
        return worker, self._guard

    def _is_fit(self, worker: Worker) -> bool:
        """Whether a worker that is free can be called: it lives, and a call before has not left bytes that
        the next one would take for its answer.
        """
        if worker.dropped.is_set():
            return False
        if not worker.has_unread():
            return True
        assert self._guard is not None, "a worker without a guard"
        self._retire(self._guard, worker)
        return False

    def _retire(self, guard: GuardClient, worker: Worker) -> None:
        self._counters["retired"] += 1
        guard.kill(worker)

    async def _exchange(
        self, guard: GuardClient, worker: Worker, request: Request, *, timeout_s: float, late: str
    ) -> Answer:
        """The worker's answer. The worker is killed unless it gave one and is fit for more.

        Raises RewardTimeout and RewardCrashed.
        """
        fit, where = False, request.where
        try:
            worker.begin_call()
            with trio.move_on_after(timeout_s):
                if worker.has_unread():  # from its import
                    raise BadAnswer("an answer to no request")
                body = await self._ask(worker, request.frame)
                if body is None:
                    raise RewardCrashed(
                        _with_output(f"{where} {await self._tell_end(guard, worker)}", worker)
                    )
                reply = parse_reply(body, count=request.count, request_id=request.id)
                answer = reply.answer
                worker.drain()
                self._check_output(worker, where)
                if isinstance(answer, Crashed):
                    raise RewardCrashed(_with_output(f"{where} {answer.reason}", worker))
                if reply.unfit:
                    self._retire(guard, worker)
                fit = True
                return answer
            worker.drain()
            raise RewardTimeout(_with_output(late, worker))
        except BadAnswer as error:
            raise RewardCrashed(_with_output(f"{where} gave {error}", worker)) from error
        finally:
            if not fit:
                guard.kill(worker)

    async def _ask(self, worker: Worker, frame: bytes) -> bytes | None:
        try:
            await trio.SocketStream(worker.channel).send_all(frame)
            return await worker.receive_frame(self._output_bytes)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return None

    async def _tell_end(self, guard: GuardClient, worker: Worker) -> str:
        end = await guard.wait_ended(worker)
        if worker.too_much_output:
            return self._too_much()
        if end is not None:
            return describe_end(end)
        return (
            "was lost: the"
            f" {'reward workers were closed' if self._closed else 'guard of the reward workers was killed'}"
        )

    def _check_output(self, worker: Worker, where: str) -> None:
        if worker.too_much_output:
            raise RewardCrashed(_with_output(f"{where} {self._too_much()}", worker))

    def _too_much(self) -> str:
        return f"printed more than output_bytes={self._output_bytes}"

    # --- the workers ---

    async def _run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Guards, one after the other: the next when one was killed. Ends by cancellation."""
        started = False
        while True:
            async with open_guard(memory_bytes=self._memory_bytes, output_limit=self._output_bytes) as guard:
                self._guard = guard
                self._counters["guards_started"] += 1
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(guard.write_commands)
                    for _ in range(self._count):
                        nursery.start_soon(self._keep_slot, guard, nursery)
                    if not started:
                        task_status.started()
                        started = True
                    await guard.read_events()
                    nursery.cancel_scope.cancel()

    async def _keep_slot(self, guard: GuardClient, slots: trio.Nursery) -> None:
        """One worker's life, and the start of the next one's when it is dropped."""
        async with guard.spawn() as worker, trio.open_nursery() as nursery:
            await worker.born.wait()
            self._counters["workers_started"] += 1
            nursery.start_soon(self._watch_output, guard, worker)
            if (
                worker.pid > 0 and not self._closed
            ):  # one that is born while the context is being left is offered to nobody
                self._offer.send_nowait(worker)
            await worker.dropped.wait()
            if worker.calls == 0:
                await trio.sleep(BACK_OFF_S)
            slots.start_soon(self._keep_slot, guard, slots)
            await worker.ended.wait()
            nursery.cancel_scope.cancel()

    async def _watch_output(self, guard: GuardClient, worker: Worker) -> None:
        """Takes what is printed, so that nobody waits for a full pipe, and kills the worker when it is too
        much.
        """
        more = True
        while more:
            await trio.lowlevel.wait_readable(worker.output_fd)
            more = worker.drain()
            if worker.too_much_output:
                guard.kill(worker)
                return

    def _close(self) -> None:
        self._closed = True
        self._free.close()


# --- words --------------------------------------------------------------------------------------------------


def describe_end(end: End) -> str:
    """How a worker ended, as the rest of a sentence that began with the function."""
    code = os.waitstatus_to_exitcode(end.status)
    if end.killed or code == EXIT_LOST_CHANNEL:
        return "closed its channel without an answer (did it close file descriptors that are not its own?)"
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
    return f"died by {name}{hint}"


def _unpack(answer: Answer, where: str, worker: Worker) -> tuple[RewardResult, ...]:
    if isinstance(answer, Rewards):
        return answer.results
    if isinstance(answer, Raised):
        message = _with_output(f"{where} raised {answer.message}", worker)
        raise UserFunctionError(message) from RaisedInWorker(answer.message, answer.traceback_text)
    assert isinstance(answer, Refused), answer
    raise UserFunctionError(_with_output(answer.message, worker))


def _with_output(message: str, worker: Worker) -> str:
    text = worker.tail.decode(errors="replace").strip()
    fatal = text.find(FATAL)
    text = (
        text[-TAIL_CHARS:] if fatal < 0 else text[fatal : fatal + TAIL_CHARS]
    )  # where it died stands at the beginning
    return f"{message}; the last it printed: {text!r}" if text else message


def _dress(call: Any, function: NamedFunction) -> Any:
    call.__name__ = call.__qualname__ = function.short_name
    call.keeps_own_time = True  # see call.keeps_own_time
    return call

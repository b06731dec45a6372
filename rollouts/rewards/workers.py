"""Reward functions in processes that can be killed: what one of them does costs its own sample only.

    a call ──► takes a free worker (waits for one) ──► request ──► the function runs ──► answer, checked
               too long · cancelled · signal · exit · memory · output · fork · nonsense
               ──► the worker's whole tree is killed, the sample fails, another worker starts

A worker that answers, but whose call changed its process (working directory, signal handlers, a thread …), is
replaced too; its answer stands. Each worker has a guard of its own (processes/guard.py): nothing escapes,
also where a function kills the guard or the trainer is killed. Limits are for mistakes: a function that means
harm has the trainer's user and could kill the trainer.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import re
import secrets
import signal
import sys
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from rollouts.errors import ConfigError, RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.processes.process import Process, describe_signal, open_process
from rollouts.protocols import GroupRewardFn, RewardFn
from rollouts.rewards.worker import EXIT_LOST_CHANNEL
from rollouts.rewards.worker_messages import (
    Answer,
    BadAnswer,
    RaisedInWorker,
    encode_request,
    encode_sample,
    parse_answer,
)
from rollouts.types import RewardResult, Sample

# for a worker to start and to import a function's module, which may well load torch
LOAD_TIMEOUT_S = 120.0
BACK_OFF_S = 0.2  # before the next worker if one ended without having been called, or could not be started
START_TRIES = 50  # in a row
END_S = 0.5  # for a worker that closed its channel to end by itself, so that its exit code says why
TAIL_CHARS = 400  # of a function's output that a message quotes
FATAL = "Fatal Python error"  # with which faulthandler begins
SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


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


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process."""

    process: Process
    dropped: trio.Event = field(default_factory=trio.Event)  # it gets no more calls
    calls: int = 0
    busy: bool = False
    received: bytearray = field(default_factory=bytearray)

    async def receive_line(self, limit: int) -> bytes:
        """Its next line. Raises EOFError if it closes the channel, BadAnswer above `limit` bytes."""
        assert self.process.channel is not None
        while b"\n" not in self.received:
            if self.received[:1] not in (b"", b"{"):
                raise BadAnswer("an answer that is none")
            if len(self.received) > limit:
                raise BadAnswer(f"an answer of more than output_bytes={limit}")
            part = await self.process.channel.receive_some(1 << 16)
            if not part:
                raise EOFError
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        return bytes(line)

    def has_unread(self) -> bool:
        """Whether there are bytes that no request asked for."""
        assert self.process.channel is not None
        count = array.array("i", [0])
        fcntl.ioctl(self.process.channel.socket.fileno(), termios.FIONREAD, count)
        return count[0] > 0 or bool(self.received)


@asynccontextmanager
async def open_reward_workers(
    *, count: int, timeout_s: float, memory_bytes: int, output_bytes: int = 1 << 20
) -> AsyncIterator[RewardWorkers]:
    """`count` worker processes for as long as the context is open; when it is left they and all that they
    started are gone.

    `timeout_s` of one call, from when its worker has it; `memory_bytes` that a worker, and each process that
    it starts, may allocate; `output_bytes` that a call may print, and that its answer may have. Raises
    RewardCrashed if the processes cannot be started.
    """
    if count < 1:
        raise ConfigError(f"count={count} reward workers; there must be at least 1")
    workers = RewardWorkers(timeout_s=timeout_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(workers._keep_worker)
            for _ in range(count - 1):
                nursery.start_soon(workers._keep_worker)
            yield workers
        except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
            failure = error
        finally:
            workers._free.close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class RewardWorkers:
    """Worker processes that call reward functions by name. Made by open_reward_workers."""

    def __init__(self, *, timeout_s: float, memory_bytes: int, output_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._offer, self._free = trio.open_memory_channel[Worker](math.inf)
        self._counters = dict.fromkeys(
            ("calls", "failed", "timeouts", "crashes", "retired", "workers_started"), 0
        )
        # SHA-256 of each file with functions, as the first worker that imported it saw it
        self._digests: dict[str, str] = {}
        self._waiting = 0
        self._busy = 0

    def reward(self, name: str, base_dir: Path, *, combine: str = "") -> RewardFn:
        """An async reward function that calls the plain function which `name` means, in a worker. It raises
        what call_reward raises.

        A function named by `combine` makes the reward from the parts, in the same worker and within the same
        limits.
        """
        function = NamedFunction(name, str(base_dir.resolve()), "reward", combine)

        async def call(sample: Sample) -> RewardResult:
            where = f"reward function {function.short_name} on sample {sample.id}"
            (result,) = await self._call(function, (sample,), where)
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
        """Totals since the start (calls, failed, timeouts, crashes, retired, workers_started) and busy and
        waiting calls now.

        retired: workers that answered but were replaced, since their call had left something behind.
        """
        return {**self._counters, "busy": self._busy, "waiting": self._waiting}

    # --- one call ---

    async def _call(
        self, function: NamedFunction, samples: tuple[Sample, ...], where: str
    ) -> tuple[RewardResult, ...]:
        request_id = secrets.token_hex(16)
        records = [encode_sample(sample) for sample in samples]
        request = encode_request({"id": request_id, **asdict(function), "where": where, "samples": records})
        self._counters["calls"] += 1
        worker = await self._take_worker(where)
        self._busy += 1
        fit = False
        try:
            worker.calls, worker.busy = worker.calls + 1, True
            worker.process.forget_output()
            answer = await self._exchange(worker, request, request_id, len(samples), where)
            if answer.unfit:
                self._counters["retired"] += 1
            fit = not answer.unfit
            if answer.raised is not None:
                message = _with_output(f"{where} raised {answer.raised}", worker)
                raise UserFunctionError(message) from RaisedInWorker(answer.raised, answer.traceback)
            if answer.refused is not None:
                raise UserFunctionError(_with_output(answer.refused, worker))
            assert answer.rewards is not None
            return tuple(answer.rewards)
        except UserFunctionError as error:
            self._counters["failed"] += 1
            self._counters["timeouts"] += isinstance(error, RewardTimeout)
            self._counters["crashes"] += isinstance(error, RewardCrashed)
            raise
        finally:
            self._busy -= 1
            worker.busy = False
            if fit and not worker.process.has_ended:
                self._offer.send_nowait(worker)
            else:
                worker.dropped.set()

    async def _take_worker(self, where: str) -> Worker:
        """A worker that is alive and has sent nothing that the next call would take for its answer."""
        self._waiting += 1
        try:
            while True:
                worker = await self._free.receive()
                if worker.dropped.is_set():
                    continue
                if not worker.has_unread():
                    return worker
                self._counters["retired"] += 1
                worker.dropped.set()
        except trio.ClosedResourceError:
            raise RewardCrashed(f"{where} was called after the reward workers had been closed") from None
        finally:
            self._waiting -= 1

    async def _exchange(
        self, worker: Worker, request: bytes, request_id: str, count: int, where: str
    ) -> Answer:
        """The worker's last answer to a request. Raises RewardTimeout, RewardCrashed, UserFunctionError."""
        late = f"{LOAD_TIMEOUT_S:g} s to import; do less when the module is imported"
        try:
            with trio.move_on_after(LOAD_TIMEOUT_S) as limit:
                assert worker.process.channel is not None
                await worker.process.channel.send_all(request)
                answer = parse_answer(
                    await worker.receive_line(self._output_bytes), request_id=request_id, count=None
                )
                if answer.files is not None:
                    self._check_files(answer.files, where)
                    limit.deadline = trio.current_time() + self._timeout_s
                    late = f"{self._timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s"
                    answer = parse_answer(
                        await worker.receive_line(self._output_bytes), request_id=request_id, count=count
                    )
                worker.process.read_output()
                if worker.process.printed_too_much:
                    raise RewardCrashed(_with_output(f"{where} {self._too_much}", worker))
                if worker.has_unread():
                    raise BadAnswer(
                        "more than one answer (did it write to file descriptor 3, which is the worker's?)"
                    )
                if answer.crashed is not None:
                    raise RewardCrashed(_with_output(f"{where} {answer.crashed}", worker))
                return answer
            worker.process.read_output()
            raise RewardTimeout(_with_output(f"{where} took longer than {late}", worker))
        except BadAnswer as error:
            raise RewardCrashed(_with_output(f"{where} gave {error}", worker)) from error
        except (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            reason = await self._describe_end(worker.process)
            raise RewardCrashed(_with_output(f"{where} {reason}", worker)) from None

    def _check_files(self, files: Mapping[str, str], where: str) -> None:
        for path, digest in files.items():
            if self._digests.setdefault(path, digest) != digest:
                raise UserFunctionError(
                    f"{where} cannot be called: {path} was changed during the run, and workers that began"
                    " earlier have the old one; put it back, or stop and go on with --resume to take the"
                    " new one"
                )

    async def _describe_end(self, process: Process) -> str:
        """Why a worker closed its channel; nothing of it is left then."""
        with trio.move_on_after(END_S):
            await process.wait_ended()
        closed = not process.has_ended
        process.kill()
        code = await process.wait_ended()
        process.read_output()
        if process.printed_too_much:
            return self._too_much
        if closed or code == EXIT_LOST_CHANNEL:
            return "closed its channel, file descriptor 3, over which the worker answers"
        if code is None:
            return f"lost its worker, which {process.describe_end()}"
        if code >= 0:
            return f"ended its process with exit code {code}"
        hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
        return f"died by {describe_signal(-code)}{hint}"

    @property
    def _too_much(self) -> str:
        return f"printed more than output_bytes={self._output_bytes}"

    # --- the workers ---

    async def _keep_worker(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Workers, one after the other: the next when one was dropped. Ends by cancellation. Raises
        RewardCrashed if none can be started.
        """
        argv = [sys.executable, "-P", "-m", "rollouts.rewards.worker", os.environ.get("PYTHONPATH", "")]
        tries = 0
        while True:
            try:
                async with open_process(
                    argv,
                    env=make_environment(),
                    output_bytes=self._output_bytes,
                    memory_bytes=self._memory_bytes,
                    with_channel=True,
                    subreaper=True,
                ) as process:
                    await process.wait_started()
                    if process.pid:
                        tries = 0
                        task_status.started()
                        task_status = trio.TASK_STATUS_IGNORED
                        await self._offer_worker(Worker(process))
                        continue
                    reason = process.describe_end()
            except OSError as error:
                reason = f"did not start: {error}"
            tries += 1
            if tries >= START_TRIES:
                raise RewardCrashed(f"a process for reward functions {reason}")
            await trio.sleep(BACK_OFF_S)

    async def _offer_worker(self, worker: Worker) -> None:
        """Offers a worker to calls until it is dropped."""
        self._counters["workers_started"] += 1
        async with trio.open_nursery() as nursery:

            async def watch_output() -> None:
                await worker.process.wait_printed_too_much()
                worker.process.kill()

            async def watch_end() -> None:
                await worker.process.wait_ended()
                if not worker.busy:  # otherwise the call says how it ended
                    worker.dropped.set()

            nursery.start_soon(watch_output)
            nursery.start_soon(watch_end)
            self._offer.send_nowait(worker)
            await worker.dropped.wait()
            nursery.cancel_scope.cancel()
        if not worker.calls:
            await trio.sleep(BACK_OFF_S)


def make_environment() -> dict[str, str]:
    """The trainer's environment without what looks like a secret, with its import path, and one thread per
    numerical library.
    """
    kept = {name: value for name, value in os.environ.items() if not SECRET_NAMES.search(name)}
    path = [str(Path(entry).resolve()) for entry in sys.path]  # '' is the working directory
    return {**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}


def _with_output(message: str, worker: Worker) -> str:
    text = worker.process.read_tail().strip()
    fatal = text.find(FATAL)
    # where it died stands at the beginning of the report of faulthandler
    text = text[-TAIL_CHARS:] if fatal < 0 else text[fatal : fatal + TAIL_CHARS]
    return f"{message}; the last it printed: {text!r}" if text else message


def _dress(call: Any, function: NamedFunction) -> Any:
    call.__name__ = call.__qualname__ = function.short_name
    call.keeps_own_time = True  # see call.keeps_own_time
    return call

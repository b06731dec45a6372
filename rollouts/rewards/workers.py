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

import math
import os
import re
import secrets
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from rollouts.errors import ConfigError, RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.processes.process import Process, open_process
from rollouts.protocols import GroupRewardFn, RewardFn
from rollouts.rewards.worker import (
    EXIT_LOST_CHANNEL,
    Answer,
    BadAnswer,
    encode_request,
    hash_file,
    parse_answer,
)
from rollouts.types import RewardResult, Sample

# for a worker to start and to import a function's module, which may well load torch
LOAD_TIMEOUT_S = 120.0
BACK_OFF_S = 0.2  # before the next try to start a process
START_TRIES = 50  # in a row
END_S = 0.5  # for a worker that closed its channel to end by itself, so that its exit code says why
TAIL_CHARS = 400  # of a function's output that a message quotes
PRINTED = "; the last it printed: "
FATAL = "Fatal Python error"  # with which faulthandler begins
SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RaisedInWorker(Exception):
    """An exception of the user's function, whose own object stays in the worker."""

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


@dataclass(eq=False)
class Call:
    """A request that waits for a worker, or is with one."""

    id: str
    count: int  # samples
    request: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # its deadline is the call's
    answered: trio.Event = field(default_factory=trio.Event)
    answer: Answer | None = None


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
    async with workers._calls, open_plain_nursery() as nursery:
        await nursery.start(workers._run_worker)
        for _ in range(count - 1):
            nursery.start_soon(workers._run_worker)
        yield workers


class RewardWorkers:
    """Worker processes that call reward functions by name. Made by open_reward_workers."""

    def __init__(self, *, timeout_s: float, memory_bytes: int, output_bytes: int) -> None:
        self._timeout_s, self._memory_bytes, self._output_bytes = timeout_s, memory_bytes, output_bytes
        self._offer, self._calls = trio.open_memory_channel[Call](math.inf)
        self._counters: dict[str, int] = dict.fromkeys(("calls", "failed", "workers_started"), 0)

    def reward(self, name: str, base_dir: Path) -> RewardFn:
        """An async reward function that calls the plain function which `name` means, in a worker. It raises
        what call_reward raises.

        Workers refuse a file whose bytes have changed since.
        """

        async def call(sample: Sample) -> RewardResult:
            (result,) = await score((sample,), f"on sample {sample.id}")
            return result

        score = self._dress(call, name, base_dir, "reward")
        return call

    def group_reward(self, name: str, base_dir: Path) -> GroupRewardFn:
        """Like `reward`, for a function that scores the samples of a group together."""

        async def call(samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
            return await score(tuple(samples), f"on the group of sample {samples[0].id}")

        score = self._dress(call, name, base_dir, "group_reward")
        return call

    def statistics(self) -> Mapping[str, int]:
        """Totals since the start."""
        return dict(self._counters)

    def _dress(self, call: Any, name: str, base_dir: Path, role: str) -> Callable[..., Any]:
        """What `call` calls. `call` gets the function's name."""
        call.__name__ = call.__qualname__ = name.rpartition(":")[2].rpartition(".")[2]
        call.keeps_own_time = True  # call.py: waiting for a worker is not the function's time
        base = str(base_dir.resolve())
        request = {"name": name, "base_dir": base, "role": role, "digest": hash_file(name, base)}
        what = f"{role.replace('_', ' ')} function {call.__name__}"
        return lambda samples, on: self._call(request, samples, f"{what} {on}")

    # --- one call ---

    async def _call(
        self, request: Mapping[str, Any], samples: tuple[Sample, ...], where: str
    ) -> tuple[RewardResult, ...]:
        request_id = secrets.token_hex(16)
        line = encode_request({**request, "id": request_id, "where": where, "samples": samples})
        call = Call(request_id, len(samples), line)
        self._counters["calls"] += 1
        try:
            self._offer.send_nowait(call)
            await call.answered.wait()
        except trio.BrokenResourceError:
            raise RewardCrashed(f"{where} was called after the reward workers had been closed") from None
        finally:
            call.scope.cancel()  # where the caller was cancelled: the worker is killed
        answer = call.answer
        assert answer is not None
        if answer.kind == "scored":
            return tuple(answer.rewards)
        self._counters["failed"] += 1
        if answer.kind == "refused":
            raise UserFunctionError(answer.text)
        if answer.kind == "raised":
            raise UserFunctionError(f"{where} raised {answer.text}") from RaisedInWorker(
                answer.text.partition(PRINTED)[0], answer.traceback
            )
        late = call.scope.cancelled_caught
        raise (RewardTimeout if late else RewardCrashed)(f"{where} {answer.text}")

    async def _run_worker(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves calls in one process after another: the next when a call has left one unfit. Ends by
        cancellation. Raises RewardCrashed if no process can be started.
        """
        argv = [sys.executable, "-P", "-m", "rollouts.rewards.worker", os.environ.get("PYTHONPATH", "")]
        call: Call | None = None
        failures, reason = 0, ""
        while failures < START_TRIES:
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
                        failures = 0
                        task_status.started()
                        task_status = trio.TASK_STATUS_IGNORED
                        self._counters["workers_started"] += 1
                        call = await self._serve_calls(process, call)
                        continue
                    reason = process.describe_end()
            except OSError as error:
                reason = f"did not start: {error}"
            failures += 1
            await trio.sleep(BACK_OFF_S)
        raise RewardCrashed(f"a process for reward functions {reason}")

    async def _serve_calls(self, process: Process, call: Call | None) -> Call | None:
        """Serves `call` and others until the process is unfit. A call for which another process is needed, as
        this one had become unfit before it.
        """
        assert process.channel is not None
        async with trio.open_nursery() as nursery:

            async def watch_output() -> None:
                await process.wait_printed_too_much()
                process.kill()

            nursery.start_soon(watch_output)
            while True:
                call = call or await self._calls.receive()
                if is_readable(process.channel):  # bytes that nobody asked for, or it has ended
                    break
                if not call.scope.cancel_called:
                    call.answer = answer = await self._exchange(process, process.channel, call)
                    call.answered.set()
                    if answer.unfit:
                        call = None
                        break
                call = None
            nursery.cancel_scope.cancel()
        return call

    async def _exchange(self, process: Process, channel: trio.SocketStream, call: Call) -> Answer:
        """The worker's last answer to a request; "crashed" and unfit where there is none."""
        late = f"{LOAD_TIMEOUT_S:g} s to import; do less when the module is imported"
        received = bytearray()
        process.forget_output()
        answer, problem = None, ""
        try:
            with call.scope:
                call.scope.deadline = trio.current_time() + LOAD_TIMEOUT_S
                await channel.send_all(call.request)
                line = await self._receive_line(channel, received)
                answer = parse_answer(line, request_id=call.id, count=None)
                if answer.kind == "loaded":
                    call.scope.deadline = trio.current_time() + self._timeout_s
                    late = f"{self._timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s"
                    line = await self._receive_line(channel, received)
                    answer = parse_answer(line, request_id=call.id, count=call.count)
                # a process that says that it crashed has ended: then its end is what can be read
                if received or (answer.kind != "crashed" and is_readable(channel)):
                    raise BadAnswer("more than one answer (did it write to file descriptor 3?)")
            if call.scope.cancelled_caught:
                problem = f"took longer than {late}"
        except BadAnswer as error:
            problem = f"gave {error}"
        except (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            problem = await _describe_end(process)
        process.read_output()
        if process.printed_too_much:
            problem = f"printed more than output_bytes={self._output_bytes}"
        if problem or answer is None:
            answer = Answer(call.id, "crashed", problem, unfit=True)
        if answer.kind != "scored" and (printed := _shorten_output(process.read_tail())):
            answer.text += f"{PRINTED}{printed!r}"
        answer.unfit |= answer.kind == "crashed"
        return answer

    async def _receive_line(self, channel: trio.SocketStream, received: bytearray) -> bytes:
        """The next line, taken from `received`, which takes what comes. Raises EOFError, BadAnswer."""
        while (end := received.find(b"\n")) < 0:
            if len(received) > self._output_bytes:
                raise BadAnswer(f"an answer of more than output_bytes={self._output_bytes}")
            part = await channel.receive_some(1 << 16)
            if not part:
                raise EOFError
            received += part
        line = bytes(received[:end])
        del received[: end + 1]
        return line


async def _describe_end(process: Process) -> str:
    """Why a worker closed its channel; nothing of it is left then."""
    with trio.move_on_after(END_S):
        await process.wait_ended()
    closed = not process.has_ended
    process.kill()
    code = await process.wait_ended()
    if closed or code == EXIT_LOST_CHANNEL:
        return "closed its channel, file descriptor 3, over which the worker answers"
    hint = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
    return f"lost its worker, which {process.describe_end()}{hint}"


def is_readable(channel: trio.SocketStream) -> bool:
    """Whether there are bytes to read, or the other side has closed it."""
    poll = select.poll()
    poll.register(channel.socket.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def make_environment() -> dict[str, str]:
    """The trainer's environment without what looks like a secret, with its import path, and one thread per
    numerical library.
    """
    kept = {name: value for name, value in os.environ.items() if not SECRET_NAMES.search(name)}
    path = [str(Path(entry).resolve()) for entry in sys.path]  # '' is the working directory
    return {**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}


def _shorten_output(text: str) -> str:
    text = text.strip()
    fatal = text.find(FATAL)  # faulthandler says first where the process died
    return text[-TAIL_CHARS:] if fatal < 0 else text[fatal : fatal + TAIL_CHARS]

"""Reward functions in processes that can be killed: what one of them does costs its own sample only.

    a call ──► takes a ready worker (waits for one) ──► request ──► the function runs ──► answer, checked
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
from pathlib import Path
from typing import Any, NamedTuple

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
FATAL = "Fatal Python error"  # with which faulthandler begins
SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RaisedInWorker(Exception):
    """The traceback of an exception that the user's function raised; the exception stays in the worker."""


class Worker(NamedTuple):
    """A process that waits for a call, or is with one."""

    process: Process
    unfit: trio.Event  # it must serve no other call


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
    async with workers._ready, open_plain_nursery() as nursery:
        await nursery.start(workers._run_worker)
        for _ in range(count - 1):
            nursery.start_soon(workers._run_worker)
        yield workers


class RewardWorkers:
    """Worker processes that call reward functions by name. Made by open_reward_workers."""

    def __init__(self, *, timeout_s: float, memory_bytes: int, output_bytes: int) -> None:
        self._timeout_s, self._memory_bytes, self._output_bytes = timeout_s, memory_bytes, output_bytes
        self._offer, self._ready = trio.open_memory_channel[Worker](math.inf)
        self._counters: dict[str, int] = dict.fromkeys(("calls", "failed", "workers_started"), 0)

    def reward(self, name: str, base_dir: Path) -> RewardFn:
        """An async reward function that calls the plain function which `name` means, in a worker. It raises
        what call_reward raises.

        Workers refuse a file whose bytes have changed since.
        """
        return self._make("reward", name, base_dir)

    def group_reward(self, name: str, base_dir: Path) -> GroupRewardFn:
        """Like `reward`, for a function that scores the samples of a group together."""
        return self._make("group_reward", name, base_dir)

    def statistics(self) -> Mapping[str, int]:
        """Totals since the start."""
        return dict(self._counters)

    def _make(self, role: str, name: str, base_dir: Path) -> Callable[..., Any]:
        base = str(base_dir.resolve())
        request = {"name": name, "base_dir": base, "role": role, "digest": hash_file(name, base)}

        async def call(given: Sample | Sequence[Sample]) -> RewardResult | tuple[RewardResult, ...]:
            samples = (given,) if isinstance(given, Sample) else tuple(given)
            on = "" if isinstance(given, Sample) else "the group of "
            where = f"{role.replace('_', ' ')} function {call.__name__} on {on}sample {samples[0].id}"
            self._counters["calls"] += 1
            try:
                rewards = await self._call(request, samples, where)
            except UserFunctionError:
                self._counters["failed"] += 1
                raise
            return rewards[0] if isinstance(given, Sample) else tuple(rewards)

        call.__name__ = call.__qualname__ = name.rpartition(":")[2].rpartition(".")[2]
        # waiting for a worker is not the function's time
        call.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    # --- one call ---

    async def _call(
        self, request: Mapping[str, Any], samples: tuple[Sample, ...], where: str
    ) -> Sequence[RewardResult]:
        request_id = secrets.token_hex(16)
        line = encode_request({**request, "id": request_id, "where": where, "samples": samples})
        try:  # the next one when a worker has ended, or has written bytes that nobody asked for
            while is_readable((worker := await self._ready.receive()).process):
                worker.unfit.set()
        except trio.ClosedResourceError:
            raise RewardCrashed(f"{where} was called after the reward workers had been closed") from None
        fit = False
        try:
            answer = await self._exchange(worker.process, line, request_id, len(samples), where)
            fit = not answer.unfit
        finally:  # also where the caller was cancelled
            if fit:
                self._offer.send_nowait(worker)
            else:
                worker.unfit.set()
        if answer.kind == "scored":
            return answer.rewards
        cause = RaisedInWorker(answer.traceback) if answer.traceback else None
        raise UserFunctionError(answer.text) from cause

    async def _exchange(
        self, process: Process, line: bytes, request_id: str, count: int, where: str
    ) -> Answer:
        """The worker's answer to a request. Raises RewardTimeout, and RewardCrashed where there is none."""
        channel = process.channel
        assert channel is not None
        late = f"{LOAD_TIMEOUT_S:g} s to import; do less when the module is imported"
        answer, kind, problem = None, RewardCrashed, ""
        process.forget_output()
        try:
            with trio.move_on_after(LOAD_TIMEOUT_S) as scope:
                await channel.send_all(line)
                received = bytearray(await channel.receive_some(1))
                if received == b"\n":  # it is loaded
                    scope.deadline = trio.current_time() + self._timeout_s
                    late = f"{self._timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s"
                    received.clear()
                while b"\n" not in received:
                    if len(received) > self._output_bytes:
                        raise BadAnswer(f"an answer of more than output_bytes={self._output_bytes}")
                    if not (part := await channel.receive_some(1 << 16)):
                        raise EOFError
                    received += part
                answer = parse_answer(bytes(received), request_id=request_id, count=count)
                # a process that says that it crashed has ended: then its end is what can be read
                if answer.kind == "crashed":
                    problem = answer.text
                elif is_readable(process):
                    raise BadAnswer("more than one answer (did it write to file descriptor 3?)")
            if scope.cancelled_caught:
                kind, problem = RewardTimeout, f"took longer than {late}"
        except BadAnswer as error:
            problem = f"gave {error}"
        except (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            problem = await _describe_end(process)
        process.read_output()
        if process.printed_too_much:
            kind, problem = RewardCrashed, f"printed more than output_bytes={self._output_bytes}"
        printed = _shorten_output(process.read_tail())
        said = f"; the last it printed: {printed!r}" if printed else ""
        if problem or answer is None:
            raise kind(f"{where} {problem}{said}")
        answer.text += said
        return answer

    async def _run_worker(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps one process ready: another when a call has left one unfit. Ends by cancellation. Raises
        RewardCrashed if no process can be started.
        """
        argv = [sys.executable, "-P", "-m", "rollouts.rewards.worker", os.environ.get("PYTHONPATH", "")]
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
                        await self._keep_ready(process)
                        continue
                    reason = process.describe_end()
            except OSError as error:
                reason = f"did not start: {error}"
            failures += 1
            await trio.sleep(BACK_OFF_S)
        raise RewardCrashed(f"a process for reward functions {reason}")

    async def _keep_ready(self, process: Process) -> None:
        """Offers a process to calls until it is unfit; kills it when it prints too much."""
        worker = Worker(process, trio.Event())
        self._offer.send_nowait(worker)
        async with trio.open_nursery() as nursery:

            async def watch_output() -> None:
                await process.wait_printed_too_much()
                process.kill()

            nursery.start_soon(watch_output)
            await worker.unfit.wait()
            nursery.cancel_scope.cancel()


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


def is_readable(process: Process) -> bool:
    """Whether there are bytes to read from a worker, or it has closed its channel."""
    assert process.channel is not None
    poll = select.poll()
    poll.register(process.channel.socket.fileno(), select.POLLIN)
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

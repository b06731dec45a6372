"""The user's sync functions in processes that can be killed: what one of them does costs its own sample, tool
call or trajectory only.

    a call ──► takes a ready worker (waits for one) ──► request ──► the function runs ──► answer, checked
               too long · cancelled · signal · exit · memory · output · fork · nonsense
               ──► the worker's whole tree is killed, the call fails, another worker starts

An environment keeps its worker from opening to closing, and answers one request after the other (lend).
A worker that answers, but whose call changed its process (working directory, signal handlers, a thread …), is
replaced too; its answer stands. Each worker has a guard of its own (processes/guard.py): nothing escapes,
also where a function kills the guard or the trainer is killed. Limits are for mistakes: a function that means
harm has the trainer's user and could kill the trainer.
"""

import ctypes
import math
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from rollouts.errors import (
    EnvironmentFailed,
    RewardCrashed,
    RewardTimeout,
    ToolError,
    UserFunctionError,
    require,
)
from rollouts.processes.guard import PR_SET_DUMPABLE, prctl
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.processes.process import Process, open_process
from rollouts.processes.program import wait_readable
from rollouts.rewards.worker import EXIT_LOST_CHANNEL, Answer, BadAnswer, encode_json, hash_file, parse_answer
from rollouts.types import Fields, Function, RewardResult, Sample, Texts, live

# for a worker to start and to import a function's module, which may well load torch
LOAD_TIMEOUT_S = 120.0
BACK_OFF_S = 0.2  # before the next try to start a process
START_TRIES = 50  # in a row
END_S = 0.5  # for a worker that closed its channel to end by itself, so that its exit code says why
TAIL_CHARS = 400  # of a function's output that a message quotes
PRINTED = "; the last it printed: "
FATAL = "Fatal Python error"  # with which faulthandler begins
DEBUGGER = "ROLLOUTS_DEBUGGER"
SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RaisedInWorker(Exception):
    """The traceback of an exception that the user's function raised; the exception stays in the worker."""


class Worker(NamedTuple):
    """A process that waits for a call, or is with one."""

    process: Process
    unfit: trio.Event  # it must serve no other call


@asynccontextmanager
async def open_workers(
    *,
    count: int,
    timeout_s: float,
    memory_bytes: int = 4 << 30,
    output_bytes: int = 1 << 20,
    module: str = "rollouts.rewards.worker",
) -> "AsyncIterator[Workers]":
    """Worker processes for as long as the context is open, started when they are needed, at most `count`;
    when it is left they and all that they started are gone.

    `timeout_s` of one call, from when its worker has it; `memory_bytes` that a worker, and each process that
    it starts, may allocate; `output_bytes` that a call may print, and that its answer may have. `module` is
    what the processes run. Where they cannot be started, calls raise RewardCrashed.
    """
    require(count >= 1, f"count={count} workers; there must be at least 1")
    workers = Workers(count, timeout_s, memory_bytes, output_bytes, module)
    async with workers._ready, open_plain_nursery() as workers._nursery:
        yield workers


@live
class Workers:
    """Worker processes that call functions by name. Made by open_workers."""

    count: int
    timeout_s: float
    memory_bytes: int
    output_bytes: int
    module: str

    def __post_init__(self) -> None:
        self._nursery: trio.Nursery
        self._slots = self._lent = 0  # processes that are kept up; blocks that have one or wait for one
        self._started = 0
        self._offer, self._ready = trio.open_memory_channel[Worker | str](math.inf)  # or why there is none

    def statistics(self) -> Mapping[str, int]:
        """How many were started, and how many are with a call or an environment."""
        return {"workers_started": self._started, "lent": self._lent}

    def reward(
        self,
        name: str,
        base_dir: Path,
        role: str = "reward",
        params: Mapping[str, str | float] = {},
    ) -> Function:
        """An async reward function that calls the plain function which `name` means, with `params` by
        keyword, in a worker; of role "group_reward" one that scores the samples of a group together. It
        raises what call_reward raises.

        Workers refuse a file whose bytes have changed since.
        """
        request = {**name_function(role, name, base_dir), "params": params}

        async def call(given: Sample | Sequence[Sample]) -> RewardResult | tuple[RewardResult, ...]:
            alone = isinstance(given, Sample)
            samples, on = ((given,), "") if alone else (tuple(given), "the group of ")
            where = f"{role.replace('_', ' ')} function {call.__name__} on {on}sample {samples[0].id}"
            kind = tuple[(RewardResult,) * len(samples)]
            rewards = await self.call({**request, "samples": samples}, where, kind)
            return rewards[0] if alone else rewards

        call.__name__ = call.__qualname__ = name.rpartition(":")[2].rpartition(".")[2]
        # waiting for a worker is not the function's time
        call.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    # --- calls ---

    async def call(self, request: Fields, where: str, kind: Any = Any) -> Any:
        """What a worker answers to a request whose errors begin with `where`: a value of that type. Raises as
        `lend` says.
        """
        async with self.lend() as ask:
            return await ask(request, where, kind)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """The `call` of one worker, for the block alone: it answers one request after the other. It is killed
        where an answer was not awaited to its end, or where a call left something behind.

        Raises UserFunctionError for what a function raised, ToolError and EnvironmentFailed as they are;
        RewardTimeout and RewardCrashed where the worker was killed, or EnvironmentFailed if one lived in it.
        """
        turn, unfit = trio.Lock(), False

        async def ask(request: Fields, where: str, kind: Any = Any) -> Any:
            nonlocal unfit
            async with turn:
                try:
                    answer = await self._exchange(worker.process, request, where, kind)
                except BaseException:  # also where the caller was cancelled
                    worker.unfit.set()
                    raise
            unfit |= answer.unfit
            if answer.kind == "done":
                return answer.value
            kinds = {"": UserFunctionError, "environment": EnvironmentFailed}
            raised = kinds.get(answer.error, partial(ToolError, answer.error))(answer.text)
            raise raised from (RaisedInWorker(answer.traceback) if answer.traceback else None)

        self._lent += 1
        try:
            if self._slots < min(self._lent, self.count):
                self._slots += 1
                self._nursery.start_soon(self._run_worker)
            # the next one when a worker has ended, or has written bytes that nobody asked for
            while True:
                if isinstance(found := await self._ready.receive(), str):
                    raise RewardCrashed(found)
                worker = found
                if not is_readable(worker.process):
                    break
                worker.unfit.set()
            try:
                yield ask
            finally:
                if unfit or worker.unfit.is_set():
                    worker.unfit.set()
                else:
                    self._offer.send_nowait(worker)
        except trio.ClosedResourceError:
            raise RewardCrashed("a function was called after the workers had been closed") from None
        finally:
            self._lent -= 1

    async def _exchange(self, process: Process, request: Fields, where: str, kind: Any) -> Answer:
        """The worker's answer to a request. Raises RewardTimeout, and RewardCrashed where there is none."""
        channel, request_id = process.channel, secrets.token_hex(16)
        line = encode_json({**request, "id": request_id, "where": where}).encode() + b"\n"
        assert channel is not None
        late = f"{LOAD_TIMEOUT_S:g} s to import; do less when the module is imported"
        answer, failure, problem = None, RewardCrashed, ""
        process.forget_output()
        try:
            with trio.fail_after(LOAD_TIMEOUT_S) as scope:
                await channel.send_all(line)
                received = bytearray(await channel.receive_some(1))
                if received == b"\n":  # it is loaded
                    scope.deadline = trio.current_time() + self.timeout_s
                    late = (
                        f"{self.timeout_s:g} s; make it faster or raise rl.rollout.reward_timeout_s (of"
                        " tools and environments: tool_timeout_s)"
                    )
                    received.clear()
                while b"\n" not in received:
                    if len(received) > self.output_bytes:
                        raise BadAnswer(f"an answer of more than output_bytes={self.output_bytes}")
                    if not (part := await channel.receive_some(1 << 16)):
                        raise EOFError
                    received += part
                answer = parse_answer(bytes(received), request_id=request_id, kind=kind)
                # a process that says that it crashed has ended: then its end is what can be read
                if answer.kind == "crashed":
                    problem = answer.text
                elif is_readable(process):
                    raise BadAnswer("more than one answer (did it write to file descriptor 3?)")
        except trio.TooSlowError:
            failure, problem = RewardTimeout, f"took longer than {late}"
        except BadAnswer as error:
            problem = f"gave {error}"
        except (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            problem = await _describe_end(process)
        process.read_output()
        if process.printed_too_much:
            failure, problem = RewardCrashed, f"printed more than output_bytes={self.output_bytes}"
        printed = process.read_tail().strip()
        fatal = printed.find(FATAL)  # faulthandler says first where the process died
        printed = printed[-TAIL_CHARS:] if fatal < 0 else printed[fatal : fatal + TAIL_CHARS]
        said = f"{PRINTED}{printed!r}" if printed else ""
        if problem or answer is None:
            failure = EnvironmentFailed if request["role"] == "environment" else failure
            raise failure(f"{where} {problem}{said}")
        answer.text += said
        return answer

    async def _run_worker(self) -> None:
        """Keeps one process ready: another when a call has left one unfit. Ends by cancellation, or when no
        process can be started: then one call fails, and the next tries again.
        """
        argv = [sys.executable, "-P", "-m", self.module, os.environ.get("PYTHONPATH", "")]
        failures, reason = 0, ""
        while failures < START_TRIES:
            try:
                async with open_process(
                    argv,
                    env=make_environment(),
                    output_bytes=self.output_bytes,
                    memory_bytes=self.memory_bytes,
                    with_channel=True,
                    subreaper=True,
                ) as process:
                    await process.wait_started()
                    if process.pid:
                        failures = 0
                        self._started += 1
                        worker = Worker(process, trio.Event())
                        self._offer.send_nowait(worker)
                        async with open_plain_nursery() as watching:
                            watching.start_soon(kill_when_loud, process)
                            await worker.unfit.wait()
                        continue
                    reason = process.describe_end()
            except OSError as error:
                reason = f"did not start: {error}"
            failures += 1
            await trio.sleep(BACK_OFF_S)
        self._slots -= 1
        self._offer.send_nowait(f"a worker process {reason}")


async def kill_when_loud(process: Process) -> None:
    """Kills it when it has printed more than it may."""
    await process.wait_printed_too_much()
    process.kill()


def name_function(role: str, name: str, base_dir: Path = Path()) -> dict[str, str]:
    """The part of a request that says what is called."""
    base = str(base_dir.resolve())
    return {"role": role, "name": name, "base_dir": base, "digest": hash_file(name, base)}


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
    return wait_readable(0, process.channel.socket.fileno())


def hide_process() -> None:
    """Keeps this process's memory, and what its environment holds that looks like a secret, from workers and
    other programs of its user: nor can gdb or py-spy look into it, and it leaves no core file, unless
    DEBUGGER is set. On Linux.
    """
    if DEBUGGER in os.environ or sys.platform != "linux":
        return
    prctl(PR_SET_DUMPABLE, 0)
    # root may read what a process was started with all the same: so secrets move, and are blotted out there
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    at, end = map(int, fields[47:49])  # env_start and env_end: proc(5)
    for entry in ctypes.string_at(at, end - at).split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in os.environb and SECRET_NAMES.search(os.fsdecode(name)):
            os.environb[name] = os.environb[name]
            ctypes.memset(at + len(name) + 1, ord("*"), len(value))
        at += len(entry) + 1


def make_environment() -> Texts:
    """The trainer's environment without what looks like a secret, with its import path, and one thread per
    numerical library.
    """
    kept = {name: value for name, value in os.environ.items() if not SECRET_NAMES.search(name)}
    path = [str(Path(entry).resolve()) for entry in sys.path]  # '' is the working directory
    return {**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}

"""One process that follows a run for several trackers: it starts a worker for each, and again when one dies or hangs.

    run (or `rollouts track`) ──► supervisor ──► worker of tensorboard
                                             └─► worker of wandb ──► what the tracker's library starts
    the run is over     ──► workers send what is left and end; those that cannot are killed when their time is up
    supervisor killed   ──► the system kills the workers

What a worker and its library say passes through here, so that no secret of the environment reaches a log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir, is_locked
from rollouts.trackers.position import position_path, read_position
from rollouts.trackers.secrets import find_secrets, hide_secrets
from rollouts.trackers.worker import DONE, LOOK_S, REFUSED, UNUSABLE, choose_wait

DRAIN_S = 30.0  # after the end of a run that started its followers: then they go, whatever is not sent
PATIENCE_S = 300.0  # after the end of the run, without a row taken: then `rollouts track` gives up
SHORT_S = 60.0  # a worker that ends sooner without a row taken counts as failing again
LINE_BYTES, LOG_BYTES = 1 << 16, 4 << 20  # of one line and of one log: a library that cannot stop complaining fills no disk
OUTPUT_S = 1.0  # after a worker's end, for its last words, which a process that it left behind could hold back for ever
WORKER = (sys.executable, "-m", "rollouts.trackers.worker")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long followers go on after the run is over."""

    drain_s: float = math.inf  # in all
    patience_s: float = PATIENCE_S  # without a row taken


async def supervise(
    root: Path,
    names: Sequence[str],
    *,
    wait_over: Callable[[], Awaitable[None]],
    limits: Limits,
    say_for: Callable[[str], Say],
    command: Sequence[str] = WORKER,
) -> list[str]:
    """Follows the run at `root` until it is over and all is sent. The names of those trackers that did not take everything.

    `wait_over` returns when nothing is written any more. `command`, followed by root, name and a process id, is a worker.
    """
    behind: list[str] = []
    over = trio.Event()

    async def notice_end() -> None:
        await wait_over()
        over.set()

    async def follow_one(name: str) -> None:
        if not await keep_following(root, name, over=over, limits=limits, say=say_for(name), command=command):
            behind.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(notice_end)
        async with trio.open_nursery() as followers:
            for name in names:
                followers.start_soon(follow_one, name)
        nursery.cancel_scope.cancel()
    return [name for name in names if name in behind]


async def keep_following(root: Path, name: str, *, over: trio.Event, limits: Limits, say: Say, command: Sequence[str]) -> bool:
    """Runs workers until one has sent everything (true), or the limits are reached or the service refuses after the run's end (false)."""
    failures = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_in_time, root, name, over, limits, nursery.cancel_scope)
        while True:
            before, began = count_sent(root, name), trio.current_time()
            code = await run_worker([*command, str(root), name, str(os.getpid())], over=over, say=say)
            if code in (DONE, REFUSED) or (code == UNUSABLE and over.is_set()):
                nursery.cancel_scope.cancel()
                return code == DONE
            if count_sent(root, name) > before or trio.current_time() - began > SHORT_S:
                failures = 0
            failures += 1
            wait_s = choose_wait(failures, asked_s=None, over=over.is_set(), draw=random.random)
            say(f"{name}: its follower {describe_end(code)}; it starts again in {wait_s:.1f} s")
            await trio.sleep(wait_s)
    return False


async def end_in_time(root: Path, name: str, over: trio.Event, limits: Limits, scope: trio.CancelScope) -> None:
    """Cancels `scope` when the time after the run's end is up."""
    await over.wait()
    with trio.move_on_after(limits.drain_s):
        sent = -1
        while sent != (sent := count_sent(root, name)):  # noqa: ASYNC110
            await trio.sleep(limits.patience_s)  # what is waited for is that nothing happens
    scope.cancel()


def count_sent(root: Path, name: str) -> int:
    """Rows that the tracker has taken or its library holds, as its position says; 0 where that cannot be read."""
    try:
        position = read_position(position_path(root, name))
    except (OSError, RunDirError):
        return 0
    return 0 if position is None else position.number + position.handed


def describe_end(code: int) -> str:
    """Why a worker ended."""
    if code == -signal.SIGALRM:
        return "hung and was ended"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


async def run_worker(command: Sequence[str], *, over: trio.Event, say: Say) -> int:
    """The exit code of a worker, minus the signal that killed it. Neither it nor what it started outlives this call. Raises OSError."""
    secrets = find_secrets(os.environ)
    process = start_worker(command)
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    stdin, output = (trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in (process.stdin, process.stdout))
    process.stdin.close()
    process.stdout.close()
    closed = trio.Event()

    async def tell_over() -> None:
        await over.wait()
        with contextlib.suppress(trio.BrokenResourceError):
            await stdin.send_all(b"o")

    async def pass_on() -> None:
        async for line in read_lines(output):
            say(hide_secrets(line, secrets))
        closed.set()

    try:
        async with stdin, output, trio.open_nursery() as nursery:
            nursery.start_soon(tell_over)
            nursery.start_soon(pass_on)
            await wait_exit(process)
            kill_group(process.pid)
            with trio.move_on_after(OUTPUT_S):
                await closed.wait()
            nursery.cancel_scope.cancel()
    finally:
        kill_group(process.pid)
        process.wait()  # killed: what cannot be, in a driver, has no network service to wait for
    return process.returncode


def start_worker(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Not through trio, which starts processes in a thread: a worker asks the system to be killed with the thread that has started it."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True, env=get_environment(os.environ))


def get_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What followers inherit: no GPU, and one thread for a library that would take every core."""
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


async def wait_exit(process: subprocess.Popen[bytes]) -> None:
    """Until the process has ended."""
    if not hasattr(os, "pidfd_open"):
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        trio.lowlevel.notify_closing(descriptor)
        os.close(descriptor)
    process.wait()


def kill_group(leader: int) -> None:
    """Kills a process that leads a group, and whoever is in that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def read_lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    """The lines that come, without their ends; a longer one than LINE_BYTES is cut."""
    held = b""
    async for received in stream:
        *lines, held = (held + received).split(b"\n")
        for line in lines:
            yield line[:LINE_BYTES].decode(errors="replace").rstrip("\r")
        held = held[:LINE_BYTES]
    if held:
        yield held.decode(errors="replace")


# --- whether the run is over -------------------------------------------------------------------------------------------------


async def wait_unlocked(run_dir: RunDir) -> None:
    """Until no run is at work in the directory. No system tells when a lock is given back, so it is looked at now and then."""
    while is_at_work(run_dir):  # noqa: ASYNC110
        await trio.sleep(LOOK_S)


def is_at_work(run_dir: RunDir) -> bool:
    """Whether a process holds the run's lock. A lock of another machine may not be seen here: that run goes on until it has a summary."""
    locked = is_locked(run_dir)
    if locked is None:
        return not run_dir.summary.exists()
    if locked or not run_dir.lock.exists():
        return locked
    return read_host(run_dir) not in ("", socket.gethostname()) and not run_dir.summary.exists()


def read_host(run_dir: RunDir) -> str:
    """The machine that used the directory last, empty where nothing says so."""
    try:
        return str(json.loads(run_dir.lock.read_text(encoding="utf-8"))["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# --- started by a run --------------------------------------------------------------------------------------------------------


async def wait_starter(parent: int) -> None:
    """Until the process that started this one closes its end of stdin, or ends: a child that it forked may hold that end."""
    descriptors = [0]
    if hasattr(os, "pidfd_open"):
        if os.getppid() != parent:
            return
        descriptors.append(os.pidfd_open(parent))
    async with trio.open_nursery() as nursery:
        for descriptor in descriptors:
            nursery.start_soon(wait_readable, descriptor, nursery.cancel_scope)


async def wait_readable(descriptor: int, scope: trio.CancelScope) -> None:
    """Cancels `scope` when there is something to read, or an end."""
    await trio.lowlevel.wait_readable(descriptor)
    scope.cancel()


def append_line(path: Path, text: str) -> None:
    """Adds a line to a log that is not too long already; a log that cannot be written is done without."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        if file.tell() < LOG_BYTES:
            file.write(text + "\n")


def main(argv: Sequence[str], *, command: Sequence[str] = WORKER) -> int:
    """The supervisor that a run starts: ROOT PARENT_PID NAME…; logs beside the positions. 0 if everything was sent, else 1."""
    root, parent, names = Path(argv[0]), int(argv[1]), argv[2:]

    def say_for(name: str) -> Say:
        return partial(append_line, root / "trackers" / f"{name}.log")

    behind = trio.run(
        partial(
            supervise,
            root,
            names,
            wait_over=partial(wait_starter, parent),
            limits=Limits(DRAIN_S, DRAIN_S),
            say_for=say_for,
            command=command,
        )
    )
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

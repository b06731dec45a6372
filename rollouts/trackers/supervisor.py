"""One process that follows a run for several trackers: it starts a worker for each, and again when one dies
or hangs.

    run (or `rollouts track`) ──► supervisor ──► worker of tensorboard
                                             └─► worker of wandb ──► what the tracker's library starts
    the run is over     ──► workers send what is left and end; those that cannot are killed when their time is up
    supervisor killed   ──► the system kills the workers

What a worker and its library say passes through here, so that no secret of the environment reaches a log.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import trio

from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir, find_activity
from rollouts.trackers.position import position_path, read_position
from rollouts.trackers.secrets import find_secrets, hide_secrets
from rollouts.trackers.worker import DONE, HELD, LOOK_S, ONCE, REFUSED, UNUSABLE, choose_wait

DRAIN_S = 30.0  # after the end of a run that started its followers: then they go, whatever is not sent
PATIENCE_S = 300.0  # after the end of the run, without a row taken: then `rollouts track` gives up
SHORT_S = 60.0  # a worker that ends sooner without a row taken counts as failing again
LINE_BYTES, LOG_BYTES = (
    1 << 16,
    4 << 20,
)  # of one line and of one log: a library that cannot stop complaining fills no disk
# after a worker's end, for its last words, which a process that it left behind could hold back for ever
OUTPUT_S = 1.0
WORKER = (sys.executable, "-m", "rollouts.trackers.worker")

Say = Callable[[str], None]
Outcome = Literal[
    "sent", "behind", "held"
]  # everything; not everything; nothing, as another process follows the run for this tracker


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
    once: bool = False,
    command: Sequence[str] = WORKER,
) -> dict[str, Outcome]:
    """Follows the run at `root` until it is over and all is sent. What became of each tracker.

    `wait_over` returns when nothing is written any more. `once`: where another process follows the run for a
    tracker it is not waited for. `command`, followed by root, name and a process id, is a worker.
    """
    outcomes: dict[str, Outcome] = dict.fromkeys(names, "behind")
    over = trio.Event()

    async def notice_end() -> None:
        await wait_over()
        over.set()

    async def follow_one(name: str) -> None:
        words = [*command, str(root), name, str(os.getpid()), *((ONCE,) if once else ())]
        outcomes[name] = await keep_following(
            root, name, over=over, limits=limits, say=say_for(name), command=words
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(notice_end)
        async with trio.open_nursery() as followers:
            for name in names:
                followers.start_soon(follow_one, name)
        nursery.cancel_scope.cancel()
    return outcomes


async def keep_following(
    root: Path, name: str, *, over: trio.Event, limits: Limits, say: Say, command: Sequence[str]
) -> Outcome:
    """Runs workers until one has sent everything, or is not to wait for another follower, or the limits are
    reached or the service refuses after the run's end.
    """
    failures = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_in_time, root, name, over, limits, nursery.cancel_scope)
        while True:
            before, began = count_sent(root, name), trio.current_time()
            try:
                code = await run_worker(command, over=over, say=say)
                end = describe_end(code)
            except (
                OSError
            ) as error:  # too many processes, no memory: the other trackers' workers go on meanwhile
                code, end = None, f"cannot start ({error})"
            if code in (DONE, REFUSED, HELD) or (code == UNUSABLE and over.is_set()):
                nursery.cancel_scope.cancel()
                return "sent" if code == DONE else "held" if code == HELD else "behind"
            if count_sent(root, name) > before or trio.current_time() - began > SHORT_S:
                failures = 0
            failures += 1
            wait_s = choose_wait(failures, asked_s=None, over=over.is_set(), draw=random.random)
            say(f"{name}: its follower {end}; it starts again in {wait_s:.1f} s")
            await trio.sleep(wait_s)
    return "behind"


async def end_in_time(
    root: Path, name: str, over: trio.Event, limits: Limits, scope: trio.CancelScope
) -> None:
    """Cancels `scope` when the time after the run's end is up."""
    await over.wait()
    with trio.move_on_after(limits.drain_s):
        sent = -1
        while sent != (sent := count_sent(root, name)):  # noqa: ASYNC110
            await trio.sleep(limits.patience_s)  # what is waited for is that nothing happens
    scope.cancel()


def count_sent(root: Path, name: str) -> int:
    """Rows that the tracker has taken or its library holds, as its position says; 0 where that cannot be
    read.
    """
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
    """The exit code of a worker, minus the signal that killed it. Neither it nor what it started outlives
    this call. Raises OSError.
    """
    secrets = find_secrets(os.environ)
    process = start_worker(command)
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    stdin, output = (
        trio.lowlevel.FdStream(os.dup(pipe.fileno())) for pipe in (process.stdin, process.stdout)
    )
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
    """Not through trio, which starts processes in a thread: a worker asks the system to be killed with the
    thread that has started it.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=get_environment(os.environ),
    )


def get_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What followers inherit: no GPU, and one thread for a library that would take every core."""
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


async def wait_exit(process: subprocess.Popen[bytes]) -> None:
    """Until the process has ended."""
    descriptor = open_pidfd(process.pid)
    if descriptor is None:
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return
    await wait_pidfd(descriptor)
    process.wait()


def open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read when the process has ended. None where it is gone, or the system has no
    such thing, or none left.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def wait_pidfd(descriptor: int) -> None:
    """Until the process has ended. The descriptor is closed then."""
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        trio.lowlevel.notify_closing(descriptor)
        os.close(descriptor)


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


# --- whether the run is over --------------------------------------------------------------------------------


async def wait_unlocked(run_dir: RunDir) -> None:
    """Until no run can be at work in the directory. No system tells when a lock is given back, so it is
    looked at now and then.
    """
    while find_activity(run_dir).may_go_on:  # noqa: ASYNC110
        await trio.sleep(LOOK_S)


# --- started by a run ---------------------------------------------------------------------------------------


async def wait_starter(parent: int) -> None:
    """Until the process that started this one closes its end of stdin, or ends: a child that it forked may
    hold that end.
    """
    pidfd = open_pidfd(parent)
    if os.getppid() != parent:  # looked at afterwards: the number may be another process's by now
        return
    descriptors = [0] if pidfd is None else [0, pidfd]
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
    """The supervisor that a run starts: ROOT PARENT_PID NAME…; logs beside the positions. 0 if everything was
    sent, else 1.
    """
    root, parent, names = Path(argv[0]), int(argv[1]), argv[2:]

    def say_for(name: str) -> Say:
        return partial(append_line, root / "trackers" / f"{name}.log")

    outcomes = trio.run(
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
    return 0 if set(outcomes.values()) <= {"sent"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

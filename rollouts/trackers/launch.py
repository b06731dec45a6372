"""A run's own followers: one process beside it, that ends with it or soon after. Whatever happens to that
process, the run goes on as if it was not.

run ──► pipe ──► supervisor ──► a worker for each tracker
the pipe closes, for whatever reason ──► what is left is sent, for at most DRAIN_S
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from rollouts.errors import ConfigError, RunDirError, TrackerError
from rollouts.run_dir import RunDir
from rollouts.trackers.position import Position, count_unsent, describe_left_out, position_path, read_position
from rollouts.trackers.sinks import SINKS, check_sink
from rollouts.trackers.supervisor import DRAIN_S, open_pidfd, wait_pidfd

END_S = 2.0  # most that a run waits at its end for its followers to have sent everything
SUPERVISOR = (sys.executable, "-m", "rollouts.trackers.supervisor")

Say = Callable[[str], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError, with the command that installs it, if a tracker's package is missing."""
    for name in names:
        try:
            check_sink(name)
        except TrackerError as error:
            raise ConfigError(f"output.trackers: {error}") from error


@asynccontextmanager
async def open_trackers(
    run_dir: RunDir,
    names: Sequence[str],
    *,
    say: Say,
    end_s: float = END_S,
    command: Sequence[str] = SUPERVISOR,
) -> AsyncIterator[None]:
    """Followers of the run, inside the block. To be entered before the run's files are opened, so that these
    are closed first.

    The block waits `end_s` at its end, at most, and says in one line which trackers do not have everything,
    and how they get it. Raises never: a follower that cannot start is said.
    """
    if not names:
        yield
        return
    try:
        process, pipe = start_followers(run_dir, names, command)
    except (OSError, NotImplementedError) as error:
        say(
            f"warning: the followers of output.trackers do not start ({error});"
            f" {describe_catching_up(run_dir.root, names)}"
        )
        yield
        return
    try:
        yield
    finally:
        os.close(pipe)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + end_s):
            await wait_process(process)
        behind = [name for name in names if is_behind(run_dir.root, name)]
        if behind:
            left = f"they have {DRAIN_S:.0f} s more" if is_running(process) else "their followers have ended"
            say(
                f"not everything was sent to {', '.join(behind)}, {left};"
                f" {describe_catching_up(run_dir.root, behind)}"
            )
        for name in names:
            left_out = read_left_out(run_dir.root, name)
            if left_out:
                say(
                    f"warning: {name} does not have all rows: {left_out};"
                    f" {run_dir.root / 'trackers' / f'{name}.log'} says why"
                )


def start_followers(run_dir: RunDir, names: Sequence[str], command: Sequence[str]) -> tuple[int, int]:
    """(process id, our end of its stdin). In a session of its own, so that neither Ctrl-C nor the end of a
    terminal reaches it. Raises OSError.
    """
    logs = run_dir.root / "trackers"
    logs.mkdir(exist_ok=True)
    words = [*command, str(run_dir.root), str(os.getpid()), *names]
    log = os.open(logs / "followers.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    theirs, ours = os.pipe()
    try:
        files = [
            (os.POSIX_SPAWN_DUP2, theirs, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ]
        return os.posix_spawn(words[0], words, os.environ, file_actions=files, setsid=True), ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
        os.close(log)


async def wait_process(pid: int) -> None:
    """Until the child has ended. It is not reaped: is_running does."""
    descriptor = open_pidfd(pid)
    if descriptor is not None:
        await wait_pidfd(descriptor)
        return
    with contextlib.suppress(ChildProcessError):  # it is gone, where a program ignores SIGCHLD
        await trio.to_thread.run_sync(
            lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT), abandon_on_cancel=True
        )


def is_running(pid: int) -> bool:
    """Whether the child has not ended yet."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False


def is_behind(root: Path, name: str) -> bool:
    """Whether rows are there that the tracker has not taken, as far as its position tells."""
    try:
        position = read_position(position_path(root, name)) or Position("")
        return count_unsent(root, SINKS[name].files, position) > 0
    except (OSError, RunDirError):
        return True


def read_left_out(root: Path, name: str) -> str:
    """What the tracker's service refused for good, as far as its position tells; empty where that is nothing."""
    try:
        position = read_position(position_path(root, name))
    except (OSError, RunDirError):
        return ""
    return "" if position is None else describe_left_out(position)


def describe_catching_up(root: Path, names: Sequence[str]) -> str:
    """The command that sends what is left."""
    return (
        f"to send the rest: python -m rollouts track {shlex.quote(str(root))}"
        f" {' '.join(f'--to {name}' for name in names)} --once"
    )

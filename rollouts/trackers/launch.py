"""A run's own follower: one process beside it, that ends with it or soon after. Whatever happens to that
process, the run goes on as if it was not.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from rollouts.errors import ConfigError, InfrastructureError, RunDirError, TrackerError
from rollouts.processes.process import open_process
from rollouts.run_dir import RunDir
from rollouts.trackers.follower import HUNG, choose_wait
from rollouts.trackers.position import Position, position_path, read_batch, read_position
from rollouts.trackers.sinks import SINKS, check_sink

END_S = 2.0  # most that a run waits at its end for its follower to have sent everything
DRAIN_S = 30.0  # that the follower has after the end of the run
FOLLOWER = (sys.executable, "-m", "rollouts.trackers.follower")

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
    command: Sequence[str] = FOLLOWER,
) -> AsyncIterator[None]:
    """A follower of the run, inside the block. To be entered before the run's files are opened, so that these
    are closed first.

    The block waits `end_s` at its end, at most, and says which trackers do not have everything, and how they
    get it. Raises never: a follower that cannot start is said.
    """
    if not names:
        yield
        return
    over, ended = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            keep_follower, run_dir.root, [*command, str(run_dir.root), *names], over, ended, say
        )
        try:
            yield
        finally:
            over.set()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + end_s):
                await ended.wait()
            left = "the follower has ended" if ended.is_set() else f"they have {DRAIN_S:.0f} s more"
            nursery.cancel_scope.cancel()
    behind = [name for name in names if is_behind(run_dir.root, name)]
    if behind:
        rest = describe_catching_up(run_dir.root, behind)
        say(f"not everything was sent to {', '.join(behind)}, {left}; {rest}")
    for name in names:
        if left_out := read_left_out(run_dir.root, name):
            log = run_dir.root / "trackers" / f"{name}.log"
            say(f"warning: {name} does not have all rows: {left_out}; {log} says why")


async def keep_follower(
    root: Path, command: Sequence[str], over: trio.Event, ended: trio.Event, say: Say
) -> None:
    """Runs the follower, and again when it dies, until the run is over. Then `ended` is set."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    failures = 0
    while True:
        try:
            (root / "trackers").mkdir(exist_ok=True)
            log = root / "trackers" / "followers.log"
            async with open_process(
                command, env=environment, log=log, with_channel=True, linger_s=DRAIN_S
            ) as process:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(close_stdin_when_over, process.channel, over)
                    code = await process.wait_ended()
                    nursery.cancel_scope.cancel()
                problem = "hung" if code == HUNG else process.describe_end()
        except (OSError, InfrastructureError) as error:
            code, problem = None, f"cannot start ({error})"
        if over.is_set():
            ended.set()
            return
        failures += 1
        if failures == 1:
            say(f"warning: the follower of output.trackers {problem}; it is started again")
        with trio.move_on_after(choose_wait(failures, None)):
            await over.wait()


async def close_stdin_when_over(channel: trio.SocketStream | None, over: trio.Event) -> None:
    """Tells the follower that the run is over."""
    assert channel is not None
    await over.wait()
    await channel.send_eof()


def is_behind(root: Path, name: str) -> bool:
    """Whether rows are there that the tracker has not taken, as far as its position tells."""
    try:
        position = read_position(position_path(root, name)) or Position("")
        return bool(read_batch(root, SINKS[name].files, position, limit=1, say=lambda text: None).rows)
    except (OSError, RunDirError):
        return True


def read_left_out(root: Path, name: str) -> str:
    """What the tracker's service refused for good, as far as its position tells; empty for nothing."""
    try:
        position = read_position(position_path(root, name))
    except (OSError, RunDirError):
        return ""
    return "" if position is None else position.describe_left_out()


def describe_catching_up(root: Path, names: Sequence[str]) -> str:
    """The command that sends what is left."""
    to = " ".join(f"--to {name}" for name in names)
    return f"to send the rest: python -m rollouts track {shlex.quote(str(root))} {to} --once"

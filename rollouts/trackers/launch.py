"""A run's own follower: one process beside it, that ends with it or soon after. Whatever happens to that
process, the run goes on as if it was not.

`rollouts track`: follows a run for trackers from a terminal.
"""

import argparse
import os
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from rollouts.errors import InfrastructureError, RunDirError
from rollouts.processes.process import open_process
from rollouts.protocols import Say
from rollouts.run_dir import RunDir, check_links, find_activity, open_run_dir
from rollouts.trackers.follower import choose_wait, follow_all, position_path, read_batch, read_position
from rollouts.trackers.sinks import SINKS, check_trackers

END_S = 2.0  # most that a run waits at its end for its follower to have sent everything
DRAIN_S = 30.0  # that the follower has after the end of the run
FOLLOWER = (sys.executable, "-m", "rollouts.trackers.follower")


@asynccontextmanager
async def open_trackers(run_dir: RunDir, names: Sequence[str], *, say: Say) -> AsyncIterator[None]:
    """A follower of the run, inside the block. To be entered before the run's files are opened, so that these
    are closed first.

    The block waits END_S at its end, at most, and says which trackers do not have everything, and how they
    get it. Raises never: a follower that cannot start is said.
    """
    if not names:
        yield
        return
    root, over, ended = run_dir.root, trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_follower, root, [*FOLLOWER, str(root), *names], over, ended, say)
        try:
            yield
        finally:
            over.set()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + END_S):
                await ended.wait()
            nursery.cancel_scope.cancel()
    behind = []
    for name in names:
        left_out, is_behind = read_state(root, name)
        behind += [name] * is_behind
        if left_out:
            say(f"warning: {name} does not have all rows: {left_out}; see {root / 'trackers' / name}.log")
    if behind:
        say(
            f"not everything was sent to {', '.join(behind)},"
            f" {'the follower has ended' if ended.is_set() else f'they have {DRAIN_S:.0f} s more'};"
            f" {describe_catching_up(root, behind)}"
        )


async def keep_follower(
    root: Path, command: Sequence[str], over: trio.Event, ended: trio.Event, say: Say
) -> None:
    """Runs the follower, and again when it dies, until the run is over. Then `ended` is set."""
    failures = 0

    async def end_stdin(channel: trio.SocketStream) -> None:
        await over.wait()
        await channel.send_eof()

    while True:
        try:
            (root / "trackers").mkdir(exist_ok=True)
            async with (
                open_process(
                    command,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                    log=Path(os.devnull),  # what libraries print may have secrets in it
                    with_channel=True,
                    linger_s=DRAIN_S,
                ) as process,
                trio.open_nursery() as nursery,
            ):
                assert process.channel is not None
                nursery.start_soon(end_stdin, process.channel)
                with suppress(trio.BrokenResourceError):
                    async for part in process.channel:  # alerts, until the process is gone
                        say(part.decode(errors="replace").rstrip())
                await process.wait_ended()
                nursery.cancel_scope.cancel()
            problem = process.describe_end()
        except (OSError, InfrastructureError) as error:
            problem = f"cannot start ({error})"
        if over.is_set():
            return ended.set()
        if not failures:
            say(f"warning: the follower of output.trackers {problem}; it is started again")
        with trio.move_on_after(choose_wait(failures)):
            await over.wait()
        failures += 1


def read_state(root: Path, name: str) -> tuple[str, bool]:
    """(what the tracker's service refused for good, empty for nothing; whether rows are there that it has not
    taken), as far as its position tells.
    """
    try:
        position = read_position(position_path(root, name))
        rows, _ = read_batch(root, SINKS[name].files, position, limit=1, say=lambda text: None)
    except (OSError, RunDirError):
        return "", True
    return position.describe_left_out(), bool(rows)


def describe_catching_up(root: Path, names: Sequence[str]) -> str:
    """The command that sends what is left."""
    return (
        f"to send the rest: python -m rollouts track {shlex.quote(str(root))}"
        f" {' '.join(f'--to {name}' for name in names)} --once"
    )


# --- from a terminal ----------------------------------------------------------------------------------------


LOOK_S = 0.5  # between two looks whether the run is over
OUTCOMES = {"sent": "", "behind": ", not all", "held": "; another process follows the run for it already"}


def run_track(arguments: argparse.Namespace) -> int:
    """An exit code, as commands.toml says. Of 1 and 3 it is 1.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker whose package is missing.
    """
    root, names, once = arguments.run_dir, list(dict.fromkeys(arguments.to)), arguments.once
    check_trackers(names, setting="--to")
    run_dir = open_run_dir(root)
    check_links(run_dir)
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts

    async def wait_over() -> None:
        while not once and find_activity(run_dir).may_go_on:  # noqa: ASYNC110
            await trio.sleep(LOOK_S)  # no system tells when a lock is given back

    try:
        outcomes = trio.run(
            partial(
                follow_all,
                root,
                names,
                wait_over=wait_over,
                say=lambda name, text: print(text, file=sys.stderr, flush=True),
                once=once,
            )
        )
    except KeyboardInterrupt:
        print(f"stopped: {describe_catching_up(root, names)}", file=sys.stderr)
        return 130
    for name, outcome in outcomes.items():
        position = read_position(position_path(root, name))
        left_out = position.describe_left_out()
        print(
            f"{name}: {position.number - position.left_out.rows} rows sent"
            f"{f' ({left_out})' if left_out else ''}{OUTCOMES[outcome]}"
        )
    if behind := [name for name, outcome in outcomes.items() if outcome == "behind"]:
        print(describe_catching_up(root, behind), file=sys.stderr, flush=True)
        return 1
    return 3 if "held" in outcomes.values() else 0

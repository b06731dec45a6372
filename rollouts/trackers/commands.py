"""`rollouts track`: follows a run for trackers from a terminal."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, RunDirError, TrackerError

NAMES = "tensorboard, trackio, wandb, mlflow, otlp, statsd, prometheus"  # so that --help is quick
PATIENCE_S = 300.0  # after the end of the run, without a row taken
LOOK_S = 0.5  # between two looks whether the run is over
EXIT_CODES = (
    "exit codes: 0 nothing is left to be sent; 1 a tracker did not take everything; 2 wrong usage; 3 with"
    " --once, another process, as the run's own, follows the run for a tracker already; 130 Ctrl-C"
)


def add_parser(commands: Any) -> None:
    """Adds the subcommand `track`."""
    what = "send a run's metrics to trackers, also while it runs, from where the last time ended"
    parser = commands.add_parser("track", help=what, description=what, epilog=EXIT_CODES, allow_abbrev=False)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    what = f"a tracker, may be given again: {NAMES}"
    add("--to", action="append", required=True, metavar="NAME", help=what)
    what = "send what is there and end, though the run may go on, and wait for no other follower"
    add("--once", action="store_true", help=what)
    parser.set_defaults(run=run_track)


def run_track(arguments: argparse.Namespace) -> int:
    """An exit code, as EXIT_CODES says. Of 1 and 3 it is 1.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker that is none or whose package
    is missing.
    """
    import trio

    from rollouts.run_dir import RunDir, find_activity
    from rollouts.trackers.follower import SinkHung, follow_all, hiding_output
    from rollouts.trackers.launch import describe_catching_up
    from rollouts.trackers.position import Position, position_path, read_position

    root, names = arguments.run_dir, list(dict.fromkeys(arguments.to))
    check_names(names)
    check_followable(root)
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts
    outcomes: dict[str, str] = dict.fromkeys(names, "behind")

    async def follow() -> None:
        over = trio.Event()

        async def wait_over() -> None:
            while not arguments.once and find_activity(RunDir(root)).may_go_on:  # noqa: ASYNC110
                await trio.sleep(LOOK_S)  # no system tells when a lock is given back
            over.set()

        options = {"once": arguments.once, "patience_s": PATIENCE_S}
        async with hiding_output(), trio.open_nursery() as nursery:
            nursery.start_soon(wait_over)
            outcomes.update(
                await follow_all(root, names, over=over, say_for=lambda name: partial(say, name), **options)
            )
            nursery.cancel_scope.cancel()

    interrupted = False
    try:
        trio.run(follow)
    except* KeyboardInterrupt:
        say("stopped", describe_catching_up(root, names))
        interrupted = True
    except* SinkHung:
        pass  # said, and the tracker is behind
    if interrupted:
        return 130
    more = {"sent": "", "behind": ", not all", "held": "; another process follows the run for it already"}
    for name in names:
        position = read_position(position_path(root, name)) or Position("")
        left_out = position.describe_left_out()
        sent = position.number - position.left_out.rows
        print(f"{name}: {sent} rows sent{f' ({left_out})' if left_out else ''}{more[outcomes[name]]}")
    behind = [name for name in names if outcomes[name] == "behind"]
    if behind:
        print(describe_catching_up(root, behind), file=sys.stderr, flush=True)
        return 1
    return 3 if "held" in outcomes.values() else 0


def check_names(names: list[str]) -> None:
    """Raises ConfigError for a tracker that is none, with the nearest one, or whose package is missing."""
    from rollouts.config.spelling import nearest
    from rollouts.trackers.sinks import SINKS, check_sink

    for name in names:
        if name not in SINKS:
            near = nearest(name, list(SINKS))
            meant = f"did you mean {near}? " if near else ""
            raise ConfigError(f"--to {name}: not a tracker; {meant}known are {', '.join(SINKS)}")
        try:
            check_sink(name)
        except TrackerError as error:
            raise ConfigError(f"--to {name}: {error}") from error


def check_followable(root: Path) -> None:
    """Raises RunDirError if this is no run directory."""
    if not any((root / name).exists() for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl")):
        raise RunDirError(f"{root} has neither config.toml nor metrics.jsonl; name a run directory")


def say(name: str, text: str) -> None:
    """Tells the person at the terminal."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)

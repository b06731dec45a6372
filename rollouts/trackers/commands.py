"""`rollouts track`: follows a run for trackers from a terminal."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rollouts.errors import ConfigError, TrackerError

# As in rollouts.trackers.sinks; here so that --help loads little.
NAMES = ("tensorboard", "trackio", "wandb", "mlflow", "otlp", "statsd", "prometheus")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `track`."""
    what = "send a run's metrics to trackers, also while it runs, from where the last time ended"
    parser = commands.add_parser("track", help=what, description=what, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    parser.add_argument("--to", action="append", required=True, metavar="NAME", help=f"a tracker, may be given again: {', '.join(NAMES)}")
    parser.add_argument("--once", action="store_true", help="send what is there and end, though the run may go on")
    parser.set_defaults(run=run_track)


def run_track(arguments: argparse.Namespace) -> int:
    """0 when the run is over, or with --once at once, and everything was sent; 1 if a tracker did not take everything; 130 for Ctrl-C.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker that is none or whose package is missing.
    """
    import trio

    from rollouts.run_dir import RunDir
    from rollouts.trackers.launch import describe_catching_up
    from rollouts.trackers.position import check_followable, position_path, read_position
    from rollouts.trackers.supervisor import Limits, supervise, wait_unlocked

    root, names = arguments.run_dir, list(dict.fromkeys(arguments.to))
    check_names(names)
    check_followable(RunDir(root))
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts
    wait_over = trio.lowlevel.checkpoint if arguments.once else partial(wait_unlocked, RunDir(root))
    try:
        behind = trio.run(partial(supervise, root, names, wait_over=wait_over, limits=Limits(), say_for=lambda name: say))
    except KeyboardInterrupt:
        say(f"stopped; {describe_catching_up(root, names)}")
        return 130
    for name in names:
        position = read_position(position_path(root, name))
        print(f"{name}: {position.number if position else 0} rows sent{', not all' if name in behind else ''}")
    if behind:
        say(describe_catching_up(root, behind))
    return 1 if behind else 0


def check_names(names: list[str]) -> None:
    """Raises ConfigError for a tracker that is none, with the nearest one, or whose package is missing."""
    from rollouts.config.spelling import nearest
    from rollouts.trackers.sinks import SINKS, check_sink

    for name in names:
        if name not in SINKS:
            near = nearest(name, list(SINKS))
            raise ConfigError(f"--to {name}: not a tracker; {f'did you mean {near}? ' if near else ''}known are {', '.join(SINKS)}")
        try:
            check_sink(name)
        except TrackerError as error:
            raise ConfigError(f"--to {name}: {error}") from error


def say(text: str) -> None:
    """Tells the person at the terminal."""
    print(text, file=sys.stderr, flush=True)

"""`rollouts track`: follows a run for trackers from a terminal."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rollouts.errors import ConfigError, TrackerError

# As in rollouts.trackers.sinks; here so that --help loads little.
NAMES = ("tensorboard", "trackio", "wandb", "mlflow", "otlp", "statsd", "prometheus")
EXIT_CODES = (
    "exit codes: 0 nothing is left to be sent; 1 a tracker did not take everything; 2 wrong usage; 3 with"
    " --once, another process, as the run's own, follows the run for a tracker already; 130 Ctrl-C"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `track`."""
    what = "send a run's metrics to trackers, also while it runs, from where the last time ended"
    parser = commands.add_parser("track", help=what, description=what, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    parser.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="NAME",
        help=f"a tracker, may be given again: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="send what is there and end, though the run may go on, and wait for no other follower",
    )
    parser.set_defaults(run=run_track)


def run_track(arguments: argparse.Namespace) -> int:
    """An exit code, as EXIT_CODES says. Of 1 and 3 it is 1.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker that is none or whose package
    is missing.
    """
    import trio

    from rollouts.run_dir import RunDir
    from rollouts.trackers.launch import describe_catching_up
    from rollouts.trackers.position import (
        Position,
        check_followable,
        describe_left_out,
        position_path,
        read_position,
    )
    from rollouts.trackers.supervisor import Limits, supervise, wait_unlocked

    root, names = arguments.run_dir, list(dict.fromkeys(arguments.to))
    check_names(names)
    check_followable(RunDir(root))
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts
    wait_over = trio.lowlevel.checkpoint if arguments.once else partial(wait_unlocked, RunDir(root))
    outcomes = None
    try:
        follow = partial(
            supervise,
            root,
            names,
            wait_over=wait_over,
            limits=Limits(),
            say_for=lambda name: say,
            once=arguments.once,
        )
        outcomes = trio.run(follow)
    except* KeyboardInterrupt:  # trio hands it out of a nursery in a group
        say(f"stopped; {describe_catching_up(root, names)}")
    if outcomes is None:
        return 130
    more = {"sent": "", "behind": ", not all", "held": "; another process follows the run for it already"}
    for name in names:
        position = read_position(position_path(root, name)) or Position("")
        left_out = describe_left_out(position)
        print(
            f"{name}: {position.number - position.left_out.rows} rows"
            f" sent{f' ({left_out})' if left_out else ''}{more[outcomes[name]]}"
        )
    behind = [name for name in names if outcomes[name] == "behind"]
    if behind:
        say(describe_catching_up(root, behind))
        return 1
    return 3 if "held" in outcomes.values() else 0


def check_names(names: list[str]) -> None:
    """Raises ConfigError for a tracker that is none, with the nearest one, or whose package is missing."""
    from rollouts.config.spelling import nearest
    from rollouts.trackers.sinks import SINKS, check_sink

    for name in names:
        if name not in SINKS:
            near = nearest(name, list(SINKS))
            raise ConfigError(
                f"--to {name}: not a tracker; {f'did you mean {near}? ' if near else ''}known are"
                f" {', '.join(SINKS)}"
            )
        try:
            check_sink(name)
        except TrackerError as error:
            raise ConfigError(f"--to {name}: {error}") from error


def say(text: str) -> None:
    """Tells the person at the terminal."""
    print(text, file=sys.stderr, flush=True)

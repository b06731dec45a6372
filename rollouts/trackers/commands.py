"""`rollouts track`: follows a run for trackers from a terminal."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rollouts.errors import RunDirError

NAMES = ("tensorboard", "trackio", "wandb", "mlflow", "otlp", "statsd", "prometheus")  # --help is quick
LOOK_S = 0.5  # between two looks whether the run is over
EXIT_CODES = (
    "exit codes: 0 nothing is left to be sent; 1 a tracker did not take everything; 2 wrong usage; 3 with"
    " --once, another process, as the run's own, follows the run for a tracker already; 130 Ctrl-C"
)
OUTCOMES = {"sent": "", "behind": ", not all", "held": "; another process follows the run for it already"}


def add_parser(commands: Any) -> None:
    """Adds the subcommand `track`."""
    what = "send a run's metrics to trackers, also while it runs, from where the last time ended"
    parser = commands.add_parser("track", help=what, description=what, epilog=EXIT_CODES, allow_abbrev=False)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    what = f"a tracker, may be given again: {', '.join(NAMES)}"
    add("--to", action="append", required=True, choices=NAMES, metavar="NAME", help=what)
    what = "send what is there and end, though the run may go on, and wait for no other follower"
    add("--once", action="store_true", help=what)
    parser.set_defaults(run=run_track)


def run_track(arguments: argparse.Namespace) -> int:
    """An exit code, as EXIT_CODES says. Of 1 and 3 it is 1.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker whose package is missing.
    """
    import trio

    from rollouts.run_dir import RunDir, find_activity
    from rollouts.trackers.follower import follow_all
    from rollouts.trackers.launch import describe_catching_up
    from rollouts.trackers.position import position_path, read_position
    from rollouts.trackers.sinks import check_trackers

    root, names, once = arguments.run_dir, list(dict.fromkeys(arguments.to)), arguments.once
    check_trackers(names, setting="--to")
    check_followable(root)
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts

    async def wait_over() -> None:
        while not once and find_activity(RunDir(root)).may_go_on:  # noqa: ASYNC110
            await trio.sleep(LOOK_S)  # no system tells when a lock is given back

    def say(name: str, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        outcomes = trio.run(partial(follow_all, root, names, wait_over=wait_over, say=say, once=once))
    except KeyboardInterrupt:
        print(f"stopped: {describe_catching_up(root, names)}", file=sys.stderr)
        return 130
    for name in names:
        position = read_position(position_path(root, name))
        left_out = position.describe_left_out()
        sent = f"{position.number - position.left_out.rows} rows sent{f' ({left_out})' if left_out else ''}"
        print(f"{name}: {sent}{OUTCOMES[outcomes[name]]}")
    if behind := [name for name in names if outcomes[name] == "behind"]:
        print(describe_catching_up(root, behind), file=sys.stderr, flush=True)
        return 1
    return 3 if "held" in outcomes.values() else 0


def check_followable(root: Path) -> None:
    """Raises RunDirError if this is no run directory."""
    if not any((root / name).exists() for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl")):
        raise RunDirError(f"{root} has neither config.toml nor metrics.jsonl; name a run directory")

"""`rollouts track`: follows a run for trackers from a terminal."""

import argparse
import sys
from functools import partial

import trio

from rollouts.run_dir import find_activity, open_run_dir
from rollouts.trackers.follower import follow_all
from rollouts.trackers.launch import describe_catching_up
from rollouts.trackers.position import position_path, read_position
from rollouts.trackers.sinks import check_trackers

LOOK_S = 0.5  # between two looks whether the run is over
OUTCOMES = {"sent": "", "behind": ", not all", "held": "; another process follows the run for it already"}


def run_track(arguments: argparse.Namespace) -> int:
    """An exit code, as commands.toml says. Of 1 and 3 it is 1.

    Raises RunDirError for a directory that is no run, ConfigError for a tracker whose package is missing.
    """
    root, names, once = arguments.run_dir, list(dict.fromkeys(arguments.to)), arguments.once
    check_trackers(names, setting="--to")
    run_dir = open_run_dir(root)
    for name in names:
        read_position(position_path(root, name))  # one that cannot be read is said before anything starts

    async def wait_over() -> None:
        while not once and find_activity(run_dir).may_go_on:  # noqa: ASYNC110
            await trio.sleep(LOOK_S)  # no system tells when a lock is given back

    def say(name: str, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        outcomes = trio.run(partial(follow_all, root, names, wait_over=wait_over, say=say, once=once))
    except KeyboardInterrupt:
        print(f"stopped: {describe_catching_up(root, names)}", file=sys.stderr)
        return 130
    for name, outcome in outcomes.items():
        position = read_position(position_path(root, name))
        left_out = position.describe_left_out()
        sent = f"{position.number - position.left_out.rows} rows sent{f' ({left_out})' if left_out else ''}"
        print(f"{name}: {sent}{OUTCOMES[outcome]}")
    if behind := [name for name, outcome in outcomes.items() if outcome == "behind"]:
        print(describe_catching_up(root, behind), file=sys.stderr, flush=True)
        return 1
    return 3 if "held" in outcomes.values() else 0

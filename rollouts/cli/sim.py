"""The command `sim`: simulated runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rollouts.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Adds `sim`."""
    what = "RL over servers that fail, simulated: runs made of a number, checked after every event"
    sim = commands.add_parser("sim", help=what, description=what, allow_abbrev=False)
    which = sim.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, metavar="N", help="the run to make (default 0)")
    which.add_argument(
        "--seeds", metavar="A..B", help="the runs from A to B, both included, until one breaks an invariant"
    )
    sim.set_defaults(run=run_sim)


def run_sim(arguments: argparse.Namespace) -> int:
    """Prints a line for each simulated run: 0 if all were sound, 1 with the first broken invariant. Raises
    ConfigError for seeds that are none.
    """
    import logging

    from rollouts.testing.fleet_schedule import draw_fleet_schedule
    from rollouts.testing.fleet_simulator import BrokenInvariant, describe_report, run_fleet_simulation

    seeds = parse_seeds(arguments.seeds) if arguments.seeds else [arguments.seed]
    logger = logging.getLogger("rollouts")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # failures are the subject
    try:
        for seed in seeds:
            try:
                report = run_fleet_simulation(draw_fleet_schedule(seed))
            except BrokenInvariant as broken:
                print(f"seed {seed}: broken: {broken}\nsee it again: {broken.__notes__[0]}", file=sys.stderr)
                return 1
            print(f"seed {seed}: {describe_report(report)}", flush=True)
    finally:
        logger.setLevel(level)  # a caller in this process keeps its warnings
    return 0


def parse_seeds(text: str) -> range:
    """The numbers of "A..B", both included. Raises ConfigError."""
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(
            f"--seeds {text}: give two whole numbers, the first not above the second, for example 0..99"
        )
    return range(int(first), int(last) + 1)

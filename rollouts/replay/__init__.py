"""`rollouts replay RUN --step N`: the loss of a step computed again from the record alone, and compared with
what was logged.

metrics.jsonl ── loss/total, kl/coef ─────────────┐
contributions.jsonl ─ which rows, loss, share ─┼─► the same loss function, in float64
    ─► loss and shares ─► compared
tokens/*.bin ── per-token arrays ─────────────────┤
config.toml ── loss, parameters, unit ────────────┘
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rollouts.errors import RecordError

if TYPE_CHECKING:
    from rollouts.replay.compare import LossPair, StepReplay


def run_replay(arguments: argparse.Namespace) -> int:
    """Prints a table: 0 where loss and shares are the same, 1 where they are not, 2 where the record lacks
    what it takes.

    Raises ConfigError and PlugInError for a config.toml that cannot be read here, RunDirError for what is no
    run directory or is damaged.
    """
    from rollouts.replay.compare import replay_step

    try:
        replay = replay_step(
            arguments.run_dir, stage=arguments.stage, step=arguments.step, update=arguments.update
        )
    except RecordError as error:
        print(f"RecordError: {error}", file=sys.stderr)
        return 2
    print_replay(replay)
    return 0 if replay.is_same else 1


def print_replay(replay: StepReplay) -> None:
    """A line for each update, one for the step, and what did not fit."""
    from rollouts.replay.compare import TOLERANCE

    print(f"{replay.stage} step {replay.step}: {replay.algorithm}\n")
    print(
        f"{'update':<10s} {'rows':>6s} {'tokens':>9s}  {'loss logged':>16s}  {'replayed':>16s} "
        f" {'differs':>8s}  {'shares':>8s}"
    )
    for one in replay.updates:
        place = f"{one.update:<10d} {one.rows:>6d} {one.tokens:>9d}"
        shares = "-" if one.share_difference is None else f"{one.share_difference:.1e}"
        print(
            f"{place}  {describe_pair(one.loss)}  {shares:>8s}  {judge(one.is_same)}"
            if one.loss
            else f"{place}  skipped: it changed nothing"
        )
    if replay.total is not None:
        print(f"{'loss/total':<27s}  {describe_pair(replay.total)}  {'':>8s}  {judge(replay.total.is_same)}")
    for problem in replay.problems:
        print(problem)
    print(
        f"\nThe same is {TOLERANCE:g} or less: of a loss relative to max(1e-3, |loss|), beside float32's"
        " rounding of its terms; of a row's share."
    )


def describe_pair(pair: LossPair) -> str:
    """Its three numbers, in columns."""
    return f"{pair.logged:>+16.9e}  {pair.replayed:>+16.9e}  {pair.difference:>8.1e}"


def judge(is_same: bool) -> str:
    """In a word."""
    return "same" if is_same else "NOT THE SAME"

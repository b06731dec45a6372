"""`rollouts replay RUN --step N`: the loss of a step computed again from the record alone, and compared with
what was logged.

metrics.jsonl ── loss/total, kl/coef ─────────────┐
contributions.jsonl ─ which rows, loss, share ─┼─► the same loss function, in float64
    ─► loss and shares ─► compared
tokens/*.bin ── per-token arrays ─────────────────┤
config.toml ── loss, parameters, unit ────────────┘
"""

import argparse
import sys

from rollouts.errors import RecordError


def run_replay(arguments: argparse.Namespace) -> int:
    """Prints a table: 0 where loss and shares are the same, 1 where they are not, 2 where the record lacks
    what it takes.

    Raises ConfigError and PlugInError for a config.toml that cannot be read here, RunDirError for what is no
    run directory or is damaged.
    """
    from rollouts.replay.compare import TOLERANCE, replay_step

    try:
        replay = replay_step(
            arguments.run_dir, stage=arguments.stage, step=arguments.step, update=arguments.update
        )
    except RecordError as error:
        print(f"RecordError: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.stage} step {arguments.step}: {replay.algorithm}\n")
    print(
        f"{'update':<10s} {'rows':>6s} {'tokens':>9s}  {'loss logged':>16s}  {'replayed':>16s} "
        f" {'differs':>8s}  {'shares':>8s}"
    )
    for one in replay.losses:
        found = "skipped: it changed nothing"
        if one.logged is not None:
            shares = "-" if one.share_difference is None else f"{one.share_difference:.1e}"
            found = f"{one.logged:>+16.9e}  {one.replayed:>+16.9e}  {one.difference:>8.1e}  {shares:>8s} "
            found += " same" if one.is_same else " NOT THE SAME"
        print(f"{one.name:<10s} {one.rows:>6d} {one.tokens:>9d}  {found}")
    for problem in replay.problems:
        print(problem)
    print(
        f"\nThe same is {TOLERANCE:g} or less: of a loss relative to max(1e-3, |loss|), beside float32's"
        " rounding of its terms; of a row's share."
    )
    return 0 if replay.is_same else 1

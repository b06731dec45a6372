"""Trains a language model in stages: supervised fine-tuning, preferences (the DPO family, KTO), a reward
model, reinforcement learning.

    python integration_training/train.py --config FILE [--mode sft+rl] [--section.key value …] [--resume]
    python integration_training/train.py … --distributed.ranks N        N processes that train one model
    torchrun --nproc-per-node=N integration_training/train.py …         the same, under a launcher

--mode joins stages by +: sft, preference (or dpo), reward_model, rl (or ppo, which is RL with a critic);
without it, all that the config has tables for. This is the one place where all parts meet: here the command
line; run.py has the start and the ranks, opening.py what a stage has open, stages.py and rl.py the stages,
reports.py evaluations, the hooks around steps and the summary. Nothing that loads torch is imported before
the config is known to be good. Exit codes: 0 done, or stopped on request after a checkpoint; 1 the run
failed; 2 a setting, file or plug-in is wrong; 75 another rank was lost; 130 interrupted before training
began.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from rollouts.config.load import STAGES, choose_stages, load_config
from rollouts.errors import RolloutsError
from rollouts.ranks.launch import check_ranks, choose_relaunch, read_launch

# Python's own look at every rollout in flight several times: a quarter of the driver's CPU time at 4096
COLLECTOR_THRESHOLDS = (10_000, 20, 20)


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """config, mode, dry_run, resume and overrides. Exits with 2 and a usage line when the command line is
    wrong.
    """
    parser = argparse.ArgumentParser(
        description="Train a language model in stages.",
        epilog="any setting: --section.key value",
        allow_abbrev=False,
    )
    described = "a TOML file; `python -m rollouts explain` lists the settings"
    parser.add_argument("--config", required=True, type=Path, help=described)
    described = f"stages joined by +: {', '.join(STAGES)} (default: all that the config has tables for)"
    parser.add_argument("--mode", metavar="STAGES", help=described)
    for flag, described in (
        ("--dry-run", "check config, files, rows and functions; train nothing"),
        ("--resume", "go on from the newest complete checkpoint, or start if there is none"),
    ):
        parser.add_argument(flag, action="store_true", help=described)
    command, command.overrides = parser.parse_known_args(argv)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A known error is one message, without a traceback."""
    argv, errors = list(sys.argv[1:] if argv is None else argv), []
    try:
        command = parse_command_line(argv)
        config = load_config(command.config, command.overrides)
        command.stages = choose_stages(config, command.mode)
        relaunch = None if command.dry_run else choose_relaunch(config, os.environ, [__file__, *argv])
        if relaunch is not None:
            # what torchrun would set, with a warning; torch's own threads are model.threads
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.execv(relaunch[0], relaunch)
        launch = read_launch(os.environ)
        check_ranks(config, launch, dry_run=command.dry_run)
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        from integration_training.run import run_rank, run_training

        return trio.run(run_training if launch.rank == 0 else run_rank, command, config, launch)
    except* RolloutsError as group:
        errors = leaf_errors(group)
        # here, because an error of another kind beside it rises from this statement, with its traceback
        for error in errors:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("interrupted before training began", file=sys.stderr)
    return errors[0].exit_code if errors else 130


def leaf_errors(group: BaseExceptionGroup[RolloutsError]) -> list[RolloutsError]:
    """The errors inside nested groups, in order, each message once."""
    leaves: list[RolloutsError] = []
    for error in group.exceptions:
        leaves += leaf_errors(error) if isinstance(error, BaseExceptionGroup) else [error]
    return list({str(error): error for error in leaves}.values())


if __name__ == "__main__":
    sys.exit(main())

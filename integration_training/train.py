"""Trains a language model in stages: supervised fine-tuning, preferences (the DPO family, KTO), a reward
model, reinforcement learning.

    python integration_training/train.py --config FILE [--mode sft+rl] [--section.key value …] [--resume]
    python integration_training/train.py … --distributed.ranks N        N processes that train one model
    torchrun --nproc-per-node=N integration_training/train.py …         the same, under a launcher

--mode joins stages by +: sft, preference (or dpo), reward_model, rl (or ppo, which is RL with a critic, or
online, on a stream without end); without it, all that the config has tables for. This is the one place where
all parts meet: here the command line; run.py has the start, the ranks and the summary, opening.py what a
stage has open, stages.py the stages and the hooks around steps, evaluations.py what is evaluated, online.py
what online learning has around them. Nothing that loads torch is imported before the config is known to be
good. Exit codes: 0 done, or stopped on request after a checkpoint; 1 the run failed; 2 a setting, file or
plug-in is wrong; 75 another rank was lost; 130 interrupted before training began.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from rollouts.config.load import STAGES, choose_stages, load_config
from rollouts.errors import ConfigError, RolloutsError
from rollouts.ranks.launch import launch_ranks

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
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        help="a TOML file; `python -m rollouts explain` lists the settings",
    )
    parser.add_argument(
        "--mode",
        metavar="STAGES",
        help=f"stages joined by +: {', '.join(STAGES)} (default: all that the config has tables for)",
    )
    described = "check config, files, rows and functions; train nothing"
    parser.add_argument("--dry-run", action="store_true", help=described)
    described = "go on from the newest complete checkpoint, or start if there is none"
    parser.add_argument("--resume", action="store_true", help=described)
    command, command.overrides = parser.parse_known_args(argv)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A known error is one message, without a traceback."""
    argv, errors = list(sys.argv[1:] if argv is None else argv), []
    try:
        command = parse_command_line(argv)
        config = load_config(command.config, command.overrides)
        command.stages = choose_stages(config, command.mode)
        launch = launch_ranks(config, [__file__, *argv], dry_run=command.dry_run)
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
    leaves = {}
    for error in group.exceptions:
        for leaf in leaf_errors(error) if isinstance(error, BaseExceptionGroup) else [error]:
            leaves.setdefault(str(leaf), leaf)
    return list(leaves.values())


def run_evaluate(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """The exit code of `rollouts evaluate`: a model, or a checkpoint of a run, evaluated as a run evaluates
    its weights. It is the mode evaluate, for which the model, the config and the directory are found here.

    Raises ConfigError for a model without a config, RunDirError for a run without a checkpoint,
    CheckpointError for one that is not whole.
    """
    from rollouts.checkpoints.load import check_checkpoint, find_run_model
    from rollouts.models.directories import is_adapter
    from rollouts.run_dir import parse_step

    model, config, data = find_run_model(arguments.model), arguments.config, arguments.data
    path, words = Path(model).absolute(), list(overrides)
    name = path.name.replace(":", "-")
    recorded = path / "../../../config.toml"  # of a checkpoint's run
    if parse_step(name) is not None and recorded.is_file():
        check_checkpoint(path, hashes=True)
        name, config = f"{path.parts[-4]}-{path.parent.name}-{name}", config or recorded
    if not config:
        raise ConfigError(
            f"{model} is no run, whose config would say what is asked and how it is scored; name a TOML file"
            " with an [eval] table: --config FILE"
        )
    if data:
        kind = "parquet" if data.suffix == ".parquet" else "jsonl"
        words += ["--eval.data.kind", kind, "--eval.data.path", str(data), "--eval.data.size", "none"]
    if arguments.against:
        words += ["--eval.against", find_run_model(arguments.against)]
    words = ["--config", str(config), "--mode", "evaluate", "--output.dir", f"runs/evaluate-{name}", *words]
    # of an adapter the model is the config's
    return main([*words, "--model.lora.init_from" if is_adapter(path) else "--model.name", model])


if __name__ == "__main__":
    sys.exit(main())

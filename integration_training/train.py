"""Trains a language model in stages: supervised fine-tuning, preferences (the DPO family, KTO), a reward
model, reinforcement learning.

    python integration_training/train.py --config FILE --mode sft+rl [--section.key value …] [--resume]
    python integration_training/train.py … --distributed.ranks N        N processes that train one model
    torchrun --nproc-per-node=N integration_training/train.py …         the same, under a launcher

--mode joins stages by +: sft, preference (or dpo), reward_model, rl (or ppo, which is RL with a critic). This
is the one place where all parts meet: here the command line and the start; what a stage has open is in
opening.py, the stages are in stages.py and rl.py, evaluations and the summary in reports.py. Nothing
that loads torch is imported before the config is known to be good. Exit codes: 0 done, or stopped on request
after a checkpoint; 1 the run failed; 2 a setting, file or plug-in is wrong; 75 another rank was lost; 130
interrupted before training began.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trio
from rich.console import Console

from integration_training.opening import Run, say
from integration_training.reports import print_report, write_atomically, write_summary
from integration_training.stages import run_stages
from rollouts.config.load import dump_config, load_config
from rollouts.config.modes import STAGES, check_mode, parse_mode, stage_config
from rollouts.config.schema import RunConfig
from rollouts.crash_points import arm_crash_points, reach
from rollouts.data.chat import TemplateOptions
from rollouts.engines.open import check_engine_config
from rollouts.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineSetupError,
    ModelError,
    PlugInError,
    RolloutsError,
    RunDirError,
    StorageError,
)
from rollouts.loops.stopping import Stop, end_overdue, end_unconnected, exit_now, watch_signals
from rollouts.preflight.checks import check_loss, look_at_run, read_context_length
from rollouts.preflight.findings import print_findings
from rollouts.preflight.functions import load_functions, open_functions
from rollouts.preflight.ranks import check_ranks, choose_relaunch
from rollouts.preflight.restarts import choose_resume, confirm_launch, describe_launch
from rollouts.preflight.reward_models import check_reward_models
from rollouts.preflight.rows import load_all_rows, prepare_rows
from rollouts.preflight.run_directory import check_run_dir, choose_run_dir, lock_run_dir, write_holder
from rollouts.protocols import MetricsLogger
from rollouts.ranks.launch import Launch, read_launch
from rollouts.run_dir import RunDir
from rollouts.trackers.launch import open_trackers
from rollouts.trackers.sinks import check_trackers

if TYPE_CHECKING:
    from rollouts.metrics.progress import Progress
    from rollouts.ranks.meet import OpenRanks

TOKEN_ARRAYS = 4 << 30  # bytes of per-token arrays that a run keeps of its newest steps
# Python's own look at every rollout in flight several times: a quarter of the driver's CPU time at 4096
COLLECTOR_THRESHOLDS = (10_000, 20, 20)
BAD_INPUT = (ConfigError, DataError, ModelError, PlugInError, RunDirError, CheckpointError, EngineSetupError)


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """config, mode, stages, dry_run, resume and overrides. Exits with 2 and a usage line when the command
    line is wrong. Raises ConfigError for a mode that is none.
    """
    parser = argparse.ArgumentParser(
        description="Train a language model in stages.",
        epilog="any setting: --section.key value",
        allow_abbrev=False,
    )
    described = "a TOML file; `python -m rollouts explain` lists the settings"
    parser.add_argument("--config", required=True, type=Path, help=described)
    described = f"stages joined by +, for example sft+rl: {', '.join(STAGES)}"
    parser.add_argument("--mode", required=True, help=described)
    for flag, described in (
        ("--dry-run", "check config, files, rows and functions; train nothing"),
        ("--resume", "go on from the newest complete checkpoint, or start if there is none"),
    ):
        parser.add_argument(flag, action="store_true", help=described)
    command, command.overrides = parser.parse_known_args(argv)
    command.stages = parse_mode(command.mode)
    return command


# --- the ranks ----------------------------------------------------------------------------------------------


def choose_run_device(config: RunConfig, launch: Launch) -> Literal["cpu", "cuda"]:
    """Where this process computes. Raises ConfigError where that is not to be had."""
    from rollouts.models.devices import choose_device

    return choose_device(
        config.model.device, deterministic=config.deterministic, local_ranks=launch.local_world_size
    )


def join_ranks(launch: Launch, config: RunConfig) -> AbstractAsyncContextManager[OpenRanks]:
    """This process connected with the other ranks."""
    from rollouts.ranks.meet import open_ranks

    choose_device = partial(choose_run_device, config, launch)
    return open_ranks(launch, shard_size=config.distributed.shard_size, choose_device=choose_device)


async def run_rank(command: argparse.Namespace, config: RunConfig, launch: Launch) -> int:
    """The exit code of a rank that does not drive: it works for rank 0 until that closes the run."""
    if command.dry_run:
        return 0
    from rollouts.backends.fsdp import serve_rank
    from rollouts.models.load import resolve_model

    arm_crash_points(os.environ, rank=launch.rank)
    check_losses(config, command.stages)
    async with join_ranks(launch, config) as opened:
        await serve_rank(opened, config, find_model=partial(resolve_model, seed=config.seed))
    return 0


@asynccontextmanager
async def open_other_ranks(
    launch: Launch, config: RunConfig, model_path: Path, stop: Stop
) -> AsyncIterator[OpenRanks | None]:
    """The connection with the other ranks, which wait for this one; None where it is alone."""
    if launch.world_size == 1:
        yield None
        return
    from rollouts.backends.fsdp import send_config

    async with trio.open_nursery() as nursery:
        connecting = trio.CancelScope()
        nursery.start_soon(end_unconnected, stop, connecting)
        async with join_ranks(launch, config) as opened:
            connecting.cancel()
            send_config(opened, config, model_path)
            stop.tell_others = opened.channel.end_others
            yield opened


# --- the run ------------------------------------------------------------------------------------------------


async def run_training(command: argparse.Namespace, config: RunConfig, launch: Launch) -> int:
    """The exit code of the program, on rank 0. What can be checked without a model is checked before one
    loads; then the run directory is locked. Raises RolloutsError.
    """
    arm_crash_points(os.environ, rank=launch.rank)
    reach("start.armed")
    started, console, run_dir = time.perf_counter(), Console(), choose_run_dir(config)
    restart, resume = choose_resume(run_dir, launch, asked=command.resume)
    check_run_dir(run_dir, config, resume=resume)
    check_trackers(config.output.trackers)
    if command.dry_run:
        # a process that stays alone answers for all
        ranks = max(config.distributed.ranks, launch.local_world_size)
        looked = look_at_run(config, command.stages, run_dir, base_dir=Path.cwd(), local_ranks=ranks)
        return print_findings(looked.findings, console)
    prepared = await prepare_run(command.stages, config, launch, run_dir, console)
    reach("start.checked")
    with ExitStack() as held:
        lock = lock_run_dir(run_dir)
        held.callback(os.close, lock)
        # again: a run may have begun and ended since
        check_run_dir(run_dir, config, resume=resume, locked=True)
        write_holder(lock, describe_launch(run_dir, launch, restart))

        def confirm(ranks: OpenRanks | None) -> None:
            if ranks is not None:
                write_holder(lock, confirm_launch(run_dir, launch, restart, ranks.agents))

        run = None
        async with trio.open_nursery() as nursery:
            stop = Stop(say=say)
            nursery.start_soon(lambda: watch_signals(stop, launched="TORCHELASTIC_RUN_ID" in os.environ))
            nursery.start_soon(end_overdue, stop)
            run = await train_stages(command.stages, launch, prepared, console, stop, confirm)
            nursery.cancel_scope.cancel()
        if run is None:
            with suppress(OSError, ValueError, SystemExit):  # as `say`; rich answers a broken pipe so
                console.print(f"stopped; go on with --resume --output.dir {run_dir.root}")
            # everything is closed; to take an interpreter with torch in it down takes seconds that a stop may
            # not have
            exit_now()
        reach("end.before_summary")
        summary = write_summary(run, command.stages, time.perf_counter() - started)
        reach("end.summary_written")
        print_report(run, summary, console)
    return 0


def check_losses(config: RunConfig, stages: Sequence[str]) -> None:
    """Raises ConfigError if a stage names a loss that is none, or that cannot be called with these parameters
    on what a batch will hold.
    """
    for stage, section in (("preference", config.preference), ("rl", config.rl)):
        if stage in stages and section:
            check_loss(section)


async def prepare_run(
    stages: Sequence[str], config: RunConfig, launch: Launch, run_dir: RunDir, console: Console
) -> dict[str, Any]:
    """Fields of the Run that are known before anything is open. Rows, losses, the model's directory and the
    tokenizer are checked and read.
    """
    from rollouts.models.load import load_tokenizer, resolve_model, stop_token_ids

    rows = load_all_rows(config, stages)
    functions = load_functions(config, stages, base_dir=Path.cwd())
    check_losses(config, stages)
    if "rl" in stages and config.rl:
        check_engine_config(config.engine)
    # ranks choose when they meet, and hear of a refusal
    device = choose_run_device(config, launch) if launch.world_size == 1 else ""
    for note in rows.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    resolve = partial(resolve_model, config.model.name, seed=config.seed)
    model_path = await trio.to_thread.run_sync(resolve, abandon_on_cancel=True)
    template = config.model.chat_template
    tokenizer = load_tokenizer(model_path, chat_template=Path(template) if template else None)
    check_reward_models(config, stages, run_dir, tokenizer)
    context_length = read_context_length(model_path)
    prepared = prepare_rows(config, stages, rows, tokenizer, context_length=context_length)
    return {
        "config": config,
        "run_dir": run_dir,
        "rows": rows,
        "conversations": prepared.conversations,
        "preferences": prepared.preferences,
        "functions": functions,  # in this process; where they work is opened later
        "tokenizer": tokenizer,
        "template": TemplateOptions(config.model.template_params),
        "stop_ids": stop_token_ids(tokenizer, model_path),
        "base_model": model_path,
        "device": device,
    }


async def train_stages(
    stages: Sequence[str],
    launch: Launch,
    prepared: dict[str, Any],
    console: Console,
    stop: Stop,
    confirm: Callable[[OpenRanks | None], None],
) -> Run | None:
    """The run when its stages are complete, with everything closed; None if the user stopped it."""
    from rollouts.metrics.jsonl import next_attempt
    from rollouts.metrics.progress import open_progress

    config, run_dir, model_path = prepared["config"], prepared["run_dir"], prepared["base_model"]
    totals = {stage: stage_config(config, stage).steps for stage in stages}
    attempt = next_attempt(run_dir)  # before the others are met: from then on they take silence for an end
    run, finished = None, False
    with open_progress(console, totals) as progress:
        async with (
            open_functions(config, prepared["functions"], base_dir=Path.cwd(), warn=say) as functions,
            open_other_ranks(launch, config, model_path, stop) as ranks,
            open_record(run_dir, config, attempt, progress, partial(confirm, ranks)) as logger,
        ):
            with stop.scope():  # inside: the other ranks end as after a finished run
                run_dir.summary.unlink(missing_ok=True)  # it says that a run is finished
                reach("start.opened")
                device = {} if ranks is None else {"device": str(ranks.ranks.device)}
                opened = {"functions": functions, "logger": logger, "stop": stop, "ranks": ranks}
                run = Run(**{**prepared, **opened, **device})
                finished = await run_stages(run, stages, model_path)
    return run if finished else None


@asynccontextmanager
async def open_record(
    run_dir: RunDir, config: RunConfig, attempt: int, progress: Progress | None, confirm: Callable[[], None]
) -> AsyncIterator[MetricsLogger]:
    """The resolved config, the files of metrics and what follows them. Nothing is written before `confirm`,
    which raises where the launch may not have the directory. Before this nothing is written at all, or a
    corrected command would be refused.
    """
    from rollouts.metrics.writer import open_jsonl_logger

    confirm()
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir.config, dump_config(config))
    except (OSError, StorageError) as error:
        raise RunDirError(
            f"output.dir={run_dir.root} cannot be written ({error}); name another directory with"
            " --output.dir DIR"
        ) from error
    reach("start.directory_made")
    output = config.output
    async with (
        open_trackers(run_dir, output.trackers, say=say),
        open_jsonl_logger(
            run_dir,
            attempt=attempt,
            samples_per_step=output.samples_per_step,
            token_arrays_bytes=TOKEN_ARRAYS,
            progress=progress,
        ) as logger,
    ):
        yield logger


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A known error is one message, without a traceback."""
    argv, errors = list(sys.argv[1:] if argv is None else argv), []
    try:
        command = parse_command_line(argv)
        config = load_config(command.config, command.overrides)
        check_mode(config, command.mode)
        relaunch = None if command.dry_run else choose_relaunch(config, os.environ, [__file__, *argv])
        if relaunch is not None:
            # what torchrun would set, with a warning; torch's own threads are model.threads
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.execv(relaunch[0], relaunch)
        launch = read_launch(os.environ)
        check_ranks(config, launch, dry_run=command.dry_run)
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        return trio.run(run_training if launch.rank == 0 else run_rank, command, config, launch)
    except* RolloutsError as group:
        errors = leaf_errors(group)
        # here, because an error of another kind beside it rises from this statement, with its traceback
        for error in errors:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("interrupted before training began", file=sys.stderr)
    if not errors:
        return 130
    return 2 if isinstance(errors[0], BAD_INPUT) else 1


def leaf_errors(group: BaseExceptionGroup[RolloutsError]) -> list[RolloutsError]:
    """The errors inside nested groups, in order, each message once."""
    leaves: list[RolloutsError] = []
    for error in group.exceptions:
        leaves += leaf_errors(error) if isinstance(error, BaseExceptionGroup) else [error]
    return list({str(error): error for error in leaves}.values())


if __name__ == "__main__":
    sys.exit(main())

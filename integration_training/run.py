"""A run from its start to its report: what is checked before a model loads, the lock of the run directory,
the ranks, the record, and the stages within them.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import trio
from rich.console import Console

from integration_training.evaluations import PAIRS
from integration_training.opening import HELD_OUT, Run, accuracy_key
from integration_training.stages import run_stages
from rollouts import __version__
from rollouts.backends.fsdp import send_config, serve_rank
from rollouts.config.load import EVALUATE, dump_config, stage_config
from rollouts.config.schema import RunConfig
from rollouts.crash_points import arm_crash_points, reach
from rollouts.environments.proxy import open_proxy
from rollouts.errors import RunDirError, StorageError
from rollouts.inspect.terminal import say
from rollouts.loops.stopping import Stop, end_unconnected, exit_now, open_stop
from rollouts.metrics.gpus import open_gpu_watch
from rollouts.metrics.jsonl import newest_attempts, next_attempt, read_rows
from rollouts.metrics.progress import Progress, open_progress
from rollouts.metrics.writer import JsonlLogger, open_jsonl_logger
from rollouts.models.devices import choose_device, describe_device
from rollouts.preflight.checks import PreparedRun, check_losses, look_at_run, prepare_run
from rollouts.preflight.findings import Findings, print_findings
from rollouts.preflight.functions import open_functions
from rollouts.preflight.run_directory import (
    check_run_dir,
    choose_run_dir,
    find_restart,
    lock_run_dir,
    record_launch,
    write_holder,
)
from rollouts.ranks.launch import Launch
from rollouts.ranks.meet import OpenRanks, open_ranks
from rollouts.run_dir import replace_file
from rollouts.trackers.launch import open_trackers
from rollouts.trackers.sinks import ALERTS, check_trackers
from rollouts.types import Fields

LABELS = {"base": "base model", "sft": "after SFT", "preference": "after preferences", "rl": "after RL"}
KEEP_PARTS = 4  # of each large file of a run without end
TOKEN_ARRAYS = 4 << 30  # bytes of per-token arrays that a run keeps of its newest steps


# --- the ranks ----------------------------------------------------------------------------------------------


def join_ranks(launch: Launch, config: RunConfig) -> AbstractAsyncContextManager[OpenRanks]:
    """This process connected with the other ranks."""
    choose = partial(choose_device, config, local_ranks=launch.local_world_size)
    return open_ranks(launch, shard_size=config.distributed.shard_size, choose_device=choose)


async def run_rank(command: Namespace, config: RunConfig, launch: Launch) -> int:
    """The exit code of a rank that does not drive: it works for rank 0 until that closes the run."""
    if not command.dry_run:
        arm_crash_points(os.environ, rank=launch.rank)
        check_losses(config, command.stages, Findings(raises=True))
        async with join_ranks(launch, config) as opened:
            await serve_rank(opened, config)
    return 0


@asynccontextmanager
async def open_other_ranks(
    launch: Launch, config: RunConfig, model_path: Path, stop: Stop
) -> AsyncIterator[OpenRanks | None]:
    """The connection with the other ranks, which wait for this one; None where it is alone."""
    if launch.world_size == 1:
        yield None
        return
    async with trio.open_nursery() as nursery:
        connecting = trio.CancelScope()
        nursery.start_soon(end_unconnected, stop, connecting)
        async with join_ranks(launch, config) as opened:
            connecting.cancel()
            send_config(opened, config, model_path)
            stop.tell_others = opened.channel.end_others
            yield opened


# --- the run ------------------------------------------------------------------------------------------------


async def run_training(command: Namespace, config: RunConfig, launch: Launch) -> int:
    """The exit code of the program, on rank 0. What can be checked without a model is checked before one
    loads; then the run directory is locked. Raises RolloutsError.
    """
    arm_crash_points(os.environ, rank=launch.rank)
    reach("start.armed")
    if command.mode is None:
        say(f"--mode {'+'.join(command.stages)}: the stages that the config has tables for", sys.stdout)
    started, run_dir = time.perf_counter(), choose_run_dir(config)
    restart = find_restart(run_dir, launch, asked=command.resume)
    resume = command.resume or restart != "no"
    check_run_dir(run_dir, config, resume=resume)
    check_trackers(config.output.trackers)
    findings, what = Findings(raises=not command.dry_run), (config, command.stages, run_dir)
    if command.dry_run:
        # a process that stays alone answers for all
        look_at_run(*what, findings, local_ranks=max(config.distributed.ranks, launch.local_world_size))
        return print_findings(findings, Console())
    # ranks choose when they meet, and hear of a refusal
    device = choose_device(config, local_ranks=1) if launch.world_size == 1 else ""
    prepared = prepare_run(*what, findings)
    for level, subject, message in findings:
        if level == "warning" or "left out" in message:  # what does not train is always said
            say(f"{subject}: {message}", sys.stdout)
    reach("start.checked")
    lock = lock_run_dir(run_dir)
    try:
        # again: a run may have begun and ended since
        check_run_dir(run_dir, config, resume=resume, locked=True)

        def record(agents: Collection[str] | None) -> None:
            write_holder(lock, record_launch(run_dir, launch, restart, agents))

        record(None)
        run = None
        async with open_stop(say, launched="TORCHELASTIC_RUN_ID" in os.environ) as stop:
            run = await train_stages(command.stages, launch, prepared, config, stop, device, record)
        if not run:
            say(f"stopped; go on with --resume --output.dir {run_dir.root}", sys.stdout)
            # everything is closed; to take an interpreter with torch in it down takes seconds that a stop may
            # not have
            exit_now()
        reach("end.before_summary")
        summary = write_summary(run, command.stages, time.perf_counter() - started)
        reach("end.summary_written")
        print_report(run, summary)
    finally:
        os.close(lock)
    return 0


async def train_stages(
    stages: Sequence[str],
    launch: Launch,
    prepared: PreparedRun,
    loaded: RunConfig,
    stop: Stop,
    device: str,
    confirm: Callable[[Collection[str]], None],
) -> Run | None:
    """The run when its stages are complete, with everything closed; None if the user stopped it. Nothing is
    written before `confirm`, which raises where the launch may not have the directory. `loaded`: the config
    as the other ranks have it, before epochs were counted.
    """
    config, run_dir, model_path = prepared.config, prepared.run_dir, prepared.base_model
    if (lora := config.model.lora) and lora.init_from:
        model_path = Path(lora.init_from)
    attempt = next_attempt(run_dir)  # before the others are met: from then on they take silence for an end
    with open_progress(Console(), {stage: stage_config(config, stage).steps for stage in stages}) as progress:
        async with (
            open_functions(config, prepared.functions, warn=say) as functions,
            open_other_ranks(launch, loaded, model_path, stop) as ranks,
            open_proxy() if config.rollout.agent else nullcontext() as proxy,
        ):
            if ranks:
                confirm(ranks.agents)
                device = str(ranks.ranks.device)
            async with open_record(prepared, attempt, progress) as logger:
                with stop.scope():  # inside: the other ranks end as after a finished run
                    run_dir.summary.unlink(missing_ok=True)  # it says that a run is finished
                    reach("start.opened")
                    run = Run(
                        **{**vars(prepared), "functions": functions},
                        logger=logger,
                        stop=stop,
                        device=device,
                        ranks=ranks,
                        proxy=proxy,
                    )
                    if await run_stages(run, stages, model_path):
                        return run
    return None


@asynccontextmanager
async def open_record(prepared: PreparedRun, attempt: int, progress: Progress) -> AsyncIterator[JsonlLogger]:
    """The resolved config, the files of metrics and what follows them. Before this nothing is written at all,
    or a corrected command would be refused.
    """
    run_dir, output = prepared.run_dir, prepared.config.output
    try:
        write_atomically(run_dir.config, dump_config(prepared.config))
    except StorageError as error:
        raise RunDirError(
            f"output.dir={run_dir.root} cannot be written ({error}); name another directory with"
            " --output.dir DIR"
        ) from error
    reach("start.directory_made")
    async with (
        open_trackers(run_dir, [*output.trackers, *([ALERTS] if prepared.config.alerts else [])], say=say),
        open_gpu_watch() as measure,
        open_jsonl_logger(
            run_dir,
            attempt=attempt,
            samples_per_step=output.samples_per_step,
            token_arrays_bytes=TOKEN_ARRAYS,
            keep_parts=KEEP_PARTS * (prepared.config.online is not None),
            progress=progress,
            measure=measure,
        ) as logger,
    ):
        try:
            yield logger
        finally:
            if not run_dir.config.exists():  # the directory was moved: what was saved since is a run too
                write_atomically(run_dir.config, dump_config(prepared.config))


# --- the end ------------------------------------------------------------------------------------------------


def write_summary(run: Run, stages: Sequence[str], wall_s: float) -> Fields:
    """What summary.json holds, read back from the files that the run left. `wall_s` is of the attempt that
    finished.
    """
    evaluations = newest_attempts(read_rows(run.run_dir.evaluations))
    accuracy = {
        row["stage"]: row[accuracy_key(run.config)] for row in evaluations if row.get("name") == HELD_OUT
    }
    ranked = f"eval/{PAIRS}/accuracy"
    pairs = {row["stage"]: row[ranked] for row in evaluations if ranked in row}
    steps = newest_attempts(read_rows(run.run_dir.metrics))
    rewards = [row["reward/mean"] for row in steps if row["stage"] == "rl" and "reward/mean" in row] or [None]
    # reward workers' memory is not in it: a child's peak, as the kernel tells it, begins with its parent's
    status = Path("/proc/self/status").read_text()
    summary = {
        "mode": "+".join(stages) or EVALUATE,
        "steps": sum(stage_config(run.config, stage).steps for stage in stages),
        "accuracy": {
            stage: accuracy.get(stage) for stage in LABELS if stage in accuracy or stage != "preference"
        },
        **({"pair_accuracy": pairs} if pairs else {}),
        "reward": {"first": rewards[0], "last": rewards[-1]},
        "wall_s": round(wall_s, 1),
        "peak_rss_gib": round(int(status.partition("VmHWM:")[2].split()[0]) / 2**20, 3),
        "device": describe_device(run.device),
        "seed": run.config.seed,
        "versions": {
            "rollouts-rl": __version__,
            **{name: version(name) for name in ("torch", "transformers", "trio", "numpy")},
        },
    }
    write_atomically(run.run_dir.summary, json.dumps(summary, indent=1) + "\n")
    return summary


def print_report(run: Run, summary: Fields) -> None:
    """Accuracy before and after each stage, three transcripts, and where the files are."""
    lines = [""]
    known = {LABELS[stage]: share for stage, share in summary["accuracy"].items() if share is not None}
    width = max([11, *(len(label) + 1 for label in known)])
    lines += [
        f"held-out accuracy, {label:<{width}}{100 * accuracy:5.1f} %   ({len(run.rows.held_out)} problems)"
        for label, accuracy in known.items()
    ]
    evaluated = read_rows(run.run_dir.evaluations)[-1:] if summary["mode"] == EVALUATE else []
    lines += [f"{name} {value}" for row in evaluated for name, value in row.items() if "/" in name]
    last_stage = f"eval-{summary['mode'].split('+')[-1]}"
    for stage, accuracy in summary.get("pair_accuracy", {}).items():
        count = len(run.prepared.list_held_out(stage))  # 0: of an attempt with another --mode
        pairs = f"   ({count} pairs)" if count else ""
        lines.append(f"held-out pairs ranked right, {stage} {100 * accuracy:5.1f} %{pairs}")
    rows = [row for row in read_rows(run.run_dir.samples) if evaluated or row["stage"] == last_stage]
    for row in [row for row in rows if row["step"] == rows[-1]["step"]][:3]:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        reward = row.get("reward", "none: the sample failed")
        lines.append(f"\n  prompt    {prompt}\n  response  {row['response']}\n  reward    {reward}")
    lines += [
        f"\n{summary['wall_s']:.0f} s, peak memory {summary['peak_rss_gib']:.2f} GiB",
        f"everything is in {run.run_dir.root}",
        f"look at it with: python -m rollouts inspect {run.run_dir.root}",
    ]
    say("\n".join(lines), sys.stdout)


def write_atomically(path: Path, text: str) -> None:
    """The whole text under this name, on disk when this returns. Raises StorageError."""

    def chunks() -> Iterator[bytes]:
        yield text.encode()
        reach("files.partial")

    replace_file(path, chunks(), way_out="free space and go on with --resume")

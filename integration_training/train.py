"""Trains a language model by supervised fine-tuning, by reinforcement learning, or by one after the other.

    python   integration_training/train.py --config FILE --mode sft|rl|sft+rl [--section.key value …] [--dry-run] [--resume]
    torchrun --nproc-per-node=1 integration_training/train.py …                                      the same, under a launcher

This is the one place where all parts meet. Nothing that loads torch is imported before the config is known to be good.
Exit codes: 0 done, or stopped on request after a checkpoint; 1 the run failed; 2 a setting, file or plug-in is wrong; 130 interrupted
before training began.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from rich.console import Console

from rollouts import __version__
from rollouts.config.load import dump_config, load_config
from rollouts.config.schema import RLTrainingConfig, RunConfig, SFTTrainingConfig
from rollouts.data.chat import TemplateOptions
from rollouts.data.sft import SFTMixture
from rollouts.engines.open import check_engine_config
from rollouts.errors import CheckpointError, ConfigError, DataError, EngineSetupError, ModelError, PlugInError, RolloutsError, RunDirError
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import SyncWeights
from rollouts.preflight.checks import prepare_rows, read_context_length
from rollouts.preflight.functions import Functions, load_functions, open_functions
from rollouts.preflight.rows import Rows, load_all_rows
from rollouts.preflight.run_directory import check_run_dir, choose_run_dir
from rollouts.protocols import InferenceEngine, LogProbScorer, MetricsLogger
from rollouts.run_dir import RunDir, parse_step
from rollouts.types import Sample, SamplingParams

if TYPE_CHECKING:
    import torch

    from rollouts.backends.pytorch import PyTorchTrainingBackend

STAGES = ("sft", "rl")
BAD_INPUT = (ConfigError, DataError, ModelError, PlugInError, RunDirError, CheckpointError, EngineSetupError)
HELD_OUT = "heldout"


@dataclass(frozen=True, slots=True)
class Command:
    """The command line."""

    config_path: Path
    stages: tuple[str, ...]
    dry_run: bool
    resume: bool
    overrides: tuple[str, ...]


def parse_command_line(argv: Sequence[str]) -> Command:
    """Exits with 2 and a usage line when the command line is wrong."""
    parser = argparse.ArgumentParser(description="Train by SFT, by RL, or both.", epilog="any setting: --section.key value", allow_abbrev=False)
    parser.add_argument("--config", required=True, type=Path, help="a TOML file; `python -m rollouts explain` lists the settings")
    parser.add_argument("--mode", required=True, choices=("sft", "rl", "sft+rl"))
    parser.add_argument("--dry-run", action="store_true", help="check config, files, rows and functions; train nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint, or start if there is none")
    known, overrides = parser.parse_known_args(argv)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return Command(known.config, tuple(known.mode.split("+")), known.dry_run, known.resume or restarted, tuple(overrides))


# --- before any model loads --------------------------------------------------------------------------------------------------


def stage_config(config: RunConfig, stage: str) -> SFTTrainingConfig | RLTrainingConfig:
    """The table of a stage. Raises ConfigError if the config has none."""
    section = config.sft if stage == "sft" else config.rl
    if section is None:
        raise ConfigError(f"--mode has the stage {stage!r} but the config has no [{stage}] table; add it or choose another mode")
    return section


def make_template_options(config: RunConfig) -> TemplateOptions:
    """What the chat template is told. Raises ConfigError for a parameter that is not the user's to set."""
    return TemplateOptions(params=config.model.template_params, thinking=config.sft.thinking if config.sft else "keep")


def check_loss(config: RLTrainingConfig) -> None:
    """Raises ConfigError if there is no such loss, or it takes no such parameters."""
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import check_loss_params

    check_loss_params(config.loss, make_loss_spec(config).params)


def write_config(run_dir: RunDir, config: RunConfig) -> None:
    """Makes the run directory with its resolved config. Only when nothing can be wrong any more, or a corrected command would be refused."""
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir.config, dump_config(config))
    except OSError as error:
        raise RunDirError(f"output.dir={run_dir.root} cannot be written ({error}); name another directory with --output.dir DIR") from error


def write_atomically(path: Path, text: str) -> None:
    """The whole text under this name, or what was there before."""
    partial = path.with_name(f".tmp-{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def check_launch() -> None:
    """Raises ConfigError when a launcher started more ranks than this program uses."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ConfigError(f"WORLD_SIZE={world_size}: this version trains on one rank; launch with --nproc-per-node=1")


# --- the run -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What every stage reads."""

    config: RunConfig
    run_dir: RunDir
    rows: Rows
    conversations: SFTMixture | None  # tokenized, where there is an SFT stage
    functions: Functions
    tokenizer: Any
    template: TemplateOptions
    stop_ids: tuple[int, ...]
    base_model: Path  # the directory that the first stage starts from; started servers load it before they get the trainer's weights
    logger: MetricsLogger
    stop: trio.Event  # set by the first SIGINT or SIGTERM


@dataclass(frozen=True, slots=True)
class Stage:
    """What is open while a stage runs."""

    backend: PyTorchTrainingBackend
    engine: InferenceEngine  # answers requests: the embedded engine, or a fleet
    sync_weights: SyncWeights  # brings every engine to the backend's version


async def watch_signals(stop: trio.Event) -> None:
    """Sets `stop` at the first SIGINT or SIGTERM; the second ends the process at once. Checkpoints are atomic, so nothing durable breaks."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if stop.is_set():
                os._exit(128 + number)
            stop.set()
            print("stopping after this step and its checkpoint; once more to stop now", file=sys.stderr, flush=True)


@asynccontextmanager
async def open_stage(run: Run, stage: str, model_path: Path) -> AsyncIterator[Stage]:
    """A backend with the weights at `model_path` and a fresh optimizer, and what generates with them: for RL as the config says."""
    from rollouts.backends.open import choose_autocast_dtype, open_pytorch_backend

    config = run.config
    section = stage_config(config, stage)
    autocast = "off" if config.deterministic else config.model.autocast
    async with open_pytorch_backend(
        model_path,
        optim=section.optim,
        total_steps=section.steps * (config.rl.updates_per_batch if config.rl and stage == "rl" else 1),
        tokenizer=run.tokenizer,
        autocast=autocast,
        threads=config.model.threads,
        deterministic=config.deterministic,
        micro_batch_tokens=section.micro_batch_tokens,
        share_prefix=config.rl.share_prefix if config.rl and stage == "rl" else False,
        gradient_checkpointing=config.model.gradient_checkpointing,
    ) as backend:
        served = stage == "rl" and config.engine.kind != "local"
        dtype = choose_autocast_dtype(autocast, backend.model.device.type)
        open_engine = open_servers(run, backend, dtype) if served else open_embedded(run, stage, backend, dtype)
        async with open_engine as (engine, sync_weights):
            yield Stage(backend, engine, sync_weights)


@asynccontextmanager
async def open_embedded(
    run: Run, stage: str, backend: PyTorchTrainingBackend, autocast_dtype: torch.dtype | None
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """An engine in this process, in the trainer's precision."""
    from rollouts.engines.local import open_local_engine
    from rollouts.weight_sync.open import choose_tolerance
    from rollouts.weight_sync.probe import Probe, make_probe_prompt
    from rollouts.weight_sync.sync import WeightSync

    config = run.config
    async with open_local_engine(
        backend.model,
        device_thread=backend.device_thread,
        mode=config.engine.mode if stage == "rl" else "shared",
        trainer_version=lambda: backend.weight_version,
        max_rows=config.engine.max_rows,
        deterministic=config.deterministic,
        seed=config.seed,
        autocast_dtype=autocast_dtype,
    ) as engine:
        if engine.path != "fast":
            print(engine.describe(), file=sys.stderr, flush=True)
        probe = Probe(make_probe_prompt(engine.features.vocab_size), choose_tolerance(exact=autocast_dtype is None))
        sync = WeightSync(probe, snapshot_dir=run.run_dir.weights)
        yield engine, sync


@asynccontextmanager
async def open_servers(
    run: Run, backend: PyTorchTrainingBackend, autocast_dtype: torch.dtype | None
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """A fleet of inference servers, each of them kept at the trainer's version, and brought there again when it comes back."""
    from rollouts.weight_sync.open import open_synced_fleet

    async with open_synced_fleet(
        run.config.engine,
        backend,
        run.base_model,
        vocab_size=int(backend.model.config.get_text_config().vocab_size),
        trainer_exact=autocast_dtype is None,
        log_dir=run.run_dir.root / "engines",
        snapshot_dir=run.run_dir.weights,
        seed=run.config.seed,
        warn=lambda text: print(text, file=sys.stderr, flush=True),
    ) as opened:
        yield opened


async def run_stages(run: Run, stages: Sequence[str], model_path: Path) -> bool:
    """True when every stage is complete, False when the user stopped the run. Each stage starts from the checkpoint of the one before."""
    from rollouts.checkpoints.load import find_newest_checkpoint
    from rollouts.checkpoints.retention import remove_incomplete

    before = ("base", 0)
    for stage in stages:
        total = stage_config(run.config, stage).steps
        remove_incomplete(run.run_dir.stage_checkpoints(stage))
        newest = find_newest_checkpoint(run.run_dir.stage_checkpoints(stage))
        completed = completed_steps(newest)
        if completed > total:
            raise ConfigError(f"{stage}.steps={total} but {newest} has {completed} steps; set {stage}.steps={completed} or more")
        last = stage == stages[-1]
        if completed < total or (last and not evaluated(run, stage, total)):
            async with open_stage(run, stage, newest or model_path) as opened:
                if newest is not None:
                    await restore(opened.backend, newest)
                if stage == "rl":
                    await opened.sync_weights(opened.backend, [opened.engine], completed)
                if newest is None:
                    await evaluate_once(run, opened.engine, *before)
                completed = await finish_stage(run, stage, opened, newest, model_path, last=last)
        if completed < total or (run.stop.is_set() and not (last and evaluated(run, stage, total))):
            return False
        model_path = run.run_dir.checkpoint(stage, total)
        before = (stage, total)
    return True


def completed_steps(checkpoint: Path | None) -> int:
    """The steps that a checkpoint holds; 0 for none."""
    return (parse_step(checkpoint.name) or 0) if checkpoint else 0


async def finish_stage(run: Run, stage: str, opened: Stage, newest: Path | None, start: Path, *, last: bool) -> int:
    """How many steps of the stage are complete. The `last` stage is evaluated when it is; every other one, where the next begins."""
    total, completed = stage_config(run.config, stage).steps, completed_steps(newest)
    if run.stop.is_set():
        return completed
    if completed == total:
        await evaluate_once(run, opened.engine, stage, total)
        return completed
    train = train_sft if stage == "sft" else train_rl
    completed = await train(run, opened, newest, start)
    if completed == total and last and not run.stop.is_set():
        await evaluate_now(run, opened.engine, stage, total)
    return completed


async def train_sft(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at `start`."""
    from rollouts.loops.sft import run_sft_training

    config, data = run.config.sft, run.conversations
    assert config is not None and data is not None
    row_count = run.rows.training["sft"].row_count
    for what, count in (("cut at", data.truncated), ("left out: nothing to train on within", sum(data.dropped.values()))):
        if count:
            print(f"sft.data: {count} of {row_count} rows {what} max_length={config.max_length}", file=sys.stderr)
    backend, engine, completed = opened.backend, opened.engine, completed_steps(newest)

    async def save(step: int) -> None:
        await save_step(run, backend, "sft", step, {})

    async def evaluate_step(step: int) -> None:
        await evaluate_now(run, engine, "sft", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, engine, "sft", completed)

    history = await run_sft_training(
        backend,
        data,
        config,
        run.logger,
        seed=run.config.seed,
        completed_steps=completed,
        hooks=LoopHooks(evaluate_step, save, run.stop.is_set, run.config.output.checkpoint_every),
    )
    return completed + len(history)


async def train_rl(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at `start`, which stays the reference."""
    from rollouts.checkpoints.load import load_trainer_state
    from rollouts.data.curriculum import call_curriculum, decode_statistics, encode_statistics, start_statistics, update_statistics
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.generation.async_rollout_manager import AsyncRolloutManager
    from rollouts.generation.generate import make_chat_generate
    from rollouts.loops.rl import run_rl_training

    config, backend, engine = run.config.rl, opened.backend, opened.engine
    assert config is not None
    buffer = DataBuffer(run.rows.training["rl"], seed=run.config.seed)
    manager = AsyncRolloutManager(
        buffer,
        engine,
        generate=run.functions.generate or make_chat_generate(run.tokenizer, options=run.template),
        config=config.rollout,
        reward=run.functions.reward,
        group_reward=run.functions.group_reward,
        filters=run.functions.filters,
        sampling=SamplingParams(max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature, stop_token_ids=run.stop_ids),
        seed=run.config.seed,
        policy_version=lambda: backend.weight_version,
        max_staleness=config.max_staleness,
    )
    completed = completed_steps(newest)
    statistics = start_statistics(buffer.weights)
    if newest is not None:
        state = load_trainer_state(newest)
        buffer.load_state_dict(state["data_buffer"])
        manager.load_state_dict(state["rollout_manager"])
        statistics = decode_statistics(state["curriculum"]) if "curriculum" in state else statistics  # checkpoints before there were curricula

    def set_weights(step: int) -> None:
        if run.functions.curriculum is not None:
            buffer.set_weights(call_curriculum(run.functions.curriculum, step, statistics, function=config.curriculum))

    def learn(step: int, samples: Sequence[Sample]) -> None:
        nonlocal statistics
        statistics = update_statistics(statistics, samples, step=step, drawn=buffer.drawn_by_source())

    async def save(step: int) -> None:
        state = {"data_buffer": buffer.state_dict(), "rollout_manager": manager.state_dict(), "curriculum": encode_statistics(statistics)}
        await save_step(run, backend, "rl", step, state)

    async def evaluate_step(step: int) -> None:
        await evaluate_now(run, engine, "rl", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, engine, "rl", completed)

    async with open_reference(run, backend, start) as reference:
        history = await run_rl_training(
            backend,
            buffer,
            manager,
            [engine],
            config,
            run.logger,
            sync_weights=opened.sync_weights,
            reference=reference,
            completed_steps=completed,
            hooks=LoopHooks(evaluate_step, save, run.stop.is_set, run.config.output.checkpoint_every, set_weights, learn),
        )
    return completed + len(history)


@asynccontextmanager
async def open_reference(run: Run, backend: PyTorchTrainingBackend, start: Path) -> AsyncIterator[LogProbScorer | None]:
    """The frozen model that RL started from, on the backend's thread; None when no KL term needs it."""
    from rollouts.reference.score import open_frozen_reference

    config = run.config.rl
    if config is None or config.kl_coef == 0:
        yield None
        return
    async with open_frozen_reference(start, device_thread=backend.device_thread, micro_batch_tokens=config.micro_batch_tokens) as reference:
        yield reference


async def restore(backend: PyTorchTrainingBackend, checkpoint: Path) -> None:
    """Puts the weights and the optimizer of `checkpoint` into `backend`. Raises CheckpointError if it is damaged."""
    from rollouts.checkpoints.load import check_checkpoint

    await trio.to_thread.run_sync(lambda: check_checkpoint(checkpoint, hashes=True))
    await backend.load(checkpoint).result()


async def save_step(run: Run, backend: PyTorchTrainingBackend, stage: str, step: int, state: dict[str, Any]) -> None:
    """Saves step `step` of `stage`; afterwards it is complete on disk or absent."""
    from rollouts.checkpoints.retention import apply_retention
    from rollouts.checkpoints.save import save_checkpoint

    async def write_model(path: Path) -> None:
        await backend.save(path).result()

    path = run.run_dir.checkpoint(stage, step)
    await save_checkpoint(path, write_model=write_model, state=state, stage=stage, step=step)
    if run.config.output.keep_checkpoints:
        await trio.to_thread.run_sync(apply_retention, path.parent, run.config.output.keep_checkpoints)


# --- evaluation and the end --------------------------------------------------------------------------------------------------


def evaluated(run: Run, stage: str, step: int) -> bool:
    """Whether evaluations.jsonl has the row already, from an earlier attempt; True when there is nothing to evaluate on."""
    from rollouts.metrics.jsonl import read_rows

    rows = read_rows(run.run_dir.evaluations) if run.run_dir.evaluations.exists() else []
    return not run.rows.held_out or any(row["stage"] == stage and row["step"] == step for row in rows)


async def evaluate_once(run: Run, engine: InferenceEngine, stage: str, step: int) -> None:
    """Evaluates the engine's weights unless this (stage, step) has a row from the same weights."""
    if not evaluated(run, stage, step):
        await evaluate_now(run, engine, stage, step)


async def evaluate_now(run: Run, engine: InferenceEngine, stage: str, step: int) -> None:
    """Evaluates the engine's weights on the held-out prompts and logs it. A row of an earlier attempt may be of weights that were lost."""
    from rollouts.evaluation.evaluate import evaluate
    from rollouts.generation.generate import make_chat_generate

    config = run.config.eval
    if config is None or run.functions.eval_reward is None:
        return
    result = await evaluate(
        run.rows.held_out,
        engine,
        generate=run.functions.generate or make_chat_generate(run.tokenizer, options=run.template),
        reward=run.functions.eval_reward,
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature, stop_token_ids=run.stop_ids),
        samples_per_prompt=config.samples_per_prompt,
        seed=run.config.seed,
        reward_timeout_s=run.config.rl.rollout.reward_timeout_s if run.config.rl else 30.0,
    )
    version = await engine.weight_version()
    await run.logger.log_samples(f"eval-{stage}", step, version, result.samples)
    await run.logger.log_evaluation(stage, step, version, HELD_OUT, result.metrics(HELD_OUT))


def write_summary(run: Run, stages: Sequence[str], wall_s: float) -> dict[str, Any]:
    """What summary.json holds, read back from the files that the run left. `wall_s` is of the attempt that finished."""
    from rollouts.metrics.jsonl import newest_attempts, read_rows

    evaluations = newest_attempts(read_rows(run.run_dir.evaluations)) if run.run_dir.evaluations.exists() else []
    accuracy: dict[str, float | None] = {"base": None, "sft": None, "rl": None}
    for row in evaluations:
        key = f"eval/{HELD_OUT}/avg@{run.config.eval.samples_per_prompt}" if run.config.eval else ""
        accuracy[row["stage"]] = row[key]
    rewards = [row["reward/mean"] for row in newest_attempts(read_rows(run.run_dir.metrics)) if row["stage"] == "rl" and "reward/mean" in row]
    summary = {
        "mode": "+".join(stages),
        "steps": sum(stage_config(run.config, stage).steps for stage in stages),
        "accuracy": accuracy,
        "reward": {"first": rewards[0] if rewards else None, "last": rewards[-1] if rewards else None},
        "wall_s": round(wall_s, 1),
        "peak_rss_gib": round(read_peak_rss_gib(), 3),
        "seed": run.config.seed,
        "versions": {"rollouts-rl": __version__, **{name: version(name) for name in ("torch", "transformers", "trio", "numpy")}},
    }
    write_atomically(run.run_dir.summary, json.dumps(summary, indent=1) + "\n")
    return summary


def read_peak_rss_gib() -> float:
    """Most memory this process ever held, in GiB. Reward workers are not in it: a child's peak, as the kernel tells it, begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss counts what the process was before exec; VmHWM does not
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_report(run: Run, summary: dict[str, Any], console: Console) -> None:
    """Accuracy before and after each stage, three transcripts, and where the files are."""
    from rollouts.metrics.jsonl import read_rows

    console.print()
    for name, label in (("base", "base model"), ("sft", "after SFT"), ("rl", "after RL")):
        accuracy = summary["accuracy"][name]
        if accuracy is not None:
            console.print(f"held-out accuracy, {label:<11}{100 * accuracy:5.1f} %   ({len(run.rows.held_out)} problems)", highlight=False)
    last_stage = f"eval-{summary['mode'].split('+')[-1]}"
    transcripts = [row for row in read_rows(run.run_dir.samples) if row["stage"] == last_stage][:3] if run.run_dir.samples.exists() else []
    for row in transcripts:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        console.print(f"\n  prompt    {prompt}\n  response  {row['response']}\n  reward    {row['reward']}", highlight=False, markup=False)
    console.print(f"\n{summary['wall_s']:.0f} s, peak memory {summary['peak_rss_gib']:.2f} GiB", highlight=False)
    console.print(f"everything is in {run.run_dir.root}", highlight=False, soft_wrap=True)
    console.print(f"look at it with: python -m rollouts inspect {run.run_dir.root}", highlight=False, soft_wrap=True)


def print_findings(command: Command, config: RunConfig, console: Console) -> int:
    """The exit code of --dry-run: 0 when nothing would stop the run."""
    from rollouts.models.load import load_tokenizer, resolve_model
    from rollouts.preflight.checks import check_run
    from rollouts.preflight.findings import print_findings as show

    findings = check_run(
        config,
        command.stages,
        find_model=lambda name: resolve_model(name, seed=config.seed),
        open_tokenizer=lambda path: load_tokenizer(path, chat_template=chat_template_path(config)),
        base_dir=Path.cwd(),
        check_loss=check_loss,
    )
    return show(findings, console)


def chat_template_path(config: RunConfig) -> Path | None:
    """The file that replaces the tokenizer's own chat template."""
    return Path(config.model.chat_template) if config.model.chat_template else None


async def run_training(command: Command, config: RunConfig) -> int:
    """The exit code. Raises RolloutsError; everything that can be checked without a model is checked before one loads."""
    from rollouts.models.load import load_tokenizer, resolve_model, stop_token_ids

    started = time.perf_counter()
    console = Console()
    check_launch()
    run_dir = choose_run_dir(config)
    check_run_dir(run_dir, config, resume=command.resume)
    if command.dry_run:
        return print_findings(command, config, console)
    rows = load_all_rows(config, command.stages)
    named = load_functions(config, command.stages, base_dir=Path.cwd())
    if "rl" in command.stages and config.rl:
        check_loss(config.rl)
        check_engine_config(config.engine)
    for note in rows.notes():
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    model_path = await trio.to_thread.run_sync(lambda: resolve_model(config.model.name, seed=config.seed))
    tokenizer = load_tokenizer(model_path, chat_template=chat_template_path(config))
    stop_ids = stop_token_ids(tokenizer, model_path)
    conversations = prepare_rows(config, command.stages, rows, tokenizer, context_length=read_context_length(model_path))
    write_config(run_dir, config)

    from rollouts.metrics.jsonl import next_attempt, open_jsonl_logger
    from rollouts.metrics.progress import open_progress

    totals = {stage: stage_config(config, stage).steps for stage in command.stages}
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        nursery.start_soon(watch_signals, stop)
        with open_progress(console, totals) as progress:
            attempt = next_attempt(run_dir)
            async with (
                open_functions(config, named, base_dir=Path.cwd(), warn=lambda text: print(text, file=sys.stderr, flush=True)) as functions,
                open_jsonl_logger(run_dir, attempt=attempt, samples_per_step=config.output.samples_per_step, progress=progress) as logger,
            ):
                run_dir.summary.unlink(missing_ok=True)  # it says that a run is finished
                run = Run(
                    config, run_dir, rows, conversations, functions, tokenizer, make_template_options(config), stop_ids, model_path, logger, stop
                )
                finished = await run_stages(run, command.stages, model_path)
        nursery.cancel_scope.cancel()
    if not finished:
        console.print(f"stopped; go on with --resume --output.dir {run_dir.root}")
        return 0
    print_report(run, write_summary(run, command.stages, time.perf_counter() - started), console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A known error is one message, without a traceback."""
    command = parse_command_line(sys.argv[1:] if argv is None else argv)
    errors: list[RolloutsError] = []
    try:
        config = load_config(command.config_path, command.overrides)
        return trio.run(run_training, command, config)
    except* RolloutsError as group:
        errors = leaf_errors(group)
        for error in errors:  # here, because an error of another kind beside it rises from this statement, with its traceback
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

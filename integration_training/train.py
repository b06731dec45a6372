"""Trains a language model by supervised fine-tuning, by reinforcement learning, or by one after the other.

    python   integration_training/train.py --config FILE --mode sft|rl|sft+rl [--section.key value …] [--dry-run] [--resume]
    python   integration_training/train.py … --distributed.ranks N                                   N processes that train one model
    torchrun --nproc-per-node=N integration_training/train.py …                                      the same, under a launcher

This is the one place where all parts meet. Nothing that loads torch is imported before the config is known to be good.
Exit codes: 0 done, or stopped on request after a checkpoint; 1 the run failed; 2 a setting, file or plug-in is wrong; 75 another rank was
lost; 130 interrupted before training began.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trio
from rich.console import Console

from rollouts import __version__
from rollouts.config.load import dump_config, load_config, training_digest
from rollouts.config.schema import RLTrainingConfig, RunConfig, SFTTrainingConfig
from rollouts.crash_points import arm_crash_points, reach
from rollouts.data.chat import TemplateOptions
from rollouts.data.sft import SFTMixture
from rollouts.distributed.launch import Launch, read_launch
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
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import SyncWeights
from rollouts.loops.stopping import StopControl, end_overdue, end_unconnected, exit_now, watch_signals
from rollouts.models.directories import fsync_path
from rollouts.preflight.checks import prepare_rows, read_context_length
from rollouts.preflight.estimate import read_free_memory
from rollouts.preflight.functions import Functions, load_functions, open_functions
from rollouts.preflight.ranks import check_ranks, choose_relaunch
from rollouts.preflight.restarts import choose_resume, confirm_launch, describe_launch
from rollouts.preflight.rows import Rows, load_all_rows
from rollouts.preflight.run_directory import check_run_dir, choose_run_dir, lock_run_dir, write_holder
from rollouts.protocols import InferenceEngine, LogProbScorer, MetricsLogger, TrainingBackend
from rollouts.run_dir import RunDir, parse_step
from rollouts.types import Sample, SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rollouts.backends.fsdp import FSDPTrainingBackend
    from rollouts.backends.pytorch import PyTorchTrainingBackend
    from rollouts.backends.ranks import OpenRanks
    from rollouts.checkpoints.writer import CheckpointWriter, Keep

    Backend = PyTorchTrainingBackend | FSDPTrainingBackend

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
    return Command(known.config, tuple(known.mode.split("+")), known.dry_run, known.resume, tuple(overrides))


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
    """Raises ConfigError if there is no such loss, or it cannot be called with these parameters on what a batch will hold."""
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import try_loss

    spec = make_loss_spec(config)
    try_loss(spec.name, spec.params, unit=spec.unit, recompute_old=config.recompute_old, reference=config.kl_coef > 0)


def choose_run_device(config: RunConfig, launch: Launch) -> Literal["cpu", "cuda"]:
    """Where this process computes. Raises ConfigError where that is not to be had."""
    from rollouts.models.devices import choose_device

    return choose_device(config.model.device, deterministic=config.deterministic, local_ranks=launch.local_world_size)


def write_config(run_dir: RunDir, config: RunConfig) -> None:
    """Makes the run directory with its resolved config. Only when nothing can be wrong any more, or a corrected command would be refused."""
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir.config, dump_config(config))
    except (OSError, StorageError) as error:
        raise RunDirError(f"output.dir={run_dir.root} cannot be written ({error}); name another directory with --output.dir DIR") from error


def write_atomically(path: Path, text: str) -> None:
    """The whole text under this name, on disk when this returns; or, after a power cut too, what was there before."""
    partial = path.with_name(f".tmp-{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        reach("files.partial")
        fsync_path(partial)
        partial.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written ({error}); free space and go on with --resume") from error


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
    stop: StopControl  # requested by the first SIGINT or SIGTERM
    device: str  # where this process computes: cpu, cuda, or cuda:N where it is one of several
    ranks: OpenRanks | None = None  # the processes that train together, of which this is rank 0; None: this one is alone


@dataclass(frozen=True, slots=True)
class Stage:
    """What is open while a stage runs."""

    backend: Backend
    engine: InferenceEngine  # answers requests: the embedded engine, or a fleet
    sync_weights: SyncWeights  # brings every engine to the backend's version
    checkpoints: CheckpointWriter


@asynccontextmanager
async def open_stage(run: Run, stage: str, model_path: Path) -> AsyncIterator[Stage]:
    """A backend with the weights at `model_path` and a fresh optimizer, and what generates with them: for RL as the config says."""
    from rollouts.backends.open import choose_autocast_dtype

    async with open_backend(run, stage, model_path) as backend:
        served = stage == "rl" and run.config.engine.kind != "local"
        dtype = choose_autocast_dtype(choose_autocast(run.config), run.device)
        open_engine = open_servers(run, backend, dtype) if served else open_embedded(run, stage, backend, dtype, model_path)
        async with open_engine as (engine, sync_weights), open_checkpoints(run, stage, backend) as checkpoints:
            yield Stage(backend, engine, sync_weights, checkpoints)


def open_backend(run: Run, stage: str, model_path: Path) -> AbstractAsyncContextManager[Backend]:
    """What trains: this process alone, or all ranks."""
    from rollouts.backends.open import open_pytorch_backend

    config, section = run.config, stage_config(run.config, stage)
    options: dict[str, Any] = {
        "optim": section.optim,
        "total_steps": section.steps * (config.rl.updates_per_batch if config.rl and stage == "rl" else 1),
        "tokenizer": run.tokenizer,
        "autocast": choose_autocast(config),
        "threads": config.model.threads,
        "deterministic": config.deterministic,
        "micro_batch_tokens": section.micro_batch_tokens,
        "share_prefix": config.rl.share_prefix if config.rl and stage == "rl" else False,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "compile_backend": "inductor" if config.model.compile else None,
        "seed": config.seed,
    }
    if run.ranks is None:
        return open_pytorch_backend(model_path, device=run.device, **options)
    from rollouts.backends.fsdp import open_fsdp_backend

    options |= {"reduce_each_micro_batch": config.distributed.reduce_each_micro_batch, "cpu_offload": config.distributed.cpu_offload}
    return open_fsdp_backend(model_path, hub=run.ranks.hub, ranks=run.ranks.ranks, **options)


def choose_autocast(config: RunConfig) -> Literal["off", "bfloat16", "auto"]:
    """In which precision the trainer multiplies; equal bits are promised for float32 only."""
    return "off" if config.deterministic else config.model.autocast


def open_checkpoints(run: Run, stage: str, backend: Backend) -> AbstractAsyncContextManager[CheckpointWriter]:
    """What saves the stage, and keeps what the config says."""
    from rollouts.checkpoints.writer import open_checkpoint_writer

    return open_checkpoint_writer(
        backend,
        run.run_dir,
        stage,
        config_hash=training_digest(run.config),
        keep=choose_keep(run.config),
        warn=warn,
        free_memory=read_free_memory,
    )


def choose_keep(config: RunConfig) -> Keep:
    """Which checkpoints of a stage stay."""
    from rollouts.checkpoints.writer import Keep

    best_by = f"eval/{HELD_OUT}/avg@{config.eval.samples_per_prompt}" if config.output.keep_best and config.eval else None
    return Keep(config.output.keep_checkpoints, best_by)


def say(text: str) -> None:
    """A line on stderr. That nobody reads it, or that the disk under it is full, ends no run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line for the user, which the log has too."""
    logging.getLogger("rollouts").warning("%s", text)


@asynccontextmanager
async def open_embedded(
    run: Run, stage: str, backend: Backend, autocast_dtype: torch.dtype | None, model_path: Path
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """An engine in this process, in the trainer's precision. Where the trainer is several ranks, it has the model at `model_path` to itself."""
    from rollouts.engines.local import open_local_engine
    from rollouts.models.load import load_hf_model
    from rollouts.weight_sync.open import choose_tolerance
    from rollouts.weight_sync.probe import Probe, make_probe_prompt
    from rollouts.weight_sync.sync import WeightSync

    config, alone = run.config, run.ranks is None
    if not alone and stage == "rl" and config.engine.mode == "shared":
        say("engine.mode='shared', but several ranks share the weights: the engine has a copy on rank 0")
    mode = (config.engine.mode if stage == "rl" else "shared") if alone else "given"

    def load_copy() -> PreTrainedModel:
        return load_hf_model(model_path).to(run.device)  # pyright: ignore[reportArgumentType]  (transformers types .to narrowly)

    model = backend.model if alone else await backend.device_thread.submit(load_copy)
    async with open_local_engine(
        model,
        device_thread=backend.device_thread,
        mode=mode,
        trainer_version=lambda: backend.weight_version,
        max_rows=config.engine.max_rows,
        deterministic=config.deterministic,
        seed=config.seed,
        autocast_dtype=autocast_dtype,
    ) as engine:
        if engine.path != "fast":
            say(engine.describe())
        probe = Probe(make_probe_prompt(engine.features.vocab_size), choose_tolerance(exact=autocast_dtype is None))
        sync = WeightSync(probe, snapshot_dir=run.run_dir.weights)

        async def sync_afresh(backend: TrainingBackend, engines: Sequence[InferenceEngine], version: int) -> Mapping[str, float]:
            # SFT never names a new version, and a WeightSync loads what was proven once no second time
            return await WeightSync(probe, snapshot_dir=run.run_dir.weights)(backend, engines, version)

        yield engine, sync if stage == "rl" else sync_afresh


@asynccontextmanager
async def open_servers(
    run: Run, backend: Backend, autocast_dtype: torch.dtype | None
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """A fleet of inference servers, each of them kept at the trainer's version, and brought there again when it comes back."""
    from rollouts.weight_sync.open import open_synced_fleet

    async with open_synced_fleet(
        run.config.engine,
        backend,
        run.base_model,
        vocab_size=int(backend.model.config.get_text_config().vocab_size),
        trainer_exact=autocast_dtype is None,
        device=run.device,
        log_dir=run.run_dir.engine_logs,
        snapshot_dir=run.run_dir.weights,
        seed=run.config.seed,
        warn=say,
    ) as opened:
        yield opened


async def run_stages(run: Run, stages: Sequence[str], model_path: Path) -> bool:
    """True when every stage is complete, False when the user stopped the run. Each stage starts from the checkpoint of the one before."""
    from rollouts.checkpoints.load import find_newest_checkpoint
    from rollouts.checkpoints.resume import choose_checkpoint
    from rollouts.checkpoints.writer import retain

    before, config_hash = ("base", 0), training_digest(run.config)
    for stage in stages:
        total = stage_config(run.config, stage).steps
        stage_dir = run.run_dir.stage_checkpoints(stage)
        newest = await trio.to_thread.run_sync(partial(choose_checkpoint, stage_dir, config_hash=config_hash, report=warn))
        await trio.to_thread.run_sync(retain, run.run_dir, stage, choose_keep(run.config), warn)
        completed = completed_steps(newest)
        if completed > total:
            raise ConfigError(f"{stage}.steps={total} but {newest} has {completed} steps; set {stage}.steps={completed} or more")
        last = stage == stages[-1]
        if completed < total or (last and not evaluated(run, stage, total)):
            completed = await run_stage(run, stage, newest, model_path, before, last=last)
            gc.collect()  # a backend and its queue know each other: model and moments would stay until a collection came by itself
        if run.stop.is_requested():
            completed = completed_steps(find_newest_checkpoint(stage_dir))  # a step that no time was left to save is none
        if completed < total or (run.stop.is_requested() and not (last and evaluated(run, stage, total))):
            return False
        model_path = run.run_dir.checkpoint(stage, total)
        before = (stage, total)
        reach("stage.complete")
    return True


async def run_stage(run: Run, stage: str, newest: Path | None, start: Path, before: tuple[str, int], *, last: bool) -> int:
    """How many steps of the stage are complete: opened, brought to `newest` or `start`, trained. `before`: what the weights at `start` are of."""
    async with open_stage(run, stage, newest or start) as opened:
        reach("stage.opened")
        if newest is not None:
            await restore(opened.backend, newest)
        if stage == "rl":
            await sync_at_start(opened, newest, trains=completed_steps(newest) < stage_config(run.config, stage).steps)
        if newest is None:
            await evaluate_once(run, opened.engine, *before)
        return await finish_stage(run, stage, opened, newest, start, last=last)


async def sync_at_start(opened: Stage, newest: Path | None, *, trains: bool) -> None:
    """Brings the engine to the trainer's weights, or to older ones if `newest` was saved between two updates of it and training goes on: what is
    complete is only evaluated."""
    from rollouts.weight_sync.engine_weights import sync_as_saved

    if newest is None or not trains:
        await opened.sync_weights(opened.backend, [opened.engine], completed_steps(newest))
    elif await sync_as_saved(opened.backend, opened.engine, opened.sync_weights, newest, completed_steps(newest)):
        await opened.backend.load(newest).result()


def completed_steps(checkpoint: Path | None) -> int:
    """The steps that a checkpoint holds; 0 for none."""
    return (parse_step(checkpoint.name) or 0) if checkpoint else 0


async def finish_stage(run: Run, stage: str, opened: Stage, newest: Path | None, start: Path, *, last: bool) -> int:
    """How many steps of the stage are complete. The `last` stage is evaluated when it is; every other one, where the next begins."""
    total, completed = stage_config(run.config, stage).steps, completed_steps(newest)
    if run.stop.is_requested():
        return completed
    if completed == total:
        await evaluate_once(run, opened.engine, stage, total)
        return completed
    train = train_sft if stage == "sft" else train_rl
    completed = await train(run, opened, newest, start)
    if completed == total and last and not run.stop.is_requested():
        if stage == "sft":
            await sync_for_evaluation(opened)
        with run.stop.phase("evaluate"):
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
            say(f"sft.data: {count} of {row_count} rows {what} max_length={config.max_length}")
    backend, engine, completed = opened.backend, opened.engine, completed_steps(newest)

    async def save(step: int) -> None:
        await run.stop.save(lambda: save_step(run, opened, "sft", step, {}), what=f"step {step} of sft")

    async def evaluate_step(step: int) -> None:
        await sync_for_evaluation(opened)
        await evaluate_now(run, engine, "sft", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, engine, "sft", completed)

    with run.stop.training():
        history = await run_sft_training(
            backend,
            data,
            config,
            run.logger,
            seed=run.config.seed,
            completed_steps=completed,
            hooks=LoopHooks(
                evaluate_step,
                save,
                run.stop.is_requested,
                run.config.output.checkpoint_every,
                stop=run.stop,
                take_metrics=opened.checkpoints.take_metrics,
                is_saved=opened.checkpoints.is_saved,
            ),
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
        reach("resume.state_loaded")
        statistics = decode_statistics(state["curriculum"]) if "curriculum" in state else statistics  # checkpoints before there were curricula

    def hold_state() -> Callable[[], dict[str, Any]]:
        drawn, rollouts, learned = buffer.state_dict(), manager.snapshot(), statistics
        return lambda: {"data_buffer": drawn, "rollout_manager": rollouts.encode(), "curriculum": encode_statistics(learned)}

    before_batch = hold_state()  # of a run that is cut inside a step; encoded only if it is

    def begin_batch(step: int) -> None:
        nonlocal before_batch
        before_batch = hold_state()
        if run.functions.curriculum is not None:
            buffer.set_weights(call_curriculum(run.functions.curriculum, step, statistics, function=config.curriculum))

    def learn(step: int, samples: Sequence[Sample]) -> None:
        nonlocal statistics
        statistics = update_statistics(statistics, samples, step=step, drawn=buffer.drawn_by_source())

    async def save(step: int) -> None:
        await run.stop.save(lambda: save_step(run, opened, "rl", step, hold_state()()), what=f"step {step} of rl")

    async def save_before_batch(step: int) -> None:
        await run.stop.save(lambda: save_step(run, opened, "rl", step, before_batch()), what=f"step {step} of rl")

    async def evaluate_step(step: int) -> None:
        await evaluate_now(run, engine, "rl", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, engine, "rl", completed)

    every, take_metrics = run.config.output.checkpoint_every, opened.checkpoints.take_metrics
    is_saved = opened.checkpoints.is_saved
    hooks = LoopHooks(evaluate_step, save, run.stop.is_requested, every, begin_batch, learn, run.stop, save_before_batch, take_metrics, is_saved)
    async with open_reference(run, backend, start) as reference:
        with run.stop.training():
            history = await run_rl_training(
                backend,
                buffer,
                manager,
                [engine],
                config,
                run.logger,
                sync_weights=opened.sync_weights,
                reference=reference,
                advantage=run.functions.advantage,
                completed_steps=completed,
                hooks=hooks,
            )
    return completed + len(history)


@asynccontextmanager
async def open_reference(run: Run, backend: Backend, start: Path) -> AsyncIterator[LogProbScorer | None]:
    """The frozen model that RL started from, on the backend's thread and device; None when no KL term needs it."""
    from rollouts.reference.score import open_frozen_reference

    config = run.config.rl
    if config is None or config.kl_coef == 0:
        yield None
        return
    options: dict[str, Any] = {"micro_batch_tokens": config.micro_batch_tokens, "device": run.device}
    async with open_frozen_reference(start, device_thread=backend.device_thread, **options) as reference:
        yield reference


async def restore(backend: Backend, checkpoint: Path) -> None:
    """Puts the weights and the optimizer of `checkpoint`, which was read through, into `backend`. Raises CheckpointError if it is another model's."""
    reach("resume.verified")
    await backend.load(checkpoint).result()
    reach("resume.restored")


async def save_step(run: Run, opened: Stage, stage: str, step: int, state: dict[str, Any]) -> float:
    """Saves step `step` of `stage`: the last one before this returns, others while training goes on. Returns the seconds that a save takes."""
    from rollouts.weight_sync.engine_weights import hold_engine_weights

    section = stage_config(run.config, stage)
    last = step == section.steps or run.stop.is_requested()
    between = isinstance(section, RLTrainingConfig) and step % section.sync_every != 0  # two updates of the engine
    engine_weights = await hold_engine_weights(opened.engine, step) if between else None
    await opened.checkpoints.save(step, state, last=last, write_more=engine_weights)
    return opened.checkpoints.expected_save_s()


# --- evaluation and the end --------------------------------------------------------------------------------------------------


def evaluated(run: Run, stage: str, step: int) -> bool:
    """Whether evaluations.jsonl has the row already, of these weights: not of ones that were lost, after which an older checkpoint was taken and
    the step trained again. True when there is nothing to evaluate on."""
    from rollouts.metrics.jsonl import drop_outdated, read_rows

    if not run.rows.held_out:
        return True
    rows = drop_outdated(read_rows(run.run_dir.evaluations), read_rows(run.run_dir.metrics))
    return any(row["stage"] == stage and row["step"] == step for row in rows)


async def evaluate_once(run: Run, engine: InferenceEngine, stage: str, step: int) -> None:
    """Evaluates the engine's weights unless this (stage, step) has a row from the same weights."""
    if not evaluated(run, stage, step):
        with run.stop.phase("evaluate"):
            await evaluate_now(run, engine, stage, step)


async def sync_for_evaluation(opened: Stage) -> None:
    """Brings an engine with weights of its own to the trainer's. RL does it after its steps, SFT only here."""
    await opened.sync_weights(opened.backend, [opened.engine], opened.backend.weight_version)


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
    from rollouts.models.devices import describe_device

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
        "device": describe_device(run.device),
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


def print_findings(command: Command, config: RunConfig, launch: Launch, console: Console) -> int:
    """The exit code of --dry-run: 0 when nothing would stop the run."""
    from rollouts.models.devices import look_at_device
    from rollouts.models.load import load_tokenizer, resolve_model
    from rollouts.preflight.checks import check_run
    from rollouts.preflight.findings import print_findings as show

    local_ranks = max(config.distributed.ranks, launch.local_world_size)  # a process that stays alone answers for all
    findings = check_run(
        config,
        command.stages,
        find_model=lambda name: resolve_model(name, seed=config.seed),
        open_tokenizer=lambda path: load_tokenizer(path, chat_template=chat_template_path(config)),
        base_dir=Path.cwd(),
        check_loss=check_loss,
        look_at_device=lambda: look_at_device(config.model.device, deterministic=config.deterministic, local_ranks=local_ranks),
    )
    return show(findings, console)


def chat_template_path(config: RunConfig) -> Path | None:
    """The file that replaces the tokenizer's own chat template."""
    return Path(config.model.chat_template) if config.model.chat_template else None


async def run_rank(command: Command, config: RunConfig, launch: Launch) -> int:
    """The exit code of a rank that does not drive: it works for rank 0 until that closes the run."""
    if command.dry_run:
        return 0
    from rollouts.backends.ranks import open_ranks, serve_rank
    from rollouts.models.load import resolve_model

    arm_crash_points(os.environ, rank=launch.rank)
    if "rl" in command.stages and config.rl:
        check_loss(config.rl)
    choose_device = partial(choose_run_device, config, launch)
    async with open_ranks(launch, shard_size=config.distributed.shard_size, choose_device=choose_device) as opened:
        await serve_rank(opened, config, find_model=lambda name: resolve_model(name, seed=config.seed))
    return 0


@asynccontextmanager
async def open_other_ranks(launch: Launch, config: RunConfig, model_path: Path, stop: StopControl) -> AsyncIterator[OpenRanks | None]:
    """The connection with the other ranks, which wait for this one; None where it is alone."""
    if launch.world_size == 1:
        yield None
        return
    from rollouts.backends.ranks import open_ranks, tell_config

    async with trio.open_nursery() as nursery:
        connecting = trio.CancelScope()
        nursery.start_soon(end_unconnected, stop, connecting)
        choose_device = partial(choose_run_device, config, launch)
        async with open_ranks(launch, shard_size=config.distributed.shard_size, choose_device=choose_device) as opened:
            connecting.cancel()
            tell_config(opened, config, model_path)
            with stop.telling(opened.hub.end_others):
                yield opened


async def run_training(command: Command, config: RunConfig, launch: Launch) -> int:
    """The exit code of the program, on rank 0. Raises RolloutsError."""
    with ExitStack() as held:
        return await run_locked(command, config, launch, held)


async def run_locked(command: Command, config: RunConfig, launch: Launch, held: ExitStack) -> int:
    """The exit code. What can be checked without a model is checked before one loads; then the run directory is locked, until `held` closes."""
    from rollouts.models.load import load_tokenizer, resolve_model, stop_token_ids

    arm_crash_points(os.environ, rank=launch.rank)
    reach("start.armed")
    started = time.perf_counter()
    console = Console()
    run_dir = choose_run_dir(config)
    restart, resume = choose_resume(run_dir, launch, asked=command.resume)
    check_run_dir(run_dir, config, resume=resume)
    if command.dry_run:
        return print_findings(command, config, launch, console)
    rows = load_all_rows(config, command.stages)
    named = load_functions(config, command.stages, base_dir=Path.cwd())
    if "rl" in command.stages and config.rl:
        check_loss(config.rl)
        check_engine_config(config.engine)
    device = choose_run_device(config, launch)
    for note in rows.notes():
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    model_path = await trio.to_thread.run_sync(lambda: resolve_model(config.model.name, seed=config.seed), abandon_on_cancel=True)
    tokenizer = load_tokenizer(model_path, chat_template=chat_template_path(config))
    stop_ids = stop_token_ids(tokenizer, model_path)
    conversations = prepare_rows(config, command.stages, rows, tokenizer, context_length=read_context_length(model_path))
    reach("start.checked")
    lock = lock_run_dir(run_dir)
    held.callback(os.close, lock)
    check_run_dir(run_dir, config, resume=resume, locked=True)  # again: a run may have begun and ended since
    write_holder(lock, describe_launch(run_dir, launch, restart))
    write_config(run_dir, config)
    reach("start.directory_made")

    from rollouts.metrics.jsonl import next_attempt, open_jsonl_logger
    from rollouts.metrics.progress import open_progress

    totals = {stage: stage_config(config, stage).steps for stage in command.stages}
    async with trio.open_nursery() as nursery:
        stop = StopControl(say=say)
        nursery.start_soon(lambda: watch_signals(stop, launched="TORCHELASTIC_RUN_ID" in os.environ))
        nursery.start_soon(end_overdue, stop)
        finished = False
        with open_progress(console, totals) as progress:
            attempt = next_attempt(run_dir)
            async with (
                open_functions(config, named, base_dir=Path.cwd(), warn=say) as functions,
                open_jsonl_logger(run_dir, attempt=attempt, samples_per_step=config.output.samples_per_step, progress=progress) as logger,
                open_other_ranks(launch, config, model_path, stop) as ranks,
            ):
                if ranks is not None:
                    write_holder(lock, confirm_launch(run_dir, launch, restart, ranks.agents))
                with stop.startup():  # inside: the other ranks end as after a finished run
                    run_dir.summary.unlink(missing_ok=True)  # it says that a run is finished
                    reach("start.opened")
                    template, place = make_template_options(config), device if ranks is None else str(ranks.ranks.device)
                    run = Run(
                        config, run_dir, rows, conversations, functions, tokenizer, template, stop_ids, model_path, logger, stop, place, ranks
                    )
                    finished = await run_stages(run, command.stages, model_path)
        nursery.cancel_scope.cancel()
    if not finished:
        with suppress(OSError, ValueError, SystemExit):  # as `say`; rich answers a broken pipe by SystemExit
            console.print(f"stopped; go on with --resume --output.dir {run_dir.root}")
        exit_now()  # everything is closed; to take an interpreter with torch in it down takes seconds that a stop may not have
    reach("end.before_summary")
    summary = write_summary(run, command.stages, time.perf_counter() - started)
    reach("end.summary_written")
    print_report(run, summary, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A known error is one message, without a traceback."""
    command = parse_command_line(sys.argv[1:] if argv is None else argv)
    errors: list[RolloutsError] = []
    try:
        config = load_config(command.config_path, command.overrides)
        relaunch = None if command.dry_run else choose_relaunch(config, os.environ, [__file__, *(sys.argv[1:] if argv is None else argv)])
        if relaunch is not None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set, with a warning; torch's own threads are model.threads
            os.execv(relaunch[0], relaunch)
        launch = read_launch(os.environ)
        check_ranks(config, launch, dry_run=command.dry_run)
        return trio.run(run_training if launch.rank == 0 else run_rank, command, config, launch)
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

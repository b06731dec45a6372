"""What a stage of a run has open: a backend, what generates, what saves.

Run      what every stage reads: config, rows, functions, tokenizer, the record
Stage    what is open while one runs; `open_stage` opens it from a model directory
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trio

from rollouts.config.load import training_digest
from rollouts.config.modes import stage_config
from rollouts.config.schema import RunConfig
from rollouts.config.tables import OptimConfig
from rollouts.data.chat import TemplateOptions
from rollouts.data.mixture import Mixture
from rollouts.data.sft import SFTSample
from rollouts.engines.open import read_api_key
from rollouts.errors import ConfigError
from rollouts.loops.algorithm import count_updates, needs_reference
from rollouts.loops.stopping import Stop
from rollouts.metrics.spans import SpanRecorder
from rollouts.preflight.functions import Functions, weigh
from rollouts.preflight.rows import PreparedPreferences, Rows
from rollouts.protocols import (
    InferenceEngine,
    LogProbScorer,
    MetricsLogger,
    RewardFn,
    SyncWeights,
    TrainingBackend,
)
from rollouts.run_dir import RunDir

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rollouts.backends.fsdp import FSDPTrainingBackend
    from rollouts.backends.policy_and_critic import PolicyAndCritic
    from rollouts.backends.pytorch import PyTorchTrainingBackend
    from rollouts.checkpoints.writer import CheckpointWriter, Keep
    from rollouts.ranks.meet import OpenRanks

    Backend = PyTorchTrainingBackend | FSDPTrainingBackend
    Saved = Backend | PolicyAndCritic

HELD_OUT = "heldout"


@dataclass(frozen=True, slots=True)
class Run:
    """What every stage reads."""

    config: RunConfig
    run_dir: RunDir
    rows: Rows
    conversations: Mixture[SFTSample] | None  # tokenized, where there is an SFT stage
    preferences: Mapping[str, PreparedPreferences]  # of the stages that train on them
    functions: Functions
    tokenizer: Any
    template: TemplateOptions
    stop_ids: tuple[int, ...]
    # the directory that the first stage starts from; started servers load it before they get the trainer's
    # weights
    base_model: Path
    logger: MetricsLogger
    stop: Stop  # requested by the first SIGINT or SIGTERM
    device: str  # where this process computes: cpu, cuda, or cuda:N where it is one of several
    ranks: OpenRanks | None = (
        None  # the processes that train together, of which this is rank 0; None: this one is alone
    )
    spans: SpanRecorder = field(default_factory=SpanRecorder)  # when what goes on beside the loop was done


@dataclass(frozen=True, slots=True)
class Stage:
    """What is open while a stage runs."""

    backend: Backend
    critic: Backend | None  # trains beside it, where [rl.critic] asks for one
    saved: Saved  # both, or the backend alone: what checkpoints hold
    engine: InferenceEngine | None  # the embedded engine or a fleet; None: the model has no head to generate
    sync_weights: SyncWeights  # brings every engine to the backend's version
    checkpoints: CheckpointWriter


@asynccontextmanager
async def open_stage(run: Run, stage: str, model_path: Path) -> AsyncIterator[Stage]:
    """A backend with the weights at `model_path` and a fresh optimizer, and what generates with them: for RL
    as the config says.
    """
    from rollouts.backends.open import choose_autocast_dtype

    async with (
        open_backend(run, stage, model_path) as backend,
        open_critic(run, stage, backend, model_path) as critic,
    ):
        saved = backend if critic is None else pair_backends(backend, critic)
        dtype = choose_autocast_dtype(choose_autocast(run.config), run.device)
        if stage == "reward_model":
            open_engine = nullcontext((None, sync_nothing))
        elif stage == "rl" and run.config.engine.kind != "local":
            open_engine = open_servers(run, backend, dtype)
        else:
            open_engine = open_embedded(run, stage, backend, dtype, model_path)
        async with open_engine as (engine, sync_weights), open_checkpoints(run, stage, saved) as checkpoints:
            yield Stage(backend, critic, saved, engine, sync_weights, checkpoints)


async def sync_nothing(*arguments: object, **options: object) -> Mapping[str, float]:
    """No metrics: there is no engine."""
    return {}


def open_backend(
    run: Run, stage: str, model_path: Path, *, optim: OptimConfig | None = None, **more: Any
) -> AbstractAsyncContextManager[Backend]:
    """What trains: this process alone, or all ranks. `optim` in place of the stage's; `more` options."""
    from rollouts.backends.open import open_pytorch_backend

    config, section = run.config, stage_config(run.config, stage)
    options: dict[str, Any] = {
        "optim": optim or section.optim,
        "total_steps": section.steps * (count_updates(config.rl) if config.rl and stage == "rl" else 1),
        "tokenizer": run.tokenizer,
        "autocast": choose_autocast(config),
        "threads": config.model.threads,
        "deterministic": config.deterministic,
        "micro_batch_tokens": section.micro_batch_tokens,
        "share_prefix": stage != "sft",
        "skip_zero_advantage": bool(config.rl and stage == "rl" and not config.rl.kl_stop),
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "compile_backend": "inductor" if config.model.compile else None,
        "seed": config.seed,
        "head": "scalar" if stage == "reward_model" else "tokens",
        **more,
    }
    if run.ranks is None:
        return open_pytorch_backend(model_path, device=run.device, **options)
    from rollouts.backends.fsdp import open_fsdp_backend

    options["cpu_offload"] = config.distributed.cpu_offload
    return open_fsdp_backend(model_path, channel=run.ranks.channel, ranks=run.ranks.ranks, **options)


@asynccontextmanager
async def open_critic(
    run: Run, stage: str, policy: Backend, model_path: Path
) -> AsyncIterator[Backend | None]:
    """The critic beside the policy that was opened at `model_path`, on its device thread: that of the
    checkpoint, or a new one; None without [rl.critic].
    """
    config = run.config.rl.critic if run.config.rl and stage == "rl" else None
    if config is None:
        yield None
        return
    from rollouts.backends.policy_and_critic import CRITIC
    from rollouts.preflight.reward_models import CRITIC as CRITIC_SETTING
    from rollouts.preflight.reward_models import find_scalar_model

    if model_path.parent == run.run_dir.stage_checkpoints(
        stage
    ):  # only this stage's own: a model of another run may have brought its critic
        path = model_path / CRITIC
    else:
        find = partial(find_scalar_model, run.config, run.run_dir, CRITIC_SETTING, config.model)
        path = (
            await trio.to_thread.run_sync(find) if config.model else model_path
        )  # in a thread: other ranks take silence for an end
    options = {"head": "scalar", "skip_zero_advantage": False, "device_thread": policy.device_thread}
    async with open_backend(run, stage, path, optim=config.optim, **options) as critic:
        yield critic


def pair_backends(policy: Backend, critic: Backend) -> Saved:
    """Both as one thing to save."""
    from rollouts.backends.policy_and_critic import PolicyAndCritic

    return PolicyAndCritic(policy, critic)


def choose_autocast(config: RunConfig) -> Literal["off", "bfloat16", "auto"]:
    """In which precision the trainer multiplies; equal bits are promised for float32 only."""
    return "off" if config.deterministic else config.model.autocast


def open_checkpoints(run: Run, stage: str, backend: Saved) -> AbstractAsyncContextManager[CheckpointWriter]:
    """What saves the stage, and keeps what the config says."""
    from rollouts.checkpoints.writer import open_checkpoint_writer

    return open_checkpoint_writer(
        backend,
        run.run_dir,
        stage,
        config_hash=training_digest(run.config),
        keep=choose_keep(run.config),
        warn=warn,
        spans=run.spans,
    )


def choose_keep(config: RunConfig) -> Keep:
    """Which checkpoints of a stage stay."""
    from rollouts.checkpoints.writer import Keep

    best_by = (
        f"eval/{HELD_OUT}/avg@{config.eval.samples_per_prompt}"
        if config.output.keep_checkpoints and config.eval
        else None
    )
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
    """An engine in this process, in the trainer's precision. Where the trainer is several ranks, it has the
    model at `model_path` to itself.
    """
    from rollouts.engines.local import open_local_engine
    from rollouts.models.load import load_hf_model
    from rollouts.weight_sync.open import choose_tolerance
    from rollouts.weight_sync.probe import make_probe
    from rollouts.weight_sync.snapshots import DiskSnapshots
    from rollouts.weight_sync.sync import WeightSync

    config, alone = run.config, run.ranks is None
    if not alone and stage == "rl" and config.engine.mode == "shared":
        say("engine.mode='shared', but several ranks share the weights: the engine has a copy on rank 0")
    mode = (config.engine.mode if stage == "rl" else "shared") if alone else "given"

    def load_copy() -> PreTrainedModel:
        model: Any = load_hf_model(model_path)  # transformers types .to narrowly
        return model.to(run.device)

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
        if engine.path not in ("compiled", "fast"):
            say(engine.describe())
        probe = make_probe(
            engine.features.vocab_size, tolerance=choose_tolerance(exact=autocast_dtype is None)
        )
        keeper = DiskSnapshots(run.run_dir.weights, warn=say)
        sync = WeightSync(probe, keeper=keeper, warn=say, spans=run.spans)

        async def sync_afresh(
            backend: TrainingBackend,
            engines: Sequence[InferenceEngine],
            version: int,
            *,
            released: trio.Event | None = None,
        ) -> Mapping[str, float]:
            # SFT never names a new version, and a WeightSync loads what was proven once no second time
            return await WeightSync(probe, keeper=keeper, warn=say)(backend, engines, version)

        yield engine, sync if stage == "rl" else sync_afresh


@asynccontextmanager
async def open_servers(
    run: Run, backend: Backend, autocast_dtype: torch.dtype | None
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """A fleet of inference servers, each of them kept at the trainer's version, and brought there again when
    it comes back.
    """
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
        spans=run.spans,
    ) as opened:
        yield opened


@asynccontextmanager
async def open_reference(
    run: Run, backend: Backend, start: Path, newest: Path | None
) -> AsyncIterator[LogProbScorer | None]:
    """The model that RL started from, or what has become of it by the checkpoint `newest`; None when no KL
    term needs it.
    """
    config = run.config.rl
    if config is None or not needs_reference(config):
        yield None
        return
    completed: Callable[[], int] = lambda: backend.weight_version  # noqa: E731
    async with open_scorer(run, backend, start, newest, config.micro_batch_tokens, completed) as reference:
        yield reference


@asynccontextmanager
async def open_scorer(
    run: Run,
    backend: Backend,
    start: Path,
    newest: Path | None,
    micro_batch_tokens: int,
    completed_steps: Callable[[], int],
) -> AsyncIterator[LogProbScorer]:
    """The reference of [reference]: the model at `start`, frozen, or following the policy, from where it was
    at the checkpoint `newest`.
    """
    config = run.config.reference
    common: dict[str, Any] = {
        "device_thread": backend.device_thread,
        "micro_batch_tokens": micro_batch_tokens,
        "device": run.device,
    }
    rule = config.rule()
    if rule is None:
        from rollouts.reference.score import open_frozen_reference
        from rollouts.reference.server import open_server_reference

        if config.where == "trainer":
            async with open_frozen_reference(start, dtype=config.dtype, say=say, **common) as frozen:
                yield frozen
        else:
            vocab_size = int(backend.model.config.get_text_config().vocab_size)
            kind = await find_server_kind(config.where)
            async with open_server_reference(
                config.where, kind=kind, vocab_size=vocab_size, api_key=read_api_key(kind)
            ) as served:
                yield served
        return
    import torch

    from rollouts.reference.moving import REFERENCE, UpdateRule, open_moving_reference

    saved = newest / REFERENCE if newest is not None and (newest / REFERENCE).is_dir() else start
    share, every = rule
    async with open_moving_reference(
        saved, rule=UpdateRule(share, 1.0 - share, every), dtype=getattr(torch, config.dtype), **common
    ) as moving:
        moving.follow(backend, completed_steps)
        yield moving


async def find_server_kind(url: str) -> Literal["vllm", "sglang"]:
    """What serves the reference: of the two only vLLM tells its version to anybody. Raises ConfigError for a
    server that does not answer.
    """
    import httpx

    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{url.rstrip('/')}/version")
    except httpx.HTTPError as error:
        raise ConfigError(f"reference.where={url!r} does not answer ({error}); start the server") from error
    return "vllm" if answer.is_success else "sglang"


@asynccontextmanager
async def open_reward(run: Run, backend: Backend) -> AsyncIterator[RewardFn | None]:
    """What scores the samples of RL: the user's function, a reward model, or both together. Raises
    ConfigError for a model with other tokens.
    """
    from rollouts.rewards.reward_model import add_model_reward, open_model_reward

    config = run.config.rl
    if config is None or not config.rollout.reward_model:
        yield run.functions.reward
        return
    from rollouts.preflight.reward_models import REWARD, check_tokens, find_scalar_model
    from rollouts.reference.score import open_frozen_reference

    path = await trio.to_thread.run_sync(
        partial(find_scalar_model, run.config, run.run_dir, REWARD, config.rollout.reward_model)
    )
    await trio.to_thread.run_sync(check_tokens, path, REWARD, run.tokenizer)
    options: dict[str, Any] = {"micro_batch_tokens": config.micro_batch_tokens, "device": run.device}
    async with (
        open_frozen_reference(path, device_thread=backend.device_thread, head="scalar", **options) as scorer,
        open_model_reward(scorer) as model_reward,
    ):
        both = add_model_reward(model_reward, run.functions.reward, timeout_s=config.rollout.reward_timeout_s)
        yield weigh(both, config.rollout)

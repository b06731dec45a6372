"""What a stage of a run has open: a backend, what generates, what saves.

Run      what every stage reads: config, rows, functions, tokenizer, the record
Stage    what is open while one runs; `open_stage` opens it from a model directory
"""

import inspect
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trio

from rollouts.backends.fsdp import open_fsdp_backend
from rollouts.backends.open import load_model, open_pytorch_backend
from rollouts.backends.pytorch import RankedTrainingBackend as Backend
from rollouts.checkpoints.writer import CheckpointWriter, Keep, open_checkpoint_writer
from rollouts.config.load import EVALUATE, stage_config, training_digest
from rollouts.config.rollout import SamplingConfig, is_address
from rollouts.config.schema import RunConfig
from rollouts.engines.local import open_local_engine
from rollouts.engines.processes import read_api_key
from rollouts.environments.episode import make_agent_generate, make_formats
from rollouts.environments.proxy import Proxy, make_proxy_generate
from rollouts.generation.generate import make_chat_generate, make_prompt_tokenizer
from rollouts.inspect.terminal import say
from rollouts.loops.algorithm import count_updates, list_algorithms, needs_reference
from rollouts.loops.rl_batch import Score, score_told
from rollouts.loops.stopping import Stop
from rollouts.metrics.writer import JsonlLogger
from rollouts.models.directories import is_adapter
from rollouts.models.load import stop_token_ids
from rollouts.models.lora import Adapter, make_adapter
from rollouts.preflight.checks import (
    CRITIC,
    OWN,
    TEACHER,
    PreparedRun,
    find_scalar_model,
    find_server_kind,
)
from rollouts.preflight.functions import join_parts, weigh
from rollouts.protocols import (
    GenerateFn,
    GroupRewardFn,
    InferenceEngine,
    LogProbScorer,
    RewardFn,
    SyncWeights,
)
from rollouts.ranks.meet import OpenRanks, Ranks
from rollouts.reference.moving import REFERENCE, UpdateRule, open_moving_reference
from rollouts.reference.score import open_frozen_reference
from rollouts.reference.server import open_server_reference
from rollouts.rewards.parts import RewardParts
from rollouts.rewards.reward_model import add_model_reward, open_model_reward
from rollouts.run_dir import RunDir, parse_step
from rollouts.types import Fields, SamplingParams, live
from rollouts.weight_sync.snapshots import DiskSnapshots
from rollouts.weight_sync.sync import WeightSync, choose_tolerance, open_synced_fleet
from rollouts.weight_sync.update import log_warning, make_probe

HELD_OUT = "heldout"
CRITIC_FOLDER = "critic"  # of a checkpoint; holds the critic


@dataclass(kw_only=True)
class Run(PreparedRun):
    """What every stage reads; the functions are where they run."""

    logger: JsonlLogger
    stop: Stop  # requested by the first SIGINT or SIGTERM
    device: str  # where this process computes: cpu, cuda, or cuda:N where it is one of several
    ranks: OpenRanks | None  # the processes that train together, of which this is rank 0; None: it is alone
    proxy: Proxy | None  # at which rl.rollout.agent plays; None: there is none

    def choose_generate(self) -> GenerateFn:
        """The user's function or what their factory makes; a trajectory with the environment and tools of
        the config, or its program; or one chat turn.
        """
        functions, rollout, params = self.functions, self.config.rollout, self.config.model.template_params
        make_format = make_formats(
            self.tokenizer, params=params, read_turn=functions.read_turn, history=rollout.history
        )
        if self.proxy:
            return make_proxy_generate(self.proxy, make_format, rollout)
        if functions.environment or functions.tools:
            make_format(functions.tools)  # what is wrong with it is said before the first step
            worlds = {"open_world": functions.environment} if functions.environment else {}
            return make_agent_generate(make_format, rollout, tools=functions.tools, **worlds)
        generate: Any = functions.generate
        if generate and "tokenizer" in inspect.signature(generate).parameters:
            generate = generate(self.tokenizer, params)
        return generate or make_chat_generate(self.tokenizer, params=params)

    def choose_sampling(self, section: SamplingConfig) -> SamplingParams:
        """How a response is sampled by the settings of `section`."""
        return SamplingParams(
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            stop_token_ids=stop_token_ids(self.tokenizer, self.base_model),
        )


@live
class Stage:
    """What is open while a stage runs."""

    name: str
    section: Any  # its table of the config
    start: Path  # the model that it starts from
    newest: Path | None  # its own checkpoint after which it goes on
    completed: int  # steps; of them `newest` holds the first
    backend: Backend
    critic: Backend | None  # trains beside it, where [rl.critic] asks for one
    engine: Any  # an InferenceEngine: the embedded one or a fleet; None: the model has no head to generate
    sync_weights: Any  # a SyncWeights that brings it to the backend's version; None without an engine
    checkpoints: CheckpointWriter
    scoring: Fields  # options of a model that scores beside the backend: where it computes


@asynccontextmanager
async def open_stage(run: Run, stage: str, start: Path, newest: Path | None) -> AsyncIterator[Stage]:
    """A backend with the weights at `newest`, or `start`, and a fresh optimizer, and what generates with
    them: for RL as the config says.
    """
    config, recorder = run.config, run.logger.recorder
    # an adapter's own checkpoint is loaded over the one that the stage starts from
    model_path = start if config.model.lora else newest or start
    async with (
        open_backend(run, stage, model_path) as backend,
        await choose_critic(run, stage, backend, start, newest) as critic,
    ):
        if backend.autocast_dtype:
            say(f"{stage}: matrices are multiplied in bfloat16 (model.autocast)")
        saved = {"": backend} | ({CRITIC_FOLDER: critic} if critic else {})
        opening = nullcontext((None, None))
        if stage in ("rl", EVALUATE) and config.engine.kind != "local":
            opening = open_fleet(
                config, backend, run.base_model, run.run_dir, device=run.device, spans=recorder
            )
        elif stage != "reward_model":
            opening = open_embedded(run, stage, backend, model_path)
        async with (
            opening as (engine, sync_weights),
            open_checkpoint_writer(
                saved,
                run.run_dir,
                stage,
                config_hash=training_digest(config),
                keep=choose_keep(config),
                warn=log_warning,
                spans=recorder,
            ) as checkpoints,
        ):
            section = stage_config(config, stage)
            scoring = {
                "device_thread": backend.device_thread,
                "micro_batch_tokens": section.micro_batch_tokens,
                "device": run.device,
            }
            yield Stage(
                stage,
                section,
                start,
                newest,
                completed_steps(newest),
                backend,
                critic,
                engine,
                sync_weights,
                checkpoints,
                scoring,
            )


def open_backend(
    run: Run, stage: str, model_path: Path, **changed: Any
) -> AbstractAsyncContextManager[Backend]:
    """What trains: this process alone, or all ranks. `changed`: options in place of the stage's."""
    config, model, section = run.config, run.config.model, stage_config(run.config, stage)
    rl, lora = config.rl if stage == "rl" else None, model.lora and model.lora.model_dump()
    if lora:
        begun = is_adapter(model_path)
        lora["init_from"] = str(model_path) if begun else ""
        model_path = run.base_model if begun else model_path
    options = {
        "optim": section.optim,
        "total_steps": section.steps * (count_updates(rl) if rl else 1),
        "tokenizer": run.tokenizer,
        # equal bits are promised for float32 only
        "autocast": "off" if config.deterministic else model.autocast,
        "threads": model.threads,
        "deterministic": config.deterministic,
        "micro_batch_tokens": section.micro_batch_tokens,
        "share_prefix": stage != "sft",
        "skip_zero_advantage": bool(rl and not rl.kl_stop),
        "gradient_checkpointing": model.gradient_checkpointing,
        "compile_backend": "inductor" if model.compile else None,
        "seed": config.seed,
        "head": "scalar" if stage == "reward_model" else "tokens",
        "lora": lora,
        **changed,
    }
    if not run.ranks:
        return open_pytorch_backend(model_path, device=run.device, **options)
    return open_fsdp_backend(
        model_path,
        channel=run.ranks.channel,
        ranks=run.ranks.ranks,
        cpu_offload=config.distributed.cpu_offload,
        **options,
    )


async def choose_critic(
    run: Run, stage: str, policy: Backend, start: Path, newest: Path | None
) -> AbstractAsyncContextManager[Backend | None]:
    """The critic beside the policy, on its device thread: that of the stage's `newest` checkpoint, or a new
    one; None without [rl.critic].
    """
    config = getattr(stage_config(run.config, stage), "critic", None)
    if not config:
        return nullcontext()
    path = start
    # only this stage's own: another run's model may have brought its critic
    if newest and not run.config.model.lora:
        path = newest / CRITIC_FOLDER
    elif config.model:  # in a thread: other ranks take silence for an end
        path = await trio.to_thread.run_sync(find_scalar_model, run.config, run.run_dir, CRITIC, config.model)
    place = {"device_thread": policy.device_thread}
    if run.config.model.lora and not config.model:
        place = {"beside": policy}  # a second adapter of the same model
    return open_backend(
        run, stage, path, head="scalar", skip_zero_advantage=False, optim=config.optim, **place
    )


def completed_steps(checkpoint: Path | None) -> int:
    """The steps that a checkpoint holds; 0 for none."""
    return (parse_step(checkpoint.name) or 0) if checkpoint else 0


def choose_keep(config: RunConfig) -> Keep:
    """Which checkpoints of a stage stay."""
    return Keep(config.output.keep_checkpoints, accuracy_key(config) or None)


def accuracy_key(config: RunConfig, name: str = HELD_OUT) -> str:
    """The metric of held-out accuracy; empty without [eval]."""
    return f"eval/{name}/avg@{config.eval.samples_per_prompt}" if config.eval else ""


# --- what generates -----------------------------------------------------------------------------------------


def open_fleet(
    config: RunConfig, backend: Backend, base_model: Path, run_dir: RunDir, **options: Any
) -> AbstractAsyncContextManager[tuple[InferenceEngine, SyncWeights]]:
    """The servers of [engine]. options: device and spans of open_synced_fleet."""
    return open_synced_fleet(
        config.engine,
        backend,
        base_model,
        vocab_size=backend.vocab_size,
        trainer_exact=backend.autocast_dtype is None,
        seed=config.seed,
        warn=say,
        log_dir=run_dir.engine_logs,
        snapshot_dir=run_dir.weights,
        **options,
    )


@asynccontextmanager
async def open_embedded(
    run: Run, stage: str, backend: Backend, model_path: Path
) -> AsyncIterator[tuple[InferenceEngine, SyncWeights]]:
    """An engine in this process, in the trainer's precision. Where the trainer is several ranks, it has the
    model at `model_path` to itself.
    """
    config, dtype, thread = run.config, backend.autocast_dtype, backend.device_thread

    def load_copy() -> tuple[Any, Adapter | None]:
        lora, alone = config.model.lora, Ranks(0, 1, 1, torch.device(run.device))
        path = run.base_model if lora else model_path
        model = load_model(path, {"lora": lora and lora.model_dump()}, alone)
        return model, lora and make_adapter(model, lora)

    adapter = backend.trained if isinstance(backend.trained, Adapter) else None
    if not run.ranks:
        model, mode = backend.model, config.engine.mode if stage == "rl" else "shared"
    else:
        (model, adapter), mode = await thread.submit(load_copy), "given"
        if stage == "rl" and config.engine.mode == "shared":
            say("engine.mode='shared', but several ranks share the weights: the engine has a copy on rank 0")
    async with open_local_engine(
        model,
        device_thread=thread,
        mode=mode,
        adapter=adapter,
        trainer_version=lambda: backend.weight_version,
        max_rows=config.engine.max_rows,
        deterministic=config.deterministic,
        seed=config.seed,
        autocast_dtype=dtype,
        tokenizer=run.tokenizer,
    ) as engine:
        if engine.path not in ("compiled", "fast"):
            say(engine.describe())
        make_sync = partial(
            WeightSync,
            make_probe(engine.features.vocab_size, tolerance=choose_tolerance(exact=dtype is None)),
            keeper=DiskSnapshots(run.run_dir.weights, warn=say),
            warn=say,
        )
        if stage == "rl":
            yield engine, make_sync(spans=run.logger.recorder)
        else:  # SFT never names a new version, and a WeightSync loads what was proven once no second time
            yield engine, lambda *given, **more: make_sync()(*given, **more)  # noqa: PLW0108


# --- what scores --------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_scorer(run: Run, opened: Stage) -> AsyncIterator[LogProbScorer]:
    """The reference of [reference]: the model that the stage starts from, frozen, or following the policy,
    from where it was at the stage's newest checkpoint.
    """
    config, rule, backend = run.config.reference, run.config.reference.rule(), opened.backend
    if rule:
        saved = opened.newest and opened.newest / REFERENCE
        async with open_moving_reference(
            saved if saved and saved.is_dir() else opened.start,
            rule=UpdateRule(*rule),
            dtype=getattr(torch, config.dtype),
            **opened.scoring,
        ) as moving:
            counts_steps = opened.name != "rl"  # there several updates are one
            moving.follow(
                backend,
                lambda: int(backend.statistics()["steps"]) if counts_steps else backend.weight_version,
            )
            yield moving
        return
    path = opened.start if config.where == "trainer" else None
    if path and run.config.model.lora:  # it is there anyway
        start: Any = SimpleNamespace(score=backend.forward_start)
        yield start
        return
    async with await choose_scorer(run, opened, path, "reference.where", config.where) as scorer:
        yield scorer


@asynccontextmanager
async def open_scorers(run: Run, opened: Stage) -> AsyncIterator[tuple[LogProbScorer | None, Score | None]]:
    """(the reference of RL, how its teacher scores); None for what it does not need."""
    config, backend, context = opened.section.distillation, opened.backend, run.functions.context
    reference: Any = None
    score: Score | None = None
    async with AsyncExitStack() as stack:
        if needs_reference(opened.section):
            reference = await stack.enter_async_context(open_scorer(run, opened))
            if "exact" in {settings.kl_estimator for settings in list_algorithms(opened.section)}:
                await backend.compare_with(reference)
        if config:
            score = backend.forward if config.teacher == "self" else reference and reference.score
            if config.teacher not in OWN:
                opening = await choose_scorer(run, opened, run.teacher, TEACHER, config.teacher)
                score = (await stack.enter_async_context(opening)).score
        if score and context:
            tokenize = make_prompt_tokenizer(run.tokenizer, params=run.config.model.template_params)
            limit = opened.engine.features.context_length
            score = partial(score_told, score=score, context=context, tokenize=tokenize, limit=limit)
        yield reference, score


async def choose_scorer(
    run: Run, opened: Stage, path: Path | None, setting: str, url: str, **changed: Any
) -> AbstractAsyncContextManager[LogProbScorer]:
    """The model at `path`, or else what the server at `url`, the value of `setting`, serves. `changed`:
    options in place of the reference's. Raises as find_server_kind.
    """
    if path:
        options = {"dtype": run.config.reference.dtype, "say": say, **opened.scoring, **changed}
        return open_frozen_reference(path, **options)
    kind = await trio.to_thread.run_sync(find_server_kind, setting, url)
    return open_server_reference(
        url, kind=kind, vocab_size=opened.backend.vocab_size, api_key=read_api_key(kind)
    )


@asynccontextmanager
async def open_rewards(
    run: Run, opened: Stage, reference: LogProbScorer | None
) -> AsyncIterator[tuple[RewardFn | None, GroupRewardFn | None, RewardParts | None]]:
    """(what scores a sample of RL, what scores its group, the parts that both are made of where [rl.rollout]
    has them by name): the user's functions, reward models, or both together.
    """
    config, functions, models = opened.section.rollout, run.functions, {}
    async with AsyncExitStack() as stack:
        for key, name in config.reward_models.items():
            path = None
            if not is_address(name):
                path = await trio.to_thread.run_sync(find_scalar_model, run.config, run.run_dir, key, name)
            opening = await choose_scorer(run, opened, path, key, name, dtype="float32", head="scalar")
            scorer = await stack.enter_async_context(opening)
            models[key.split(".")[-2]] = await stack.enter_async_context(open_model_reward(scorer))
        if config.rewards:
            given = {**functions.parts, **models}
            parts = join_parts(
                run.config,
                given,
                lambda: opened.backend.weight_version + 1,
                backend=opened.backend,
                reference=reference,
            )
            yield parts.score, parts.score_group, parts
        elif models:
            [model_reward] = models.values()
            both = add_model_reward(model_reward, functions.reward, timeout_s=config.reward_timeout_s)
            yield weigh(both, config), None, None
        else:
            yield functions.reward, functions.group_reward, None

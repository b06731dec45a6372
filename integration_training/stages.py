"""The stages of a run, one after the other: each starts from the checkpoint of the one before, or goes on
from its own newest one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration_training.opening import (
    Run,
    Stage,
    choose_keep,
    open_reference,
    open_reward,
    open_stage,
    say,
    warn,
)
from integration_training.preferences import evaluate_pairs_once, run_reward_model, train_preference
from integration_training.reports import (
    PAIRS,
    evaluate_now,
    evaluate_once,
    evaluated,
    has_evaluation,
    sync_for_evaluation,
)
from integration_training.saving import completed_steps, restore, save_step
from rollouts.config.load import training_digest
from rollouts.config.modes import stage_config
from rollouts.crash_points import reach
from rollouts.errors import ConfigError
from rollouts.loops.hooks import LoopHooks
from rollouts.protocols import LogProbScorer, RewardFn
from rollouts.types import Sample, SamplingParams

if TYPE_CHECKING:
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.generation.async_rollout_manager import AsyncRolloutManager


async def run_stages(run: Run, stages: Sequence[str], model_path: Path) -> bool:
    """True when every stage is complete, False when the user stopped the run. Each stage starts from the
    checkpoint of the one before.
    """
    from rollouts.checkpoints.load import find_newest_checkpoint
    from rollouts.checkpoints.resume import choose_checkpoint
    from rollouts.checkpoints.writer import retain

    before, config_hash = ("base", 0), training_digest(run.config)
    for stage in stages:
        total = stage_config(run.config, stage).steps
        stage_dir = run.run_dir.stage_checkpoints(stage)
        newest = await trio.to_thread.run_sync(
            partial(choose_checkpoint, stage_dir, config_hash=config_hash, report=warn)
        )
        await trio.to_thread.run_sync(retain, run.run_dir, stage, choose_keep(run.config), warn)
        completed = completed_steps(newest)
        if completed > total:
            raise ConfigError(
                f"{stage}.steps={total} but {newest} has {completed} steps; set {stage}.steps={completed} or"
                " more"
            )
        last = set(stages[stages.index(stage) + 1 :]) <= {
            "reward_model"
        }  # no later stage evaluates its weights before it begins
        if (
            completed < total
            or (last and not evaluated(run, stage, total))
            or not has_evaluation(run, stage, total, PAIRS)
        ):
            run_one = run_reward_model if stage == "reward_model" else run_stage
            completed = await run_one(run, stage, newest, model_path, before, last=last)
            await run.logger.log_spans(
                stage, completed, completed, run.spans.take()
            )  # of what came after the last step
            # a backend and its queue know each other: model and moments would stay until a collection came by
            # itself
            gc.collect()
        if run.stop.is_requested():
            completed = completed_steps(
                find_newest_checkpoint(stage_dir)
            )  # a step that no time was left to save is none
        done = (
            last
            and evaluated(run, stage, total)
            and has_evaluation(run, stage, total, PAIRS)
            and stage == stages[-1]
        )
        if completed < total or (run.stop.is_requested() and not done):
            return False
        if stage != "reward_model":  # which the next stage does not start from
            model_path = run.run_dir.checkpoint(stage, total)
            before = (stage, total)
        reach("stage.complete")
    return True


async def run_stage(
    run: Run, stage: str, newest: Path | None, start: Path, before: tuple[str, int], *, last: bool
) -> int:
    """How many steps of the stage are complete: opened, brought to `newest` or `start`, trained. `before`:
    what the weights at `start` are of.
    """
    async with open_stage(run, stage, newest or start) as opened:
        reach("stage.opened")
        if newest is not None:
            await restore(opened.saved, newest)
        if stage == "rl":
            await sync_at_start(
                opened, newest, trains=completed_steps(newest) < stage_config(run.config, stage).steps
            )
        if newest is None:
            await evaluate_once(run, opened.engine, *before)
        return await finish_stage(run, stage, opened, newest, start, last=last)


async def sync_at_start(opened: Stage, newest: Path | None, *, trains: bool) -> None:
    """Brings the engine to the trainer's weights, or to older ones if `newest` was saved between two updates
    of it and training goes on: what is complete is only evaluated.
    """
    from rollouts.weight_sync.engine_weights import sync_as_saved

    if newest is None or not trains:
        await opened.sync_weights(opened.backend, [opened.engine], completed_steps(newest))
    elif await sync_as_saved(
        opened.backend, opened.engine, opened.sync_weights, newest, completed_steps(newest)
    ):
        await opened.backend.load(newest).result()


async def finish_stage(
    run: Run, stage: str, opened: Stage, newest: Path | None, start: Path, *, last: bool
) -> int:
    """How many steps of the stage are complete. The `last` stage that generates is evaluated when it is;
    every other one, where the next begins.
    """
    total, completed = stage_config(run.config, stage).steps, completed_steps(newest)
    if run.stop.is_requested():
        return completed
    if completed == total:
        if stage == "preference":
            await evaluate_pairs_once(run, opened, start)
        if last:
            await evaluate_once(run, opened.engine, stage, total)
        return completed
    train = {"sft": train_sft, "preference": train_preference, "rl": train_rl}[stage]
    completed = await train(run, opened, newest, start)
    if completed == total and last and not run.stop.is_requested():
        if stage != "rl":
            await sync_for_evaluation(opened)
        with run.stop.phase("evaluate"):
            await evaluate_now(run, opened.engine, stage, total)
    return completed


async def train_sft(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at
    `start`.
    """
    from rollouts.loops.sft import run_sft_training

    config, data = run.config.sft, run.conversations
    assert config is not None and data is not None
    row_count = run.rows.training["sft"].row_count
    for what, count in (
        ("cut at", data.truncated),
        ("left out: nothing to train on within", sum(data.dropped.values())),
    ):
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
                take_spans=run.spans.take,
            ),
        )
    return completed + len(history)


async def train_rl(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at
    `start`, which stays the reference.
    """
    async with (
        open_reward(run, opened.backend) as reward,
        open_reference(run, opened.backend, start, newest) as reference,
    ):
        return await train_rl_with(run, opened, newest, reward, reference)


def make_manager(run: Run, opened: Stage, buffer: DataBuffer, reward: RewardFn | None) -> AsyncRolloutManager:
    """What generates and scores the batches of RL."""
    from rollouts.generation.async_rollout_manager import AsyncRolloutManager
    from rollouts.generation.generate import make_chat_generate

    config = run.config.rl
    assert config is not None
    return AsyncRolloutManager(
        buffer,
        opened.engine,
        generate=run.functions.generate or make_chat_generate(run.tokenizer, options=run.template),
        config=config.rollout,
        reward=reward,
        group_reward=run.functions.group_reward,
        filters=run.functions.filters,
        sampling=SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            stop_token_ids=run.stop_ids,
        ),
        seed=run.config.seed,
        policy_version=lambda: opened.backend.weight_version,
        max_staleness=config.max_staleness,
        spans=run.spans,
    )


async def train_rl_with(
    run: Run, opened: Stage, newest: Path | None, reward: RewardFn | None, reference: LogProbScorer | None
) -> int:
    """How many steps are complete, with what scores samples and the reference open."""
    from rollouts.checkpoints.load import load_trainer_state
    from rollouts.data.curriculum import (
        call_curriculum,
        decode_statistics,
        encode_statistics,
        start_statistics,
        update_statistics,
    )
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.loops.algorithm import decode_loop_state, encode_loop_state, start_loop_state
    from rollouts.loops.rl import run_rl_training
    from rollouts.metrics.sample_rows import select_evenly

    config, backend, engine = run.config.rl, opened.backend, opened.engine
    assert config is not None
    buffer = DataBuffer(run.rows.training["rl"], seed=run.config.seed)
    manager = make_manager(run, opened, buffer, reward)
    completed = completed_steps(newest)
    statistics, loop_state = start_statistics(buffer.weights), start_loop_state(config)
    if newest is not None:
        state = load_trainer_state(newest)
        buffer.load_state_dict(state["data_buffer"])
        manager.load_state_dict(state["rollout_manager"])
        reach("resume.state_loaded")
        statistics = (
            decode_statistics(state["curriculum"]) if "curriculum" in state else statistics
        )  # checkpoints before there were curricula
        loop_state = decode_loop_state(state["loop"]) if "loop" in state else loop_state  # or controllers

    def hold_state() -> Callable[[], dict[str, Any]]:
        drawn, rollouts, learned, loop = (
            buffer.state_dict(),
            manager.snapshot(),
            statistics,
            encode_loop_state(loop_state),
        )
        return lambda: {
            "data_buffer": drawn,
            "rollout_manager": rollouts.encode(),
            "curriculum": encode_statistics(learned),
            "loop": loop,
        }

    before_batch = hold_state()  # of a run that is cut inside a step; encoded only if it is

    def begin_batch(step: int) -> None:
        nonlocal before_batch
        before_batch = hold_state()
        if run.functions.curriculum is not None:
            buffer.set_weights(
                call_curriculum(run.functions.curriculum, step, statistics, function=config.curriculum)
            )

    def learn(step: int, samples: Sequence[Sample]) -> None:
        nonlocal statistics
        statistics = update_statistics(statistics, samples, step=step, drawn=buffer.drawn_by_source())
        for logged in (samples, manager.failed_samples()):
            run.spans.keep(
                logged[index].id for index in select_evenly(len(logged), run.config.output.samples_per_step)
            )

    async def save(step: int) -> None:
        await run.stop.save(
            lambda: save_step(run, opened, "rl", step, hold_state()(), reference=reference),
            what=f"step {step} of rl",
        )

    async def save_before_batch(step: int) -> None:
        await run.stop.save(
            lambda: save_step(run, opened, "rl", step, before_batch(), reference=reference),
            what=f"step {step} of rl",
        )

    async def evaluate_step(step: int) -> None:
        await evaluate_now(run, engine, "rl", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, engine, "rl", completed)

    every = run.config.output.checkpoint_every

    def take_metrics() -> dict[str, float]:
        return {**opened.checkpoints.take_metrics(), **getattr(reference, "metrics", {})}

    is_saved, stop = opened.checkpoints.is_saved, run.stop
    hooks = LoopHooks(
        evaluate_step,
        save,
        stop.is_requested,
        every,
        begin_batch,
        learn,
        stop,
        save_before_batch,
        take_metrics,
        is_saved,
    )
    hooks = replace(hooks, take_spans=run.spans.take)
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
            advantages=run.functions.advantages,
            seed=run.config.seed,
            state=loop_state,
            critic=opened.critic,
            completed_steps=completed,
            hooks=hooks,
        )
    return completed + len(history)

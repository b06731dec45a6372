"""The stages of a run, one after the other: each starts from the checkpoint of the one before, or goes on
from its own newest one.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration_training.hooks import StageLogger, completed_steps, make_hooks, restore
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
from integration_training.preferences import evaluate_pairs_once, train_preference, train_reward_model
from integration_training.reports import (
    PAIRS,
    evaluate_now,
    evaluate_once,
    evaluated,
    has_evaluation,
    sync_for_evaluation,
)
from rollouts.config.load import training_digest
from rollouts.config.modes import stage_config
from rollouts.crash_points import reach
from rollouts.errors import CheckpointError, ConfigError
from rollouts.loops.steps import EncodeState
from rollouts.protocols import LogProbScorer, RewardFn, TrainingBackend
from rollouts.types import RolloutBatch, SamplingParams

if TYPE_CHECKING:
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.generation.async_rollout_manager import AsyncRolloutManager


async def run_stages(run: Run, stages: Sequence[str], model_path: Path) -> bool:
    """True when every stage is complete, False when the user stopped the run. Each stage starts from the
    checkpoint of the one before.
    """
    from rollouts.checkpoints.resume import choose_checkpoint
    from rollouts.checkpoints.writer import retain

    before, config_hash = ("base", 0), training_digest(run.config)
    for stage in stages:
        total = stage_config(run.config, stage).steps
        stage_dir = run.run_dir.stage_checkpoints(stage)
        choose = partial(choose_checkpoint, stage_dir, config_hash=config_hash, report=warn)
        newest = await trio.to_thread.run_sync(choose)
        await trio.to_thread.run_sync(retain, run.run_dir, stage, choose_keep(run.config), warn)
        completed = completed_steps(newest)
        if completed > total:
            raise ConfigError(
                f"{stage}.steps={total} but {newest} has {completed} steps; set {stage}.steps={completed} or"
                " more"
            )
        # no later stage evaluates its weights before it begins
        last = set(stages[stages.index(stage) + 1 :]) <= {"reward_model"}
        if (
            completed < total
            or (last and not evaluated(run, stage, total))
            or not has_evaluation(run, stage, total, PAIRS)
        ):
            completed = await run_stage(run, stage, newest, model_path, before, last=last)
            # the spans of what came after the last step
            await run.logger.log_spans(stage, completed, completed, run.spans.take())
            gc.collect()  # a backend and its queue refer to each other: the model would stay in memory
        if completed < total:
            return False
        if stage != "reward_model":  # no stage starts from a reward model
            model_path = run.run_dir.checkpoint(stage, total)
            before = (stage, total)
        reach("stage.complete")
    return True


async def run_stage(
    run: Run, stage: str, newest: Path | None, start: Path, before: tuple[str, int], *, last: bool
) -> int:
    """How many steps of the stage are complete: opened, brought to `newest` or `start`, trained. `before` is
    the stage and step whose weights are at `start`. The `last` stage that generates is evaluated when it is
    complete; every other one where the next begins.
    """
    total, completed = stage_config(run.config, stage).steps, completed_steps(newest)
    train = {
        "sft": train_sft,
        "preference": train_preference,
        "reward_model": train_reward_model,
        "rl": train_rl,
    }[stage]
    async with open_stage(run, stage, newest or start) as opened:
        reach("stage.opened")
        if newest is not None:
            await restore(opened.saved, newest)
        if stage == "rl":
            await sync_at_start(opened, newest, trains=completed < total)
        if newest is None:
            await evaluate_once(run, opened, *before)
        if completed < total:
            completed = await train(run, opened, newest, start)
            if completed == total and last:
                if stage != "rl":
                    await sync_for_evaluation(opened)
                await evaluate_now(run, opened, stage, total)
            return completed
        if stage == "preference":
            await evaluate_pairs_once(run, opened, start)
        if stage == "reward_model":  # only its evaluation is left
            await train(run, opened, newest, start)
        if last:
            await evaluate_once(run, opened, stage, total)
        return completed


async def sync_at_start(opened: Stage, newest: Path | None, *, trains: bool) -> None:
    """Brings the engine to the trainer's weights, or to older ones if `newest` was saved between two updates
    of it and training goes on: what is complete is only evaluated.
    """
    from rollouts.weight_sync.engine_weights import sync_as_saved

    assert opened.engine is not None
    if newest is None or not trains:
        await opened.sync_weights(opened.backend, [opened.engine], completed_steps(newest))
    elif await sync_as_saved(
        opened.backend, opened.engine, opened.sync_weights, newest, completed_steps(newest)
    ):
        await opened.backend.load(newest).result()


async def train_sft(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at
    `start`.
    """
    from rollouts.loops.sft import run_sft_training

    config, data, completed = run.config.sft, run.conversations, completed_steps(newest)
    assert config is not None and data is not None
    row_count = len(run.rows.training["sft"].samples)
    for what, count in (
        ("cut at", data.truncated),
        ("left out: nothing to train on within", sum(data.dropped.values())),
    ):
        if count:
            say(f"sft.data: {count} of {row_count} rows {what} max_length={config.max_length}")

    async def evaluate_step(step: int) -> None:
        await sync_for_evaluation(opened)
        await evaluate_now(run, opened, "sft", step)

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, opened, "sft", completed)
    history = await run_sft_training(
        opened.backend,
        data,
        config,
        StageLogger(run, opened.checkpoints.take_metrics),
        seed=run.config.seed,
        completed_steps=completed,
        hooks=make_hooks(run, opened, "sft", evaluate_step),
    )
    return completed + len(history)


# --- RL -----------------------------------------------------------------------------------------------------


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
    assert config is not None and opened.engine is not None
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


class CurriculumBatches:
    """The manager's batches, whose prompts are drawn by the weights of the curriculum, which learns from each
    batch. Of the samples that are logged, the spans are kept.
    """

    def __init__(
        self, run: Run, backend: TrainingBackend, buffer: DataBuffer, manager: AsyncRolloutManager
    ) -> None:
        from rollouts.data.curriculum import start_statistics

        self._run = run
        self._backend = backend
        self._buffer = buffer
        self._manager = manager
        self.statistics: Mapping[str, Any] = start_statistics(buffer.weights)
        self.generating = manager.generating
        self.overlaps = manager.overlaps
        self.engines_updated = manager.engines_updated
        self.batch_metrics = manager.batch_metrics
        self.failed_samples = manager.failed_samples

    async def generate_batch(self) -> RolloutBatch:
        """The manager's next batch."""
        from rollouts.data.curriculum import call_curriculum, update_statistics
        from rollouts.metrics.sample_rows import select_evenly

        run, config, buffer = self._run, self._run.config.rl, self._buffer
        assert config is not None
        step = self._backend.weight_version + 1
        if run.functions.curriculum is not None:
            weights = call_curriculum(
                run.functions.curriculum, step, self.statistics, function=config.curriculum
            )
            buffer.set_weights(weights)
        batch = await self._manager.generate_batch()
        self.statistics = update_statistics(
            self.statistics, batch.samples, step=step, drawn=buffer.drawn_by_source()
        )
        for logged in (batch.samples, self._manager.failed_samples()):
            chosen = select_evenly(len(logged), run.config.output.samples_per_step)
            run.spans.keep(logged[index].id for index in chosen)
        return batch


async def train_rl_with(
    run: Run, opened: Stage, newest: Path | None, reward: RewardFn | None, reference: LogProbScorer | None
) -> int:
    """How many steps are complete, with what scores samples and the reference open."""
    from rollouts.checkpoints.load import load_trainer_state
    from rollouts.data.curriculum import decode_statistics, encode_statistics
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.loops.algorithm import decode_loop_state, encode_loop_state, start_loop_state
    from rollouts.loops.rl import run_rl_training

    config, engine, completed = run.config.rl, opened.engine, completed_steps(newest)
    assert config is not None and engine is not None
    buffer = DataBuffer(run.rows.training["rl"], seed=run.config.seed)
    manager = make_manager(run, opened, buffer, reward)
    batches, loop_state = CurriculumBatches(run, opened.backend, buffer, manager), start_loop_state(config)
    if newest is not None:
        state = load_trainer_state(newest)
        try:
            buffer.load_state_dict(state["data_buffer"])
            manager.load_state_dict(state["rollout_manager"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{newest}: the state of its prompts or rollouts does not read ({error!r}); another version"
                f" of rollouts saved it: resume with that one, or begin a new run with --model.name {newest}"
            ) from error
        reach("resume.state_loaded")
        if "curriculum" in state:  # older checkpoints have neither
            batches.statistics = decode_statistics(state["curriculum"], buffer.weights)
        loop_state = decode_loop_state(state["loop"]) if "loop" in state else loop_state

    def hold_state() -> EncodeState:
        drawn, rollouts = buffer.state_dict(), manager.snapshot()
        learned, loop = batches.statistics, encode_loop_state(loop_state)
        return lambda: {
            "data_buffer": drawn,
            "rollout_manager": rollouts(),
            "curriculum": encode_statistics(learned),
            "loop": loop,
        }

    async def evaluate_step(step: int) -> None:
        await evaluate_now(run, opened, "rl", step)

    def take_metrics() -> dict[str, float]:
        return {**opened.checkpoints.take_metrics(), **getattr(reference, "metrics", {})}

    if completed and config.eval_every and completed % config.eval_every == 0:
        await evaluate_once(run, opened, "rl", completed)
    history = await run_rl_training(
        opened.backend,
        buffer,
        batches,
        [engine],
        config,
        StageLogger(run, take_metrics),
        sync_weights=opened.sync_weights,
        reference=reference,
        advantages=run.functions.advantages,
        seed=run.config.seed,
        state=loop_state,
        critic=opened.critic,
        completed_steps=completed,
        hooks=make_hooks(run, opened, "rl", evaluate_step, hold_state=hold_state, reference=reference),
    )
    return completed + len(history)

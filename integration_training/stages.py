"""The stages of a run, one after the other: each starts from the checkpoint of the one before, or goes on
from its own newest one.

Around the steps of each: evaluations of its weights, and what its loop is handed, the record and hooks that
save and evaluate. Around run_rl_training: prompts, rollouts, rewards and the reference.
"""

import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from integration_training.evaluations import PAIRS, evaluate_once, is_evaluated
from integration_training.online import SERVED, Online, open_online
from integration_training.opening import (
    CRITIC_FOLDER,
    Run,
    Stage,
    choose_keep,
    completed_steps,
    open_rewards,
    open_scorer,
    open_scorers,
    open_stage,
)
from rollouts.advantages import ADVANTAGES
from rollouts.checkpoints.load import list_checkpoints, load_trainer_state
from rollouts.checkpoints.retention import choose_checkpoint
from rollouts.checkpoints.writer import retain
from rollouts.config.load import EVALUATE, STAGES, stage_config, training_digest
from rollouts.crash_points import reach
from rollouts.data.curriculum import (
    SourceStatistics,
    call_curriculum,
    decode_statistics,
    update_statistics,
)
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.samples import measure_scores
from rollouts.errors import CheckpointError, ConfigError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.collector import REPLAYED
from rollouts.loops import preference, reward_model
from rollouts.loops.algorithm import LoopState, decode_loop_state
from rollouts.loops.pairs import train_on_pairs
from rollouts.loops.rl import run_rl_training
from rollouts.loops.sft import run_sft_training
from rollouts.loops.steps import EncodeState, StepHooks, on_thread
from rollouts.losses.row_losses import (
    compares_with_reference,
    make_kto_loss,
    make_pair_loss,
    make_regression_loss,
    make_score_loss,
    measure_calibration,
    measure_regression,
)
from rollouts.metrics.jsonl import read_rows
from rollouts.online.buffer import weigh_draws
from rollouts.protocols import GroupRewardFn, LogProbScorer, RewardFn
from rollouts.reference.moving import REFERENCE, MovingReference
from rollouts.rewards.parts import RewardParts
from rollouts.run_dir import parse_step
from rollouts.types import Fields, Mean, Metric, Numbers, RolloutBatch
from rollouts.weight_sync.engine_weights import hold_engine_weights, sync_as_saved
from rollouts.weight_sync.update import log_warning

CENTRING = 0.01  # of reward models: weight of (score of chosen + score of rejected)²


async def run_stages(run: Run, stages: Sequence[str], model_path: Path) -> bool:
    """True when every stage is complete, False when the user stopped the run. Each stage starts from the
    checkpoint of the one before. Without stages the model is evaluated: the row is of the stage and step that
    made it, where its name is a checkpoint's.
    """
    if not stages:
        step = parse_step(model_path.name)
        made_by = ("base", 0) if step is None else (model_path.parent.name, step)
        async with open_stage(run, EVALUATE, model_path, None) as opened:
            await evaluate_once(run, opened, *made_by)
    for name in STAGES[: STAGES.index(stages[0])] if stages else ():
        if name != "reward_model" and list_checkpoints(run.run_dir.stage_checkpoints(name)):
            raise ConfigError(
                f"{run.run_dir.root} has the stage {name!r}, from which {stages[0]!r} would not begin; go on"
                f" with --mode {'+'.join((name, *stages))}, or name another --output.dir"
            )
    before, config_hash = ("base", 0), training_digest(run.config)
    for index, stage in enumerate(stages):
        total = stage_config(run.config, stage).steps
        choose = partial(choose_checkpoint, config_hash=config_hash, report=log_warning)
        newest = await trio.to_thread.run_sync(choose, run.run_dir.stage_checkpoints(stage))
        later = [
            name
            for name in STAGES[STAGES.index(stage) + 1 :]
            if name not in stages[:index] and list_checkpoints(run.run_dir.stage_checkpoints(name))
        ]
        if not newest and {*later} & {*stages}:
            raise ConfigError(
                f"the stage {stage!r} comes before {later[0]!r}, which has begun without it in"
                f" {run.run_dir.root}; go on with --mode {'+'.join(later)}, or name another --output.dir"
            )
        await trio.to_thread.run_sync(retain, run.run_dir, stage, choose_keep(run.config), log_warning)
        completed = completed_steps(newest)
        if later and completed < total:
            check_built_on(run, stage, later[0])
        if completed > total:
            raise ConfigError(
                f"{stage}.steps={total} but {newest} has {completed} steps; set {stage}.steps={completed} or"
                " more, or more epochs"
            )
        # no later stage evaluates its weights before it begins
        last = stage != "reward_model" and set(stages[index + 1 :]) <= {"reward_model"}
        evaluated = is_evaluated(run, stage, total, PAIRS) and (not last or is_evaluated(run, stage, total))
        if completed < total or not evaluated:
            completed = await run_stage(run, stage, newest, model_path, before, last=last)
            # the spans of what came after the last step
            await run.logger.log_spans(stage, completed, completed, run.logger.recorder.take())
            gc.collect()  # a backend and its queue refer to each other: the model would stay in memory
        if completed < total:
            return False
        if stage != "reward_model":  # no stage starts from a reward model
            model_path, before = run.run_dir.checkpoint(stage, total), (stage, total)
        reach("stage.complete")
    return True


def check_built_on(run: Run, stage: str, later: str) -> None:
    """Raises ConfigError where a stage is to have more steps than when `later` began from it. Steps that it
    had, and whose checkpoint was damaged, are made again.
    """
    rows, total = read_rows(run.run_dir.metrics), stage_config(run.config, stage).steps
    made = max((row["step"] for row in rows if row["stage"] == stage), default=0)
    if made < total:
        raise ConfigError(
            f"{stage}.steps={total}, but {later!r} has begun from step {made}, without the others; set"
            f" {stage}.steps={made}, or name another --output.dir"
        )


async def run_stage(
    run: Run, stage: str, newest: Path | None, start: Path, before: tuple[str, int], *, last: bool
) -> int:
    """How many steps of the stage are complete: opened, brought to `newest` or `start`, trained. `before` is
    the stage and step whose weights are at `start`. The `last` stage that generates is evaluated when it is
    complete; every other one where the next begins.
    """
    trainers = {
        "sft": train_sft,
        "preference": train_preference,
        "reward_model": train_reward_model,
        "rl": train_rl,
    }
    async with open_stage(run, stage, start, newest) as opened:
        reach("stage.opened")
        completed, steps, eval_every = opened.completed, opened.section.steps, opened.section.eval_every
        if newest:
            reach("resume.verified")
            await opened.backend.load(newest)
            if opened.critic:
                await opened.critic.load(newest / CRITIC_FOLDER)
            reach("resume.restored")
        if stage == "rl":
            await sync_at_start(opened)
        if not newest:
            await evaluate_once(run, opened, *before)
        elif completed < steps and eval_every and completed % eval_every == 0:
            await evaluate_once(run, opened, stage, completed)
        if completed < steps or run.prepared.list_held_out(stage):  # which may be left
            await trainers[stage](run, opened)
        if opened.completed == steps and last:
            await evaluate_once(run, opened, stage, steps)
        return opened.completed


async def sync_at_start(opened: Stage) -> None:
    """Brings the engine to the trainer's weights, or to older ones if the newest checkpoint was saved between
    two updates of it and training goes on: what is complete is only evaluated.
    """
    backend, engine, sync, completed = opened.backend, opened.engine, opened.sync_weights, opened.completed
    if not opened.newest or completed == opened.section.steps:
        await sync(backend, [engine], completed)
    elif await sync_as_saved(backend, engine, sync, opened.newest, completed):
        await backend.load(opened.newest)


# --- around the steps ---------------------------------------------------------------------------------------


def surround(
    run: Run,
    opened: Stage,
    *,
    reference: LogProbScorer | None = None,
    online: Online | None = None,
    **changed: Any,
) -> Fields:
    """The arguments that all loops share. The hooks save the stage's backends with the state of the hook
    hold_state, a reference that moves, the average of online learning and, between two updates of the engine,
    its weights; the last save ends before the loop does, others beside training. `changed`: hooks in place of
    the usual ones.
    """

    async def save(step: int, encode: EncodeState) -> None:
        write_more = []
        if opened.name == "rl" and step % opened.section.sync_every:
            write_engine = await hold_engine_weights(opened.engine, step)
            write_more += [("", write_engine)] if write_engine else []
        if isinstance(reference, MovingReference):
            write_more.append((REFERENCE, await reference.hold()))
        if online:
            write_more.append((SERVED, await online.average.hold()))
        last = step == opened.section.steps or run.stop.is_requested()
        await opened.checkpoints.save(step, encode(), last=last, write_more=write_more)

    usual: Fields = {
        "stop": run.stop,
        "save": save,
        "is_saved": opened.checkpoints.is_saved,
        "check": run.logger.check_kept,
        "checkpoint_every": run.config.output.checkpoint_every,
        "evaluate": partial(evaluate_once, run, opened, opened.name),
    }

    def measure() -> Numbers:
        beside = {**opened.checkpoints.take_metrics(), **getattr(reference, "metrics", {})}
        return {**run.logger.measure(), **beside}

    def note_row(stage: str, step: int, metrics: Numbers) -> None:
        opened.completed = step
        run.logger.progress(stage, step, metrics)
        if online:
            online.note_row(stage, step, metrics)

    return {
        "metrics_logger": replace(run.logger, measure=measure, progress=note_row),
        "seed": run.config.seed,
        "completed_steps": opened.completed,
        "hooks": StepHooks(**usual | changed),
    }


# --- training -----------------------------------------------------------------------------------------------


async def train_sft(run: Run, opened: Stage) -> None:
    """From what is completed to the last step, as the others do."""
    samples = run.prepared.samples["sft"].training
    await run_sft_training(opened.backend, samples, opened.section, **surround(run, opened))


# --- preferences --------------------------------------------------------------------------------------------


async def train_preference(run: Run, opened: Stage) -> None:
    """The model that the stage starts from is the reference."""
    config, backend, reference = opened.section, opened.backend, None
    training, held_out = run.prepared.samples["preference"]
    async with AsyncExitStack() as stack:
        if compares_with_reference(config.loss):
            scorer = open_scorer(run, opened)
            if run.config.reference.update != "none":
                reference = await stack.enter_async_context(scorer)
            else:
                async with scorer as frozen:  # scores every row once, and is gone before training begins
                    held_out = await preference.score_samples(held_out, config, frozen)
                    if opened.completed < config.steps:
                        scored = await preference.score_samples(training.samples, config, frozen)
                        training = training.with_samples(scored)
        if config.loss == "kto":
            good = sum(bool(sample.desirable) for sample in training.samples)
            bad = len(training.samples) - good
            loss = make_kto_loss(config.loss_params, num_desirable=good, num_undesirable=bad)
        else:
            loss = make_pair_loss(config.loss, config.loss_params)
        both = {"loss": on_thread(backend.device_thread.submit, loss), "reference": reference}
        train = partial(preference.run_preference_training, backend, training, config, **both)
        measure = partial(preference.evaluate_preferences, backend, held_out, config, name=PAIRS, **both)
        await train_and_measure(run, opened, train, measure, reference)


async def train_reward_model(run: Run, opened: Stage) -> None:
    """Trains a scalar head."""
    config, backend = opened.section, opened.backend
    training, held_out = run.prepared.samples["reward_model"]
    on_backend = partial(on_thread, backend.device_thread.submit)
    loss, measured = make_score_loss(CENTRING), measure_calibration
    if config.loss == "mse":
        mean, std = measure_scores(training.samples)
        targets = (np.asarray([sample.margin for sample in held_out]) - mean) / std
        loss, measured = make_regression_loss(mean, std), partial(measure_regression, targets=targets)
        backend.model.config.update({"score_mean": mean, "score_std": std})  # into every checkpoint
    train = partial(reward_model.run_reward_model_training, backend, training, config, loss=on_backend(loss))
    measure = partial(
        reward_model.evaluate_reward_model, backend, held_out, name=PAIRS, measure=on_backend(measured)
    )
    await train_and_measure(run, opened, train, measure)


async def train_and_measure(
    run: Run,
    opened: Stage,
    train: Callable[..., Awaitable[object]],
    measure: Callable[[], Awaitable[Numbers]],
    reference: LogProbScorer | None = None,
) -> None:
    """Held-out preferences are evaluated by `measure` before the first step, every eval_every steps and after
    the last, unless the record has it.
    """
    stage, completed, config = opened.name, opened.completed, opened.section

    async def evaluate_pairs(step: int) -> None:
        if not is_evaluated(run, stage, step, PAIRS):
            with run.logger.recorder.measure("evaluate"):
                metrics = await measure()
            await run.logger.log_evaluation(stage, step, opened.backend.weight_version, PAIRS, metrics)

    async def evaluate_step(step: int) -> None:
        await evaluate_pairs(step)
        await evaluate_once(run, opened, stage, step)

    if completed == 0 or (config.eval_every > 0 and completed % config.eval_every == 0):
        await evaluate_pairs(completed)
    await train(**surround(run, opened, evaluate=evaluate_step, reference=reference))
    if opened.completed == config.steps:
        await evaluate_pairs(config.steps)


# --- reinforcement learning ---------------------------------------------------------------------------------


async def train_rl(run: Run, opened: Stage) -> None:
    """The model that the stage starts from stays the reference."""
    config, backend, newest = opened.section, opened.backend, opened.newest
    loop, advantages = LoopState(config.kl_coef), run.functions.advantages
    async with (
        open_scorers(run, opened) as (reference, teacher),
        open_rewards(run, opened, reference) as rewards,
        open_online(run, opened, loop) as online,
    ):
        batches = Batches(run, opened, *rewards, online)
        buffer, manager, parts = batches.buffer, batches.manager, batches.parts
        if newest:
            batches.load(newest, loop)
        if online:
            advantages = {name: weigh_draws(one) for name, one in {**ADVANTAGES, **advantages}.items()}

        def hold_state() -> EncodeState:
            drawn, rollouts = buffer.state_dict(), manager.snapshot()
            learned, looped = batches.statistics, asdict(loop)
            seen = {"rewards": parts.state_dict()} if parts else {}
            seen |= {"guardrails": online.guardrails.state_dict()} if online else {}
            return lambda: {
                "data_buffer": drawn,
                "rollout_manager": rollouts(),
                "curriculum": {name: source._asdict() for name, source in learned.items()},
                "loop": looped,
                **seen,
            }

        async def evaluate_step(step: int) -> None:
            await evaluate_once(run, opened, "rl", step, parts=parts)
            if online:
                await online.publish(step)

        async with online.reading() if online else nullcontext():
            await run_rl_training(
                backend,
                buffer,
                batches,
                [opened.engine],
                config,
                sync_weights=opened.sync_weights,
                reference=reference,
                advantages=advantages,
                state=loop,
                critic=opened.critic,
                teacher=teacher,
                pairs=choose_pairs(run, opened, reference),
                compute_loss=backend.compute_loss,
                **surround(
                    run,
                    opened,
                    reference=reference,
                    online=online,
                    hold_state=hold_state,
                    evaluate=evaluate_step,
                ),
            )


def choose_pairs(run: Run, opened: Stage, reference: LogProbScorer | None) -> Any:
    """How a batch trains by pairs; None where it does by advantages."""
    submit = opened.backend.device_thread.submit
    return run.functions.pairs and partial(
        train_on_pairs,
        select=run.functions.pairs,
        find_loss=lambda spec: on_thread(submit, make_pair_loss(spec.name, spec.params)),
        reference=reference,
    )


class Batches:
    """A manager's batches of RL's prompts, which are drawn by the weights of the curriculum; it learns from
    each batch, and so do the parts of the reward.
    """

    def __init__(
        self,
        run: Run,
        opened: Stage,
        reward: RewardFn | None,
        group_reward: GroupRewardFn | None,
        parts: RewardParts | None,
        online: Online | None,
    ) -> None:
        config, functions = opened.section, run.functions
        self.opened, self.curriculum, self.parts = opened, functions.curriculum, parts
        self.online = online
        self.driven: Numbers = {}  # metrics of the parts in the last batch
        self.buffer: Any = online and online.buffer
        self.buffer = self.buffer or DataBuffer(run.rows.training["rl"], seed=run.config.seed)
        self.manager = manager = AsyncRolloutManager(
            self.buffer,
            opened.engine,
            generate=run.choose_generate(),
            config=config.rollout,
            reward=reward,
            group_reward=group_reward,
            filters=functions.filters,
            ranker=functions.ranker,
            sampling=run.choose_sampling(config.rollout),
            seed=run.config.seed,
            policy_version=lambda: opened.backend.weight_version,
            max_staleness=config.max_staleness,
            needs_reward=config.rollout.is_scored,
            spans=run.logger.recorder,
        )
        self.statistics: Any = {name: SourceStatistics() for name in ([] if online else self.buffer.weights)}
        if online:
            online.buffer.note_arrivals = manager.note_prompts
        self.generating, self.overlaps = manager.generating, manager.overlaps
        self.engines_updated, self.failed_samples = manager.engines_updated, manager.failed_samples

    def load(self, checkpoint: Path, loop: LoopState) -> None:
        """Goes on from what a checkpoint has, also of `loop`. Raises CheckpointError."""
        state = load_trainer_state(checkpoint)
        try:
            self.buffer.load_state_dict(state["data_buffer"])
            self.manager.load_state_dict(state["rollout_manager"])
            reach("resume.state_loaded")
            if self.parts:
                self.parts.load_state_dict(state["rewards"])
            if self.online:
                self.online.guardrails.load_state_dict(state["guardrails"])
            else:
                self.statistics = decode_statistics(state["curriculum"], self.buffer.weights)
            vars(loop).update(vars(decode_loop_state(state["loop"])))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint}: the state of its RL loop does not read ({error!r}); another version of"
                " rollouts saved it: resume with that one, or begin a new run with --model.name"
                f" {checkpoint}"
            ) from error

    async def generate_batch(self) -> RolloutBatch:
        """The manager's next batch."""
        buffer, step = self.buffer, self.opened.backend.weight_version + 1
        if self.curriculum:
            name = self.opened.section.curriculum
            buffer.set_weights(call_curriculum(self.curriculum, step, self.statistics, function=name))
        if self.online:
            await self.online.begin_batch()
        batch = await self.manager.generate_batch()
        new = [sample for sample in batch.samples if REPLAYED not in sample.metadata]
        self.driven = await self.parts.learn(new) if self.parts else {}
        if self.online:
            buffer.learn(new)
            self.driven = {**self.driven, **self.online.guardrails.observe(new)}
        else:
            drawn = buffer.drawn_by_source()
            self.statistics = update_statistics(self.statistics, new, step=step, drawn=drawn)
        return batch

    def batch_metrics(self) -> dict[str, Metric]:
        """Those of the manager, and of the parts of the reward."""
        driven = {name: Mean(value, 1) for name, value in self.driven.items()}
        return {**self.manager.batch_metrics(), **driven}

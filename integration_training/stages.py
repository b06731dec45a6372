"""The stages of a run, one after the other: each starts from the checkpoint of the one before, or goes on
from its own newest one.
"""

import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from integration_training.opening import (
    CRITIC,
    Run,
    Stage,
    choose_keep,
    completed_steps,
    open_scorer,
    open_stage,
    warn,
)
from integration_training.reports import PAIRS, evaluate_once, evaluate_pairs_once, is_evaluated, surround
from integration_training.rl import train_rl
from rollouts.checkpoints.load import list_checkpoints
from rollouts.checkpoints.retention import choose_checkpoint
from rollouts.checkpoints.writer import retain
from rollouts.config.load import EVALUATE, stage_config, training_digest
from rollouts.crash_points import reach
from rollouts.data.samples import measure_scores
from rollouts.errors import ConfigError
from rollouts.loops import preference, reward_model
from rollouts.loops.sft import run_sft_training
from rollouts.loops.steps import on_thread
from rollouts.losses.row_losses import (
    compares_with_reference,
    make_kto_loss,
    make_pair_loss,
    make_regression_loss,
    make_score_loss,
    measure_calibration,
    measure_regression,
)
from rollouts.protocols import LogProbScorer
from rollouts.run_dir import parse_step
from rollouts.weight_sync.engine_weights import sync_as_saved

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
    before, config_hash = ("base", 0), training_digest(run.config)
    for index, stage in enumerate(stages):
        total = stage_config(run.config, stage).steps
        stage_dir = run.run_dir.stage_checkpoints(stage)
        newest = await trio.to_thread.run_sync(
            partial(choose_checkpoint, stage_dir, config_hash=config_hash, report=warn)
        )
        later = [
            name for name in stages[index + 1 :] if list_checkpoints(run.run_dir.stage_checkpoints(name))
        ]
        if later and newest is None:
            raise ConfigError(
                f"the stage {stage!r} comes before {later[0]!r}, which has begun without it in"
                f" {run.run_dir.root}; go on with --mode {'+'.join(later)}, or name another --output.dir"
            )
        await trio.to_thread.run_sync(retain, run.run_dir, stage, choose_keep(run.config), warn)
        completed = completed_steps(newest)
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
            await run.logger.log_spans(stage, completed, completed, run.spans.take())
            gc.collect()  # a backend and its queue refer to each other: the model would stay in memory
        if completed < total:
            return False
        if stage != "reward_model":  # no stage starts from a reward model
            model_path, before = run.run_dir.checkpoint(stage, total), (stage, total)
        reach("stage.complete")
    return True


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
        if newest is not None:
            reach("resume.verified")
            await opened.backend.load(newest).result()
            if opened.critic is not None:
                await opened.critic.load(newest / CRITIC).result()
            reach("resume.restored")
        if stage == "rl":
            await sync_at_start(opened)
        if newest is None:
            await evaluate_once(run, opened, *before)
        elif completed < steps and eval_every and completed % eval_every == 0:
            await evaluate_once(run, opened, stage, completed)
        if completed < steps or run.prepared.list_held_out(stage):  # which may be left
            completed += await trainers[stage](run, opened)
        if completed == steps and last:
            await evaluate_once(run, opened, stage, completed)
        return completed


async def sync_at_start(opened: Stage) -> None:
    """Brings the engine to the trainer's weights, or to older ones if the newest checkpoint was saved between
    two updates of it and training goes on: what is complete is only evaluated.
    """
    backend, engine, sync, completed = opened.backend, opened.engine, opened.sync_weights, opened.completed
    assert engine is not None and sync is not None
    if opened.newest is None or completed == opened.section.steps:
        await sync(backend, [engine], completed)
    elif await sync_as_saved(backend, engine, sync, opened.newest, completed):
        await backend.load(opened.newest).result()


async def train_sft(run: Run, opened: Stage) -> int:
    """How many steps were made."""
    samples = run.prepared.samples["sft"].training
    return len(await run_sft_training(opened.backend, samples, opened.section, **surround(run, opened)))


# --- preferences --------------------------------------------------------------------------------------------


async def train_preference(run: Run, opened: Stage) -> int:
    """How many steps were made. The model that the stage starts from is the reference."""
    config, backend, reference = opened.section, opened.backend, None
    training, held_out = run.prepared.samples["preference"]
    async with AsyncExitStack() as stack:
        if compares_with_reference(config.loss):
            scorer = open_scorer(run, opened, lambda: int(backend.statistics()["steps"]))
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
        both: dict[str, Any] = {
            "loss": on_thread(backend.device_thread.submit, loss),
            "reference": reference,
        }
        train = partial(preference.run_preference_training, backend, training, config, **both)
        measure = partial(preference.evaluate_preferences, backend, held_out, config, name=PAIRS, **both)
        return await train_and_measure(run, opened, train, measure, reference)


async def train_reward_model(run: Run, opened: Stage) -> int:
    """How many steps were made, of training a scalar head."""
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
    return await train_and_measure(run, opened, train, measure)


async def train_and_measure(
    run: Run,
    opened: Stage,
    train: Callable[..., Awaitable[Sequence[object]]],
    measure: Callable[[], Awaitable[Mapping[str, float]]],
    reference: LogProbScorer | None = None,
) -> int:
    """How many steps were made. Held-out preferences are evaluated by `measure` before the first step,
    every eval_every steps and after the last, unless the record has it.
    """
    stage, completed, config = opened.name, opened.completed, opened.section

    async def evaluate_step(step: int) -> None:
        await evaluate_pairs_once(run, opened, step, measure)
        await evaluate_once(run, opened, stage, step)

    due = completed == 0 or (config.eval_every > 0 and completed % config.eval_every == 0)
    if due and completed < config.steps:
        await evaluate_pairs_once(run, opened, completed, measure)
    made = len(await train(**surround(run, opened, evaluate=evaluate_step, reference=reference)))
    if completed + made == config.steps:
        await evaluate_pairs_once(run, opened, config.steps, measure)
    return made

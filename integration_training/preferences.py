"""The stages that train on preferences: the DPO family and KTO on the policy, and reward models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration_training.hooks import StageLogger, completed_steps, make_hooks
from integration_training.opening import Run, Stage, open_scorer, say
from integration_training.reports import (
    PAIRS,
    evaluate_now,
    evaluate_once,
    has_evaluation,
    sync_for_evaluation,
)
from rollouts.data.preference import count_labels
from rollouts.preflight.rows import PreparedPreferences, describe_counts

if TYPE_CHECKING:
    from integration_training.opening import Backend
    from rollouts.loops.linearised import AsyncRowLoss
    from rollouts.protocols import LogProbScorer

Measure = Callable[[], Awaitable[dict[str, float]]]
"""Evaluates the held-out samples of a stage under its weights as they are."""

CENTRING = 0.01  # of reward models: weight of (score of chosen + score of rejected)²


def is_due(step: int, eval_every: int) -> bool:
    """Whether held-out samples are evaluated after `step`, which is not the last: before the first step, and
    every `eval_every` of them.
    """
    return step == 0 or (eval_every > 0 and step % eval_every == 0)


async def log_pairs(run: Run, stage: str, step: int, version: int, measure: Measure) -> None:
    """Evaluates the held-out preferences after `step`, unless the record has it."""
    if not has_evaluation(run, stage, step, PAIRS):
        with run.spans.measure("evaluate"):
            metrics = await measure()
        await run.logger.log_evaluation(stage, step, version, PAIRS, metrics)


# --- on the policy ------------------------------------------------------------------------------------------


def make_loss(run: Run, backend: Backend, prepared: PreparedPreferences) -> AsyncRowLoss:
    """The loss that [preference] names, on the backend's thread. Raises ConfigError."""
    from rollouts.loops.linearised import on_thread
    from rollouts.losses.row_losses import make_kto_loss, make_pair_loss

    config = run.config.preference
    assert config is not None
    if config.loss != "kto":
        return on_thread(backend.device_thread.submit, make_pair_loss(config.loss, config.loss_params))
    good, bad = count_labels(prepared.training.samples)
    loss = make_kto_loss(config.loss_params, num_desirable=good, num_undesirable=bad)
    return on_thread(backend.device_thread.submit, loss)


async def train_preference(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Starts after `newest`, a checkpoint of this stage, or from the model at
    `start`, which is the reference.
    """
    from rollouts.loops.preference import (
        evaluate_preferences,
        run_preference_training,
        score_mixture,
        score_samples,
    )
    from rollouts.losses.row_losses import compares_with_reference

    config, backend, completed, stage = (
        run.config.preference,
        opened.backend,
        completed_steps(newest),
        "preference",
    )
    assert config is not None
    prepared: Any = run.preferences[stage]  # of pairs or of labels, which the functions below tell apart
    training, held_out = prepared.training, prepared.held_out
    for line in describe_counts(stage, prepared.training, config.max_length):
        say(line)
    loss = make_loss(run, backend, prepared)
    async with AsyncExitStack() as stack:
        reference: LogProbScorer | None = None
        needed, moves = compares_with_reference(config.loss), run.config.reference.update != "none"
        if needed and moves:
            completed_now: Callable[[], int] = lambda: int(backend.statistics()["steps"])  # noqa: E731
            scorer = open_scorer(run, backend, start, newest, config.micro_batch_tokens, completed_now)
            reference = await stack.enter_async_context(scorer)
        if needed and not moves:  # every row is scored once
            async with open_scorer(
                run, backend, start, newest, config.micro_batch_tokens, lambda: 0
            ) as scorer:  # gone before training begins
                training = await score_mixture(training, config, scorer)
                held_out = await score_samples(held_out, config, scorer)

        async def measure() -> dict[str, float]:
            return await evaluate_preferences(
                backend, held_out, config, loss=loss, reference=reference, name=PAIRS
            )

        async def evaluate_step(step: int) -> None:
            await log_pairs(run, stage, step, backend.weight_version, measure)
            await sync_for_evaluation(opened)
            await evaluate_now(run, opened, stage, step)

        if is_due(completed, config.eval_every):  # step 0 too; a run that ended before this goes on with it
            await log_pairs(run, stage, completed, backend.weight_version, measure)
            if completed:
                await evaluate_once(run, opened, stage, completed)
        history = await run_preference_training(
            backend,
            training,
            config,
            StageLogger(run, opened.checkpoints.take_metrics),
            loss=loss,
            reference=reference,
            seed=run.config.seed,
            completed_steps=completed,
            hooks=make_hooks(run, opened, stage, evaluate_step, reference=reference),
        )
        completed += len(history)
        if completed == config.steps:
            await log_pairs(run, stage, completed, backend.weight_version, measure)
    return completed


async def evaluate_pairs_once(run: Run, opened: Stage, start: Path) -> None:
    """The evaluation of held-out preferences after the last step, if a run ended before it."""
    from rollouts.loops.preference import evaluate_preferences
    from rollouts.losses.row_losses import compares_with_reference

    config, backend = run.config.preference, opened.backend
    assert config is not None
    if has_evaluation(run, "preference", config.steps, PAIRS):
        return
    prepared: Any = run.preferences["preference"]
    async with AsyncExitStack() as stack:
        needed = compares_with_reference(config.loss)
        newest = run.run_dir.checkpoint("preference", config.steps)
        scorer = open_scorer(run, backend, start, newest, config.micro_batch_tokens, lambda: config.steps)
        reference = await stack.enter_async_context(scorer) if needed else None
        loss = make_loss(run, backend, prepared)
        measure = partial(
            evaluate_preferences,
            backend,
            prepared.held_out,
            config,
            loss=loss,
            reference=reference,
            name=PAIRS,
        )
        await log_pairs(run, "preference", config.steps, backend.weight_version, measure)


# --- reward models ------------------------------------------------------------------------------------------


async def train_reward_model(run: Run, opened: Stage, newest: Path | None, start: Path) -> int:
    """How many steps are complete. Trains a scalar head on the model at `start`, or `newest`."""
    from rollouts.loops.linearised import on_thread
    from rollouts.loops.reward_model import evaluate_reward_model, run_reward_model_training
    from rollouts.losses.row_losses import make_score_loss, measure_calibration

    config, completed, stage = run.config.reward_model, completed_steps(newest), "reward_model"
    backend, prepared = opened.backend, run.preferences[stage]
    assert config is not None
    for line in describe_counts(stage, prepared.training, config.max_length):
        say(line)
    on_backend = partial(on_thread, backend.device_thread.submit)
    calibration = on_backend(measure_calibration)
    measure = partial(evaluate_reward_model, backend, prepared.held_out, measure=calibration, name=PAIRS)

    async def evaluate_step(step: int) -> None:
        await log_pairs(run, stage, step, backend.weight_version, measure)

    if completed < config.steps and is_due(completed, config.eval_every):
        await evaluate_step(completed)
    history = await run_reward_model_training(
        backend,
        prepared.training,
        config,
        StageLogger(run, opened.checkpoints.take_metrics),
        loss=on_backend(make_score_loss(CENTRING)),
        seed=run.config.seed,
        completed_steps=completed,
        hooks=make_hooks(run, opened, stage, evaluate_step),
    )
    completed += len(history)
    if completed == config.steps:
        await evaluate_step(completed)
    return completed

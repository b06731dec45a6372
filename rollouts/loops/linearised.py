"""Training on batches of a dataset, one update each; also on losses that need several rows at once: a pass
without gradient, the loss's slope for every row, a step with these slopes.

    prepare(step) ──► forward ──► RowLoss ──► advantages ──► forward_backward("linear"), optim_step

A loss of sums of log-probs has one slope per row, at every token of it. So rows may be in any micro-batch and
on any rank, and the gradient is that of the loss of the whole batch; what it costs is the forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollouts.config.schema import StageConfig
from rollouts.data.scores import spread_scores
from rollouts.loops.steps import StepHooks, surround_steps
from rollouts.loops.updates import UpdateResult, record_updates, step_metrics, train, work_metrics
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import FloatArray, LossSpec, RolloutBatch

if TYPE_CHECKING:
    from rollouts.losses.row_losses import LinearisedRows

P = ParamSpec("P")
T = TypeVar("T")
AsyncRowLoss = Callable[..., Awaitable["LinearisedRows"]]
"""A RowLoss of rollouts.losses.row_losses, run where torch may run; see `on_thread`."""


def on_thread(
    submit: Callable[[Callable[[], T]], Awaitable[T]], function: Callable[P, T]
) -> Callable[P, Awaitable[T]]:
    """`function`, run by `submit`: `on_thread(backend.device_thread.submit, make_pair_loss("dpo", {}))` is
    what a loop takes as its loss.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return submit(lambda: function(*args, **kwargs))

    return call


class PreparedStep(NamedTuple):
    """What a step trains on."""

    batch: RolloutBatch
    loss: LossSpec
    found: LinearisedRows | None = None  # the true loss of the rows, where `loss` is its linear surrogate


def prepare_linear_step(rows: RolloutBatch, found: LinearisedRows) -> PreparedStep:
    """A step whose gradient is that of the true loss, `found` of these rows."""
    batch = dataclasses.replace(rows, advantages=spread_scores(found.advantages, rows))
    return PreparedStep(batch, LossSpec("linear", unit="constant", constant=found.total), found)


async def train_prepared(backend: TrainingBackend, step: PreparedStep) -> UpdateResult:
    """The result of its update. Where the loss is linearised, `loss` and the loss's own metrics are those of
    the true loss.
    """
    [(forward, optim)] = await train(backend, [step[:2]])
    if step.found is not None and forward.loss is not None:
        metrics = {**forward.metrics, **step.found.metrics}
        forward = dataclasses.replace(forward, loss=step.found.loss, metrics=metrics)
    return forward, optim


async def run_batch_steps(
    backend: TrainingBackend,
    prepare: Callable[[int, PhaseTimer], Awaitable[PreparedStep]],
    metrics_logger: MetricsLogger,
    stage: str,
    config: StageConfig,
    completed_steps: int,
    hooks: StepHooks | None,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to config.steps: one update on one batch
    each, as train_prepared makes it. `prepare` is called with the step, counted from 1.
    """
    history: list[dict[str, float]] = []
    async with surround_steps(hooks or StepHooks(), config, backend, completed=completed_steps) as steps:
        for step in range(completed_steps + 1, config.steps + 1):
            timer = PhaseTimer()
            prepared = await prepare(step, timer)
            with timer.phase("train"):
                result = await train_prepared(backend, prepared)
            async with steps.completing(step):
                metrics = step_metrics(*result) | timer.metrics() | work_metrics([result])
                trained_tokens = float(prepared.batch.response_lengths.sum())
                metrics["perf/trained_tokens_per_s"] = trained_tokens / timer.seconds("train")
                updates = record_updates(f"{stage} step {step}", [prepared.batch], [result])
                await metrics_logger.log_step(
                    stage, step, step - 1, metrics, updates=updates, spans=timer.spans()
                )
                history.append(metrics)
    return history


def sum_rows(values: Sequence[FloatArray]) -> NDArray[np.float64]:
    """[B] float64 sums of values [T_i] that are 0 where the loss mask is 0: log-probs of whole responses, in
    nats.
    """
    return np.asarray([row.sum(dtype=np.float64) for row in values])

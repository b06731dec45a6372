"""Training on losses that need several rows at once: a pass without gradient, the loss's slope for every row,
a step with these slopes.

    prepare(step) ──► forward ──► RowLoss ──► advantages ──► forward_backward("linear"), optim_step ──► one row of metrics

A loss of sums of log-probs has one slope per row, at every token of it. So rows may be in any micro-batch and
on any rank, and the gradient is that of the loss of the whole batch; what it costs is the forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollouts.data.scores import spread_scores
from rollouts.errors import StepInterrupted
from rollouts.loops.contributions import list_updates
from rollouts.loops.hooks import LoopHooks, read_piece_s, run_hooks, save_after_cut
from rollouts.loops.sft import step_metrics, train, warn_of_skipped_step
from rollouts.loops.stopping import StopControl
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import FloatArray, LossSpec, RolloutBatch, metric_values

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


class LinearisedStep(NamedTuple):
    """What a step trains on."""

    rows: RolloutBatch  # without advantages
    found: LinearisedRows  # of these rows


Prepare = Callable[[int], Awaitable[LinearisedStep]]
"""From the step, counted from 1."""


async def run_linearised_steps(
    backend: TrainingBackend,
    prepare: Prepare,
    metrics_logger: MetricsLogger,
    *,
    stage: str,
    steps: int,
    eval_every: int,
    completed_steps: int,
    hooks: LoopHooks,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to `steps`; `loss/total` and the loss's own
    metrics are those of the true loss.

    Saves, evaluates and stops as the other loops do; a stop that leaves no time for the step under way cuts
    it, in the pass before it too.
    """
    history: list[dict[str, float]] = []
    for step in range(completed_steps + 1, steps + 1):
        timer = PhaseTimer()
        try:
            with timer.phase("log_probs"):
                rows, found = await finish_or_interrupt(
                    backend, hooks.stop, "log_probs", lambda step=step: prepare(step)
                )
            batch = dataclasses.replace(rows, advantages=spread_scores(found.advantages, rows))
            with timer.phase("train"):
                [(forward, optim)] = await train(
                    backend, batch, LossSpec("linear", unit="constant", constant=found.total), hooks.stop
                )
        except StepInterrupted as cut:
            await save_after_cut(
                hooks,
                backend,
                cut,
                step - 1,
                saved=step - 1 == completed_steps or hooks.saves_after(step - 1),
            )
            break
        warn_of_skipped_step(stage, step, optim)
        metrics = step_metrics(forward, optim)
        true_loss = None if forward.loss is None else found.loss  # takes the place of the surrogate's
        if true_loss is not None:
            metrics |= {**metric_values(found.metrics), "loss/total": true_loss}
        trained_tokens = int(batch.response_lengths.sum())
        metrics |= {
            **timer.metrics(),
            "perf/trained_tokens_per_s": trained_tokens / timer.seconds("train"),
            **hooks.take_metrics(),
        }
        updates = list_updates([batch], [(dataclasses.replace(forward, loss=true_loss), optim)])
        await metrics_logger.log_step(
            stage, step, step - 1, metrics, updates=updates, spans=[*timer.spans(), *hooks.take_spans()]
        )
        history.append(metrics)
        if await run_hooks(hooks, step, last_step=steps, eval_every=eval_every):
            break
    return history


async def finish_or_interrupt(
    backend: TrainingBackend, stop: StopControl, phase: str, work: Callable[[], Awaitable[T]]
) -> T:
    """What `work` gives. Raises StepInterrupted when a stop cuts it; the backend's pass ends at its next
    micro-batch.
    """
    with stop.phase(phase, piece_s=lambda: read_piece_s(backend)):
        return await work()
    backend.interrupt()
    raise StepInterrupted(f"the step was cut during its {phase}")


def sum_rows(values: Sequence[FloatArray]) -> NDArray[np.float64]:
    """[B] float64 sums of values [T_i] that are 0 where the loss mask is 0: log-probs of whole responses, in
    nats.
    """
    return np.asarray([row.sum(dtype=np.float64) for row in values], np.float64)

"""The updates of a step, shared by all loops: submit them, await them, and say what the backend answered."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import trio

from rollouts.errors import EarlierStepFailed, StepInterrupted
from rollouts.messages import drop_none
from rollouts.metrics.token_shards import UpdateRecord
from rollouts.protocols import TrainingBackend
from rollouts.types import (
    BoolArray,
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    merge_metrics,
    metric_values,
)

Update = tuple[RolloutBatch, LossSpec]  # what one optimizer step is made of
UpdateResult = tuple[ForwardBackwardResult, OptimStepResult]


async def train(
    backend: TrainingBackend,
    updates: Sequence[Update],
    *,
    version: int | None = None,
    optim: OptimParams | None = None,
) -> list[UpdateResult]:
    """The results of each optimizer step, all submitted at once, with the settings `optim` in place of the
    backend's. The backend then has weight version `version`, if given.

    A cancellation interrupts the backend at its next micro-batch. If nothing was left to compute, the
    results are returned all the same.
    """
    submitted = [
        (backend.forward_backward(batch, loss), backend.optim_step(optim)) for batch, loss in updates
    ]
    results = []

    async def collect() -> None:
        for forward, optim in submitted[len(results) :]:
            results.append((await forward, await optim))

    try:
        await collect()
    except trio.Cancelled:
        backend.interrupt()
        with trio.CancelScope(shield=True), suppress(StepInterrupted, EarlierStepFailed):
            await collect()
        if len(results) < len(updates):
            raise
    if version is not None:
        with trio.CancelScope(shield=True):  # the backend is idle
            await backend.set_weight_version(version)
    return results


def measure_kl(
    before: Sequence[FloatArray], after: Sequence[FloatArray], masks: Sequence[BoolArray]
) -> float:
    """KL(before || after) in nats per trained token by k3, exp(r) − 1 − r with r = after − before: exact on
    average where `before` sampled the tokens. Not finite where a log-prob is not, or exp(r) overflows.
    """
    trained = np.concatenate(masks)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (np.concatenate(after) - np.concatenate(before))[trained].astype(np.float64)
        return float(np.mean(np.expm1(moved) - moved))


def record_updates(
    where: str, batches: Sequence[RolloutBatch], results: Sequence[UpdateResult], **fields: Any
) -> list[UpdateRecord]:
    """A record of each update that was made, with the same `fields`; with kl_stop these are the first of
    `batches`. Logs why an update changed nothing, as the metrics only count it.
    """
    records = []
    for number, (batch, (forward, optim)) in enumerate(zip(batches, results, strict=False)):
        if optim.skipped is not None:
            logging.getLogger("rollouts").warning(
                "%s: update %d changed nothing: %s", where, number, optim.skipped
            )
        records.append(UpdateRecord(number, batch, forward, optim, **fields))
    return records


# --- metrics ------------------------------------------------------------------------------------------------


def begin_last_pass(updates: int, minibatches: int) -> int:
    """The index of the first update of the last pass over a batch that had `updates`, 1 or more."""
    return (updates - 1) // minibatches * minibatches


def last_pass_metrics(results: Sequence[UpdateResult], minibatches: int) -> dict[str, float]:
    """The backend's metrics of the last pass over a batch, and how many updates changed nothing."""
    last_pass = results[begin_last_pass(len(results), minibatches) :]
    metrics = step_metrics(merge_forwards([forward for forward, _ in last_pass]), results[-1][1])
    return metrics | {"optim/skipped_steps": float(sum(optim.skipped is not None for _, optim in results))}


def work_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """How long the backend worked for these updates, and the most work that was queued before one of their
    optimizer steps; empty where it does not say so.
    """
    found = {
        "perf/forward_backward_s": sum(forward.seconds for forward, _ in results),
        "perf/optim_step_s": sum(optim.seconds for _, optim in results),
        "perf/trainer_queue/max": float(max(optim.queued for _, optim in results)),
    }
    return {name: value for name, value in found.items() if value}


def merge_forwards(forwards: Sequence[ForwardBackwardResult]) -> ForwardBackwardResult:
    """The result that one forward_backward on all parts would have had: Σ loss·denominator / Σ denominator.

    A part that was skipped counts for nothing; if all were, so is the result. A single part is the result, to
    the bit.
    """
    if len(forwards) == 1:
        return forwards[0]
    counted = [(forward.loss, forward.denominator) for forward in forwards if forward.loss is not None]
    denominator = sum(weight for _, weight in counted)
    return ForwardBackwardResult(
        loss=sum(loss * weight for loss, weight in counted) / denominator if counted else None,
        denominator=denominator,
        metrics=merge_metrics([forward.metrics for forward in forwards]),
        skipped=None if counted else forwards[-1].skipped,
    )


def step_metrics(forward: ForwardBackwardResult, optim: OptimStepResult) -> dict[str, float]:
    """The metrics of one update. A skipped one has no loss and no gradient norm."""
    found = {
        "optim/lr": optim.lr,
        "optim/clipped": float(optim.clipped),
        "optim/skipped_steps": float(optim.skipped is not None),
        "loss/total": forward.loss,
        "optim/grad_norm": optim.grad_norm,
    }
    return metric_values(forward.metrics) | drop_none(found)

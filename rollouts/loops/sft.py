"""Supervised fine-tuning: rows → batch → forward_backward → optim_step, one row of metrics a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rollouts.config.schema import SFTTrainingConfig
from rollouts.data.sft import SFTMixture, SFTSample, make_sft_batch, make_sft_mixture, select_sft_samples
from rollouts.errors import StepInterrupted
from rollouts.loops.contributions import list_updates
from rollouts.loops.hooks import LoopHooks, read_piece_s, run_hooks, save_after_cut
from rollouts.loops.stopping import StopControl
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainFuture, TrainingBackend
from rollouts.types import (
    ForwardBackwardResult,
    LossSpec,
    OptimStepResult,
    RolloutBatch,
    merge_metrics,
    metric_values,
)

SFT = LossSpec("sft")
UpdateResult = tuple[ForwardBackwardResult, OptimStepResult]  # of one optimizer step


async def run_sft_training(
    backend: TrainingBackend,
    data: SFTMixture | Sequence[SFTSample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: LoopHooks | None = None,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to `config.steps`.

    Consumes tokenized conversations; produces weights inside `backend`. The rows of a step are a pure
    function of (seed, step), so a resumed run sees what an unbroken one would have. The loss is the token
    mean of the whole batch. Waits for both futures of a step before the next: submitting ahead gains nothing
    here, because batches cost no time to make.
    """
    hooks = hooks or LoopHooks()
    mixture = data if isinstance(data, SFTMixture) else make_sft_mixture(data)
    history: list[dict[str, float]] = []
    for step in range(completed_steps + 1, config.steps + 1):
        timer = PhaseTimer()
        batch = make_sft_batch(select_sft_samples(mixture, config.batch_size, step - 1, seed))
        try:
            with timer.phase("train"):
                [(forward, optim)] = await train(backend, batch, SFT, hooks.stop)
        except StepInterrupted as cut:
            await save_after_cut(
                hooks,
                backend,
                cut,
                step - 1,
                saved=step - 1 == completed_steps or hooks.saves_after(step - 1),
            )
            break
        warn_of_skipped_step("sft", step, optim)
        trained_tokens = int(batch.response_lengths.sum())
        metrics = {
            **step_metrics(forward, optim),
            **timer.metrics(),
            "perf/trained_tokens_per_s": trained_tokens / timer.seconds("train"),
        }
        metrics |= hooks.take_metrics()
        updates = list_updates([batch], [(forward, optim)])
        await metrics_logger.log_step(
            "sft", step, step - 1, metrics, updates=updates, spans=[*timer.spans(), *hooks.take_spans()]
        )
        history.append(metrics)
        if await run_hooks(hooks, step, last_step=config.steps, eval_every=config.eval_every):
            break
    return history


async def train(
    backend: TrainingBackend,
    batch: RolloutBatch,
    loss: LossSpec,
    stop: StopControl,
    *,
    updates: int = 1,
    version: int | None = None,
) -> list[UpdateResult]:
    """What each of `updates` optimizer steps on the batch gave; see `train_on`."""
    return await train_on(backend, [(batch, loss)] * updates, stop, version=version)


async def train_on(
    backend: TrainingBackend,
    updates: Sequence[tuple[RolloutBatch, LossSpec]],
    stop: StopControl,
    *,
    version: int | None = None,
    ends_after: Callable[[ForwardBackwardResult], bool] | None = None,
    phase: str = "train",
) -> list[UpdateResult]:
    """What each optimizer step gave, after which the backend has weight version `version`, if given.

    `phase`: its name for a stop. All are submitted at once; with `ends_after` one by one, and none after one
    of which it is True. Raises StepInterrupted when a stop cuts it: the backend ends at its next micro-batch.
    One that had no more to compute is a step all the same.
    """
    futures: list[tuple[TrainFuture[ForwardBackwardResult], TrainFuture[OptimStepResult]]] = []
    results: list[UpdateResult] = []
    version_set: TrainFuture[None] | None = None
    ahead = len(updates) if ends_after is None else 1

    def has_ended() -> bool:
        return len(results) == len(updates) or (
            ends_after is not None and len(results) > 0 and ends_after(results[-1][0])
        )

    def submit_next() -> None:
        """Updates, and behind the last of them the version."""
        nonlocal version_set
        if not has_ended():
            futures.extend(
                (backend.forward_backward(batch, loss), backend.optim_step())
                for batch, loss in updates[len(futures) :][:ahead]
            )
        if version is not None and version_set is None and (len(futures) == len(updates) or has_ended()):
            version_set = backend.set_weight_version(version)

    async def collect_results() -> None:
        """Of what is submitted, and of the version once it is due."""
        for forward, optim in futures[len(results) :]:
            results.append((await forward.result(), await optim.result()))
        if has_ended():
            submit_next()
        if version_set is not None:
            await version_set.result()

    with stop.phase(phase, piece_s=lambda: read_piece_s(backend)) as scope:
        while not has_ended():
            submit_next()
            await collect_results()
    if scope.cancelled_caught:
        backend.interrupt()
        try:
            with stop.until_save() as scope:
                await collect_results()
        except StepInterrupted as cut:
            raise StepInterrupted(str(cut), updates_done=len(results)) from cut
        if scope.cancelled_caught:
            raise StepInterrupted("the micro-batch under way did not end in time", updates_done=len(results))
        if not has_ended():
            raise StepInterrupted("the step was cut between two of its updates", updates_done=len(results))
    return results


def warn_of_skipped_step(stage: str, step: int, optim: OptimStepResult) -> None:
    """Says by name why a step changed nothing; the metrics only count it."""
    if optim.skipped is not None:
        logging.getLogger("rollouts").warning("%s step %d changed nothing: %s", stage, step, optim.skipped)


def merge_forwards(forwards: Sequence[ForwardBackwardResult]) -> ForwardBackwardResult:
    """What one forward_backward on all of the parts would have said: Σ loss·denominator / Σ denominator, and
    the metrics merged.

    A part that was skipped counts for nothing; where all were, so is the result. A single part is the result,
    to the bit.
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
    """What the backend said about one step, under the names of the metrics file. A skipped step has no loss
    and no gradient norm.
    """
    metrics = metric_values(forward.metrics)
    metrics["optim/lr"] = optim.lr
    metrics["optim/clipped"] = float(optim.clipped)
    metrics["optim/skipped_steps"] = float(optim.skipped is not None)
    if forward.loss is not None:
        metrics["loss/total"] = forward.loss
    if optim.grad_norm is not None:
        metrics["optim/grad_norm"] = optim.grad_norm
    return metrics

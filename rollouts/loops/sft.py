"""Supervised fine-tuning: rows → batch → forward_backward → optim_step, one row of metrics a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollouts.config.schema import SFTTrainingConfig
from rollouts.data.sft import SFTMixture, SFTSample, make_sft_batch, make_sft_mixture, select_sft_samples
from rollouts.errors import StepInterrupted
from rollouts.loops.hooks import LoopHooks, read_piece_s, run_hooks, save_after_cut
from rollouts.loops.stopping import StopControl
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import ForwardBackwardResult, LossSpec, OptimStepResult, RolloutBatch, metric_values


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

    Consumes tokenized conversations; produces weights inside `backend`. The rows of a step are a pure function of (seed, step), so a
    resumed run sees what an unbroken one would have. The loss is the token mean of the whole batch. Waits for both futures of a step
    before the next: submitting ahead gains nothing here, because batches cost no time to make.
    """
    hooks = hooks or LoopHooks()
    mixture = data if isinstance(data, SFTMixture) else make_sft_mixture(data)
    history: list[dict[str, float]] = []
    for step in range(completed_steps + 1, config.steps + 1):
        timer = PhaseTimer()
        batch = make_sft_batch(select_sft_samples(mixture, config.batch_size, step - 1, seed))
        try:
            with timer.phase("train"):
                [(forward, optim)] = await train(backend, batch, LossSpec("sft"), hooks.stop)
        except StepInterrupted as cut:
            await save_after_cut(hooks, backend, cut, step - 1, saved=step - 1 == completed_steps or hooks.saves_after(step - 1))
            break
        warn_of_skipped_step("sft", step, optim)
        trained_tokens = int(batch.response_lengths.sum())
        metrics = {**step_metrics(forward, optim), **timer.metrics(), "perf/trained_tokens_per_s": trained_tokens / timer.seconds("train")}
        metrics |= hooks.take_metrics()
        await metrics_logger.log_step("sft", step, step - 1, metrics)
        history.append(metrics)
        if await run_hooks(hooks, step, last_step=config.steps, eval_every=config.eval_every):
            break
    return history


async def train(
    backend: TrainingBackend, batch: RolloutBatch, loss: LossSpec, stop: StopControl, *, updates: int = 1, version: int | None = None
) -> list[tuple[ForwardBackwardResult, OptimStepResult]]:
    """What each of `updates` optimizer steps on the batch gave, after which the backend has weight version `version`, if given.

    Raises StepInterrupted when a stop cuts it: the backend ends at its next micro-batch. One that had no more to compute is a step all the same.
    """
    futures = [(backend.forward_backward(batch, loss), backend.optim_step()) for _ in range(updates)]
    version_set = backend.set_weight_version(version) if version is not None else None
    results: list[tuple[ForwardBackwardResult, OptimStepResult]] = []

    async def collect_results() -> None:
        for forward, optim in futures[len(results) :]:
            results.append((await forward.result(), await optim.result()))
        if version_set is not None:
            await version_set.result()

    with stop.phase("train", piece_s=lambda: read_piece_s(backend)) as scope:
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
    return results


def warn_of_skipped_step(stage: str, step: int, optim: OptimStepResult) -> None:
    """Says by name why a step changed nothing; the metrics only count it."""
    if optim.skipped is not None:
        logging.getLogger("rollouts").warning("%s step %d changed nothing: %s", stage, step, optim.skipped)


def step_metrics(forward: ForwardBackwardResult, optim: OptimStepResult) -> dict[str, float]:
    """What the backend said about one step, under the names of the metrics file. A skipped step has no loss and no gradient norm."""
    metrics = metric_values(forward.metrics)
    metrics["optim/lr"] = optim.lr
    metrics["optim/clipped"] = float(optim.clipped)
    metrics["optim/skipped_steps"] = float(optim.skipped is not None)
    if forward.loss is not None:
        metrics["loss/total"] = forward.loss
    if optim.grad_norm is not None:
        metrics["optim/grad_norm"] = optim.grad_norm
    return metrics

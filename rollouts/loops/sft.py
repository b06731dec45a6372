"""Supervised fine-tuning: rows → batch → forward_backward → optim_step, one row of metrics a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollouts.config.schema import SFTTrainingConfig
from rollouts.data.sft import SFTMixture, SFTSample, make_sft_batch, make_sft_mixture, select_sft_samples
from rollouts.loops.hooks import LoopHooks, run_hooks
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import ForwardBackwardResult, LossSpec, OptimStepResult, metric_values


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
        with timer.phase("train"):
            forward_future = backend.forward_backward(batch, LossSpec("sft"))
            optim_future = backend.optim_step()
            forward, optim = await forward_future.result(), await optim_future.result()
        warn_of_skipped_step("sft", step, optim)
        trained_tokens = int(batch.response_lengths.sum())
        metrics = {**step_metrics(forward, optim), **timer.metrics(), "perf/trained_tokens_per_s": trained_tokens / timer.seconds("train")}
        await metrics_logger.log_step("sft", step, step - 1, metrics)
        history.append(metrics)
        if await run_hooks(hooks, step, last_step=config.steps, eval_every=config.eval_every):
            break
    return history


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

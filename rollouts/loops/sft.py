"""Supervised fine-tuning: rows → batch → forward_backward → optim_step, one row of metrics a step."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.config.schema import SFTTrainingConfig
from rollouts.data.mixture import Mixture, make_mixture, select_samples
from rollouts.data.sft import SFTSample, make_sft_batch
from rollouts.loops.steps import StepHooks, surround_steps
from rollouts.loops.updates import record_updates, step_metrics, train
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import LossSpec


async def run_sft_training(
    backend: TrainingBackend,
    data: Mixture[SFTSample] | Sequence[SFTSample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to `config.steps`.

    Consumes tokenized conversations; produces weights inside `backend`. The rows of a step are a pure
    function of (seed, step), so a resumed run sees what an unbroken one would have. The loss is the token
    mean of the whole batch. Waits for each step before the next: submitting ahead gains nothing here, because
    batches cost no time to make.
    """
    mixture = data if isinstance(data, Mixture) else make_mixture(data)
    history: list[dict[str, float]] = []
    async with surround_steps(hooks or StepHooks(), config, backend, completed=completed_steps) as steps:
        for step in range(completed_steps + 1, config.steps + 1):
            timer = PhaseTimer()
            batch = make_sft_batch(select_samples(mixture, config.batch_size, step - 1, seed))
            with timer.phase("train"):
                results = await train(backend, [(batch, LossSpec("sft"))])
            async with steps.completing(step):
                metrics = step_metrics(*results[0]) | timer.metrics()
                trained_tokens = float(batch.response_lengths.sum())
                metrics["perf/trained_tokens_per_s"] = trained_tokens / timer.seconds("train")
                await metrics_logger.log_step(
                    "sft",
                    step,
                    step - 1,
                    metrics,
                    updates=record_updates(f"sft step {step}", [batch], results),
                    spans=timer.spans(),
                )
                history.append(metrics)
    return history

"""Supervised fine-tuning: rows → batch → forward_backward → optim_step, one row of metrics a step."""

from collections.abc import Sequence

from rollouts.config.schema import SFTTrainingConfig
from rollouts.data.mixture import Mixture, make_mixture, select_samples
from rollouts.data.samples import SFTSample, make_sft_batch
from rollouts.loops.steps import PreparedStep, StepHooks, run_batch_steps
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import LossSpec, Numbers


async def run_sft_training(
    backend: TrainingBackend,
    data: Mixture[SFTSample] | Sequence[SFTSample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[Numbers]:
    """The metrics of the newest HELD_STEPS of the steps that ran, `completed_steps` + 1 to config.steps.

    Consumes tokenized conversations; produces weights inside `backend`. The rows of a step are a pure
    function of (seed, step), so a resumed run sees what an unbroken one would have. The loss is the token
    mean of the whole batch. Waits for each step before the next: submitting ahead gains nothing here, because
    batches cost no time to make.
    """
    mixture = data if isinstance(data, Mixture) else make_mixture(data)

    async def prepare(step: int, _: PhaseTimer) -> PreparedStep:
        samples = select_samples(mixture, config.batch_size, step - 1, seed)
        return PreparedStep(make_sft_batch(samples), LossSpec("sft"))

    return await run_batch_steps(backend, prepare, metrics_logger, "sft", config, completed_steps, hooks)

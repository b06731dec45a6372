"""Training of a reward model: pairs, or responses with scores → a score of the model's for each → the loss of
the whole batch → one step.

The backend's model has a scalar head. A response's score is read at the last token that trains, its end of
turn, as where RL samples end.
"""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollouts.config.schema import RewardModelTrainingConfig
from rollouts.data.mixture import Mixture, select_samples
from rollouts.data.samples import PreferenceSample
from rollouts.data.scores import make_score_batch, read_scores
from rollouts.loops.steps import AsyncRowLoss, PreparedStep, StepHooks, prepare_linear_step, run_batch_steps
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import Numbers, RolloutBatch

Measure = Callable[[NDArray[np.float64]], Awaitable[Numbers]]
"""measure_calibration or measure_regression of rollouts.losses.row_losses, run where torch may run."""


async def run_reward_model_training(
    backend: TrainingBackend,
    data: Mixture[PreferenceSample],
    config: RewardModelTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    loss: AsyncRowLoss,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[Numbers]:
    """The metrics of the newest HELD_STEPS of the steps that ran, `completed_steps` + 1 to config.steps.

    Consumes tokenized samples with their margins; produces weights inside `backend`, which has a scalar head.
    `loss` is make_score_loss(centring), or make_regression_loss, on the backend's thread. The samples of a
    step are a pure function of (seed, step). As in run_preference_training a pass without gradient comes
    first, so micro-batches and ranks do not matter.
    """

    async def prepare(step: int, timer: PhaseTimer) -> PreparedStep:
        samples = select_samples(data, config.batch_size, step - 1, seed)
        margins = np.asarray([sample.margin for sample in samples], np.float64)
        with timer.phase("log_probs"):
            rows, scores = await score_pairs(backend, samples)
            return prepare_linear_step(rows, await loss(scores, margins=margins))

    return await run_batch_steps(
        backend, prepare, metrics_logger, "reward_model", config, completed_steps, hooks
    )


async def evaluate_reward_model(
    backend: TrainingBackend, held_out: Sequence[PreferenceSample], *, measure: Measure, name: str
) -> Numbers:
    """`eval/{name}/…` of held-out samples under the backend's weights: what `measure` finds; empty without a
    sample. Raises ModelError if a score is not finite.
    """
    if not held_out:
        return {}
    _, scores = await score_pairs(backend, held_out)
    return {f"eval/{name}/{key}": value for key, value in (await measure(scores)).items()}


async def score_pairs(
    backend: TrainingBackend, samples: Sequence[PreferenceSample]
) -> tuple[RolloutBatch, NDArray[np.float64]]:
    """(rows, their scores), of pairs [2P] chosen and rejected in turn."""
    rows = make_score_batch([row.token_ids for sample in samples for row in sample.rows])
    return rows, read_scores(await backend.forward(rows), rows).astype(np.float64)

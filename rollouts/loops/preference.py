"""Training on preferences: pairs or labelled responses → sums of log-probs → a preference loss of the whole
batch → one step.

data ──(reference, once)──► samples with reference sums
  └──► batch ──► policy's sums ──► loss and slopes ──► forward_backward, optim_step
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollouts.config.schema import REFERENCE_FREE, PreferenceTrainingConfig
from rollouts.data.mixture import Mixture, select_samples
from rollouts.data.samples import PreferenceSample, make_preference_batch
from rollouts.errors import ConfigError
from rollouts.loops.steps import (
    AsyncRowLoss,
    PreparedStep,
    StepHooks,
    prepare_linear_step,
    run_batch_steps,
    sum_rows,
)
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import LogProbScorer, MetricsLogger, TrainingBackend
from rollouts.types import Numbers, metric_values

if TYPE_CHECKING:
    from rollouts.losses.row_losses import LinearisedRows

KTO = "kto"
HIGHEST_EXPONENT = 709.0  # exp of more overflows float64


async def run_preference_training(
    backend: TrainingBackend,
    data: Mixture[PreferenceSample],
    config: PreferenceTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None = None,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[Numbers]:
    """The metrics of the newest HELD_STEPS of the steps that ran, `completed_steps` + 1 to config.steps.

    Consumes tokenized samples; produces weights inside `backend`. The samples of a step are a pure function
    of (seed, step). Every step is two passes: one without gradient gives each response's log-prob, from which
    `loss` (made by rollouts.losses.row_losses, on the backend's thread) takes the loss and its slopes; the
    other trains with these. Both are the whole batch's, so micro-batches and ranks do not matter. `reference`
    scores every batch; samples that score_samples has scored need none. Raises ConfigError without the
    reference that the loss asks for.
    """

    async def prepare(step: int, timer: PhaseTimer) -> PreparedStep:
        samples = select_samples(data, config.batch_size, step - 1, seed)
        with timer.phase("log_probs"):
            _, found = await linearise_samples(backend, samples, config, loss, reference)
        rows = make_preference_batch(samples, rows_per_sample=1 if config.loss == KTO else 2)
        return prepare_linear_step(rows, found)

    return await run_batch_steps(
        backend, prepare, metrics_logger, "preference", config, completed_steps, hooks
    )


async def evaluate_preferences(
    backend: TrainingBackend,
    held_out: Sequence[PreferenceSample],
    config: PreferenceTrainingConfig,
    *,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None = None,
    name: str = "pairs",
) -> Numbers:
    """Metrics of held-out samples under the backend's weights, `eval/{name}/…`; empty without a sample.

    `loss`, and the loss's own metrics: `accuracy` (share of pairs with a positive margin of the loss's
    rewards; pairs only), `rewards/margins`, …; `perplexity/chosen` and `perplexity/rejected`: exp of the mean
    negative log-prob per token of the chosen or good, and of the other responses. KTO's reference point is
    that of all held-out samples together. What is not finite, as the loss of a response of probability 0, is
    absent. Raises ConfigError without the reference that config asks for.
    """
    if not held_out:
        return {}
    sums, found = await linearise_samples(backend, held_out, config, loss, reference)
    values = {"loss": found.loss, **metric_values(found.metrics)}
    totals = {"chosen": np.zeros(2), "rejected": np.zeros(2)}  # −Σ log-prob and tokens, by kind of response
    for sample, of_rows in zip(held_out, sums.reshape(len(held_out), -1).tolist(), strict=True):
        pair = sample.desirable is None
        kinds = ("chosen", "rejected") if pair else ("chosen" if sample.desirable else "rejected",)
        for kind, row, value in zip(kinds, sample.rows, of_rows, strict=False):
            totals[kind] += -value, row.loss_mask.sum()
    for kind, (total, count) in totals.items():
        if count and total / count < HIGHEST_EXPONENT:  # a NaN is not below either
            values[f"perplexity/{kind}"] = math.exp(total / count)
    called = {"rewards/accuracies": "accuracy"}
    return {
        f"eval/{name}/{called.get(key, key)}": value for key, value in values.items() if math.isfinite(value)
    }


# --- what a step does ---------------------------------------------------------------------------------------


async def linearise_samples(
    backend: TrainingBackend,
    samples: Sequence[PreferenceSample],
    config: PreferenceTrainingConfig,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None,
) -> "tuple[NDArray[np.float64], LinearisedRows]":
    """(the policy's sums [B] of all rows that config scores, in nats; the loss of these samples with a slope
    for every row that trains).

    Of pairs both rows train, of labelled samples the first. Raises ConfigError without the reference that
    config asks for.
    """
    rows_per_sample = count_rows(config)
    scored = make_preference_batch(samples, rows_per_sample=rows_per_sample)
    sums, ref = sum_rows(await backend.forward(scored)), None
    optional = config.loss in REFERENCE_FREE or ":" in config.loss
    if reference is not None or not optional or all(sample.ref_log_probs for sample in samples):
        known = await score_samples(samples, config, reference)
        ref = np.asarray([one for sample in known for one in (sample.ref_log_probs or ())[:rows_per_sample]])
    assert (samples[0].desirable is not None) == (config.loss == KTO), (
        "KTO trains on labelled samples, the other losses on pairs"
    )
    if config.loss != KTO:
        return sums, await loss(sums, ref_log_probs=ref, lengths=scored.response_lengths)
    assert ref is not None
    (own, others), (ref_own, ref_others) = (
        (values[::rows_per_sample], values[1::2] if rows_per_sample == 2 else None) for values in (sums, ref)
    )
    good = np.asarray([sample.desirable for sample in samples])
    return sums, await loss(own, ref_log_probs=ref_own, desirable=good, others=others, ref_others=ref_others)


def count_rows(config: PreferenceTrainingConfig) -> int:
    """Rows of a sample that are scored: two, but for KTO with a reference point of its own no mismatched
    ones.
    """
    return 1 if config.loss == KTO and "reference_point" in config.loss_params else 2


async def score_samples(
    samples: Sequence[PreferenceSample], config: PreferenceTrainingConfig, reference: LogProbScorer | None
) -> list[PreferenceSample]:
    """The samples with the reference's log-probs of their rows, in chunks of config.batch_size in order;
    those that are scored stay as they are.

    A pure function of the samples, their order and the reference: a resumed run that scores again gets the
    same numbers, of a reference that gives the same. Raises ConfigError if there is something to score and no
    reference.
    """
    found, count = list(samples), count_rows(config)
    places = [place for place, sample in enumerate(found) if sample.ref_log_probs is None]
    for begin in range(0, len(places), config.batch_size):
        if reference is None:
            raise ConfigError(
                f"preference.loss={config.loss!r} compares with a reference model; pass reference=, or"
                " samples that it has scored"
            )
        chunk = places[begin : begin + config.batch_size]
        batch = make_preference_batch([found[place] for place in chunk], rows_per_sample=count)
        sums = sum_rows(await reference.score(batch)).reshape(-1, count)
        for place, values in zip(chunk, sums.tolist(), strict=True):
            found[place] = found[place]._replace(ref_log_probs=tuple(values))
    return found

"""Training on preferences: pairs or labelled responses → sums of log-probs → a preference loss of the whole
batch → one step.

data ──(reference, once)──► samples with reference sums
  └──► batch ──► policy's sums ──► loss and slopes ──► forward_backward, optim_step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollouts.config.schema import REFERENCE_FREE, PreferenceTrainingConfig
from rollouts.data.mixture import Mixture, select_samples
from rollouts.data.preference import (
    LabelledSample,
    PairSample,
    PreferenceSample,
    make_preference_batch,
)
from rollouts.errors import ConfigError
from rollouts.loops.linearised import (
    AsyncRowLoss,
    LinearisedStep,
    run_linearised_steps,
    sum_rows,
)
from rollouts.loops.steps import StepHooks
from rollouts.protocols import LogProbScorer, MetricsLogger, TrainingBackend
from rollouts.types import RolloutBatch, metric_values

if TYPE_CHECKING:
    from rollouts.losses.row_losses import LinearisedRows

S = TypeVar("S", PairSample, LabelledSample)
Sums = NDArray[np.float64]  # [B] nats, log-probs of responses
KTO = "kto"
HIGHEST_EXPONENT = 709.0  # exp of more overflows float64


async def run_preference_training(
    backend: TrainingBackend,
    data: Mixture[S],
    config: PreferenceTrainingConfig,
    metrics_logger: MetricsLogger,
    *,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None = None,
    seed: int = 0,
    completed_steps: int = 0,
    hooks: StepHooks | None = None,
) -> list[dict[str, float]]:
    """The metrics of every step that ran, `completed_steps` + 1 to `config.steps`.

    Consumes tokenized samples; produces weights inside `backend`. The samples of a step are a pure function
    of (seed, step). Every step is two passes: one without gradient gives each response's log-prob, from which
    `loss` (made by rollouts.losses.row_losses, on the backend's thread) takes the loss and its slopes; the
    other trains with these. Both are the whole batch's, so micro-batches and ranks do not matter. `reference`
    scores every batch; samples that score_mixture has scored need none. Raises ConfigError without the
    reference that the loss asks for.
    """

    async def prepare(step: int) -> LinearisedStep:
        samples = select_samples(data, config.batch_size, step - 1, seed)
        _, found = await linearise_samples(backend, samples, config, loss=loss, reference=reference)
        return LinearisedStep(
            make_preference_batch(samples, rows_per_sample=1 if config.loss == KTO else 2), found
        )

    return await run_linearised_steps(
        backend,
        prepare,
        metrics_logger,
        stage="preference",
        config=config,
        completed_steps=completed_steps,
        hooks=hooks,
    )


async def evaluate_preferences(
    backend: TrainingBackend,
    held_out: Sequence[S],
    config: PreferenceTrainingConfig,
    *,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None = None,
    name: str = "pairs",
) -> dict[str, float]:
    """Metrics of held-out samples under the backend's weights, `eval/{name}/…`; empty without a sample.

    `loss`, and the loss's own metrics: `accuracy` (share of pairs with a positive margin of the loss's
    rewards; pairs only), `rewards/margins`, …; `perplexity/chosen` and `perplexity/rejected`: exp of the mean
    negative log-prob per token of the chosen or good, and of the other responses. KTO's reference point is
    that of all held-out samples together. What is not finite, as the loss of a response of probability 0, is
    absent. Raises ConfigError without the reference that config asks for.
    """
    if not held_out:
        return {}
    samples = list(held_out)
    sums, found = await linearise_samples(backend, samples, config, loss=loss, reference=reference)
    metrics = metric_values(found.metrics)
    accuracy = {"accuracy": metrics.pop("rewards/accuracies")} if "rewards/accuracies" in metrics else {}
    values = {"loss": found.loss, **accuracy, **metrics, **_compute_perplexities(samples, sums)}
    return {f"eval/{name}/{key}": value for key, value in values.items() if math.isfinite(value)}


# --- what a step does ---------------------------------------------------------------------------------------


async def linearise_samples(
    backend: TrainingBackend,
    samples: Sequence[PreferenceSample],
    config: PreferenceTrainingConfig,
    *,
    loss: AsyncRowLoss,
    reference: LogProbScorer | None = None,
) -> tuple[Sums, LinearisedRows]:
    """(the policy's sums of all rows that config scores, the loss of these samples with a slope for every row
    that trains).

    Of pairs both rows train, of labelled samples the first. Raises ConfigError without the reference that
    config asks for.
    """
    scored = make_preference_batch(samples, rows_per_sample=count_rows(config))
    sums = sum_rows(await backend.forward(scored).result())
    ref = await _find_reference_sums(samples, scored, config, reference)
    assert isinstance(samples[0], LabelledSample) == (config.loss == KTO), (
        "KTO trains on labelled samples, the other losses on pairs"
    )
    if isinstance(samples[0], PairSample):
        return sums, await loss(sums, ref_log_probs=ref, lengths=scored.response_lengths)
    good = np.asarray([isinstance(sample, LabelledSample) and sample.desirable for sample in samples])
    if count_rows(config) == 1:
        return sums, await loss(sums, ref_log_probs=ref, desirable=good, others=None, ref_others=None)
    assert ref is not None
    return sums, await loss(
        sums[0::2], ref_log_probs=ref[0::2], desirable=good, others=sums[1::2], ref_others=ref[1::2]
    )


def count_rows(config: PreferenceTrainingConfig) -> int:
    """Rows of a sample that are scored: two, but for KTO with a reference point of its own no mismatched
    ones.
    """
    return 1 if config.loss == KTO and "reference_point" in config.loss_params else 2


async def _find_reference_sums(
    samples: Sequence[PreferenceSample],
    scored: RolloutBatch,
    config: PreferenceTrainingConfig,
    reference: LogProbScorer | None,
) -> Sums | None:
    known = [sample.ref_log_probs for sample in samples]
    if all(sums is not None for sums in known):
        return np.asarray(
            [value for sums in known if sums is not None for value in sums[: count_rows(config)]]
        )
    if reference is None and (config.loss in REFERENCE_FREE or ":" in config.loss):
        return None
    return sum_rows(await _require(reference, config).score(scored))


def _require(reference: LogProbScorer | None, config: PreferenceTrainingConfig) -> LogProbScorer:
    if reference is None:
        raise ConfigError(
            f"preference.loss={config.loss!r} compares with a reference model; pass reference=, or samples"
            " that it has scored"
        )
    return reference


# --- the reference, once ------------------------------------------------------------------------------------


async def score_mixture(
    data: Mixture[S], config: PreferenceTrainingConfig, reference: LogProbScorer | None
) -> Mixture[S]:
    """The data with the reference's log-probs in every sample; see score_samples."""
    return data.with_samples(await score_samples(data.samples, config, reference))


async def score_samples(
    samples: Sequence[S], config: PreferenceTrainingConfig, reference: LogProbScorer | None
) -> list[S]:
    """The samples with the reference's log-probs of their rows, in chunks of config.batch_size in order;
    those that are scored stay as they are.

    A pure function of the samples, their order and the reference: a resumed run that scores again gets the
    same numbers, of a reference that gives the same. Raises ConfigError if there is something to score and no
    reference.
    """
    found = list(samples)
    places = [place for place, sample in enumerate(found) if sample.ref_log_probs is None]
    per_sample = count_rows(config)
    for begin in range(0, len(places), config.batch_size):
        chunk = places[begin : begin + config.batch_size]
        batch = make_preference_batch([found[place] for place in chunk], rows_per_sample=per_sample)
        sums = sum_rows(await _require(reference, config).score(batch)).reshape(-1, per_sample)
        for place, values in zip(chunk, sums.tolist(), strict=True):
            found[place] = replace(found[place], ref_log_probs=tuple(values))
    return found


# --- measures -----------------------------------------------------------------------------------------------


def _compute_perplexities(samples: Sequence[PreferenceSample], sums: Sums) -> dict[str, float]:
    """exp(−Σ log-prob / Σ tokens) of the rows of each kind, from `sums`, which begin with the rows of the
    first sample; a kind without rows, or with a token of probability 0, is absent.
    """
    per_sample = len(sums) // len(samples)
    totals: dict[str, list[float]] = {"chosen": [0.0, 0.0], "rejected": [0.0, 0.0]}
    for index, sample in enumerate(samples):
        kinds = (
            ("chosen", "rejected")
            if isinstance(sample, PairSample)
            else ("chosen" if sample.desirable else "rejected",)
        )
        for kind, row, value in zip(kinds, sample.rows, sums[index * per_sample :].tolist(), strict=False):
            totals[kind][0] -= value
            totals[kind][1] += float(row.loss_mask.sum())
    means = {kind: total / count for kind, (total, count) in totals.items() if count}
    return {
        f"perplexity/{kind}": math.exp(mean) for kind, mean in means.items() if mean < HIGHEST_EXPONENT
    }  # a NaN is not below either

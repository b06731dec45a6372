"""What every policy loss can add to its own term: a correction, a KL term, an entropy bonus; and the metrics
that all losses share.

    loss of a token = weight · (policy term, where selected + kl_coef · KL) − entropy_coef · H, where selected
    + mu_penalty_coef · (lp − mu)²

The weight is the correction's, an expectation's change of measure; entropy and the last term are no
expectations over sampled tokens and keep the weight 1. All parameters are plain numbers or text, so that a
loss crosses ranks by name.

Metrics (means over trained tokens, unless said otherwise; absent where the batch lacks what they need):
    approx_kl/mean                       r − 1 − log r, r = exp(lp − old): KL(old || policy), how far the updates on this batch have moved
    kl/ref                               lp − ref: the k1 estimate of KL(policy || reference)
    mismatch_kl/mean|max                 k3 of q against mu, w − 1 − log w with w = q/mu: KL(engine || trainer), never negative; q is old
                                         if recomputed, else lp, which has moved when a batch is trained on more than once
    mismatch/k1, mismatch/chi2           −log w, the k1 estimate of the same; w² − 1, chi-squared of q against mu
    mismatch/ess                         effective sample size of w over its number
    mismatch/logprob_abs_diff            |q − mu|
    mismatch/prob_abs_diff/max           largest |e^q − e^mu|
    importance_weight/mean|mean_square|max|ess     the weights that multiply the loss, after cap and masks
    importance_weight/capped             share of tokens on which importance_cap bit
    importance_weight/dropped            share of tokens whose weight is 0; with `correction`
    entropy/mean                         nats
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.corrections import Correction, compute_truncated_weights, parse_correction
from rollouts.losses.inputs import LossInputs, LossOutput, choose_old_log_probs, need_rollout_log_probs
from rollouts.losses.kl import KlEstimator, compute_kl_penalty
from rollouts.losses.ratios import compute_log_ratio
from rollouts.losses.reductions import collect_token_metrics, reduce_loss, select_top_fraction
from rollouts.types import EffectiveShare, LossUnit, Mean, Metric

TokenValues = dict[str, Tensor]
RatioAgainst = Literal["old", "mu", "none"]
"""What the policy term has a ratio against: old, that is mu without old ones; mu whatever the batch has; no ratio."""


class Terms(TypedDict, total=False):
    """Keywords of every policy loss beside its own."""

    correction: (
        str | Correction
    )  # weights of rollouts.losses.corrections, "token_tis(cap=2) * veto(floor=1e-4)" or a function; "": none
    kl_coef: float  # of KL(policy || reference) in the loss; 0 turns it off
    kl_estimator: (
        str | KlEstimator
    )  # "k2" (default), "k3", module:function or a function; "k1" only with kl_importance
    # multiply the estimate by exp(lp − what the loss's ratio is against, or mu), with gradient: unbiased off
    # policy
    kl_importance: bool
    entropy_coef: (
        float  # of the entropy bonus; not 0: LossInputs.entropy must have a gradient. Negative: a penalty
    )
    entropy_fraction: (
        float  # share of each row's tokens, those of highest entropy, that get the bonus; 1: all
    )
    policy_entropy_fraction: float  # the same for the policy term: "forking tokens", 2506.01939; 1: all
    mu_penalty_coef: float  # of (lp − mu)²: holds the policy near the engine that sampled; 2602.02276


class RatioTerms(Terms, total=False):
    """Keywords of losses with a ratio against old."""

    # C of the weight min(exp(old − mu), C), taken where the batch has both and no correction is named
    importance_cap: float


def finish_loss(
    inputs: LossInputs,
    token_losses: Tensor,
    unit: LossUnit,
    means: TokenValues,
    largest: TokenValues,
    *,
    ratio: RatioAgainst = "old",
    importance_cap: float | None = None,
    correction: str | Correction = "",
    kl_coef: float = 0.0,
    kl_estimator: str | KlEstimator = "k2",
    kl_importance: bool = False,
    entropy_coef: float = 0.0,
    entropy_fraction: float = 1.0,
    policy_entropy_fraction: float = 1.0,
    mu_penalty_coef: float = 0.0,
) -> LossOutput:
    """The output of a loss from its policy term [B, T], of inputs that went through clear_masked. See Terms
    for the keywords.

    ratio: decides what a correction compares with mu (see _find_corrected) and from whom kl_importance takes
    the KL term to be sampled. Without a ratio a correction's weight is exp(lp − mu) itself, which
    kl_importance has in the KL term already: it only drops tokens of that term. importance_cap None: no
    weight unless a correction is named. Raises ConfigError naming a parameter that breaks its rule, or what
    the batch lacks for it.
    """
    _check_terms(kl_coef, kl_importance, entropy_fraction, policy_entropy_fraction, mu_penalty_coef)
    means, largest = dict(means), dict(largest)
    if policy_entropy_fraction < 1:
        chosen = select_top_fraction(
            _need_entropy(inputs, "policy_entropy_fraction", policy_entropy_fraction),
            inputs.mask,
            policy_entropy_fraction,
        )
        token_losses = torch.where(chosen, token_losses, torch.zeros_like(token_losses))
    kl_terms = None
    if kl_coef > 0:
        if inputs.ref_log_probs is None:
            raise ConfigError(
                f"kl_coef={kl_coef} needs ref_log_probs and the batch has none; score it with a reference, or"
                " set kl_coef=0"
            )
        sampler = _choose_sampler(inputs, ratio) if kl_importance else None
        kl_terms = kl_coef * compute_kl_penalty(
            inputs.log_probs, inputs.ref_log_probs, kl_estimator, sampler_log_probs=sampler
        )
    weights = _find_weights(_find_corrected(inputs, ratio), correction, importance_cap)
    if weights is not None:
        if inputs.note_weights is not None:
            inputs.note_weights(weights)
        token_losses = _weigh(token_losses, weights)
        if kl_terms is not None:
            weighted_already = kl_importance and ratio == "none"
            kl_terms = (
                torch.where(weights == 0, torch.zeros_like(kl_terms), kl_terms)
                if weighted_already
                else _weigh(kl_terms, weights)
            )
        means["importance_weight/mean"] = weights
        means["importance_weight/mean_square"] = weights.square()
        largest["importance_weight/max"] = weights
        if correction:
            means["importance_weight/dropped"] = weights == 0
        elif importance_cap is not None:
            means["importance_weight/capped"] = weights >= importance_cap
    if kl_terms is not None:
        token_losses = token_losses + kl_terms
    if entropy_coef != 0:
        entropy = _need_entropy(inputs, "entropy_coef", entropy_coef)
        if inputs.log_probs.requires_grad and not entropy.requires_grad:
            raise ConfigError(
                f"entropy_coef={entropy_coef} needs LossInputs.entropy with a gradient; ask for it where it"
                " is computed, with entropy_gradient=True"
            )
        if entropy_fraction < 1:
            entropy = torch.where(
                select_top_fraction(entropy, inputs.mask, entropy_fraction),
                entropy,
                torch.zeros_like(entropy),
            )
        token_losses = token_losses - entropy_coef * entropy
    if mu_penalty_coef > 0:
        token_losses = (
            token_losses
            + mu_penalty_coef
            * (inputs.log_probs - need_rollout_log_probs(inputs, "mu_penalty_coef")).square()
        )
    _add_shared_metrics(inputs, means, largest)
    total, count = reduce_loss(token_losses, inputs.mask, unit)
    return LossOutput(total, count, _add_sample_sizes(collect_token_metrics(means, largest, inputs.mask)))


def _choose_sampler(inputs: LossInputs, ratio: RatioAgainst) -> Tensor:
    """[B, T] log-probs of what the KL term's tokens are drawn from once the weight, if any, is multiplied on."""
    if ratio != "old" and inputs.rollout_log_probs is not None:
        return inputs.rollout_log_probs
    return choose_old_log_probs(inputs, "kl_importance")


def _find_corrected(inputs: LossInputs, ratio: RatioAgainst) -> LossInputs:
    """The inputs as a correction sees them: it compares their old_log_probs with mu."""
    if ratio == "mu":  # no weight may count the gap again
        return replace(inputs, old_log_probs=None)
    if ratio == "none":  # what a weight compares with the engine is the policy itself
        return replace(inputs, old_log_probs=inputs.log_probs.detach())
    return inputs


def _weigh(token_losses: Tensor, weights: Tensor) -> Tensor:
    # a product with 0 would keep what is not finite, and a dropped token is dropped whatever it holds
    return torch.where(weights == 0, torch.zeros_like(token_losses), token_losses * weights)


def _find_weights(
    inputs: LossInputs, correction: str | Correction, importance_cap: float | None
) -> Tensor | None:
    if correction:
        weights = parse_correction(correction)(inputs) if isinstance(correction, str) else correction(inputs)
        if weights.requires_grad or weights.shape != inputs.mask.shape:
            raise ConfigError(
                "the correction gave weights of shape"
                f" {tuple(weights.shape)}{', with a gradient' if weights.requires_grad else ''}; it must give"
                f" {tuple(inputs.mask.shape)}, detached"
            )
        return torch.where(inputs.mask, weights, torch.zeros_like(weights))
    if importance_cap is None or inputs.old_log_probs is None or inputs.rollout_log_probs is None:
        return None
    return compute_truncated_weights(inputs.old_log_probs, inputs.rollout_log_probs, importance_cap)


def _need_entropy(inputs: LossInputs, parameter: str, value: float) -> Tensor:
    if inputs.entropy is None:
        raise ConfigError(
            f"{parameter}={value} needs the entropy of each position and the inputs have none; fill"
            " LossInputs.entropy"
        )
    return inputs.entropy


def _check_terms(
    kl_coef: float,
    kl_importance: object,
    entropy_fraction: float,
    policy_entropy_fraction: float,
    mu_penalty_coef: float,
) -> None:
    if not isinstance(kl_importance, bool):  # the text "false" would count as true
        raise ConfigError(f"kl_importance={kl_importance!r} must be true or false, without quotation marks")
    for name, value in (("kl_coef", kl_coef), ("mu_penalty_coef", mu_penalty_coef)):
        if not value >= 0:
            raise ConfigError(f"{name}={value} must not be negative; 0 turns the term off")
    for name, value in (
        ("entropy_fraction", entropy_fraction),
        ("policy_entropy_fraction", policy_entropy_fraction),
    ):
        if not 0 < value <= 1:
            raise ConfigError(
                f"{name}={value} must be above 0 and at most 1: a share of each row's tokens; 0.2 is usual, 1"
                " takes all"
            )


def _add_shared_metrics(inputs: LossInputs, means: TokenValues, largest: TokenValues) -> None:
    log_probs, old, mu = inputs.log_probs.detach(), inputs.old_log_probs, inputs.rollout_log_probs
    behaviour = mu if old is None else old
    if behaviour is not None:
        log_ratio = compute_log_ratio(log_probs, behaviour)
        means["approx_kl/mean"] = torch.exp(log_ratio) - 1.0 - log_ratio
    if mu is not None:
        trainer = log_probs if old is None else old
        log_weight = compute_log_ratio(trainer, mu)
        weight = torch.exp(log_weight)
        means["mismatch_kl/mean"] = weight - log_weight - 1.0
        largest["mismatch_kl/max"] = means["mismatch_kl/mean"]
        means["mismatch/k1"] = -log_weight
        means["mismatch/chi2"] = weight.square() - 1.0
        means["mismatch/logprob_abs_diff"] = (trainer - mu).abs()
        largest["mismatch/prob_abs_diff/max"] = (trainer.exp() - mu.exp()).abs()
    if inputs.ref_log_probs is not None:
        means["kl/ref"] = log_probs - inputs.ref_log_probs
    if inputs.entropy is not None:
        means["entropy/mean"] = inputs.entropy.detach()


def _add_sample_sizes(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The effective sample sizes follow from sums that are there already: Σw = Σ(w − 1 − log w) − Σ(−log w) +
    n, Σw² = Σ(w² − 1) + n.
    """

    def read(name: str) -> Mean | None:
        metric = metrics.get(name)
        return metric if isinstance(metric, Mean) else None

    weight, square = read("importance_weight/mean"), read("importance_weight/mean_square")
    if weight is not None and square is not None:
        metrics["importance_weight/ess"] = EffectiveShare(weight.total, square.total, weight.count)
    k3, k1, chi2 = read("mismatch_kl/mean"), read("mismatch/k1"), read("mismatch/chi2")
    if k3 is not None and k1 is not None and chi2 is not None:
        metrics["mismatch/ess"] = EffectiveShare(
            k3.total - k1.total + k3.count, chi2.total + chi2.count, k3.count
        )
    return metrics

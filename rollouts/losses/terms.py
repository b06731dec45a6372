"""What every policy loss can add to its own term, and the metrics that all of them share.

    loss of a token = weight · (policy term, where selected + kl_coef · KL) − entropy_coef · H, where selected
    + mu_penalty_coef · (lp − mu)²

The weight is the correction's, an expectation's change of measure; entropy and the last term are no
expectations over sampled tokens and keep the weight 1. All parameters are plain numbers or text, so that a
loss crosses ranks by name.

Metrics (means over trained tokens, unless said otherwise; absent where the batch lacks what they need):
    ratio/mean, ratio/max        exp(lp − old), of losses with a ratio
    clip_ratio, clip_ratio/low|high  share of tokens on which the clip took the gradient away; low: A < 0,
                                 high: A > 0 (cispo: see there)
    approx_kl/mean               r − 1 − log r, r = exp(lp − old): how far the updates have moved the policy
    kl/ref                       lp − ref: the k1 estimate of KL(policy || reference)
    mismatch_kl/mean|max         w − 1 − log w with w = q/mu, k3 of KL(engine || trainer); q is old if
                                 recomputed, else lp, which moves when a batch is trained on more than once
    mismatch/k1, mismatch/chi2   −log w, the k1 estimate of the same; w² − 1, chi-squared of q against mu
    mismatch/ess                 effective sample size of w over its number
    mismatch/logprob_abs_diff    |q − mu|
    mismatch/prob_abs_diff/max   largest |e^q − e^mu|
    importance_weight/mean|mean_square|max|ess   the weights that multiply the loss, after cap and masks
    importance_weight/capped     share of tokens on which importance_cap bit
    importance_weight/dropped    share of tokens whose weight is 0; with `correction`
    entropy/mean                 nats
    loss/policy|kl|entropy|mu_penalty  the parts of the loss, with their weights and coefficients; where the
                                 unit is tokens they add up to it
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollouts.losses.corrections import Correction, parse_correction
from rollouts.losses.inputs import (
    LossFn,
    LossInputs,
    LossOutput,
    bind_numbers,
    clear_masked,
    compute_log_ratio,
    compute_token_ratio,
    require,
    select_top_fraction,
    sum_tokens,
)
from rollouts.losses.kl import KlEstimator, compute_kl_penalty
from rollouts.types import LossUnit, record

RatioAgainst = Literal["old", "mu", "none"]
"""old: recomputed log-probs, or mu where there are none; mu: always the engine's; none: no ratio."""


class PolicyTerm(NamedTuple):
    """A loss's own part, of inputs that went through clear_masked."""

    token_losses: Tensor  # [B, T]
    ratio: Tensor | None = None  # [B, T]
    low: Tensor | None = None  # [B, T] bool: clipped from below
    high: Tensor | None = None  # [B, T] bool: clipped from above
    shares: Mapping[str, Tensor] = {}  # more metrics: [B, T] bool


@record
class Terms:
    """Keywords of every policy loss beside its own."""

    # C of the weight min(exp(old − mu), C), where the batch has both and no correction is named
    importance_cap: float = 2.0
    # weights of rollouts.losses.corrections, "token_tis(cap=2) * veto(floor=1e-4)" or a function; "": none
    correction: str | Correction = ""
    kl_coef: float = 0.0  # of KL(policy || reference) in the loss
    kl_estimator: str | KlEstimator = "k2"  # or "k3", module:function, a function; "k1" with kl_importance
    # the estimate times exp(lp − what the loss's ratio is against, or mu), with gradient: unbiased off policy
    kl_importance: bool = False
    entropy_coef: float = 0.0  # of the entropy bonus; needs LossInputs.entropy with a gradient
    entropy_fraction: float = 1.0  # share of each row's tokens, of highest entropy, that get the bonus
    policy_entropy_fraction: float = 1.0  # the same for the policy term: "forking tokens", 2506.01939
    mu_penalty_coef: float = 0.0  # of (lp − mu)²: holds the policy near the engine; 2602.02276


POLICY_LOSSES: dict[str, LossFn] = {}


def policy_loss(
    against: RatioAgainst = "old", *, unit: LossUnit = "tokens"
) -> Callable[[Callable[..., PolicyTerm]], LossFn]:
    """A decorator that makes a loss of a function `(inputs, advantages, **numbers) -> PolicyTerm`, under its
    name in POLICY_LOSSES.

    The loss takes that function's keywords, `unit` and Terms; importance_cap only with a ratio against old.
    """

    def decorate(compute: Callable[..., PolicyTerm]) -> LossFn:
        name = compute.__name__.removesuffix("_loss")
        first, _, *own = inspect.signature(compute).parameters.values()
        shared = [*inspect.signature(Terms).parameters.values()][0 if against == "old" else 1 :]
        unit_keyword = inspect.Parameter("unit", inspect.Parameter.KEYWORD_ONLY, default=unit)
        signature = inspect.Signature([first, *own, unit_keyword, *shared])

        @functools.wraps(compute)
        def loss(inputs: LossInputs, **params: Any) -> LossOutput:
            given = bind_numbers(name, signature, clear_masked(inputs), **params)
            inputs, unit = given.pop("inputs"), given.pop("unit")
            terms = Terms(**{parameter.name: given.pop(parameter.name) for parameter in shared})
            return _finish(inputs, compute(inputs, inputs.need("advantages"), **given), unit, against, terms)

        setattr(loss, "__signature__", signature)  # noqa: B010  (unknown to pyright)
        POLICY_LOSSES[name] = loss
        return loss

    return decorate


def _finish(
    inputs: LossInputs, term: PolicyTerm, unit: LossUnit, against: RatioAgainst, terms: Terms
) -> LossOutput:
    """The output of a loss. Raises ConfigError naming what the batch lacks for a term."""
    # the text "false" would count as true
    require(isinstance(terms.kl_importance, bool), f"kl_importance={terms.kl_importance!r} must be a boolean")
    token_losses, values = term.token_losses, {**term.shares, **_measure_policies(inputs)}
    if term.ratio is not None:
        values["ratio/mean"] = values["ratio/max"] = term.ratio
    if term.low is not None and term.high is not None:
        either = term.low | term.high
        values |= {"clip_ratio": either, "clip_ratio/low": term.low, "clip_ratio/high": term.high}
    if terms.policy_entropy_fraction < 1:
        chosen = select_top_fraction(inputs.need("entropy"), inputs.mask, terms.policy_entropy_fraction)
        token_losses = _drop(token_losses, ~chosen, token_losses, inputs)
    parts = {"loss/policy": token_losses}
    if terms.kl_coef > 0:
        parts["loss/kl"] = _compute_kl_terms(inputs, against, terms)
    weights = _find_weights(inputs, against, terms)
    if weights is not None:
        if inputs.note_weights is not None:
            inputs.note_weights(weights)
        # without a ratio, kl_importance has multiplied the KL term by exp(lp − mu) already
        once = terms.kl_importance and against == "none"
        for name, part in parts.items():
            weighed = part if once and name == "loss/kl" else part * weights
            parts[name] = _drop(weighed, weights == 0, part, inputs)
        area = "importance_weight"
        values |= {f"{area}/{stat}": weights for stat in ("mean", "max", "ess")}
        values[f"{area}/mean_square"] = weights.square()
        if terms.correction:
            values[f"{area}/dropped"] = weights == 0
        else:
            values[f"{area}/capped"] = weights >= terms.importance_cap
    if terms.entropy_coef != 0:
        parts["loss/entropy"] = -terms.entropy_coef * _choose_entropy(inputs, terms)
    if terms.mu_penalty_coef > 0:
        gap = compute_log_ratio(inputs.log_probs, inputs.mu)
        parts["loss/mu_penalty"] = terms.mu_penalty_coef * gap.square()
    token_losses = functools.reduce(torch.add, parts.values())
    return sum_tokens(token_losses, inputs, unit, values | parts)


def _drop(losses: Tensor, dropped: Tensor, unweighted: Tensor, inputs: LossInputs) -> Tensor:
    """[B, T] the losses, 0 where dropped: also of an impossible token, of which a product with 0 is none. A
    NaN is not dropped.
    """
    spoilt = unweighted.isnan() & (inputs.log_probs != -torch.inf)
    return torch.where(dropped & ~spoilt, 0.0, losses)


def _compute_kl_terms(inputs: LossInputs, against: RatioAgainst, terms: Terms) -> Tensor:
    """[B, T]. Once the weight, if any, is multiplied on, tokens without a ratio against old count as mu's."""
    sampler = None
    if terms.kl_importance:
        from_mu = against != "old" and inputs.rollout_log_probs is not None
        sampler = inputs.rollout_log_probs if from_mu else inputs.need_old()
    return terms.kl_coef * compute_kl_penalty(
        inputs.log_probs, inputs.need("ref_log_probs"), terms.kl_estimator, sampler_log_probs=sampler
    )


def _choose_entropy(inputs: LossInputs, terms: Terms) -> Tensor:
    """[B, T] the entropy of the tokens that get the bonus, 0 elsewhere."""
    entropy = inputs.need("entropy")
    require(
        entropy.requires_grad or not inputs.log_probs.requires_grad,
        f"entropy_coef={terms.entropy_coef} needs LossInputs.entropy with a gradient; compute it with"
        " entropy_gradient=True",
    )
    if terms.entropy_fraction == 1:
        return entropy
    return torch.where(select_top_fraction(entropy, inputs.mask, terms.entropy_fraction), entropy, 0.0)


def _find_weights(inputs: LossInputs, against: RatioAgainst, terms: Terms) -> Tensor | None:
    """[B, T] the weights, None without any. A correction compares its inputs' old_log_probs with mu."""
    old, mu, correction = inputs.old_log_probs, inputs.rollout_log_probs, terms.correction
    if not correction:
        if against != "old" or old is None or mu is None:
            return None
        return compute_token_ratio(old, mu).clamp(max=terms.importance_cap)
    if against != "old":  # to mu: no weight may count the gap again; no ratio: the policy itself is compared
        inputs = replace(inputs, old_log_probs=inputs.log_probs.detach() if against == "none" else None)
    weights = (parse_correction(correction) if isinstance(correction, str) else correction)(inputs)
    require(
        weights.shape == inputs.mask.shape and not weights.requires_grad,
        f"the correction gave weights of shape {tuple(weights.shape)}, requires_grad={weights.requires_grad};"
        f" it must give {tuple(inputs.mask.shape)}, detached",
    )
    return torch.where(inputs.mask, weights, 0.0)


def _measure_policies(inputs: LossInputs) -> dict[str, Tensor]:
    """The metrics that need no loss: how far policy, old policy, engine and reference are from another."""
    log_probs, old, mu = inputs.log_probs.detach(), inputs.old_log_probs, inputs.rollout_log_probs
    values: dict[str, Tensor] = {}
    if old is not None or mu is not None:
        log_ratio = compute_log_ratio(log_probs, inputs.need_old())
        values["approx_kl/mean"] = torch.exp(log_ratio) - 1.0 - log_ratio
    if mu is not None:
        trainer = log_probs if old is None else old
        log_weight = compute_log_ratio(trainer, mu)
        weight = values["mismatch/ess"] = torch.exp(log_weight)
        values["mismatch_kl/mean"] = values["mismatch_kl/max"] = weight - log_weight - 1.0
        values["mismatch/k1"] = -log_weight
        values["mismatch/chi2"] = weight.square() - 1.0
        values["mismatch/logprob_abs_diff"] = (trainer - mu).abs()
        values["mismatch/prob_abs_diff/max"] = (trainer.exp() - mu.exp()).abs()
    if inputs.ref_log_probs is not None:
        values["kl/ref"] = log_probs - inputs.ref_log_probs
    if inputs.entropy is not None:
        values["entropy/mean"] = inputs.entropy
    return values

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
    kl/exact                     KL(reference || policy) over the vocabulary, with kl_estimator = "exact"
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

Corrections are for the gap between the policy that trains (q) and the engine that sampled (mu): a weight for
every token's loss.

A correction is a function of (inputs, **numbers) to weights [B, T] without gradient; 0 drops a token from the
sum. The denominator stays that of the whole batch: a dropped token counts as one that taught nothing. With w
= exp(q − mu):

    weights; q must be the recomputed old_log_probs
    token_tis         min(max(w, low), cap)
    icepop            w if low <= w <= high, else 0
    sequence_tis      min(product of the row's w, cap)
    masks, 0 or 1; q is old_log_probs, or the policy itself without them
    token_mask        low <= w <= high
    geometric_mask    low <= exp(mean of log w) <= high, of the row
    sequence_mask     low <= product of the row's w <= high
    veto              no token of the row has w < floor
    sequence_k1_mask  |mean of −log w| <= limit, of the row
    sequence_k3_mask  mean of w − 1 − log w <= limit, of the row
    opsm              A >= 0, or mean of mu − lp <= delta, of the row

Without old_log_probs a loss takes its ratio against mu itself; a weight would count the gap twice, so it is
refused there. `reinforce` and `dro` have no ratio: for them q is the policy itself.

Several are multiplied: "token_tis(cap=2) * veto(floor=1e-4)" is what the parameter `correction` of a loss
takes, or a function. Log-ratios are held within ±20, as everywhere, and a bound that could never act is
refused; low = 0 and a high or cap of 4.85e8 or more say that there is none. Means are over the row's trained
tokens; a row without any is kept. A NaN in what is compared gives weights of NaN, of the whole row where the
row is judged.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ConfigError, check_keywords, parse_call, require
from rollouts.losses.inputs import (
    LossFn,
    LossInputs,
    LossOutput,
    bind_numbers,
    clear_masked,
    compute_log_ratio,
    compute_row_mean,
    compute_row_sum,
    compute_token_ratio,
    find_function,
    select_top_fraction,
    sum_tokens,
)
from rollouts.losses.kl import KlEstimator, compute_kl_penalty
from rollouts.types import LossUnit, record

Correction = Callable[[LossInputs], Tensor]
"""Inputs that are 0 outside the mask -> weights [B, T], not negative, without gradient."""

Judged = tuple[Tensor, Tensor]
"""A statistic of tokens [B, T] or rows [B, 1], and where it drops them."""

CORRECTIONS: dict[str, Callable[..., Tensor]] = {}


def _correction(compute: Callable[..., Tensor | Judged]) -> Callable[..., Tensor]:
    """Enters a function into CORRECTIONS, its numbers checked. It gives weights, or a statistic of tokens
    or rows and what is dropped: the weight is 0 there, else 1, and NaN where the statistic is NaN.
    """
    name, signature = compute.__name__, inspect.signature(compute)

    @functools.wraps(compute)
    def weigh(inputs: LossInputs, **numbers: float) -> Tensor:
        found = compute(**bind_numbers(name, signature, inputs, **numbers))
        if isinstance(found, Tensor):
            return found
        statistic, dropped = found
        weights = (~dropped).to(statistic.dtype).expand_as(inputs.log_probs)
        return weights.masked_fill(statistic.isnan(), torch.nan)

    CORRECTIONS[name] = weigh
    return weigh


# --- weights ------------------------------------------------------------------------------------------------


@_correction
def token_tis(inputs: LossInputs, *, low: float = 0.0, cap: float = 2.0) -> Tensor:
    """w held between low and cap, per token: truncated importance sampling.

    Multiplied onto a token's loss it turns an average over what the engine sampled into one over the old
    policy, exactly as long as neither bound bites. Sources: 1606.02647; Yao et al. 2025.
    """
    return compute_token_ratio(*_need_both(inputs)).clamp(low, cap)


@_correction
def icepop(inputs: LossInputs, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w where low <= w <= high, else 0: a token that the two disagree on is dropped. IcePop, 2510.18855."""
    weights = compute_token_ratio(*_need_both(inputs))
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


@_correction
def sequence_tis(inputs: LossInputs, *, cap: float = 2.0) -> Tensor:
    """min(exp(Σ log w), cap) on every token of a row: of the sequence. richardli.xyz/rl-collapse."""
    old, mu = _need_both(inputs)
    return torch.exp(compute_row_sum(old - mu, inputs.mask)).clamp(max=cap).expand_as(mu)


# --- masks --------------------------------------------------------------------------------------------------


@_correction
def token_mask(inputs: LossInputs, *, low: float = 0.5, high: float = 2.0) -> Judged:
    """1 where low <= w <= high, else 0."""
    weights = torch.exp(_compute_log_weights(inputs))
    return weights, (weights < low) | (weights > high)


@_correction
def geometric_mask(inputs: LossInputs, *, low: float = 0.99, high: float = 1.01) -> Judged:
    """1 on rows with low <= exp(mean of log w) <= high, else 0. Source: richardli.xyz/rl-collapse."""
    mean = torch.exp(compute_row_mean(_compute_log_weights(inputs), inputs.mask))
    return mean, (mean < low) | (mean > high)


@_correction
def sequence_mask(inputs: LossInputs, *, low: float = 0.5, high: float = 2.0) -> Judged:
    """1 on rows with low <= product of the row's w <= high, else 0: TRL's mode of that name is
    sequence_tis(cap=c) * sequence_mask(low=0, high=c).
    """
    product = torch.exp(compute_row_sum(_compute_log_weights(inputs), inputs.mask))
    return product, (product < low) | (product > high)


@_correction
def veto(inputs: LossInputs, *, floor: float = 1e-4) -> Judged:
    """0 on rows in which a token has w < floor, else 1: a token that the trainer would hardly give."""
    log_weights = _compute_log_weights(inputs)
    spoilt = ((log_weights < math.log(floor)) & inputs.mask).any(-1, keepdim=True)
    return compute_row_mean(log_weights, inputs.mask), spoilt


@_correction
def sequence_k1_mask(inputs: LossInputs, *, limit: float = 0.1) -> Judged:
    """1 on rows with |mean of −log w| <= limit nats, else 0: an estimate of KL(engine || trainer)."""
    mean = compute_row_mean(_compute_log_weights(inputs), inputs.mask)
    return mean, mean.abs() > limit


@_correction
def sequence_k3_mask(inputs: LossInputs, *, limit: float = 0.1) -> Judged:
    """1 on rows with mean of w − 1 − log w <= limit nats, else 0: KL(engine || trainer), never negative."""
    log_weights = _compute_log_weights(inputs)
    mean = compute_row_mean(torch.exp(log_weights) - 1.0 - log_weights, inputs.mask)
    return mean, mean > limit


@_correction
def opsm(inputs: LossInputs, *, delta: float = 0.1) -> Judged:
    """0 on tokens with A < 0 of rows with mean of mu − lp > delta nats, else 1: off-policy sequence masking.

    What the policy has moved away from is not pushed further. lp is the policy as it is now. Paper:
    DeepSeek-V3.2, 2512.02556.
    """
    gap = compute_log_ratio(inputs.mu, inputs.log_probs.detach())
    mean = compute_row_mean(gap, inputs.mask)
    return mean, (mean > delta) & (inputs.need("advantages") < 0)


def _need_both(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    mu = inputs.mu
    if inputs.old_log_probs is None:
        raise ConfigError(
            "a correction that weighs by exp(old - mu) needs old log-probs: the ratio is against the engine"
            " already; set rl.recompute_old = true (a loss whose ratio is always against the engine does not"
            " read them), or use a mask, for example token_mask"
        )
    return inputs.old_log_probs, mu


def _compute_log_weights(inputs: LossInputs) -> Tensor:
    """[B, T] log w, q being old_log_probs or else the policy itself."""
    policy = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
    return compute_log_ratio(policy.detach(), inputs.mu)


# --- by name ------------------------------------------------------------------------------------------------


@functools.cache
def parse_correction(text: str) -> Correction:
    """The correction that a text stands for: factors name(number=value, ...) joined by *, a name being a key
    of CORRECTIONS or module:function.

    Raises ConfigError naming the factor that is not understood or the number that breaks its rule,
    PlugInError for a function that cannot be imported.
    """
    factors = []
    try:
        for factor in text.split("*"):
            name, numbers = parse_call(factor)
            function = find_function("correction", name, CORRECTIONS, takes="(inputs, **numbers)")
            check_keywords(f"correction {name!r}", function, numbers, beside=("inputs",))
            bind_numbers(name, inspect.signature(function), None, **numbers)
            factors.append(functools.partial(function, **numbers))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"correction={text!r}: {error}; write it as token_tis(cap=2.0)") from error
    return lambda inputs: functools.reduce(torch.mul, [factor(inputs) for factor in factors])


# --- log-probs ----------------------------------------------------------------------------------------------


def renormalise_log_probs(log_probs: Tensor, kept_mass: Tensor) -> Tensor:
    """log_probs − log(kept_mass): log-probs over the whole vocabulary [B, T] become those among the tokens
    that the engine sampled from.

    kept_mass [B, T] is the probability, between 0 and 1, that the trainer's own distribution gives to the set
    that top-k or top-p kept at the position. Without it the ratio of equal models is kept_mass, not 1. Its
    gradient counts: the kept set is renormalised as the policy moves. A mass of 0 gives +inf; outside the
    loss mask give 1. Paper: keep-sampling-mask of DeepSeek-V3.2, 2512.02556.
    """
    return log_probs - kept_mass.log()


def compute_loglinear_prox(
    log_probs: Tensor, rollout_log_probs: Tensor, *, sampled_version: Tensor, old_version: int, version: int
) -> Tensor:
    """[B, T] an estimate of old log-probs without a forward pass: mu + α·(lp − mu), α = (old_version −
    sampled) / (version − sampled), detached.

    sampled_version [B, T] is the weight version that produced each token, mu at that version, lp of the
    policy at `version`. α is held within 0 and 1; a token of the current version has α = 0, for lp and mu are
    then of the same weights. It takes the place of LossInputs.old_log_probs. Source: AReaL,
    docs/en/algorithms/prox_approx.md. Raises ConfigError if old_version is above version.
    """
    require(old_version <= version, f"old_version={old_version} must not be above version={version}")
    mu = rollout_log_probs.detach()
    elapsed = (version - sampled_version).to(mu.dtype)
    share = torch.where(elapsed > 0, (old_version - sampled_version) / elapsed.clamp(min=1), 0.0)
    return mu + share.clamp(0.0, 1.0) * (log_probs.detach() - mu)


# --- what a policy loss is made of --------------------------------------------------------------------------


RatioAgainst = Literal["old", "mu", "none"]
"""old: recomputed log-probs, or mu where there are none; mu: always the engine's; none: no ratio."""


class PolicyTerm(NamedTuple):
    """A loss's own part, of inputs that went through clear_masked."""

    token_losses: Tensor  # [B, T]
    ratio: Tensor | None = None  # [B, T]
    clipped: tuple[Tensor, Tensor] | None = None  # [B, T] bool: from below, from above
    shares: Mapping[str, Tensor] = {}  # more metrics: [B, T] bool


@record
class Terms:
    """Keywords of every policy loss beside its own."""

    # C of the weight min(exp(old − mu), C), where the batch has both and no correction is named
    importance_cap: float = 2.0
    # weights of CORRECTIONS, "token_tis(cap=2) * veto(floor=1e-4)" or a function; "": none
    correction: str | Correction = ""
    kl_coef: float = 0.0  # of the KL between policy and reference, in the loss
    # or "k3", module:function, a function; "k1" with kl_importance; "exact": LossInputs.exact_kl
    kl_estimator: str | KlEstimator = "k2"
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
    if term.clipped:
        low, high = term.clipped
        values |= {"clip_ratio": low | high, "clip_ratio/low": low, "clip_ratio/high": high}
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
        # without a ratio, kl_importance has multiplied the KL term by exp(lp − mu) already; an exact KL is no
        # expectation over sampled tokens
        once = terms.kl_estimator == "exact" or (terms.kl_importance and against == "none")
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
    if terms.kl_estimator == "exact":
        if inputs.exact_kl is None or terms.kl_importance:
            raise ConfigError(
                "kl_estimator='exact' needs a reference beside a trainer on one rank (rl.kl_estimator, or a"
                " backend's compare_with), and no kl_importance, which is about sampled tokens"
            )
        return terms.kl_coef * inputs.exact_kl
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
    values = {}
    if old is not None or mu is not None:
        log_ratio = compute_log_ratio(log_probs, inputs.need_old())
        values["approx_kl/mean"] = torch.exp(log_ratio) - 1.0 - log_ratio
    if mu is not None:
        trainer = log_probs if old is None else old
        log_weight = compute_log_ratio(trainer, mu)
        weight = torch.exp(log_weight)
        kl = weight - log_weight - 1.0
        values |= {
            "mismatch/ess": weight,
            "mismatch_kl/mean": kl,
            "mismatch_kl/max": kl,
            "mismatch/k1": -log_weight,
            "mismatch/chi2": weight.square() - 1.0,
            "mismatch/logprob_abs_diff": (trainer - mu).abs(),
            "mismatch/prob_abs_diff/max": (trainer.exp() - mu.exp()).abs(),
        }
    if inputs.ref_log_probs is not None:
        values["kl/ref"] = log_probs - inputs.ref_log_probs
    if inputs.exact_kl is not None:
        values["kl/exact"] = inputs.exact_kl
    if inputs.entropy is not None:
        values["entropy/mean"] = inputs.entropy
    return values

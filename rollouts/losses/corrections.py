"""Corrections for the gap between the policy that trains (q) and the engine that sampled (mu): a weight for
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
from collections.abc import Callable

import torch
from torch import Tensor

from rollouts.errors import ConfigError, check_keywords, parse_call
from rollouts.losses.inputs import (
    LossInputs,
    bind_numbers,
    compute_log_ratio,
    compute_row_mean,
    compute_row_sum,
    compute_token_ratio,
    find_function,
    require,
)

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
    factors = [_parse_factor(factor, text) for factor in text.split("*")]
    return lambda inputs: functools.reduce(torch.mul, [factor(inputs) for factor in factors])


def _parse_factor(factor: str, text: str) -> Correction:
    try:
        name, numbers = parse_call(factor)
        function = find_function("correction", name, CORRECTIONS, takes="(inputs, **numbers)")
        check_keywords(f"correction {name!r}", function, numbers, beside=("inputs",))
        bind_numbers(name, inspect.signature(function), None, **numbers)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"correction={text!r}: {error}; write it as token_tis(cap=2.0)") from error
    return functools.partial(function, **numbers)


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

"""Corrections for the gap between the policy that trains (q) and the engine that sampled (mu): a weight for
every token's loss.

A correction is a function of (inputs, **numbers) to weights [B, T] without gradient; 0 drops a token from the
sum. The denominator stays that of the whole batch: a dropped token counts as one that taught nothing. With w
= exp(q − mu):

    weights: q must be the recomputed old_log_probs         masks, 0 or 1: q is old_log_probs, or the policy itself without them
    token_tis        min(w, cap)                            token_mask        low <= w <= high
    icepop           w if low <= w <= high, else 0          geometric_mask    low <= exp(mean of log w) <= high, of the row
    sequence_tis     min(product of the row's w, cap)       veto              no token of the row has w < floor
                                                            sequence_k1_mask  |mean of −log w| <= limit, of the row
                                                            sequence_k3_mask  mean of w − 1 − log w <= limit, of the row
                                                            opsm              A >= 0, or mean of mu − lp <= delta, of the row

Without old_log_probs a loss takes its ratio against mu itself; a weight would count the gap twice, so it is
refused there. `reinforce` and `dro` have no ratio: for them q is the policy itself.

Several are multiplied: "token_tis(cap=2) * veto(floor=1e-4)" is what the parameter `correction` of a loss
takes, or a function. Log-ratios are held within ±20, as everywhere. Means are over the row's trained tokens;
a row without any is kept. A NaN in what is compared gives weights of NaN, of the whole row where the row is
judged.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.inputs import LossInputs, need_advantages, need_rollout_log_probs
from rollouts.losses.plug_ins import import_function
from rollouts.losses.ratios import MAX_LOG_RATIO, compute_log_ratio, compute_row_mean, compute_token_ratio

Correction = Callable[[LossInputs], Tensor]
"""Inputs that are 0 outside the mask -> weights [B, T], not negative, without gradient."""

FACTOR = re.compile(r"([\w.]+(?::\w+)?)\s*(?:\(([^()]*)\))?")


# --- weights ------------------------------------------------------------------------------------------------


def compute_truncated_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """[B, T] min(exp(old − mu), cap), detached: truncated importance sampling per token.

    Multiplied onto a token's loss it turns an average over what the engine sampled into one over the old
    policy, exactly as long as the cap does not bite. Sources: 1606.02647; Yao et al. 2025. Raises ConfigError
    if cap is not positive.
    """
    if not cap > 0:
        raise ConfigError(f"importance_cap={cap} must be above 0; 2.0 is usual")
    return compute_token_ratio(old_log_probs.detach(), rollout_log_probs.detach()).clamp(max=cap)


def token_tis(inputs: LossInputs, *, cap: float = 2.0) -> Tensor:
    """min(w, cap) per token; see compute_truncated_weights. Raises ConfigError without old and the engine's
    log-probs.
    """
    old, mu = _need_both(inputs, "token_tis")
    return compute_truncated_weights(old, mu, cap)


def icepop(inputs: LossInputs, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w where low <= w <= high, else 0: a token that the two disagree on is dropped instead of capped. Paper:
    IcePop, 2510.18855.
    """
    _check_band("icepop", low, high)
    weights = compute_token_ratio(*_need_both(inputs, "icepop"))
    return torch.where((weights < low) | (weights > high), torch.zeros_like(weights), weights)


def sequence_tis(inputs: LossInputs, *, cap: float = 2.0) -> Tensor:
    """min(exp(Σ log w), cap) on every token of a row: the importance weight of the whole sequence. Source:
    richardli.xyz/rl-collapse.
    """
    if not cap > 0:
        raise ConfigError(f"cap={cap} of sequence_tis must be above 0; 2.0 is usual")
    old, mu = _need_both(inputs, "sequence_tis")
    total = torch.where(inputs.mask, old - mu, torch.zeros_like(mu)).sum(-1, keepdim=True)
    return _spread(torch.exp(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=cap), inputs)


# --- masks --------------------------------------------------------------------------------------------------


def token_mask(inputs: LossInputs, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """1 where low <= w <= high, else 0."""
    _check_band("token_mask", low, high)
    weights = torch.exp(_compute_log_weights(inputs, "token_mask"))
    return _keep(~((weights < low) | (weights > high)), weights, inputs)


def geometric_mask(inputs: LossInputs, *, low: float = 0.99, high: float = 1.01) -> Tensor:
    """1 on rows with low <= exp(mean of log w) <= high, else 0. Source: richardli.xyz/rl-collapse."""
    _check_band("geometric_mask", low, high)
    mean = torch.exp(compute_row_mean(_compute_log_weights(inputs, "geometric_mask"), inputs.mask))
    return _keep(~((mean < low) | (mean > high)), mean, inputs)


def veto(inputs: LossInputs, *, floor: float = 1e-4) -> Tensor:
    """0 on rows in which a token has w < floor, else 1: one token that the trainer would hardly give spoils
    its row.
    """
    if not 0 < floor < 1:
        raise ConfigError(f"floor={floor} of veto must lie between 0 and 1; 1e-4 is usual")
    log_weights = _compute_log_weights(inputs, "veto")
    spoilt = ((log_weights < math.log(floor)) & inputs.mask).any(-1, keepdim=True)
    return _keep(~spoilt, compute_row_mean(log_weights, inputs.mask), inputs)


def sequence_k1_mask(inputs: LossInputs, *, limit: float = 0.1) -> Tensor:
    """1 on rows with |mean of −log w| <= limit nats, else 0: −log w estimates KL(engine || trainer), of
    either sign.
    """
    _check_limit("sequence_k1_mask", limit)
    mean = compute_row_mean(_compute_log_weights(inputs, "sequence_k1_mask"), inputs.mask)
    return _keep(~(mean.abs() > limit), mean, inputs)


def sequence_k3_mask(inputs: LossInputs, *, limit: float = 0.1) -> Tensor:
    """1 on rows with mean of w − 1 − log w <= limit nats, else 0: KL(engine || trainer), never negative."""
    _check_limit("sequence_k3_mask", limit)
    log_weights = _compute_log_weights(inputs, "sequence_k3_mask")
    mean = compute_row_mean(torch.exp(log_weights) - 1.0 - log_weights, inputs.mask)
    return _keep(~(mean > limit), mean, inputs)


def opsm(inputs: LossInputs, *, delta: float = 0.1) -> Tensor:
    """0 on tokens with A < 0 of rows with mean of mu − lp > delta nats, else 1: off-policy sequence masking.

    What the policy has moved away from is not pushed further. lp is the policy as it is now. Paper:
    DeepSeek-V3.2, 2512.02556.
    """
    _check_limit("opsm", delta)
    gap = compute_log_ratio(need_rollout_log_probs(inputs, "opsm"), inputs.log_probs.detach())
    mean = compute_row_mean(gap, inputs.mask)
    return _keep(~((mean > delta) & (need_advantages(inputs, "opsm") < 0)), mean, inputs)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "token_tis": token_tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "token_mask": token_mask,
    "geometric_mask": geometric_mask,
    "veto": veto,
    "sequence_k1_mask": sequence_k1_mask,
    "sequence_k3_mask": sequence_k3_mask,
    "opsm": opsm,
}


# --- by name ------------------------------------------------------------------------------------------------


def combine_corrections(*corrections: Correction) -> Correction:
    """The product of their weights."""

    def combined(inputs: LossInputs) -> Tensor:
        return math.prod(
            (correction(inputs) for correction in corrections),
            start=torch.ones_like(inputs.log_probs.detach()),
        )

    return combined


@functools.cache
def parse_correction(text: str) -> Correction:
    """The correction that a text stands for: factors name(number=value, ...) joined by *, a name being a key
    of CORRECTIONS or module:function.

    Raises ConfigError naming the factor that is not understood or the number that breaks its rule,
    PlugInError for a function that cannot be imported.
    """
    return combine_corrections(*(_parse_factor(factor.strip(), text) for factor in text.split("*")))


def _parse_factor(factor: str, text: str) -> Correction:
    match = FACTOR.fullmatch(factor)
    if match is None:
        raise ConfigError(
            f"correction={text!r}: {factor!r} is not understood; write name(number=value, ...), several"
            " joined by *"
        )
    name, inside = match.group(1), match.group(2)
    function = CORRECTIONS.get(name)
    if function is None and ":" in name:
        function = import_function("correction", name, "(inputs, **numbers)")
    if function is None:
        raise ConfigError(
            f"correction={text!r}: {name!r} is not known; corrections are {', '.join(CORRECTIONS)}, or"
            " module:function"
        )
    numbers = _parse_numbers(inside or "", factor, text)
    _check_numbers(function, numbers, factor, text)
    if name in CORRECTIONS:
        nothing = torch.zeros(1, 1)
        function(
            LossInputs(
                log_probs=nothing,
                mask=nothing > 0,
                advantages=nothing,
                old_log_probs=nothing,
                rollout_log_probs=nothing,
            ),
            **numbers,
        )
    return functools.partial(function, **numbers)


def _parse_numbers(inside: str, factor: str, text: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in inside.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            numbers[key] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"correction={text!r}: {part!r} in {factor!r} is not name=number; write for example cap=2.0"
            ) from error
    return numbers


def _check_numbers(
    function: Callable[..., Any], numbers: Mapping[str, float], factor: str, text: str
) -> None:
    parameters = inspect.signature(function).parameters.values()
    accepted = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if unknown := [key for key in numbers if key not in accepted]:
        raise ConfigError(
            f"correction={text!r}: {factor!r} takes no {unknown[0]!r}; it takes"
            f" {', '.join(accepted) or 'none'}"
        )


# --- measures -----------------------------------------------------------------------------------------------


def compute_ess_fraction(mean_weight: float, mean_square_weight: float) -> float:
    """Effective sample size over the number of tokens, (Σw)² / (n Σw²), from the mean weight and the mean
    squared weight: 1 is perfect.

    The two means merge across micro-batches and ranks, this number does not: take it last. No weight at all
    gives 0.
    """
    return mean_weight**2 / mean_square_weight if mean_square_weight > 0 else 0.0


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
    then of the same weights. It goes in the place of LossInputs.old_log_probs. Source: AReaL,
    docs/en/algorithms/prox_approx.md. Raises ConfigError if old_version is above version.
    """
    if old_version > version:
        raise ConfigError(
            f"old_version={old_version} is above version={version}; old is the policy before the update,"
            " version - 1 as a rule"
        )
    mu = rollout_log_probs.detach()
    elapsed = (version - sampled_version).to(mu.dtype)
    share = torch.where(
        elapsed > 0,
        (old_version - sampled_version).to(mu.dtype) / elapsed.clamp(min=1),
        torch.zeros_like(elapsed),
    )
    return mu + share.clamp(0.0, 1.0) * (log_probs.detach() - mu)


# --- pieces -------------------------------------------------------------------------------------------------


def _need_both(inputs: LossInputs, name: str) -> tuple[Tensor, Tensor]:
    mu = need_rollout_log_probs(inputs, name)
    if inputs.old_log_probs is None:
        raise ConfigError(
            f"correction {name!r} weighs by exp(old - mu) and there are no old log-probs: the ratio is"
            " against the engine already; set rl.recompute_old = true, or use a mask, for example token_mask"
        )
    return inputs.old_log_probs.detach(), mu.detach()


def _compute_log_weights(inputs: LossInputs, name: str) -> Tensor:
    """[B, T] log w, q being old_log_probs or else the policy itself."""
    policy = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
    return compute_log_ratio(policy.detach(), need_rollout_log_probs(inputs, name).detach())


def _spread(values: Tensor, inputs: LossInputs) -> Tensor:
    return values.to(inputs.log_probs.dtype).expand_as(inputs.log_probs)


def _keep(kept: Tensor, statistic: Tensor, inputs: LossInputs) -> Tensor:
    """kept as 1 and 0, NaN where the statistic that decides is NaN: a comparison with NaN is false and would
    keep what nobody measured.
    """
    return torch.where(statistic.isnan(), _spread(statistic, inputs), _spread(kept, inputs))


def _check_band(name: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(
            f"low={low}, high={high} of {name}; the rule is 0 <= low < high, for example 0.5 and 2"
        )


def _check_limit(name: str, limit: float) -> None:
    if not limit >= 0:
        raise ConfigError(f"the limit of {name} is {limit} nats; it must not be negative, 0.1 is usual")

"""Policy-gradient losses. Per token: lp = log π(a|s) with gradient, old, mu and ref without; A = advantage;
minimised.

    ratio against old = the trainer's recomputed log-probs if the batch has them, else mu = the engine's. With
    both, a token's loss is also multiplied by min(exp(old − mu), importance_cap), or by what `correction`
    says. See rollouts.losses.corrections.

What all losses can add (KL, entropy bonus, correction, ...) and the metrics that they share are in rollouts.losses.terms: `**terms`.
Metrics of the ratio (means and maxima over trained tokens):
    ratio/mean, ratio/max                exp(lp − old)
    clip_ratio, clip_ratio/low|high      share of tokens on which the clip took the gradient away; low: A < 0, high: A > 0 (cispo: see there)
A sampled token that the policy cannot give, lp = −inf, has a finite ratio (e^−20) and no gradient from it; losses in lp itself are infinite
there, and the step is skipped.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.inputs import (
    LossInputs,
    LossOutput,
    choose_old_log_probs,
    clear_masked,
    need_advantages,
    need_rollout_log_probs,
)
from rollouts.losses.ratios import (
    MAX_LOG_RATIO,
    compute_log_ratio,
    compute_row_mean,
    compute_sequence_ratio,
    compute_token_ratio,
)
from rollouts.losses.reductions import select_top_fraction
from rollouts.losses.terms import RatioTerms, Terms, TokenValues, finish_loss
from rollouts.types import LossUnit

DEFAULT_CAP = 2.0  # of the truncated importance weight

# --- one ratio per token ------------------------------------------------------------------------------------


def ppo_clip_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), r = exp(lp − old); gradient exactly 0 on clipped
    tokens.

    dual_clip = c > 1 also bounds the loss of a token with A < 0 by c·|A|. With old and mu this is decoupled
    PPO (2110.00641; 2505.24298). Papers: 1707.06347; 2503.14476 (clip_high above clip_low); 1912.09729 (dual
    clip). Raises ConfigError naming what is wrong.
    """
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(
            f"dual_clip={dual_clip} must be above 1, or every token with a negative advantage loses its"
            " gradient; 3.0 is usual"
        )
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "ppo_clip")
    ratio = compute_token_ratio(inputs.log_probs, choose_old_log_probs(inputs, "ppo_clip"))
    token_losses, means = _clip_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (token_losses.detach() > bound)
        token_losses = torch.where(over, bound, token_losses)
        means["clip_ratio/dual"] = over
    return finish_loss(inputs, token_losses, unit, means, _largest(ratio), **_with_cap(terms))


def importance_sampling_loss(
    inputs: LossInputs, *, unit: LossUnit = "tokens", **terms: Unpack[Terms]
) -> LossOutput:
    """−A·exp(lp − mu): the unclipped off-policy policy gradient, against the engine's log-probs even when old
    ones are given.
    """
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "importance_sampling")
    ratio = compute_token_ratio(inputs.log_probs, need_rollout_log_probs(inputs, "importance_sampling"))
    return finish_loss(inputs, -advantages * ratio, unit, _mean(ratio), _largest(ratio), ratio="mu", **terms)


def reinforce_loss(inputs: LossInputs, *, unit: LossUnit = "tokens", **terms: Unpack[Terms]) -> LossOutput:
    """−A·lp: the on-policy policy gradient. Of an older policy or another engine only a `correction` takes
    account, with w = exp(lp − mu).
    """
    inputs = clear_masked(inputs)
    token_losses = -need_advantages(inputs, "reinforce") * inputs.log_probs
    return finish_loss(inputs, token_losses, unit, {}, {}, ratio="none", **terms)


def cispo_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    ratio_low: float = 0.0,
    ratio_high: float = 5.0,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−clip(r, ratio_low, ratio_high)·A·lp with the clipped ratio detached: no token loses its gradient. The
    bounds are absolute.

    `clip_ratio` and its parts count the tokens whose weight was clipped, which keep a gradient, of either
    sign of A. Papers: 2506.13585; 2510.13786.
    """
    if not 0 <= ratio_low < ratio_high:
        raise ConfigError(
            f"ratio_low={ratio_low}, ratio_high={ratio_high}; the rule is 0 <= ratio_low < ratio_high, for"
            " example 0 and 5"
        )
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "cispo")
    ratio = compute_token_ratio(inputs.log_probs.detach(), choose_old_log_probs(inputs, "cispo"))
    token_losses = -ratio.clamp(ratio_low, ratio_high) * advantages * inputs.log_probs
    means = _share(ratio < ratio_low, ratio > ratio_high) | _mean(ratio)
    return finish_loss(inputs, token_losses, unit, means, _largest(ratio), **_with_cap(terms))


def sapo_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−(4/τ)·σ(τ·(r − 1))·A, τ = tau_positive where A > 0, else tau_negative: a soft gate in place of the
    clip.

    Its gradient is that of PPO at r = 1 and fades on both sides, faster with a larger τ. Paper: SAPO,
    2511.20347.
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not value > 0:
            raise ConfigError(
                f"{name}={value} must be above 0: it is the steepness of the gate; 1.0 is usual"
            )
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "sapo")
    ratio = compute_token_ratio(inputs.log_probs, choose_old_log_probs(inputs, "sapo"))
    tau = torch.where(
        advantages > 0, torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative)
    )
    token_losses = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return finish_loss(inputs, token_losses, unit, _mean(ratio), _largest(ratio), **_with_cap(terms))


def dppo_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    tv_low: float = 0.2,
    tv_high: float = 0.2,
    **terms: Unpack[Terms],
) -> LossOutput:
    """−A·exp(lp − mu), 0 where the update would go on beyond the trust region: A > 0 and e^lp − e^mu >
    tv_high, or A < 0 and e^mu − e^lp > tv_low.

    The region is one of the token's probability, the total variation of "this token or another", not of the
    ratio: rare tokens may move by large ratios. `clip_ratio/low|high` are the shares that were left out.
    Paper: DPPO, 2602.04879. With mu_penalty_coef = 1e-3 this is the default loss of prime-rl (2602.02276).
    """
    for name, value in (("tv_low", tv_low), ("tv_high", tv_high)):
        if not 0 < value <= 1:
            raise ConfigError(
                f"{name}={value} must be above 0 and at most 1: it is a difference of probabilities; 0.2 is"
                " usual"
            )
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "dppo")
    mu = need_rollout_log_probs(inputs, "dppo")
    ratio = compute_token_ratio(inputs.log_probs, mu)
    moved = inputs.log_probs.detach().exp() - mu.exp()
    low, high = (advantages < 0) & (moved < -tv_low), (advantages > 0) & (moved > tv_high)
    token_losses = torch.where(low | high, torch.zeros_like(ratio), -advantages * ratio)
    return finish_loss(
        inputs, token_losses, unit, _share(low, high) | _mean(ratio), _largest(ratio), ratio="mu", **terms
    )


def dro_loss(
    inputs: LossInputs, *, unit: LossUnit = "tokens", beta: float = 0.05, **terms: Unpack[Terms]
) -> LossOutput:
    """−A·lp + ½·beta·(lp − mu)²: direct reward optimisation, without a ratio. Papers: 2405.19107; Kimi k1.5,
    2501.12599.
    """
    if not beta >= 0:
        raise ConfigError(
            f"beta={beta} must not be negative: it holds the policy near the engine that sampled; 0.05 is"
            " usual"
        )
    inputs = clear_masked(inputs)
    gap = inputs.log_probs - need_rollout_log_probs(inputs, "dro")
    token_losses = -need_advantages(inputs, "dro") * inputs.log_probs + 0.5 * beta * gap.square()
    return finish_loss(inputs, token_losses, unit, {}, {}, ratio="none", **terms)


# --- one ratio per sequence ---------------------------------------------------------------------------------


def gspo_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "sequences",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) on every token, s = exp(mean over the row of lp −
    old): one ratio per sequence.

    With unit "sequences" this is the paper's objective; with "tokens" long rows weigh more. Paper:
    2507.18071. The ratio metrics are of s.
    """
    _check_clip(clip_low, clip_high)
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "gspo")
    ratio = compute_sequence_ratio(
        inputs.log_probs, choose_old_log_probs(inputs, "gspo"), inputs.mask
    ).expand_as(advantages)
    token_losses, means = _clip_surrogate(ratio, advantages, clip_low, clip_high)
    return finish_loss(inputs, token_losses, unit, means, _largest(ratio), **_with_cap(terms))


def gspo_token_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "sequences",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """gspo's value with a gradient per token: −min(s_t·A_t, clip(s_t, ...)·A_t), s_t = sg[s]·exp(lp −
    sg[lp]).

    For advantages that differ inside a row; where they do not, value and gradient are gspo's with unit
    "sequences". Paper: 2507.18071, eq. 14.
    """
    _check_clip(clip_low, clip_high)
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "gspo_token")
    detached = inputs.log_probs.detach()
    sequence = compute_sequence_ratio(detached, choose_old_log_probs(inputs, "gspo_token"), inputs.mask)
    # −inf − −inf would be NaN; a NaN is in `sequence` already
    own = torch.exp(
        torch.where(detached > -torch.inf, inputs.log_probs - detached, torch.zeros_like(detached))
    )
    ratio = sequence * own
    token_losses, means = _clip_surrogate(ratio, advantages, clip_low, clip_high)
    return finish_loss(inputs, token_losses, unit, means, _largest(ratio), **_with_cap(terms))


def gmpo_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "sequences",
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−A·exp(mean over the row of the clipped lp − old): the geometric mean of clipped token ratios.

    lp − old is held below clip_high where A > 0 and above −clip_low where A < 0, in nats; a clipped token has
    exactly no gradient, the others of its row keep theirs. The ratio metrics are of the geometric mean.
    Paper: GMPO, 2507.20673, which clips at ±0.4.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0 nats: lp - old is clipped at it; 0.4 is usual")
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "gmpo")
    log_ratio = inputs.log_probs - choose_old_log_probs(inputs, "gmpo")
    low, high = (
        (advantages < 0) & (log_ratio.detach() < -clip_low),
        (advantages > 0) & (log_ratio.detach() > clip_high),
    )
    bounded = torch.where(
        low,
        torch.full_like(log_ratio, -clip_low),
        torch.where(high, torch.full_like(log_ratio, clip_high), log_ratio),
    )
    mean = compute_row_mean(bounded, inputs.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(mean).expand_as(advantages)
    return finish_loss(
        inputs,
        -advantages * ratio,
        unit,
        _share(low, high) | _mean(ratio),
        _largest(ratio),
        **_with_cap(terms),
    )


# --- tokens that would cost most entropy --------------------------------------------------------------------


def compute_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    log_prob_mean: float | None = None,
    advantage_mean: float | None = None,
) -> Tensor:
    """[B, T] (lp − mean lp)·(A − mean A), detached, 0 outside the mask: to first order, how much entropy an
    update on the token costs.

    A mean that is not given is that of the masked tokens here. Paper: 2505.22617.
    """
    count = mask.sum().clamp(min=1)
    centred: list[Tensor] = []
    for values, mean in ((log_probs.detach(), log_prob_mean), (advantages.detach(), advantage_mean)):
        kept = torch.where(mask, values, torch.zeros_like(values))
        centred.append(kept - (kept.sum() / count if mean is None else mean))
    return torch.where(mask, centred[0] * centred[1], torch.zeros_like(centred[0]))


def clip_cov_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    log_prob_mean: float | None = None,
    advantage_mean: float | None = None,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """ppo_clip's loss, 0 on the tokens of largest covariance: ⌈cov_fraction · n⌉ at most, of those unclipped
    with cov_low < cov < cov_high.

    n and the means are those of the micro-batch, as in the authors' code, so the choice depends on how a
    batch is divided; with cov_fraction = 1 and both means given it does not. We take the largest where the
    authors draw at random. `clip_ratio/cov`: share of tokens left out. Paper: Clip-Cov, 2505.22617.
    """
    _check_clip(clip_low, clip_high)
    _check_covariance(cov_fraction, cov_low, cov_high)
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "clip_cov")
    ratio = compute_token_ratio(inputs.log_probs, choose_old_log_probs(inputs, "clip_cov"))
    token_losses, means = _clip_surrogate(ratio, advantages, clip_low, clip_high)
    covariances = compute_covariances(
        inputs.log_probs, advantages, inputs.mask, log_prob_mean=log_prob_mean, advantage_mean=advantage_mean
    )
    inside = (covariances > cov_low) & (covariances < cov_high) & ~means["clip_ratio"]
    chosen = _select_largest(covariances, inside, inputs.mask, cov_fraction)
    means["clip_ratio/cov"] = chosen
    token_losses = torch.where(chosen, torch.zeros_like(token_losses), token_losses)
    return finish_loss(inputs, token_losses, unit, means, _largest(ratio), **_with_cap(terms))


def kl_cov_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    cov_fraction: float = 2e-3,
    cov_low: float = 0.0,
    cov_kl_coef: float = 1.0,
    log_prob_mean: float | None = None,
    advantage_mean: float | None = None,
    **terms: Unpack[RatioTerms],
) -> LossOutput:
    """−r·A, plus cov_kl_coef·|lp − old| on the ⌈cov_fraction · n⌉ tokens of largest covariance above cov_low.
    No clip.

    |lp − old| stands for the KL of old and policy, as in the authors' code; where lp = old it has no gradient, so the first update on a
    batch is plain importance sampling. n and the means: see clip_cov. `clip_ratio/cov`: share of penalised tokens. Paper: KL-Cov, 2505.22617.
    """
    _check_covariance(cov_fraction, cov_low, float("inf"))
    if not cov_kl_coef >= 0:
        raise ConfigError(f"cov_kl_coef={cov_kl_coef} must not be negative; 1.0 is usual")
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "kl_cov")
    log_ratio = compute_log_ratio(inputs.log_probs, choose_old_log_probs(inputs, "kl_cov"))
    ratio = torch.exp(log_ratio)
    covariances = compute_covariances(
        inputs.log_probs, advantages, inputs.mask, log_prob_mean=log_prob_mean, advantage_mean=advantage_mean
    )
    chosen = _select_largest(covariances, covariances > cov_low, inputs.mask, cov_fraction)
    token_losses = torch.where(
        chosen, cov_kl_coef * log_ratio.abs() - advantages * ratio, -advantages * ratio
    )
    return finish_loss(
        inputs,
        token_losses,
        unit,
        _mean(ratio) | {"clip_ratio/cov": chosen},
        _largest(ratio),
        **_with_cap(terms),
    )


def _select_largest(values: Tensor, candidates: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """[B, T] bool: candidates among the ⌈fraction · n⌉ largest of the candidates' values, n counted over the
    mask.
    """
    ranked = torch.where(candidates & mask, values, torch.full_like(values, -torch.inf))
    largest = select_top_fraction(ranked.flatten()[None], mask.flatten()[None], fraction)
    return largest.view_as(mask) & candidates & mask


def _check_covariance(fraction: float, low: float, high: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"cov_fraction={fraction} must be above 0 and at most 1: a share of the micro-batch's trained"
            " tokens"
        )
    if not low < high:
        raise ConfigError(
            f"cov_low={low}, cov_high={high}; the rule is cov_low < cov_high, for example 1 and 5"
        )


# --- pieces -------------------------------------------------------------------------------------------------


def _clip_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, TokenValues]:
    """−min(r·A, clip(r)·A), and its metrics."""
    lowest, highest = 1.0 - clip_low, 1.0 + clip_high
    token_losses = -torch.minimum(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
    detached = ratio.detach()
    low, high = (advantages < 0) & (detached < lowest), (advantages > 0) & (detached > highest)
    return token_losses, _share(low, high) | _mean(ratio)


def _share(low: Tensor, high: Tensor) -> TokenValues:
    return {"clip_ratio": low | high, "clip_ratio/low": low, "clip_ratio/high": high}


def _mean(ratio: Tensor) -> TokenValues:
    return {"ratio/mean": ratio.detach()}


def _largest(ratio: Tensor) -> TokenValues:
    return {"ratio/max": ratio.detach()}


def _with_cap(terms: RatioTerms) -> RatioTerms:
    return {"importance_cap": DEFAULT_CAP, **terms}


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 < clip_low <= 1:
        raise ConfigError(
            f"clip_low={clip_low} must be above 0 and at most 1: the ratio is clipped below 1 - clip_low; 0.2"
            " is usual"
        )
    if not clip_high > 0:
        raise ConfigError(
            f"clip_high={clip_high} must be above 0: the ratio is clipped above 1 + clip_high; 0.2 is usual"
        )

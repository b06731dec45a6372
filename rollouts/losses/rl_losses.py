"""Policy-gradient losses. Per token: lp = log π(a|s) with gradient, old, mu and ref without; A = advantage; minimised.

    ratio against old = the trainer's recomputed log-probs if the batch has them, else mu = the engine's. With both, a token's loss is
    also multiplied by min(exp(old − mu), importance_cap). See rollouts.losses.corrections.

Metrics (means and maxima over trained tokens; absent where the batch lacks what they need):
    ratio/mean, ratio/max                exp(lp − old)
    clip_ratio, clip_ratio/low|high      share of tokens on which the clip took the gradient away; low: A < 0, high: A > 0
    kl/ref                               lp − ref: the k1 estimate of KL(policy || reference)
    mismatch_kl/mean|max                 k3 of q against mu, w − 1 − log w with w = q/mu: KL(engine || trainer), never negative; q is old
                                         if recomputed, else lp, which has moved when a batch is trained on more than once
    mismatch/logprob_abs_diff            |q − mu|
    importance_weight/mean|mean_square|max, importance_weight/capped     the truncated weight and how often the cap bit
    entropy/mean                         nats
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.corrections import compute_loss_weights
from rollouts.losses.inputs import LossInputs, LossOutput, choose_old_log_probs, clear_masked, need_advantages, need_rollout_log_probs
from rollouts.losses.kl import compute_kl_penalty
from rollouts.losses.ratios import compute_log_ratio, compute_sequence_ratio, compute_token_ratio
from rollouts.losses.reductions import collect_token_metrics, reduce_loss
from rollouts.types import LossUnit

TokenValues = dict[str, Tensor]


def ppo_clip_loss(
    inputs: LossInputs,
    *,
    unit: LossUnit = "tokens",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k2",
    importance_cap: float = 2.0,
) -> LossOutput:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_coef·KL, r = exp(lp − old); gradient exactly 0 on clipped tokens.

    dual_clip = c > 1 also bounds the loss of a token with A < 0 by c·|A|. The KL term (k2 or k3) needs ref_log_probs and, like the rest,
    is multiplied by the truncated importance weight: its expectation is over what the old policy samples.
    Papers: 1707.06347; 2503.14476 (clip_high above clip_low); 1912.09729 (dual clip). Raises ConfigError naming what is wrong.
    """
    _check_ppo_params(clip_low, clip_high, dual_clip, kl_coef)
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "ppo_clip")
    ratio = compute_token_ratio(inputs.log_probs, choose_old_log_probs(inputs, "ppo_clip"))
    token_losses = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    detached = ratio.detach()
    means = _clip_metrics(detached, advantages, 1.0 - clip_low, 1.0 + clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (token_losses.detach() > bound)
        token_losses = torch.where(over, bound, token_losses)
        means["clip_ratio/dual"] = over
    if kl_coef > 0:
        if inputs.ref_log_probs is None:
            raise ConfigError(f"kl_coef={kl_coef} needs ref_log_probs and the batch has none; score it with a reference, or set kl_coef=0")
        token_losses = token_losses + kl_coef * compute_kl_penalty(inputs.log_probs, inputs.ref_log_probs, kl_estimator)
    return _finish(inputs, token_losses, unit, means | {"ratio/mean": detached}, {"ratio/max": detached}, importance_cap=importance_cap)


def importance_sampling_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """−A·exp(lp − mu): the unclipped off-policy policy gradient, against the engine's log-probs even when old ones are given."""
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "importance_sampling")
    ratio = compute_token_ratio(inputs.log_probs, need_rollout_log_probs(inputs, "importance_sampling"))
    detached = ratio.detach()
    return _finish(inputs, -advantages * ratio, unit, {"ratio/mean": detached}, {"ratio/max": detached})


def reinforce_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """−A·lp: the on-policy policy gradient. Nothing corrects for samples of an older policy or another engine."""
    inputs = clear_masked(inputs)
    return _finish(inputs, -need_advantages(inputs, "reinforce") * inputs.log_probs, unit, {}, {})


def cispo_loss(
    inputs: LossInputs, *, unit: LossUnit = "tokens", ratio_low: float = 0.0, ratio_high: float = 5.0, importance_cap: float = 2.0
) -> LossOutput:
    """−clip(r, ratio_low, ratio_high)·A·lp with the clipped ratio detached: no token loses its gradient. The bounds are absolute.

    `clip_ratio/low|high` count the tokens whose weight was clipped, of either sign of A. Papers: 2506.13585; 2510.13786.
    """
    if not 0 <= ratio_low < ratio_high:
        raise ConfigError(f"ratio_low={ratio_low}, ratio_high={ratio_high}; the rule is 0 <= ratio_low < ratio_high, for example 0 and 5")
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "cispo")
    ratio = compute_token_ratio(inputs.log_probs.detach(), choose_old_log_probs(inputs, "cispo"))
    low, high = ratio < ratio_low, ratio > ratio_high
    token_losses = -ratio.clamp(ratio_low, ratio_high) * advantages * inputs.log_probs
    means = {"clip_ratio": low | high, "clip_ratio/low": low, "clip_ratio/high": high, "ratio/mean": ratio}
    return _finish(inputs, token_losses, unit, means, {"ratio/max": ratio}, importance_cap=importance_cap)


def gspo_loss(
    inputs: LossInputs, *, unit: LossUnit = "sequences", clip_low: float = 3e-4, clip_high: float = 4e-4, importance_cap: float = 2.0
) -> LossOutput:
    """−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) on every token, s = exp(mean over the row of lp − old): one ratio per sequence.

    With unit "sequences" this is the paper's objective; with "tokens" long rows weigh more. Paper: 2507.18071. The ratio metrics are of s.
    """
    _check_ppo_params(clip_low, clip_high, None, 0.0)
    inputs = clear_masked(inputs)
    advantages = need_advantages(inputs, "gspo")
    ratio = compute_sequence_ratio(inputs.log_probs, choose_old_log_probs(inputs, "gspo"), inputs.mask).expand_as(advantages)
    token_losses = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    detached = ratio.detach()
    means = _clip_metrics(detached, advantages, 1.0 - clip_low, 1.0 + clip_high) | {"ratio/mean": detached}
    return _finish(inputs, token_losses, unit, means, {"ratio/max": detached}, importance_cap=importance_cap)


def _check_ppo_params(clip_low: float, clip_high: float, dual_clip: float | None, kl_coef: float) -> None:
    if not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low={clip_low} must be above 0 and at most 1: the ratio is clipped below 1 - clip_low; 0.2 is usual")
    if not clip_high > 0:
        raise ConfigError(f"clip_high={clip_high} must be above 0: the ratio is clipped above 1 + clip_high; 0.2 is usual")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip} must be above 1, or every token with a negative advantage loses its gradient; 3.0 is usual")
    if not kl_coef >= 0:
        raise ConfigError(f"kl_coef={kl_coef} must not be negative; 0 turns the KL term off")


def _clip_metrics(ratio: Tensor, advantages: Tensor, lowest: float, highest: float) -> TokenValues:
    low = (advantages < 0) & (ratio < lowest)
    high = (advantages > 0) & (ratio > highest)
    return {"clip_ratio": low | high, "clip_ratio/low": low, "clip_ratio/high": high}


def _finish(
    inputs: LossInputs, token_losses: Tensor, unit: LossUnit, means: TokenValues, largest: TokenValues, *, importance_cap: float | None = None
) -> LossOutput:
    """Weights, reduces, and adds the metrics that all losses share. importance_cap None: the loss takes no truncated weight."""
    means, largest = dict(means), dict(largest)
    weights = None if importance_cap is None else compute_loss_weights(inputs, importance_cap)
    if weights is not None and importance_cap is not None:
        token_losses = token_losses * weights
        means["importance_weight/mean"] = weights
        means["importance_weight/mean_square"] = weights.square()
        means["importance_weight/capped"] = weights >= importance_cap
        largest["importance_weight/max"] = weights
    log_probs = inputs.log_probs.detach()
    if inputs.rollout_log_probs is not None:
        trainer = log_probs if inputs.old_log_probs is None else inputs.old_log_probs
        log_weight = compute_log_ratio(trainer, inputs.rollout_log_probs)
        means["mismatch_kl/mean"] = torch.exp(log_weight) - log_weight - 1.0
        largest["mismatch_kl/max"] = means["mismatch_kl/mean"]
        means["mismatch/logprob_abs_diff"] = (trainer - inputs.rollout_log_probs).abs()
    if inputs.ref_log_probs is not None:
        means["kl/ref"] = log_probs - inputs.ref_log_probs
    if inputs.entropy is not None:
        means["entropy/mean"] = inputs.entropy.detach()
    total, count = reduce_loss(token_losses, inputs.mask, unit)
    return LossOutput(total, count, collect_token_metrics(means, largest, inputs.mask))

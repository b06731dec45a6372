"""Corrections for the gap between the policy that trains (old) and the engine that sampled (mu). Weights carry no gradient."""

from __future__ import annotations

from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.inputs import LossInputs
from rollouts.losses.ratios import compute_token_ratio


def compute_truncated_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """[B, T] min(exp(old − mu), cap), detached: truncated importance sampling per token.

    Multiplied onto a token's loss it turns an average over what the engine sampled into one over the old policy, exactly as long as the
    cap does not bite. Sources: 1606.02647; Yao et al. 2025. Raises ConfigError if cap is not positive.
    """
    if not cap > 0:
        raise ConfigError(f"importance_cap={cap} must be above 0; 2.0 is usual")
    return compute_token_ratio(old_log_probs.detach(), rollout_log_probs.detach()).clamp(max=cap)


def compute_loss_weights(inputs: LossInputs, cap: float) -> Tensor | None:
    """[B, T] weights when both the recomputed old log-probs and mu are given; None otherwise, because the ratio is then against mu itself."""
    if inputs.old_log_probs is None or inputs.rollout_log_probs is None:
        return None
    return compute_truncated_weights(inputs.old_log_probs, inputs.rollout_log_probs, cap)


def compute_ess_fraction(mean_weight: float, mean_square_weight: float) -> float:
    """Effective sample size over the number of tokens, (Σw)² / (n Σw²), from the mean weight and the mean squared weight: 1 is perfect.

    The two means merge across micro-batches and ranks, this number does not: take it last. No weight at all gives 0.
    """
    return mean_weight**2 / mean_square_weight if mean_square_weight > 0 else 0.0

"""Per-token estimates of KL(policy || reference) from sampled tokens, d = policy − ref in nats. [B, T] in, [B, T] out.

    name   value            used on rewards            used as a loss: expected gradient
    k1     d                right (2203.02155)         zero: it trains nothing
    k2     d²/2             biased                     that of KL(policy || reference): right
    k3     e^−d − 1 + d     unbiased, low variance     that of KL(reference || policy): popular, another direction

Values agree near d = 0, gradients do not: p = [.5, .3, .2], q = [.4, .4, .2] has KL .02527 and the three gradients above differ already
in the second decimal. Expectations are over tokens that the policy sampled. Sources: Schulman 2020, "Approximating KL Divergence";
2506.09477; 2510.01555. Positions outside a mask are computed but meaningless: mask after. A NaN stays in its own position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.ratios import compute_log_ratio


def kl_k1(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """policy − ref: unbiased, of either sign."""
    return policy_log_probs - ref_log_probs


def kl_k2(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(policy − ref)²/2: never negative, biased in value, with the gradient of KL(policy || reference)."""
    return 0.5 * (policy_log_probs - ref_log_probs).square()


def kl_k3(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(ref − policy) − (ref − policy) − 1: never negative, unbiased. We do not clip; the loss does."""
    difference = ref_log_probs - policy_log_probs
    return torch.exp(difference) - difference - 1.0


def compute_kl_penalty(policy_log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """[B, T] KL term of a loss, never negative: k2, or k3 with ref − policy held within ±20.

    Raises ConfigError for k1, whose expected gradient as a loss is zero, and for any other name.
    """
    if estimator == "k2":
        return kl_k2(policy_log_probs, ref_log_probs)
    if estimator == "k3":
        difference = compute_log_ratio(ref_log_probs, policy_log_probs)
        return torch.exp(difference) - difference - 1.0
    if estimator == "k1":
        raise ConfigError("kl_estimator='k1' in a loss has an expected gradient of zero; use 'k2' or 'k3', or put the KL term in the reward")
    raise ConfigError(f"kl_estimator={estimator!r} is not known; a loss takes 'k2' or 'k3'")

"""Probability ratios from log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = (
    20.0  # exp(20) = 4.9e8: far outside every clip range, and its square is still finite in float32
)


def compute_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log_probs − old_log_probs, [B, T] nats, held within ±20.

    Outside that range the gradient is 0: exp would overflow, and an infinite ratio gives a NaN gradient even
    where the clip discards it (0 · inf). A NaN stays a NaN.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs − old_log_probs), [B, T], between e^−20 and e^20."""
    return torch.exp(compute_log_ratio(log_probs, old_log_probs))


def compute_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] mean over a row's trained tokens of values [B, T]; a row without any gives 0. What lies outside
    the mask never counts.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def compute_sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] exp of the mean over a row's trained tokens of log_probs − old_log_probs: the geometric mean of
    its token ratios.

    A row without trained tokens gives 1. Values outside the mask must be finite (see `clear_masked`). Paper:
    GSPO, 2507.18071.
    """
    mean = compute_row_mean(log_probs - old_log_probs, mask)
    return torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

"""Ratios from log-probs; from per-token values to a sum with its count, and to metrics that merge."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollouts.losses.inputs import LossOutput, require
from rollouts.types import EffectiveShare, Max, Mean, Metric, Min

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8 is far outside every clip, and its square is finite in float32


def compute_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log_probs − old_log_probs, [B, T] nats, held within ±20. A NaN stays a NaN.

    Outside that range the gradient is 0: exp would overflow, and an infinite ratio has a NaN gradient even
    where a clip discards it (0 · inf).
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs − old_log_probs), [B, T], between e^−20 and e^20."""
    return torch.exp(compute_log_ratio(log_probs, old_log_probs))


def compute_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] mean over a row's trained tokens of values [B, T]; a row without any gives 0."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def compute_row_sum(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] sum over a row's trained tokens of log-ratios [B, T], held within ±20."""
    return torch.where(mask, log_ratios, 0.0).sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] geometric mean of a row's token ratios; 1 for a row without trained tokens. GSPO, 2507.18071."""
    mean = compute_row_mean(log_probs - old_log_probs, mask)
    return torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def reduce_loss(token_losses: Tensor, mask: Tensor, unit: str) -> tuple[Tensor, float]:
    """(sum, count) of losses [B, T] over the masked tokens, in the loss's unit.

    tokens, constant: sum over tokens; count is the number of tokens. (For "constant" the backend divides by
    the constant instead.) sequences: sum over rows of the mean over the row's tokens; count is the number of
    rows that have a token. sequence_sums: sum over tokens, count as for sequences. An empty mask gives 0 with
    a zero gradient, and 0. What lies outside the mask never counts. Raises ConfigError on another unit.
    """
    kept = torch.where(mask, token_losses, 0.0)
    lengths = mask.sum(dim=-1)
    if unit in ("tokens", "constant"):
        return kept.sum(), float(lengths.sum())
    require(
        unit in ("sequences", "sequence_sums"),
        f"unit={unit!r} is not known; use 'tokens', 'sequences', 'sequence_sums' or 'constant'",
    )
    total = kept.sum() if unit == "sequence_sums" else compute_row_mean(token_losses, mask).sum()
    return total, float((lengths > 0).sum())


def select_top_fraction(values: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """[B, T] bool: of each row's n masked tokens the ⌈fraction · n⌉ largest; of equal ones the earlier."""
    order = torch.where(mask, values.detach(), -torch.inf).argsort(dim=-1, descending=True, stable=True)
    kept = torch.ceil(fraction * mask.sum(dim=-1, keepdim=True).double() - 1e-9)
    return (order.argsort(dim=-1) < kept) & mask


def collect_token_metrics(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Metrics over the masked tokens of values, each of the mask's shape, by name; empty when the mask is
    empty. What is taken of the tokens is the last part of the name: max, min, ess (the effective sample size
    of weights), else their mean.

    All numbers are read back in one transfer: on an accelerator each transfer stalls the queue.
    """
    kept = mask.flatten().nonzero().squeeze(-1)
    count = float(len(kept))
    if not count or not values:
        return {}
    columns = torch.stack([column.detach().flatten()[kept].double() for column in values.values()])
    statistics = columns.sum(-1), columns.square().sum(-1), columns.amax(-1), columns.amin(-1)
    metrics: dict[str, Metric] = {}
    for name, (total, squares, top, low) in zip(values, torch.stack(statistics, -1).tolist(), strict=True):
        special = {"max": Max(top), "min": Min(low), "ess": EffectiveShare(total, squares, count)}
        metrics[name] = special.get(name.rpartition("/")[2], Mean(total, count))
    return metrics


def sum_rows(losses: Tensor, values: Mapping[str, Tensor]) -> LossOutput:
    """The sum of the losses of rows or pairs [P], their number, and metrics of values [P]."""
    everywhere = torch.ones_like(losses, dtype=torch.bool)
    return LossOutput(losses.sum(), float(len(losses)), collect_token_metrics(values, everywhere))

"""From per-token values to a sum with its count, and to metrics that merge."""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.types import Max, Mean, Metric


def reduce_loss(token_losses: Tensor, mask: Tensor, unit: str) -> tuple[Tensor, float]:
    """(sum, count) of losses [B, T] over the masked tokens, in the loss's unit. What lies outside the mask
    never counts, NaN included.

    tokens, constant: sum over tokens; count is the number of tokens. (For "constant" the backend divides by
    the constant instead.) sequences: sum over rows of the mean over the row's tokens; count is the number of
    rows that have a token. sequence_sums: sum over tokens; count is the number of rows that have a token.
    Nothing masked in gives (0 with a zero gradient, 0). Raises ConfigError on another unit.
    """
    kept = torch.where(mask, token_losses, torch.zeros_like(token_losses))
    if unit in ("tokens", "constant"):
        return kept.sum(), float(mask.sum())
    lengths = mask.sum(dim=-1)
    if unit == "sequence_sums":
        return kept.sum(), float((lengths > 0).sum())
    if unit == "sequences":
        row_means = kept.sum(dim=-1) / lengths.clamp(min=1)
        return row_means.sum(), float((lengths > 0).sum())
    raise ConfigError(
        f"unit={unit!r} is not known; a loss is normalised by 'tokens', 'sequences', 'sequence_sums' or"
        " 'constant'"
    )


def select_top_fraction(values: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """[B, T] bool: of each row's n masked tokens the ⌈fraction · n⌉ with the largest values; of equal ones
    the earlier.

    Rows are never split among micro-batches, so neither is what this selects.
    """
    ranked = torch.where(mask, values.detach(), torch.full_like(values, -torch.inf))
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    kept = torch.ceil(fraction * mask.sum(dim=-1, keepdim=True).double() - 1e-9)
    return (ranks < kept) & mask


def collect_token_metrics(
    means: dict[str, Tensor], largest: dict[str, Tensor], mask: Tensor
) -> dict[str, Metric]:
    """Means and maxima over the masked tokens of values [B, T], by name. Empty when no token is masked in.

    All sums are read back in one transfer: on an accelerator every single number would stall the queue.
    """
    kept = mask.flatten().nonzero().squeeze(-1)
    if len(kept) == 0:
        return {}
    with torch.no_grad():
        values = {name: value.flatten()[kept].double() for name, value in (means | largest).items()}
        scalars = [values[name].sum() for name in means] + [values[name].max() for name in largest]
        numbers = torch.stack(scalars).tolist() if scalars else []
    metrics: dict[str, Metric] = {}
    for name, number in zip(means, numbers, strict=False):
        metrics[name] = Mean(number, float(len(kept)))
    for name, number in zip(largest, numbers[len(means) :], strict=True):
        metrics[name] = Max(number)
    return metrics

"""From per-token values to a sum with its count, and to metrics that merge."""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.types import Max, Mean, Metric


def reduce_loss(token_losses: Tensor, mask: Tensor, unit: str) -> tuple[Tensor, float]:
    """(sum, count) of losses [B, T] over the masked tokens, in the loss's unit. What lies outside the mask never counts, NaN included.

    tokens, constant: sum over tokens; count is the number of tokens. (For "constant" the backend divides by the constant instead.)
    sequences: sum over rows of the mean over the row's tokens; count is the number of rows that have a token.
    Nothing masked in gives (0 with a zero gradient, 0). Raises ConfigError on another unit.
    """
    kept = torch.where(mask, token_losses, torch.zeros_like(token_losses))
    if unit in ("tokens", "constant"):
        return kept.sum(), float(mask.sum())
    if unit == "sequences":
        lengths = mask.sum(dim=-1)
        row_means = kept.sum(dim=-1) / lengths.clamp(min=1)
        return row_means.sum(), float((lengths > 0).sum())
    raise ConfigError(f"unit={unit!r} is not known; a loss is normalised by 'tokens', 'sequences' or 'constant'")


def collect_token_metrics(means: dict[str, Tensor], largest: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
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

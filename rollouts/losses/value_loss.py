"""The loss of a critic, from values and from what a backend gives a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.losses.inputs import LossInputs, LossOutput
from rollouts.losses.reductions import collect_token_metrics, reduce_loss
from rollouts.types import ExplainedVariance, LossUnit, Mean, Metric


def critic_loss(inputs: LossInputs, *, unit: LossUnit = "tokens", clip: float | None = None) -> LossOutput:
    """value_loss of a backend with a scalar head, whose values are inputs.log_probs; the loss "value".
    Returns, and old_values with a clip, are the batch's.

    Raises ConfigError if the batch has no returns, and what value_loss raises.
    """
    if inputs.returns is None:
        raise ConfigError(
            "loss 'value' needs returns and the batch has none; fill RolloutBatch.returns, as compute_gae"
            " makes them"
        )
    return value_loss(
        inputs.log_probs, inputs.returns, inputs.mask, old_values=inputs.old_values, clip=clip, unit=unit
    )


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    unit: LossUnit = "tokens",
) -> LossOutput:
    """½·max((v − R)², (clip(v, old − clip, old + clip) − R)²) per token, all [B, T], in the reward's unit;
    without clip ½·(v − R)².

    values with gradient, the rest without. A value beyond the clip whose clipped error is the larger has
    exactly no gradient. What lies outside the mask counts for nothing, NaN included; an empty mask gives 0
    with a zero gradient. Paper: 1707.06347, and the clip of its code. Metrics: value/mean, return/mean,
    value/clip_ratio (share of tokens without gradient), value/explained_variance. Raises ConfigError on a
    clip that is not positive or has no old_values, ValueError on shapes that differ.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"clip={clip} of the value loss must be above 0; 0.2 is usual, None does not clip")
    if clip is not None and old_values is None:
        raise ConfigError(
            f"clip={clip} of the value loss needs old_values, those before the first update on the batch; or"
            " set clip=None"
        )
    old_values = None if clip is None else old_values
    for name, tensor in (("values", values), ("returns", returns), ("old_values", old_values)):
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(
                f"{name} have shape {tuple(tensor.shape)}; it must be that of the mask, {tuple(mask.shape)}"
            )
    values, returns = (
        torch.where(mask, tensor, torch.zeros_like(tensor)) for tensor in (values, returns.detach())
    )
    squares = (values - returns).square()
    means = {"value/mean": values.detach(), "return/mean": returns}
    if old_values is not None and clip is not None:
        old = torch.where(mask, old_values.detach(), torch.zeros_like(old_values))
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        means["value/clip_ratio"] = ((values - old).abs() > clip) & (clipped > squares)
        squares = torch.maximum(squares, clipped)
    total, count = reduce_loss(0.5 * squares, mask, unit)
    error = returns - values.detach()
    sums = {
        "target": returns,
        "target_square": returns.double().square(),
        "error": error,
        "error_square": error.double().square(),
    }
    metrics = collect_token_metrics(means | sums, {}, mask)
    return LossOutput(total, count, _explain(metrics))


def _explain(metrics: dict[str, Metric]) -> dict[str, Metric]:
    parts = [metrics.pop(name, None) for name in ("target", "target_square", "error", "error_square")]
    totals = [part for part in parts if isinstance(part, Mean)]
    if totals:
        metrics["value/explained_variance"] = ExplainedVariance(
            totals[0].count, *(part.total for part in totals)
        )
    return metrics

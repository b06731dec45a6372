"""The loss of a critic."""

import torch
from torch import Tensor

from rollouts.losses.inputs import LossInputs, LossOutput, check_numbers, clear_masked, sum_tokens
from rollouts.types import ExplainedVariance, LossUnit


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    unit: LossUnit = "tokens",
) -> LossOutput:
    """critic_loss of tensors [B, T]."""
    inputs = LossInputs(log_probs=values, mask=mask, returns=returns, old_values=old_values)
    return critic_loss(inputs, unit=unit, clip=clip)


def critic_loss(inputs: LossInputs, *, unit: LossUnit = "tokens", clip: float | None = None) -> LossOutput:
    """½·max((v − R)², (clip(v, old − clip, old + clip) − R)²) per token, in the reward's unit; without clip
    ½·(v − R)².

    v are inputs.log_probs, which a backend with a scalar head fills with its values. A value beyond the clip
    whose clipped error is the larger has exactly no gradient. Paper: 1707.06347, and the clip of its code.
    Metrics: loss/value, value/mean, return/mean, value/clip_ratio (share of tokens without gradient),
    value/explained_variance. Raises ConfigError without returns, on a clip that is not positive or lacks
    old_values, ValueError on shapes that differ.
    """
    inputs = clear_masked(inputs)
    values, returns = inputs.log_probs, inputs.need("returns")
    squares, error = (values - returns).square(), (returns - values).detach()
    means = {"value/mean": values, "return/mean": returns}
    if clip is not None:
        check_numbers("value", clip=clip)
        old = inputs.need("old_values")
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        means["value/clip_ratio"] = ((values - old).abs() > clip) & (clipped > squares)
        squares = torch.maximum(squares, clipped)
    losses = means["loss/value"] = 0.5 * squares
    output = sum_tokens(losses, inputs, unit, means)
    if output.metrics:
        target, missed = (values[inputs.mask].double() for values in (returns, error))
        sums = torch.stack([target, target.square(), missed, missed.square()]).sum(-1).tolist()
        output.metrics["value/explained_variance"] = ExplainedVariance(float(len(target)), *sums)
    return output

"""The loss whose gradient is known beforehand."""

from __future__ import annotations

from rollouts.losses.inputs import LossInputs, LossOutput, clear_masked, need_advantages
from rollouts.losses.reductions import reduce_loss
from rollouts.types import LossUnit


def linear_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """−A·lp with nothing else and no metrics: its derivative by each log-prob (of a scalar head: value) is
    −A, whatever A was made from.

    For losses over whole batches, such as preference losses: compute dL/dlp from all of forward()'s
    log-probs, and train with A = −dL/dlp and LossSpec("linear", unit="constant", constant=1.0). Raises
    ConfigError if the batch has no advantages.
    """
    inputs = clear_masked(inputs)
    total, count = reduce_loss(-need_advantages(inputs, "linear") * inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count, {})

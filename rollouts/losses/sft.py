"""Supervised loss."""

from __future__ import annotations

from rollouts.losses.inputs import LossInputs, LossOutput, clear_masked
from rollouts.losses.reductions import collect_token_metrics, reduce_loss
from rollouts.types import LossUnit


def sft_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """Negative log-likelihood of the trained tokens, in nats. Perplexity is exp of the metric `loss/nll`.

    Reads log_probs and mask; everything else in `inputs` is ignored.
    """
    inputs = clear_masked(inputs)
    token_losses = -inputs.log_probs
    total, count = reduce_loss(token_losses, inputs.mask, unit)
    means = {"loss/nll": token_losses.detach()}
    if inputs.entropy is not None:
        means["entropy/mean"] = inputs.entropy.detach()
    return LossOutput(total, count, collect_token_metrics(means, {}, inputs.mask))

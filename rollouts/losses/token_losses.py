"""The two losses of one log-prob: supervised, and the loss whose gradient is known beforehand."""

from rollouts.losses.inputs import LossInputs, LossOutput, clear_masked, sum_tokens
from rollouts.types import LossUnit


def sft_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """Negative log-likelihood of the trained tokens, in nats. Perplexity is exp of the metric `loss/nll`."""
    inputs = clear_masked(inputs)
    losses = -inputs.log_probs
    means = {"loss/nll": losses} | ({} if inputs.entropy is None else {"entropy/mean": inputs.entropy})
    return sum_tokens(losses, inputs, unit, means)


def linear_loss(inputs: LossInputs, *, unit: LossUnit = "tokens") -> LossOutput:
    """−A·lp, without metrics: its derivative by each log-prob (of a scalar head: value) is −A.

    For losses over whole batches: compute dL/dlp from all of forward()'s log-probs, and train with
    A = −dL/dlp and LossSpec("linear", unit="constant", constant=1.0). Raises ConfigError without advantages.
    """
    inputs = clear_masked(inputs)
    return sum_tokens(-inputs.need("advantages") * inputs.log_probs, inputs, unit, {})

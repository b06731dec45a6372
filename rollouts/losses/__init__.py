"""Losses by name. A loss takes per-token values [B, T] and returns (sum, count, metrics); the denominator is
the backend's, and global.
"""

import inspect
from collections.abc import Mapping

import torch

from rollouts.errors import ConfigError, RolloutsError, check_keywords
from rollouts.losses.corrections import CORRECTIONS
from rollouts.losses.inputs import (
    LossFn,
    LossInputs,
    LossOutput,
    clear_masked,
    find_function,
    sum_tokens,
)
from rollouts.losses.kl import KL_ESTIMATORS
from rollouts.losses.rl_losses import POLICY_LOSSES
from rollouts.losses.value_loss import critic_loss
from rollouts.types import LossUnit

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "LossFn",
    "LossInputs",
    "LossOutput",
    "find_own_unit",
    "resolve_loss",
    "try_loss",
    "wants_entropy_gradient",
]


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


LOSSES: dict[str, LossFn] = {"sft": sft_loss, **POLICY_LOSSES, "value": critic_loss, "linear": linear_loss}


def resolve_loss(name: str) -> LossFn:
    """The loss function of a name: a key of LOSSES, or `module:function`.

    Raises ConfigError naming the nearest key when the name is unknown, PlugInError when the function cannot
    be imported.
    """
    return find_function("loss", name, LOSSES, takes="(inputs, *, unit, ...)")


def find_own_unit(name: str) -> str:
    """The unit that a loss is defined by: the default of `unit` in its signature, tokens where that has none.
    Raises like resolve_loss.
    """
    parameter = inspect.signature(resolve_loss(name)).parameters.get("unit")
    return parameter.default if parameter and isinstance(parameter.default, str) else "tokens"


def try_loss(
    name: str,
    params: Mapping[str, object],
    *,
    unit: LossUnit = "tokens",
    recompute_old: bool = False,
    reference: bool = False,
) -> None:
    """Raises ConfigError if a loss cannot be called as a run will call it: its parameters, their numbers, and
    what a batch will hold for them.

    It is called once, on one token of log-prob 0, with old log-probs if recompute_old and the reference's if
    reference. A function of the user is not called: only its signature is looked at. A parameter that is not
    known is refused with the nearest one and all that there are. Raises like resolve_loss.
    """
    function = resolve_loss(name)
    check_keywords(f"loss {name!r}", function, params, beside=("inputs", "unit"))
    try:
        inspect.signature(function).bind(None, unit="tokens", **params)
    except TypeError as error:
        raise ConfigError(
            f"loss {name!r}: {error}; it is called as function(inputs, *, unit, …) with what params has"
        ) from error
    if name not in LOSSES:
        return
    zeros = torch.zeros(1, 1)
    inputs = LossInputs(
        log_probs=zeros.clone().requires_grad_(),
        mask=zeros == 0,
        entropy=zeros.clone().requires_grad_(wants_entropy_gradient(name, params)),
        advantages=zeros + 1.0,
        old_log_probs=zeros if recompute_old else None,
        ref_log_probs=zeros if reference else None,
        **dict.fromkeys(("rollout_log_probs", "returns", "old_values", "exact_kl"), zeros),
    )
    try:
        function(inputs, unit=unit, **params)
    except RolloutsError:
        raise
    except Exception as error:
        raise ConfigError(
            f"loss {name!r} fails with {dict(params)}: {type(error).__name__}: {error}; look for a value of"
            " the wrong kind"
        ) from error


def wants_entropy_gradient(name: str, params: Mapping[str, object]) -> bool:
    """Whether LossInputs.entropy must have a gradient: the loss has a parameter `entropy_coef`, and it is not
    0.

    A function of the user asks in the same way; what it does not get in `params` counts as its default.
    Raises like resolve_loss.
    """
    if "entropy_coef" in params:
        return params["entropy_coef"] != 0
    parameter = inspect.signature(resolve_loss(name)).parameters.get("entropy_coef")
    return parameter is not None and parameter.default not in (parameter.empty, 0)

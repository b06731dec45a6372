"""Losses by name. A loss takes per-token values [B, T] and returns (sum, count, metrics); the denominator is
the backend's, and global.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import cast

import torch

from rollouts.errors import ConfigError, RolloutsError
from rollouts.losses.corrections import CORRECTIONS, parse_correction
from rollouts.losses.inputs import LossFn, LossInputs, LossOutput
from rollouts.losses.kl import KL_ESTIMATORS
from rollouts.losses.plug_ins import import_function
from rollouts.losses.rl_losses import (
    cispo_loss,
    clip_cov_loss,
    dppo_loss,
    dro_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_sampling_loss,
    kl_cov_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from rollouts.losses.token_losses import linear_loss, sft_loss
from rollouts.losses.value_loss import critic_loss
from rollouts.types import LossUnit

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "LossFn",
    "LossInputs",
    "LossOutput",
    "check_loss_params",
    "resolve_loss",
    "try_loss",
    "wants_entropy_gradient",
]

LOSSES: dict[str, LossFn] = {
    "sft": sft_loss,
    "ppo_clip": ppo_clip_loss,
    "importance_sampling": importance_sampling_loss,
    "reinforce": reinforce_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "gmpo": gmpo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "dro": dro_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "value": critic_loss,
    "linear": linear_loss,
}


def resolve_loss(name: str) -> LossFn:
    """The loss function of a name: a key of LOSSES, or `module:function`.

    Raises ConfigError naming the nearest key when the name is unknown, PlugInError when the function cannot
    be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        nearest = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"loss={name!r} is not known; did you mean {nearest!r}? Known: {', '.join(LOSSES)}, or"
            " module:function"
        )
    return cast(LossFn, import_function("loss", name, "(inputs, *, unit, ...)"))


def check_loss_params(name: str, params: Mapping[str, object]) -> None:
    """Raises ConfigError if the loss cannot be called with these parameters, naming the nearest one and all
    that it takes.
    """
    accepted = _list_keywords(resolve_loss(name))
    for key in params:
        if accepted is not None and key not in accepted:
            nearest = difflib.get_close_matches(key, accepted, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            takes = ", ".join(accepted) or "none"
            raise ConfigError(f"loss {name!r} has no parameter {key!r}{hint} It takes {takes}")
    correction = params.get("correction")
    if name in LOSSES and correction:
        parse_correction(str(correction))


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
    reference. A function of the user is not called: only what `check_loss_params` sees of it is looked at.
    Raises what that raises.
    """
    check_loss_params(name, params)
    if name not in LOSSES:
        return
    zeros = torch.zeros(1, 1)
    inputs = LossInputs(
        log_probs=zeros.clone().requires_grad_(),
        mask=zeros == 0,
        entropy=zeros.clone().requires_grad_(wants_entropy_gradient(name, params)),
        advantages=zeros + 1.0,
        old_log_probs=zeros if recompute_old else None,
        rollout_log_probs=zeros,
        ref_log_probs=zeros if reference else None,
        returns=zeros,
        old_values=zeros,
    )
    try:
        LOSSES[name](inputs, unit=unit, **params)
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


def _list_keywords(loss: LossFn) -> list[str] | None:
    """The keywords of a loss beside `unit`; None where it takes any."""
    parameters = [*inspect.signature(loss).parameters.values()]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return [name for name in keywords if name != "unit"]

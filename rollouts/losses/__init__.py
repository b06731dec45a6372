"""Losses by name. A loss takes per-token values [B, T] and returns (sum, count, metrics); the denominator is the backend's, and global."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor

from rollouts.errors import ConfigError, PlugInError
from rollouts.losses.inputs import LossFn, LossInputs, LossOutput
from rollouts.losses.kl import kl_k1, kl_k2, kl_k3
from rollouts.losses.rl_losses import cispo_loss, gspo_loss, importance_sampling_loss, ppo_clip_loss, reinforce_loss
from rollouts.losses.sft import sft_loss

__all__ = ["KL_ESTIMATORS", "LOSSES", "LossFn", "LossInputs", "LossOutput", "check_loss_params", "resolve_loss"]

LOSSES: dict[str, LossFn] = {
    "sft": sft_loss,
    "ppo_clip": ppo_clip_loss,
    "importance_sampling": importance_sampling_loss,
    "reinforce": reinforce_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
}

KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def resolve_loss(name: str) -> LossFn:
    """The loss function of a name: a key of LOSSES, or `module:function`.

    Raises ConfigError naming the nearest key when the name is unknown, PlugInError when the function cannot be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        nearest = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"loss={name!r} is not known; did you mean {nearest!r}? Known: {', '.join(LOSSES)}, or module:function")
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        raise PlugInError(
            f"loss={name!r} names a file; a loss is named as module:function, so that every worker can import it: write {module}:{function_name} "
            "and put the file's directory on PYTHONPATH"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlugInError(f"loss={name!r} cannot be imported ({error}); it must be module:function with the module on the Python path") from error
    if not callable(function):
        raise PlugInError(f"loss={name!r} is a {type(function).__name__}; it must be a function of (inputs, *, unit, ...)")
    return cast(LossFn, function)


def check_loss_params(name: str, params: Mapping[str, object]) -> None:
    """Raises ConfigError if the loss cannot be called with these parameters, naming the nearest one and all that it takes."""
    signature = inspect.signature(resolve_loss(name))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    accepted = [key for key, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY and key != "unit"]
    for key in params:
        if key in accepted:
            continue
        nearest = difflib.get_close_matches(key, accepted, n=1, cutoff=0.6)
        question = f"did you mean {nearest[0]!r}? It" if nearest else "it"
        hint = f"{question} takes {', '.join(accepted)}" if accepted else "it takes none"
        raise ConfigError(f"loss {name!r} has no parameter {key!r}; {hint}")

"""Layers that keep only their input for the gradient, and compute the rest again when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from rollouts.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_layers(model: PreTrainedModel) -> int:
    """How many layers of `model` now compute their activations twice instead of keeping them. Gradients stay
    the same.

    Transformers' own switch works in training mode only, which turns dropout on: here the layers stay in
    evaluation mode. Raises ModelError if the model has no layers that can be computed twice.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers for gradient checkpointing; set"
            " model.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = partial(
            _run_twice, layer.forward
        )  # which a copy of the model binds to its own layer, as it would not a closure
    return len(layers)


def _run_twice(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(
        forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options
    )  # in evaluation mode nothing is drawn

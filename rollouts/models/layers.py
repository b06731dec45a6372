"""The layers that a decoder repeats: which they are, compiled in place, run uncompiled, and computed again
for the gradient in place of being kept; and a model without its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from rollouts.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Programs of one layer's code, beyond which torch runs it uncompiled. With and without gradient, with and
# without a mask, one sequence or several make 8, which is torch's own limit; kinds of layers multiply that.
PROGRAMS = 64


def find_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The outermost layers that repeat: those that transformers can compute twice, or must not split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    unsplit = set(getattr(model, "_no_split_modules", None) or ())

    def find(module: torch.nn.Module) -> list[torch.nn.Module]:
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in unsplit:
            return [module]
        return [layer for child in module.children() for layer in find(child)]

    return find(model)


def compile_layers(model: PreTrainedModel, *, backend: str | Callable[..., Any]) -> int:
    """How many layers of `model` are now run by torch.compile. They are compiled when they first run, alike
    ones once.

    Sizes are variables of the programs, so that batches of other lengths need no others; a single sequence is
    a case of its own. Layers that FSDP shards keep its hooks outside of the programs, those that are computed
    twice for the gradient have that inside. Raises ConfigError in deterministic mode, ModelError if the model
    has no layers that repeat.
    """
    import torch._dynamo

    if torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            "model.compile=true with deterministic=true; compiled sums round in another order; leave one of"
            " the two out"
        )
    layers = find_layers(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that repeat, to be compiled; set model.compile=false"
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, PROGRAMS)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    return len(layers)


@contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Inside, compiled layers run as they are written. For who calls them with caches, of which every layer
    and length would be a case.
    """
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """The model without dropout inside the block; afterwards the modules that were training train again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def checkpoint_layers(model: PreTrainedModel) -> int:
    """How many layers of `model` now compute their activations twice instead of keeping them. Gradients stay
    the same.

    Transformers' own switch works in training mode only, which turns dropout on: here the layers stay in
    evaluation mode. Raises ModelError if the model has no layers that can be computed twice.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers for gradient checkpointing; set"
            " model.gradient_checkpointing=false"
        )
    for layer in layers:
        # which a copy of the model binds to its own layer, as it would not a closure
        layer.forward = partial(run_twice, layer.forward)
    return len(layers)


def run_twice(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """What `forward` gives. For the gradient it is computed again, in place of what it would keep."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)  # draws an adapter's dropout again

"""The layers that a decoder repeats: which they are, compiled in place, run uncompiled, and computed again
for the gradient in place of being kept; a model without its dropout; and a scalar head in place of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollouts.errors import ConfigError, ModelError
from rollouts.types import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Programs of one layer's code, beyond which torch runs it uncompiled. With and without gradient, with and
# without a mask, one sequence or several make 8, which is torch's own limit; kinds of layers multiply that.
PROGRAMS = 64


def find_layers(model: "PreTrainedModel") -> list[torch.nn.Module]:
    """The outermost layers that repeat: those that transformers can compute twice, or must not split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    unsplit = set(getattr(model, "_no_split_modules", None) or ())

    def find(module: torch.nn.Module) -> list[torch.nn.Module]:
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in unsplit:
            return [module]
        return [layer for child in module.children() for layer in find(child)]

    return find(model)


def compile_layers(model: "PreTrainedModel", *, backend: str | Function) -> int:
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


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether compile_layers has been here."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Inside, compiled layers run as they are written. For who calls them with caches, of which every layer
    and length would be a case.
    """
    if not is_compiled(model):
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


def checkpoint_layers(model: "PreTrainedModel") -> int:
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


def run_twice(forward: Function, *inputs: Any, **options: Any) -> Any:
    """What `forward` gives. For the gradient it is computed again, in place of what it would keep."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)  # draws an adapter's dropout again


# --- a scalar head ------------------------------------------------------------------------------------------

# Models that say one number at each position: reward models and critics, any causal language model with a
# head [1, H] instead of its own.
#
#     directory of a causal model ───────────► its decoder, a new head of exactly 0
#     directory of a …ForSequenceClassification with one label
#         ─► its decoder and its head  both are transformers' class of that name
#
# The number at a position is hidden state · head: it depends on that token and those before it. Transformers
# takes the last token's as the score of a sequence.

HEAD = "score"  # transformers' name of the module
HEAD_WEIGHT = f"{HEAD}.weight"
PROBING_DIRECTIONS = 16


def has_scalar_head(model: torch.nn.Module) -> bool:
    """Whether this is one of the models above, sharded or not; a causal language model has no such module."""
    head = getattr(model, HEAD, None)
    return isinstance(head, torch.nn.Linear) and head.bias is None


def get_scalar_weight(model: torch.nn.Module) -> Tensor:
    """The head's weight [1, H]."""
    return getattr(model, HEAD).weight


def make_probing_directions(states: Tensor) -> Tensor:
    """[D, H] fixed random directions in which hidden states [N, H] have values of size 1: what is proved of a
    model whose own head may be 0.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((PROBING_DIRECTIONS, states.shape[-1]), generator=generator, dtype=torch.float64)
    # |hidden|: a random direction of unit variance gives values of this size
    size = float(states.double().square().sum(-1).mean().sqrt())
    return (drawn / max(size, torch.finfo(torch.float32).tiny)).to(states)


def set_padding_token(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Gives the config the tokenizer's padding token, where it has none: transformers scores several
    sequences at once only if there is one.

    One that also ends an answer is not taken: transformers takes the last token that is no padding, and would
    pass over the end of every answer.
    """
    config = model.config.get_text_config()
    own = None if tokenizer is None else tokenizer.pad_token_id
    if tokenizer and own != tokenizer.eos_token_id and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = own

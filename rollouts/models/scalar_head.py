"""Models that say one number at each position: reward models and critics, any causal language model with a
head [1, H] instead of its own.

    directory of a causal model ───────────► its decoder, a new head of exactly 0
    directory of a …ForSequenceClassification with one label
        ─► its decoder and its head  both are transformers' class of that name

The number at a position is hidden state · head: it depends on that token and those before it. Transformers
takes the last token's as the score of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollouts.losses.logprobs import widen

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def project_states(states: Tensor, direction: Tensor) -> Tensor:
    """hidden states [N, H] · direction [H], [N]: in float32, in float64 where states are."""
    with torch.autocast(states.device.type, enabled=False):
        # no view of something larger: FSDP waits for the gradient of what this gives. A copy: where a weight
        # lies in memory changes the rounding
        wide = widen(states)
        return torch.mv(wide, direction.to(wide.dtype, copy=True))


def make_probing_directions(states: Tensor) -> Tensor:
    """[D, H] fixed random directions in which hidden states [N, H] have values of size 1: what is proved of a
    model whose own head may be 0.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((PROBING_DIRECTIONS, states.shape[-1]), generator=generator, dtype=torch.float64)
    # |hidden|: a random direction of unit variance gives values of this size
    size = float(states.double().square().sum(-1).mean().sqrt())
    return (drawn / max(size, torch.finfo(torch.float32).tiny)).to(states)


def set_padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Gives the config the tokenizer's padding token, where it has none: transformers scores several
    sequences at once only if there is one.

    One that also ends an answer is not taken: transformers takes the last token that is no padding, and would
    pass over the end of every answer.
    """
    config = model.config.get_text_config()
    own = None if tokenizer is None else tokenizer.pad_token_id
    if tokenizer and own != tokenizer.eos_token_id and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = own

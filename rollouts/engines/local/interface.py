"""What DecodeBatch asks of a model: a decoder, and the slots where it keeps what it knows of each row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rollouts.models.layers import uncompiled

ForwardPath = Literal["compiled", "fast", "cached", "recompute"]
SlotsT = TypeVar("SlotsT", bound="Slots")
FLOAT32_TOLERANCE = 1e-4  # nats
HALF_TOLERANCE = 0.25  # nats; bfloat16 keeps 8 bits


def is_exact(dtype: torch.dtype) -> bool:
    """Whether two ways of one computation in `dtype` agree for every token."""
    return dtype in (torch.float32, torch.float64)


def tolerance_of(dtype: torch.dtype) -> float:
    """How far, in nats, log-probs computed in `dtype` in two ways may lie apart by rounding."""
    return FLOAT32_TOLERANCE if is_exact(dtype) else HALF_TOLERANCE


class Slots(Protocol):
    """State by slot: rows 0..n-1, without holes. All methods but drop are called inside `computing()`."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a row's first positions can be copied after it has grown; a recurrent state's cannot."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` slots of `length` positions; contents stay."""
        ...

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Each source slot [N] into the target slot [N] beside it, the first `length` positions at least."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """One row of `length` positions into another slot."""
        ...

    def drop(self) -> None:
        """Forgets all rows and gives the memory back."""
        ...


class Decoder(Protocol[SlotsT]):
    """A model's forward pass over slots: whole prompts, or one token per row."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        ...

    def make_slots(self, *, max_rows: int, max_length: int) -> SlotsT:
        """Empty slots of this model's shape."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """The context of every forward pass; one for many steps."""
        ...

    def prefill(self, ids: Tensor, lengths: Tensor, slots: Tensor, kv: SlotsT) -> Tensor:
        """Logits [N, V] after the last token of each prompt, whose states go to `slots` [N]. ids [N, S] is
        right-padded, lengths [N].
        """
        ...

    def decode(self, ids: Tensor, positions: Tensor, kv: SlotsT, *, length: int) -> Tensor:
        """Logits [B, V] after one more token in each of slots 0..B-1, at `positions` [B]; `length` is 1 + the
        largest of them.
        """
        ...


@contextmanager
def inferring(device: torch.device, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Inference mode, with autocast where a dtype is given. One for many steps: autocast converts the weights
    once per context.
    """
    autocast: AbstractContextManager[Any] = nullcontext()
    if autocast_dtype is not None:
        autocast = torch.autocast(device.type, dtype=autocast_dtype)
    with torch.inference_mode(), autocast:
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference behaviour inside, with the layers as they are written; outside, every module's own training
    flag again, and compiled layers.
    """
    flags = [(module, module.training) for module in model.modules() if module.training]
    for module, _ in flags:
        module.training = False
    try:
        with uncompiled(model):
            yield
    finally:
        for module, training in flags:
            module.training = training

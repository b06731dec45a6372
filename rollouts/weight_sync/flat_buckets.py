"""Tensors that travel together as one flat tensor of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Where one tensor lies in a flat bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Tensors one after the other as bytes; those with wider elements first, so that every one is aligned."""

    pieces: tuple[Piece, ...]
    flat: Tensor  # [bytes] uint8, a copy

    @property
    def dtype_names(self) -> list[str]:
        return [str(piece.dtype).removeprefix("torch.") for piece in self.pieces]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors, as views of the bytes."""
        found: list[tuple[str, Tensor]] = []
        at = 0
        for name, dtype, shape in self.pieces:
            size = math.prod(shape) * dtype.itemsize
            found.append((name, self.flat[at : at + size].view(dtype).reshape(shape)))
            at += size
        return found


def flatten_tensors(
    tensors: Sequence[tuple[str, Tensor]], *, dtype: torch.dtype | None, device: torch.device
) -> FlatBucket:
    """Copies of all `tensors` in one. `dtype`: what floating-point ones are sent as; None: as they are. At
    least one.
    """
    assert tensors, "an empty bucket"
    sent = [
        (
            name,
            tensor.detach().to(device=device, dtype=dtype if dtype and tensor.is_floating_point() else None),
        )
        for name, tensor in tensors
    ]
    sent.sort(key=lambda entry: -entry[1].dtype.itemsize)
    pieces = tuple(Piece(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent)
    return FlatBucket(
        pieces, torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in sent])
    )


def split_tensors(
    tensors: Sequence[tuple[str, Tensor]], *, bucket_bytes: int
) -> list[list[tuple[str, Tensor]]]:
    """`tensors` in order, in buckets of at most `bucket_bytes`; a larger tensor alone."""
    buckets: list[list[tuple[str, Tensor]]] = []
    size = 0
    for name, tensor in tensors:
        if not buckets or size + tensor.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets

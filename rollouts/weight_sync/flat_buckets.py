"""Tensors in buckets of a given size, and a bucket as one flat tensor of bytes."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rollouts.models.export import Bucket

TensorT = TypeVar("TensorT", bound=Tensor)


class FlatBucket(NamedTuple):
    """Tensors one after the other as bytes."""

    flat: Tensor  # [bytes] uint8, a copy
    tensors: Bucket  # views of it, wider elements first, so that each is aligned

    def describe(self) -> dict[str, list[Any]]:
        """The names, dtypes and shapes of the tensors, as servers are told them."""
        names, tensors = zip(*self.tensors, strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        return {"names": [*names], "dtypes": dtypes, "shapes": shapes}


def flatten_tensors(tensors: Bucket, *, dtype: torch.dtype | None, device: torch.device) -> FlatBucket:
    """A copy of all `tensors`, of which there is one at least. `dtype`: of floating-point ones; None: as they
    are.
    """
    sent = [
        (name, one.detach().to(device, dtype if one.is_floating_point() else None)) for name, one in tensors
    ]
    sent.sort(key=lambda entry: -entry[1].dtype.itemsize)
    flat = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for _, one in sent])
    parts = flat.split([one.nbytes for _, one in sent])
    views = [part.view(one.dtype).reshape(one.shape) for part, (_, one) in zip(parts, sent, strict=True)]
    return FlatBucket(flat, [(name, view) for view, (name, _) in zip(views, sent, strict=True)])


def split_buckets(
    tensors: Iterable[tuple[str, TensorT]], bucket_bytes: int
) -> list[list[tuple[str, TensorT]]]:
    """`tensors` in order, in buckets of one dtype and at most `bucket_bytes`; a larger tensor alone."""
    buckets: list[list[tuple[str, TensorT]]] = []
    size = 0
    for name, tensor in tensors:
        if not buckets or size + tensor.nbytes > bucket_bytes or buckets[-1][0][1].dtype != tensor.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets

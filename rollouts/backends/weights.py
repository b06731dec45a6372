"""Whole weights from shards and shards from whole weights, a bucket at a time: rank 0 gets or gives all of
them, or each rank gets its own part. On one rank the weights are whole already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollouts.errors import BackendError
from rollouts.models.export import Bucket
from rollouts.models.sharded import compute_local_slices, get_local
from rollouts.ranks.group import Ranks
from rollouts.weight_sync.flat_buckets import split_buckets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET_BYTES = 256 * 2**20
# of whole tensors gathered at once: the rank that gets them holds about three times that beside its shards
RANK_BUCKET_BYTES = 8 * 2**20


def check_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Raises BackendError naming the weights that are missing, unknown or of another shape. A tied weight may
    come under each of its names.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wrong = [f"{name} is missing" for name in parameters if name not in weights]
    wrong += [f"{name} is not the model's" for name in weights if name not in known]
    wrong += [
        f"{name} has the shape {tuple(weights[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if wrong:
        raise BackendError(f"{len(wrong)} weights do not fit: {'; '.join(wrong[:5])}; nothing was loaded")


def _pad_shard(parameter: Tensor, num_shards: int) -> Tensor:
    """This rank's rows, flat, with zeros behind them to as many as the first shard has: torch cuts as
    torch.chunk does, and the last shards have fewer or none.
    """
    assert isinstance(parameter, DTensor) and parameter.placements[-1] == Shard(0), parameter
    rows, count = get_local(parameter), -(-parameter.shape[0] // num_shards)
    return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))]).flatten()


def gather_bucket(ranks: Ranks, bucket: Bucket, *, to: int = 0) -> Bucket | None:
    """On rank `to` the whole tensors of a bucket of one dtype, by one collective; None on the others.

    Every shard is padded to the first one's rows. Ranks of another replica than that of `to` give nothing.
    """
    if ranks.mesh is None:
        return [(name, parameter.detach()) for name, parameter in bucket]
    if ranks.rank // ranks.num_shards != to // ranks.num_shards:
        return None
    pieces = [_pad_shard(parameter, ranks.num_shards) for _, parameter in bucket]
    mine = torch.cat(pieces)
    blocks = list(mine.new_empty((ranks.num_shards, len(mine))).unbind(0)) if ranks.rank == to else None
    dist.gather(mine, blocks, dst=to, group=ranks.shard_mesh.get_group())
    if blocks is None:
        return None
    split = [block.split([len(piece) for piece in pieces]) for block in blocks]
    return [
        (name, torch.cat(rows)[: parameter.numel()].view(parameter.shape))
        for (name, parameter), rows in zip(bucket, zip(*split, strict=True), strict=True)
    ]


def gather_parts(
    ranks: Ranks,
    parts: Sequence[Bucket],
    take: Callable[[Bucket], object],
) -> None:
    """Hands `take` on each rank the whole tensors of its own part of `parts` [W], bucket by bucket.
    Collective. What `take` raises is raised after the last turn, so that the ranks stay together.

    In turns: a bucket for every rank is gathered, then all take theirs at the same time.
    """
    failure: Exception | None = None
    buckets = [split_buckets(part, RANK_BUCKET_BYTES) for part in parts]
    for turn in range(max(len(mine) for mine in buckets)):
        own: Bucket | None = None
        for rank, theirs in enumerate(buckets):
            if turn < len(theirs):
                own = gather_bucket(ranks, theirs[turn], to=rank) or own
        try:
            if own is not None and failure is None:
                take(own)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def scatter_weight(ranks: Ranks, parameter: Tensor, weight: Tensor | None) -> None:
    """Copies rank 0's `weight` into a parameter, each rank its own rows."""
    local = get_local(parameter)
    whole = local.new_empty(parameter.shape) if weight is None else weight.to(local).contiguous()
    if ranks.mesh is not None:  # whole for a moment, as in a forward pass
        dist.broadcast(whole, src=0)
    local.copy_(whole[compute_local_slices(parameter)])

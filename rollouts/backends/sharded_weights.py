"""Whole weights from shards and shards from whole weights, a bucket at a time: rank 0 gets or gives all of
them, or each rank gets its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollouts.backends.steps import split_buckets
from rollouts.distributed.process_group import Ranks
from rollouts.models.sharded import get_local

RANK_BUCKET_BYTES = (
    8 * 2**20
)  # of whole tensors gathered at once: the rank that gets them holds about three times that beside its shards


def rows_of_shard(parameter: Tensor, num_shards: int) -> int:
    """Rows of each shard but the last ones, which have fewer or none: torch cuts as torch.chunk does."""
    return -(-parameter.shape[0] // num_shards)


def _check_layout(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), type(parameter)
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard) and placement.dim == 0, parameter.placements
    return parameter


def gather_bucket(
    ranks: Ranks, bucket: Sequence[tuple[str, Tensor]], *, to: int = 0
) -> list[tuple[str, Tensor]] | None:
    """On rank `to` the whole tensors of a bucket of one dtype, by one collective; None on the others.

    Every shard is padded to the first one's rows. The ranks of other replicas than that of `to` have nothing
    to give.
    """
    if (
        ranks.rank // ranks.num_shards != to // ranks.num_shards
    ):  # the mesh numbers a replica's ranks one after the other
        return None
    pieces: list[Tensor] = []
    for _, parameter in bucket:
        local = get_local(_check_layout(parameter))
        padded = local.new_zeros((rows_of_shard(parameter, ranks.num_shards), *parameter.shape[1:]))
        padded[: len(local)] = local
        pieces.append(padded.flatten())
    mine = torch.cat(pieces)
    blocks = list(mine.new_empty((ranks.num_shards, len(mine))).unbind(0)) if ranks.rank == to else None
    dist.gather(mine, blocks, dst=to, group=ranks.shard_group)
    if blocks is None:
        return None
    whole: list[tuple[str, Tensor]] = []
    at = 0
    for (name, parameter), piece in zip(bucket, pieces, strict=True):
        rows = torch.cat([block[at : at + len(piece)] for block in blocks])
        whole.append((name, rows[: parameter.numel()].view(parameter.shape)))
        at += len(piece)
    return whole


def gather_parts(
    ranks: Ranks,
    parts: Sequence[Sequence[tuple[str, Tensor]]],
    take: Callable[[list[tuple[str, Tensor]]], None],
) -> None:
    """Hands `take` on each rank the whole tensors of its own part of `parts` [W], bucket by bucket.
    Collective; `take` must not raise.

    In turns: a bucket for every rank is gathered, then all take theirs at the same time.
    """
    buckets = [split_buckets(part, RANK_BUCKET_BYTES) for part in parts]
    for turn in range(max(len(mine) for mine in buckets)):
        own: list[tuple[str, Tensor]] | None = None
        for rank, theirs in enumerate(buckets):
            if turn < len(theirs):
                own = gather_bucket(ranks, theirs[turn], to=rank) or own
        if own is not None:
            take(own)


def scatter_weight(ranks: Ranks, parameter: Tensor, weight: Tensor | None) -> None:
    """Copies rank 0's `weight` into a parameter, each rank its own rows."""
    local = get_local(_check_layout(parameter))
    rows = rows_of_shard(parameter, ranks.num_shards)
    block = local.new_empty((rows, *parameter.shape[1:]))
    parts: list[Tensor] | None = None
    if weight is not None:
        padded = local.new_zeros((rows * ranks.num_shards, *parameter.shape[1:]))
        padded[: len(weight)] = weight.to(padded)
        shards = list(padded.split(rows))
        parts = [
            shards[rank % ranks.num_shards] for rank in range(ranks.world_size)
        ]  # the mesh numbers a replica's ranks one after the other
    dist.scatter(block, parts, src=0)
    local.copy_(block[: len(local)])

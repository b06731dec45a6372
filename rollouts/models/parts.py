"""A model directory that the ranks of a job write together: each has some of the tensors whole, none has all
of them.

    every rank:  deal_weights ─► who writes which weights, the same on all
        ─► write_part: model-of-rank-R-0000i.safetensors
    rank 0:  write_description, and when all have written name_parts
        ─► model-0000i-of-0000N.safetensors, their index

Nothing here communicates: the caller brings each rank its tensors, and rank 0 the number of files of each.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import StorageError
from rollouts.models.directories import fsync_path
from rollouts.models.export import FileNames, name_shards, write_shards
from rollouts.models.shard_writer import ShardWriter, name_shard
from rollouts.models.weight_files import list_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Deal:
    """Who writes which of a model's weights, and what one of the ranks needs for its part."""

    parameters: Sequence[
        Sequence[tuple[str, Tensor]]
    ]  # of each rank, as the model holds them: sharded or whole
    names: FileNames  # of the one rank's part, looked at
    nbytes: int  # of the one rank's part, whole


def deal_weights(model: PreTrainedModel, rank: int, ranks: int) -> Deal:
    """The weights dealt to `ranks`, about as many bytes to each, and the part of `rank`. The same deal on all
    ranks; no communication.

    Tensors that the files join go to one rank; buffers, and what files join with one, to rank 0. Raises
    ModelError.
    """
    names = FileNames(model)
    units = names.find_units()
    weights, _ = list_weights(model)
    parameters = dict(model.named_parameters())
    sizes = [sum(weights[name].numel() * weights[name].element_size() for name in unit) for unit in units]
    with_buffers = [
        number for number, unit in enumerate(units) if any(name not in parameters for name in unit)
    ]
    dealt = [
        [name for number in numbers for name in units[number]]
        for numbers in deal_evenly(sizes, ranks, to_first=with_buffers)
    ]
    names.expect_only(dealt[rank])
    nbytes = sum(weights[name].numel() * weights[name].element_size() for name in dealt[rank])
    return Deal(
        [[(name, parameters[name]) for name in mine if name in parameters] for mine in dealt], names, nbytes
    )


def deal_evenly(sizes: Sequence[int], ranks: int, *, to_first: Collection[int] = ()) -> list[list[int]]:
    """Which things each rank gets, by their numbers, in ascending order.

    The largest first, each to the rank that has least so far, the first of such ranks: none gets more than an
    equal share and one thing besides. The things of `to_first` are rank 0's before all others.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    dealt[0] += to_first
    loads = [(sum(sizes[number] for number in mine), rank) for rank, mine in enumerate(dealt)]
    heapq.heapify(loads)
    others = set(range(len(sizes))) - set(to_first)
    for number in sorted(others, key=lambda number: (-sizes[number], number)):
        load, rank = loads[0]
        dealt[rank].append(number)
        heapq.heapreplace(loads, (load + sizes[number], rank))
    return [sorted(mine) for mine in dealt]


@contextmanager
def write_part(path: Path, names: FileNames, rank: int) -> Iterator[ShardWriter]:
    """A writer of one rank's part of the weights, which `names` expects; its files are complete when the
    context is left.

    They are synced where rank 0 will not do it: another machine's memory may hold the bytes back. Raises as
    write_hf_stream.
    """
    with write_shards(
        path, names, prefix=_prefix(rank), on_shard=fsync_path if rank else lambda _: None
    ) as writer:
        yield writer


def name_parts(path: Path, counts: Sequence[int]) -> None:
    """Gives the files of all ranks, of which each has written so many, their final names, and writes the
    index. On rank 0, after all have written.

    Raises OSError, StorageError if what another rank has written is not to be read here, ModelError if two
    ranks have written one tensor.
    """
    files = [
        name_shard(_prefix(rank), number)
        for rank, count in enumerate(counts)
        for number in range(1, count + 1)
    ]
    name_shards(path, [(file, _read_names(path / file)) for file in files])


def _prefix(rank: int) -> str:
    return f"model-of-rank-{rank}"


def _read_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise StorageError(
            f"{file}, as its rank has written it, cannot be read on rank 0 ({error}); check the filesystem of"
            " output.dir"
        ) from error

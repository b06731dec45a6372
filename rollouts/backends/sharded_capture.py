"""A checkpoint of several ranks that is written beside training: each rank copies its part to host memory,
and writes it later.

    all ranks, on their device threads:   room on every machine? ──► each rank's part of the weights, whole ──► its moments and random states
                                             └─ no: None on all, and the caller saves while training waits
    each rank, in a thread, later:        HeldPart.write(path): its files of the weights and of state/, on rank 0 the config too; not collective
    rank 0, once all have written:        rollouts.models.parts.name_parts

So a rank of W needs memory for a W-th of the state, weights and moments alike.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.backends.sharded_state import HeldShard, hold_sharded_state
from rollouts.backends.sharded_weights import gather_parts
from rollouts.checkpoints.writer import MEMORY_MARGIN, is_allocation_failure
from rollouts.distributed.process_group import Ranks, run_agreed
from rollouts.errors import RunDirError
from rollouts.models.export import FileNames, write_description
from rollouts.models.host_memory import read_free_memory
from rollouts.models.parts import Deal, deal_weights, write_part
from rollouts.models.sharded import get_local

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Held = TypeVar("Held")
UNKNOWN = -1.0  # free memory that the system does not tell
Buckets = list[list[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank has to write of a checkpoint."""

    shard: HeldShard
    weights: Sequence[
        Sequence[tuple[str, Tensor]]
    ]  # its part, in the buckets in which it came: files then have it in the order of a save at once
    # of the part's files, looked at before training went on: the model's parameters take turns while it runs
    names: FileNames
    # of which config and conversions are read when this is written, which training leaves alone
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # on rank 0

    def write(self, path: Path) -> int:
        """Writes this rank's files of the checkpoint `path`, which rank 0 has made and all see; once, on any
        thread. How many of them hold weights, and wait for their names. Blocks.

        Raises OSError, and RunDirError on a rank that does not see `path`.
        """
        rank = self.shard.layout.rank
        check_seen(path, rank)
        if rank == 0:
            write_description(self.model, path, self.tokenizer)
        with write_part(path, self.names, rank) as writer:
            for bucket in self.weights:
                writer.take(bucket)
        self.shard.write(path)
        return len(writer.shards)

    def nbytes(self) -> int:
        """Host memory that is held for the weights and the training state."""
        tensors = [*(tensor for bucket in self.weights for _, tensor in bucket), *self.shard.tensors.values()]
        return sum(tensor.nbytes for tensor in tensors)


def hold_together(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    position: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase | None,
) -> HeldPart | None:
    """This rank's part of the state as it is now; None, on all ranks, if one of them has no room for it.
    Collective, on the device thread.

    `position` and `tokenizer` are rank 0's.
    """
    plan, told = run_agreed(
        ranks,
        lambda: plan_capture(model, ranks),
        lambda plan: (float(plan.room.machine), plan.room.free, float(plan.needed)),
        count=3,
    )
    if not has_room(told):
        return None
    buckets: Buckets = []
    short: list[BaseException] = []

    def keep(bucket: Sequence[tuple[str, Tensor]]) -> None:
        if not short:
            attempt(
                short,
                lambda: buckets.append([(name, tensor.to("cpu", copy=True)) for name, tensor in bucket]),
            )

    def hold() -> HeldShard | None:
        return attempt(
            short,
            lambda: hold_sharded_state(
                model, optimizer, position, rank=ranks.rank, ranks=ranks.world_size, copied=True
            ),
        )

    gather_parts(ranks, plan.deal.parameters, keep)
    shard, lacking = run_agreed(ranks, hold, lambda _: [float(bool(short))], count=1)
    if lacking.any():
        return None
    assert shard is not None
    return HeldPart(shard, buckets, plan.deal.names, model, tokenizer)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the machine that a rank is on."""

    machine: int  # the same for ranks that share memory
    free: float  # bytes; UNKNOWN


def read_room() -> Room:
    """This rank's."""
    free = read_free_memory()
    return Room(zlib.crc32(socket.gethostname().encode()), UNKNOWN if free is None else float(free))


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a rank is to hold, and whether it can."""

    deal: Deal
    room: Room
    needed: int  # bytes, of this rank


def plan_capture(model: PreTrainedModel, ranks: Ranks) -> CapturePlan:
    """This rank's plan: its part of the weights, and its rows of two moments where no other replica has them.
    No communication.
    """
    deal = deal_weights(model, ranks.rank, ranks.world_size)
    moments = 2 * sum(get_local(weight).nbytes for weight in model.parameters()) if ranks.first_replica else 0
    return CapturePlan(deal, read_room(), deal.nbytes + moments)


def has_room(told: NDArray[np.floating[Any]]) -> bool:
    """Whether every machine has memory for what its ranks need together. `told` [W, 3]: machine, free bytes,
    bytes needed, of each rank.
    """
    for machine in np.unique(told[:, 0]):
        free, needed = told[told[:, 0] == machine, 1], told[told[:, 0] == machine, 2].sum()
        known = free[free != UNKNOWN]
        if len(known) and known.min() < MEMORY_MARGIN * needed:
            return False
    return True


def attempt(short: list[BaseException], work: Callable[[], Held]) -> Held | None:
    """`work()`; None, and the failure in `short`, where memory was not to be had: the ranks are told of that
    and raise nothing.
    """
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_allocation_failure(error):
            raise
        short.append(error)
        return None


def check_seen(path: Path, rank: int) -> None:
    """Raises RunDirError if this rank does not see the directory that rank 0 has made: its part of a
    checkpoint would lie somewhere else.
    """
    if not path.is_dir():
        raise RunDirError(
            f"rank {rank} on {socket.gethostname()} does not see {path}; put output.dir on a filesystem that"
            " all machines share"
        )

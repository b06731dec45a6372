"""A checkpoint of several ranks that is written beside training: each rank copies its part to host memory, and writes it later.

    all ranks, on their device threads:   room on every machine? ──► weights, gathered to rank 0 ──► each rank's moments and random states
                                             └─ no: None on all, and the caller saves while training waits
    each rank, in a thread, later:        HeldPart.write(path): rank 0 the model directory, each its own file of state/; nothing is collective

Rank 0 needs memory for the whole weights (a third of the state), every other one for its own part of the moments.
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
from rollouts.checkpoints.writer import MEMORY_MARGIN, is_allocation_failure
from rollouts.distributed.process_group import Ranks, run_agreed
from rollouts.errors import RunDirError
from rollouts.models.export import FileNames, write_hf_stream
from rollouts.models.host_memory import read_free_memory
from rollouts.models.sharded import get_local
from rollouts.protocols import WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Held = TypeVar("Held")
UNKNOWN = -1.0  # free memory that the system does not tell
Buckets = list[list[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class HeldModel:
    """The whole weights, on rank 0, in the buckets in which they were gathered: files then have them in the order of a save at once."""

    model: PreTrainedModel  # of which config and conversions are read when this is written, which training leaves alone
    names: FileNames  # of its files, looked at before training went on: its parameters take turns while it runs
    buckets: Sequence[Sequence[tuple[str, Tensor]]]
    tokenizer: PreTrainedTokenizerBase | None

    def write(self, path: Path) -> None:
        """Writes the model directory, once. Blocks; raises OSError."""
        with write_hf_stream(self.model, path, self.tokenizer, names=self.names) as sink:
            for bucket in self.buckets:
                sink(bucket)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank has to write of a checkpoint."""

    shard: HeldShard
    model: HeldModel | None  # on rank 0

    def write(self, path: Path) -> None:
        """Writes this rank's files of the checkpoint `path`, which rank 0 has made and all see; once, on any thread. Blocks.

        Raises OSError, and RunDirError on a rank that does not see `path`.
        """
        check_seen(path, self.shard.layout.rank)
        if self.model is not None:
            self.model.write(path)
        self.shard.write(path)


def hold_together(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    position: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    stream_weights: Callable[[WeightSink | None], None],
) -> HeldPart | None:
    """This rank's part of the state as it is now; None, on all ranks, if one of them has no room for it. Collective, on the device thread.

    `stream_weights`: hands rank 0's sink every weight. `position` and `tokenizer` are rank 0's.
    """
    weights = [parameter for _, parameter in model.named_parameters()]
    needed = 2 * sum(get_local(weight).nbytes for weight in weights)
    needed += sum(weight.numel() * weight.element_size() for weight in weights) if ranks.rank == 0 else 0
    told = run_agreed(ranks, read_room, lambda room: (float(room.machine), room.free, float(needed)), count=3).numbers
    if not has_room(told):
        return None
    buckets: Buckets = []
    short: list[BaseException] = []

    def keep(bucket: Sequence[tuple[str, Tensor]]) -> None:
        if not short:
            attempt(short, lambda: buckets.append([(name, tensor.to("cpu", copy=True)) for name, tensor in bucket]))

    def hold() -> HeldShard | None:
        return attempt(short, lambda: hold_sharded_state(model, optimizer, position, rank=ranks.rank, ranks=ranks.world_size, copied=True))

    stream_weights(keep if ranks.rank == 0 else None)
    shard, lacking = run_agreed(ranks, hold, lambda _: [float(bool(short))], count=1)
    if lacking.any():
        return None
    assert shard is not None
    if ranks.rank:
        return HeldPart(shard, None)
    names = FileNames(model)
    names.look()
    return HeldPart(shard, HeldModel(model, names, buckets, tokenizer))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the machine that a rank is on."""

    machine: int  # the same for ranks that share memory
    free: float  # bytes; UNKNOWN


def read_room() -> Room:
    """This rank's."""
    free = read_free_memory()
    return Room(zlib.crc32(socket.gethostname().encode()), UNKNOWN if free is None else float(free))


def has_room(told: NDArray[np.floating[Any]]) -> bool:
    """Whether every machine has memory for what its ranks need together. `told` [W, 3]: machine, free bytes, bytes needed, of each rank."""
    for machine in np.unique(told[:, 0]):
        free, needed = told[told[:, 0] == machine, 1], told[told[:, 0] == machine, 2].sum()
        known = free[free != UNKNOWN]
        if len(known) and known.min() < MEMORY_MARGIN * needed:
            return False
    return True


def attempt(short: list[BaseException], work: Callable[[], Held]) -> Held | None:
    """`work()`; None, and the failure in `short`, where memory was not to be had: the ranks are told of that and raise nothing."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_allocation_failure(error):
            raise
        short.append(error)
        return None


def check_seen(path: Path, rank: int) -> None:
    """Raises RunDirError if this rank does not see the directory that rank 0 has made: its part of a checkpoint would lie somewhere else."""
    if not path.is_dir():
        raise RunDirError(f"rank {rank} on {socket.gethostname()} does not see {path}; put output.dir on a filesystem that all machines share")

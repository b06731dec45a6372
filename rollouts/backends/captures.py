"""A checkpoint of which every rank writes its part: at once, or copied to host memory and written beside
training.

    device threads:  room on every machine? ─► each rank's part of the weights, whole ─► its training state
                        └─ no: None on all, and the caller saves while training waits
    rank 0, later:   HeldCheckpoint(path) ─ "write_held" ─► every rank writes its part, in a thread
                        └─► when all have answered, rank 0 names the files

A rank of W needs memory for a W-th of the state. What is written either way is the same.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import trio

from rollouts.backends.state import HeldState, Position, gather_parts, hold_state
from rollouts.errors import RunDirError
from rollouts.models.export import (
    Bucket,
    Deal,
    FileNames,
    copy_bucket,
    deal_weights,
    name_parts,
    open_part,
    write_description,
)
from rollouts.models.host_memory import read_free_memory
from rollouts.models.lora import Trained, list_trained
from rollouts.models.sharded import get_local
from rollouts.ranks.channel import RankChannel
from rollouts.ranks.meet import Ranks, decode_error, run_agreed
from rollouts.types import live

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEMORY_MARGIN = 1.25  # times the needed memory must be free before it is copied: what else grows meanwhile


# --- at once ------------------------------------------------------------------------------------------------


def save_together(
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    path: Path,
    position: Position,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    """Writes the model directory `path` and its `state/`, each rank its own part, a bucket at a time.
    Collective. All ranks must see `path`; rank 0's `position` and `tokenizer` count.

    Raises AgreedFailure with an OSError if a disk refuses a write on any rank, with a RunDirError if a rank
    does not see `path`.
    """

    def begin() -> Deal:
        if ranks.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            write_description(trained, path, tokenizer)
        return deal_weights(trained, ranks.rank, ranks.world_size)

    deal = run_agreed(ranks, begin).value
    run_agreed(ranks, lambda: check_seen(path, ranks.rank))
    writer = open_part(path, deal.names, ranks.rank)

    def write() -> None:
        gather_parts(ranks, deal.parameters, writer.take)
        writer.close()
        hold_state(trained, optimizer, position, ranks, copied=False).write(path)

    counts = run_agreed(ranks, write, lambda _: [float(len(writer.shards))], count=1).numbers[:, 0]
    run_agreed(ranks, lambda: name_parts(path, counts.astype(int).tolist()) if ranks.rank == 0 else None)


def check_seen(path: Path, rank: int) -> None:
    """Raises RunDirError if this rank does not see the directory that rank 0 has made: its part of a
    checkpoint would lie somewhere else.
    """
    if not path.is_dir():
        raise RunDirError(
            f"rank {rank} on {socket.gethostname()} does not see {path}; put output.dir on a filesystem that"
            " all machines share"
        )


# --- beside training ----------------------------------------------------------------------------------------


class HeldPart(NamedTuple):
    """One rank's copy of its part of a checkpoint."""

    state: HeldState
    weights: Sequence[Bucket]  # whole tensors, in the buckets in which they came
    names: FileNames
    # of which config and conversions are read, which training leaves alone
    trained: Trained
    tokenizer: "PreTrainedTokenizerBase | None"  # on rank 0

    def write(self, path: Path) -> int:
        """Writes this rank's files of the checkpoint `path`, which rank 0 has made; once, on any thread. How
        many of them hold weights, and wait for their names. Raises OSError; RunDirError on a rank that does
        not see `path`.
        """
        rank = self.state.rank
        check_seen(path, rank)
        if rank == 0:
            write_description(self.trained, path, self.tokenizer)
        writer = open_part(path, self.names, rank)
        for bucket in self.weights:
            writer.take(bucket)
        writer.close()
        self.state.write(path)
        return len(writer.shards)


def hold_together(
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    position: Position,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> HeldPart | None:
    """This rank's part of the state as it is now, in host memory; None, on all ranks, if one has no room.
    Collective, on the device thread. `position` and `tokenizer` are rank 0's.
    """
    margin = MEMORY_MARGIN * ranks.local_world_size  # its neighbours hold about as much
    free = read_free_memory()  # None: this machine does not tell
    deal, room = run_agreed(
        ranks,
        lambda: deal_weights(trained, ranks.rank, ranks.world_size),
        lambda deal: [free is None or free >= margin * compute_held_bytes(trained, ranks, deal)],
        count=1,
    )
    if not room.all():
        return None
    buckets = []

    def keep(bucket: Bucket) -> None:
        buckets.append(copy_bucket(bucket))

    def hold() -> HeldState | None:
        try:
            gather_parts(ranks, deal.parameters, keep)
            return hold_state(trained, optimizer, position, ranks, copied=True)
        except (MemoryError, RuntimeError):  # torch's allocators raise the latter
            return None

    state, lacking = run_agreed(ranks, hold, lambda state: [float(state is None)], count=1)
    if state is None or lacking.any():
        return None
    return HeldPart(state, buckets, deal.names, trained, tokenizer)


def compute_held_bytes(trained: Trained, ranks: Ranks, deal: Deal) -> int:
    """What this rank copies: its part of the weights, and its rows of two moments where no other replica has
    them.
    """
    if not ranks.first_replica:
        return deal.nbytes
    return deal.nbytes + 2 * sum(get_local(weight).nbytes for weight in list_trained(trained).values())


@live
class HeldCheckpoint:
    """What capture() leaves on rank 0: a function that writes it to a directory, once."""

    _channel: RankChannel
    _name: str  # of this capture alone
    _held: HeldPart | None  # until it is written or dropped

    async def __call__(self, path: Path) -> None:
        """Every rank writes its part to `path`, which all see; afterwards no rank holds it.

        Raises what any rank has met, after all have ended: OSError of a disk, StorageError, RunDirError, else
        BackendError.
        """
        held, self._held = self._held, None
        assert held, f"{self._name} is written or dropped already"
        self._channel.send({"name": "write_held", "capture": self._name, "path": str(path)})
        counts, failure = [0], None
        try:
            counts[0] = await trio.to_thread.run_sync(held.write, path)
        except Exception as error:  # raised when nobody writes there any more: the directory is removed then
            failure = error
        del held  # its memory is free while the others write, and while the files are hashed
        for rank, answer in sorted((await self._channel.wait_answers(self._name)).items()):
            if answer.isdecimal():
                counts.append(int(answer))
            else:
                failure = failure or decode_error(rank, answer.encode())
        if failure:
            raise failure
        await trio.to_thread.run_sync(name_parts, path, counts)

    def drop(self) -> None:
        """Frees every rank's part, if it was not written. Returns at once."""
        if self._held:
            self._held = None
            self._channel.send({"name": "drop_held", "capture": self._name})

"""The ranks of one training job and what they tell each other in step: numbers, bytes, and whether local work
has failed.

Everything here is collective: all ranks call it, in the same order, from the thread that owns torch. What
crosses are float64 numbers and bytes on the CPU, never pickled objects.

    run_agreed(work):  every rank does its own ──► one all-gather: ok? ──► all ok: each goes on with its result
                                                                      └──► any failed: all raise AgreedFailure, and stay in step

An error outside an agreed section leaves the others inside a collective: nobody can go on, and the job must
end.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rollouts.errors import BackendError, ConfigError, ControlError, RankLost
from rollouts.types import FloatArray

T = TypeVar("T")
TOLD_CHARS = 600  # of an error, for others to hear: JSON makes six of one at most


class Place(Protocol):
    """Where a process stands among those of its job: rollouts.distributed.launch.Launch is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """A process among the W of its job, once they are connected."""

    rank: int
    world_size: int  # W
    local_world_size: int  # ranks on this machine, which share its cores
    device: torch.device
    # ("shard",), or ("replicate", "shard"): each replica divides the model among its own ranks
    mesh: DeviceMesh
    store: Store  # by which they found each other; no collective

    @property
    def num_shards(self) -> int:
        """Ranks among which one copy of the model is divided."""
        return self.mesh["shard"].size()

    @property
    def shard(self) -> int:
        """Which of them this rank has."""
        return self.mesh["shard"].get_local_rank()

    @property
    def first_replica(self) -> bool:
        """Whether this rank is one of those that rank 0 shares a copy of the model with."""
        return self.mesh.ndim == 1 or self.mesh["replicate"].get_local_rank() == 0

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that divide one copy of the model."""
        return self.mesh["shard"].get_group()


class Meeting(NamedTuple):
    """Ranks that have found each other and are in no process group yet."""

    store: Store
    words: tuple[bytes, ...]  # what each rank has told the others on coming, by rank


class AgreedFailure(Exception):
    """Every rank raises this in the same place, so all are still in step. `error` is what this rank has to
    say.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Agreed(NamedTuple, Generic[T]):
    """What run_agreed brings back."""

    value: T
    numbers: FloatArray  # [W, n] float64, those of every rank


# --- coming and going ---------------------------------------------------------------------------------------


CONNECT_S = 300.0  # that rank 0, which comes last, waits for the others
COLLECTIVE_S = 1800.0  # that one collective may take
LOOK_S = 0.2  # between two looks of rank 0 at who has come


def meet_ranks(
    place: Place, *, word: bytes = b"", timeout_s: float = COLLECTIVE_S, connect_timeout_s: float = CONNECT_S
) -> Meeting:
    """All processes of the job, each of which has told the others a `word`. Blocks until all are there;
    MASTER_ADDR and MASTER_PORT are the environment's.

    timeout_s: how long the others wait for rank 0, which may have much to read before. connect_timeout_s: how
    long rank 0 waits for the others. A launcher that starts the ranks again may keep the store, and what dead
    ones have left in it; no two processes are known to share a count of such starts. So each shows a key that
    nobody had before, rank 0 answers every key that it finds, and all go on under rank 0's own. Raises
    RankLost if a rank does not come, and ControlError on rank 0 if torch does not say who is missing.
    """
    patience_s = connect_timeout_s if place.rank == 0 else timeout_s
    store = _open_own_part(place, _open_store(place, patience_s), patience_s)
    came = _meet_in_store(store, place, "came", word, patience_s)
    words = tuple(store.get(key) for key in came)
    if (
        place.rank == 0
    ):  # which may have the store: whoever leaves for what he has read, leaves after all have
        _meet_in_store(store, place, "heard", b"", patience_s)
    else:
        store.set(f"heard/{place.rank}", "")
    return Meeting(store, words)


def init_ranks(
    place: Place,
    *,
    device: str,
    shard_size: int = 0,
    timeout_s: float = COLLECTIVE_S,
    connect_timeout_s: float = CONNECT_S,
    meeting: Meeting | None = None,
) -> Ranks:
    """Connects this process with the others of its job, which have met in `meeting`, or else meet here: see
    meet_ranks.

    device: "cpu" (gloo) or "cuda" (NCCL, gloo for what stays on the CPU), the same on all ranks. shard_size:
    ranks among which one copy of the model is divided, 0 for all. timeout_s: how long one collective may take
    too, the waiting for a slower rank included. Raises ConfigError if shard_size does not divide the ranks,
    RankLost if a rank does not come.
    """
    world_size = place.world_size
    if shard_size < 0 or world_size % (shard_size or world_size):
        raise ConfigError(
            f"distributed.shard_size={shard_size} does not divide {world_size} ranks; use a divisor, or 0 for"
            " all of them"
        )
    kind = torch.device(device).type
    if kind == "cuda":  # pragma: gpu
        torch.cuda.set_device(place.local_rank)
    timeout = dt.timedelta(seconds=timeout_s)
    store = (meeting or meet_ranks(place, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)).store
    store.set_timeout(timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=world_size,
        timeout=timeout,
    )
    whole = shard_size in (0, world_size)
    mesh = (
        init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
        if whole
        else init_device_mesh(
            kind, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
        )
    )
    where = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
    return Ranks(place.rank, world_size, place.local_world_size, where, mesh, store)


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"


def _open_store(place: Place, timeout_s: float) -> Store:
    """The store of the job, which may have been that of others. Raises RankLost, and ControlError on rank 0
    if torch does not say who is missing.
    """
    waiting, where = dt.timedelta(seconds=timeout_s), _where()
    try:
        found, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=waiting))
    except dist.DistError as error:
        said = str(error).strip().split("\n", 1)[0]
        if place.rank == 0:
            raise ControlError(
                f"rank 0 waited {timeout_s:g} s at {where} and not all ranks came ({said}); see that all are"
                " started"
            ) from error
        raise RankLost(
            0, "start-up", f"it was not to be reached at {where} within {timeout_s:g} s ({said})"
        ) from error
    return PrefixStore("rollouts", found)


def _open_own_part(place: Place, store: Store, timeout_s: float) -> Store:
    """The part of the store that these processes, and none before them, use. On rank 0 once each of the
    others knows of it. Raises RankLost.
    """
    own = secrets.token_hex(16)
    store.set(f"shown/{place.rank}", own)
    if place.rank:
        _wait_for(store, [f"answer/{own}"], timeout_s, missing=lambda: 0)
        part = PrefixStore(store.get(f"answer/{own}").decode(), store)
        part.set(f"seen/{place.rank}", "")
        return part
    part = PrefixStore(own, store)
    answered: dict[int, bytes] = {}
    until = time.monotonic() + timeout_s
    while missing := [rank for rank in range(1, place.world_size) if not part.check([f"seen/{rank}"])]:
        if time.monotonic() > until:
            raise _never_came(missing[0], timeout_s)
        for rank in missing:
            if store.check([f"shown/{rank}"]) and (shown := store.get(f"shown/{rank}")) != answered.get(rank):
                answered[rank] = shown  # perhaps of a dead one, whose place another takes yet
                store.set(f"answer/{shown.decode()}", own)
        try:
            part.wait([f"seen/{rank}" for rank in missing], dt.timedelta(seconds=LOOK_S))
        except dist.DistStoreError:
            continue
    return part


def _meet_in_store(store: Store, place: Place, name: str, word: bytes, timeout_s: float) -> list[str]:
    """The keys under which each rank has left its word, once all have: nobody waits long for another after
    that. Raises RankLost.
    """
    keys = [f"{name}/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], word)  # pyright: ignore[reportArgumentType]  (bytes are taken as they are)
    _wait_for(
        store,
        keys,
        timeout_s,
        missing=lambda: next((rank for rank, key in enumerate(keys) if not store.check([key])), 0),
    )
    return keys


def _wait_for(store: Store, keys: list[str], timeout_s: float, *, missing: Callable[[], int]) -> None:
    """Returns once all keys are there. Raises RankLost of the `missing` rank."""
    try:
        store.wait(keys, dt.timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise _never_came(missing(), timeout_s) from error


def _never_came(rank: int, timeout_s: float) -> RankLost:
    return RankLost(rank, "start-up", f"it did not come to {_where()} within {timeout_s:g} s")


def close_ranks() -> None:
    """Ends what init_ranks began. Not a collective: a rank that is alone may call it too."""
    if dist.is_initialized():
        dist.destroy_process_group()


_meetings = (
    itertools.count()
)  # one number for each place where ranks met: all that go on have met at all of them


def meet_all(ranks: Ranks, timeout_s: float) -> bool:
    """Whether all ranks come here within `timeout_s` of this one. Not a collective: a rank that is inside one
    is only not here.

    After False this rank must end: the next meeting would have another number here than elsewhere.
    """
    name = f"meeting/{next(_meetings)}"
    if ranks.store.add(f"{name}/here", 1) == ranks.world_size:
        ranks.store.set(f"{name}/all", "1")
        return True
    try:
        ranks.store.wait([f"{name}/all"], dt.timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


# --- numbers and bytes --------------------------------------------------------------------------------------


def all_gather_floats(ranks: Ranks, values: Sequence[float]) -> FloatArray:
    """[W, n] float64: the n values of every rank, known to all. n must be the same everywhere."""
    found = torch.empty((ranks.world_size, len(values)), dtype=torch.float64)
    dist.all_gather(list(found.unbind(0)), torch.tensor(list(values), dtype=torch.float64))
    return found.numpy()


def all_gather_bytes(ranks: Ranks, data: bytes) -> list[bytes]:
    """The bytes of every rank, known to all."""
    sizes = _gather_sizes(ranks, len(data))
    blocks = list(torch.empty((ranks.world_size, max(sizes)), dtype=torch.uint8).unbind(0))
    dist.all_gather(blocks, _padded(data, max(sizes)))
    return [_to_bytes(block, size) for block, size in zip(blocks, sizes, strict=True)]


def gather_bytes(ranks: Ranks, data: bytes) -> list[bytes] | None:
    """On rank 0 the bytes of every rank, in their order; None on the others."""
    sizes = _gather_sizes(ranks, len(data))
    blocks = (
        list(torch.empty((ranks.world_size, max(sizes)), dtype=torch.uint8).unbind(0))
        if ranks.rank == 0
        else None
    )
    dist.gather(_padded(data, max(sizes)), blocks, dst=0)
    return (
        None
        if blocks is None
        else [_to_bytes(block, size) for block, size in zip(blocks, sizes, strict=True)]
    )


def broadcast_bytes(ranks: Ranks, data: bytes | None) -> bytes:
    """Rank 0's bytes, on every rank. Only rank 0 gives any."""
    assert (data is not None) == (ranks.rank == 0), ranks.rank
    size = torch.tensor(len(data or b""))
    dist.broadcast(size, src=0)
    block = _padded(data or b"", int(size))
    dist.broadcast(block, src=0)
    return _to_bytes(block, int(size))


def scatter_bytes(ranks: Ranks, parts: Sequence[bytes] | None) -> bytes:
    """This rank's part of what rank 0 has for each. Only rank 0 gives any."""
    assert (parts is not None) == (ranks.rank == 0), ranks.rank
    sizes = (
        torch.tensor([len(part) for part in parts])
        if parts is not None
        else torch.empty(ranks.world_size, dtype=torch.int64)
    )
    dist.broadcast(sizes, src=0)
    longest = int(sizes.max())
    block = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(block, [_padded(part, longest) for part in parts] if parts is not None else None, src=0)
    return _to_bytes(block, int(sizes[ranks.rank]))


def _gather_sizes(ranks: Ranks, size: int) -> list[int]:
    return [int(row[0]) for row in all_gather_floats(ranks, [float(size)])]


def _padded(data: bytes, size: int) -> torch.Tensor:
    block = np.zeros(size, np.uint8)
    block[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(block)


def _to_bytes(block: torch.Tensor, size: int) -> bytes:
    return block.numpy()[:size].tobytes()


# --- agreement ----------------------------------------------------------------------------------------------


def run_agreed(
    ranks: Ranks,
    work: Callable[[], T],
    numbers: Callable[[T], Sequence[float]] | None = None,
    *,
    count: int = 0,
) -> Agreed[T]:
    """Local work that may fail on one rank alone, done by all; and the `count` numbers that each rank's
    result gave.

    Raises AgreedFailure on every rank if the work failed on any: where it failed with that error, elsewhere
    with a BackendError (an OSError, if that is what it was) naming the first rank that failed and what it
    said. The work itself must not be collective.
    """
    value: T | None = None
    failure: BaseException | None = None
    given: Sequence[float] = [0.0] * count
    try:
        value = work()
        given = numbers(value) if numbers is not None else given
    # whatever it is, the others must hear of it before it is raised: they would wait for this rank forever
    except BaseException as error:
        failure, given = error, [0.0] * count
    assert len(given) == count, (len(given), count)
    told = all_gather_floats(ranks, [float(failure is not None), *given])
    failed = np.flatnonzero(told[:, 0])
    if not len(failed):
        return Agreed(value, told[:, 1:])  # pyright: ignore[reportReturnType]  (work has returned)
    said = all_gather_bytes(ranks, b"" if failure is None else describe_failure(failure))
    if failure is None:
        first = int(failed[0])
        failure = hear_failure(first, said[first])
    raise AgreedFailure(failure)


def describe_failure(error: BaseException) -> bytes:
    """An error for another rank to hear of."""
    text = f"{type(error).__name__}: {error}"[:TOLD_CHARS]
    return json.dumps([text, error.errno if isinstance(error, OSError) else None]).encode()


def hear_failure(rank: int, said: bytes) -> Exception:
    """Another rank's error. That of a disk stays one, so that a save that finds no room is the same whichever
    rank met it.
    """
    text, number = json.loads(said)
    return (
        BackendError(f"rank {rank} failed: {text}")
        if number is None
        else OSError(number, f"rank {rank} failed: {text}")
    )

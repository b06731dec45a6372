"""Collectives of the ranks of one job: numbers, bytes, and whether local work has failed. On one rank they do
nothing.

All ranks call these functions in the same order, from the thread that owns torch. What crosses are tensors
of float64 and of bytes on the CPU; nothing is pickled.

    run_agreed(work):  each rank does its own ──► one all-gather: ok? ──► all ok: each goes on with its result
                                                                     └──► any failed: all raise AgreedFailure

An error outside of run_agreed leaves the other ranks inside a collective, so the job must end.
"""

import datetime as dt
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from rollouts.errors import BackendError, ConfigError
from rollouts.ranks.launch import Launch
from rollouts.types import FloatArray

T = TypeVar("T")
COLLECTIVE_S = 1800.0  # one collective may take so long, the waiting for a slower rank included
ERROR_CHARS = 600  # of an error that another rank reports


class Ranks(NamedTuple):
    """This process among the W of its job, after they are connected."""

    rank: int
    world_size: int  # W
    local_world_size: int  # ranks on this machine, which share its cores
    device: torch.device
    # ("shard",), or ("replicate", "shard"): each replica divides the model among its own ranks. None: alone
    mesh: DeviceMesh | None = None
    store: Store | None = None  # for meet_all

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that divide one copy of the model."""
        assert self.mesh is not None, "one rank alone divides nothing"
        return self.mesh["shard"]

    @property
    def num_shards(self) -> int:
        """Ranks among which one copy of the model is divided."""
        return 1 if self.mesh is None else self.shard_mesh.size()

    @property
    def first_replica(self) -> bool:
        """Whether this rank shares rank 0's copy of the model."""
        return self.rank < self.num_shards


class AgreedFailure(Exception):
    """Every rank raises this in the same place, so all are still in step. `error` is this rank's, or the
    first failed rank's as this one heard it.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Agreed(NamedTuple, Generic[T]):
    """Result of run_agreed."""

    value: T
    numbers: FloatArray  # [W, n] float64, those of every rank


def init_group(
    launch: Launch, store: Store, *, device: str, shard_size: int = 0, timeout_s: float = COLLECTIVE_S
) -> Ranks:
    """Connects this process with the others of its job, which meet at `store`.

    device: "cpu" (gloo) or "cuda" (NCCL, gloo for what stays on the CPU), the same on all ranks. shard_size:
    ranks among which one copy of the model is divided, 0 for all. Raises ConfigError if it does not divide
    the ranks.
    """
    world_size = launch.world_size
    if world_size % (shard_size or world_size):
        raise ConfigError(
            f"distributed.shard_size={shard_size} does not divide {world_size} ranks; use a divisor, or 0"
        )
    cuda = torch.device(device).type == "cuda"
    if cuda:  # pragma: gpu
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=launch.rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=timeout_s),
    )
    whole = shard_size in (0, world_size)
    shape = (world_size,) if whole else (world_size // shard_size, shard_size)
    names = ("shard",) if whole else ("replicate", "shard")
    mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=names)
    where = torch.device("cuda", launch.local_rank) if cuda else torch.device("cpu")
    return Ranks(launch.rank, world_size, launch.local_world_size, where, mesh, store)


def close_group() -> None:
    """Ends what init_group began. Not a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


_meetings = itertools.count()  # the number of each call of meet_all, the same on all ranks


def meet_all(ranks: Ranks, timeout_s: float) -> bool:
    """Whether all ranks call this within `timeout_s`. Not a collective: other ranks may be inside one.

    After False this rank must end: the next call would have another number here than elsewhere.
    """
    if ranks.store is None or ranks.world_size == 1:
        return True
    name = f"meeting/{next(_meetings)}"
    if ranks.store.add(f"{name}/here", 1) == ranks.world_size:
        ranks.store.set(f"{name}/all", "1")
    try:
        ranks.store.wait([f"{name}/all"], dt.timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


# --- numbers and bytes --------------------------------------------------------------------------------------


def all_gather_floats(ranks: Ranks, values: Sequence[float]) -> FloatArray:
    """[W, n] float64: the n values of every rank, on all ranks."""
    mine = torch.tensor([list(values)], dtype=torch.float64)
    if ranks.world_size == 1:
        return mine.numpy()
    found = torch.empty((ranks.world_size, len(values)), dtype=torch.float64)
    dist.all_gather(list(found.unbind(0)), mine[0])
    return found.numpy()


def all_gather_bytes(ranks: Ranks, data: bytes) -> list[bytes]:
    """The bytes of every rank, on all ranks."""
    if ranks.world_size == 1:
        return [data]
    sizes = all_gather_floats(ranks, [float(len(data))])[:, 0].astype(int).tolist()
    blocks = torch.empty((ranks.world_size, max(sizes)), dtype=torch.uint8)
    dist.all_gather(list(blocks.unbind(0)), _pad(data, max(sizes)))
    return [block.numpy()[:size].tobytes() for block, size in zip(blocks, sizes, strict=True)]


def scatter_bytes(ranks: Ranks, parts: Sequence[bytes] | None) -> bytes:
    """This rank's part of what rank 0 has for each; the others give None."""
    if ranks.world_size == 1 and parts is not None:
        return parts[0]
    sizes = torch.zeros(ranks.world_size, dtype=torch.int64)
    if parts is not None:
        sizes = torch.tensor([len(part) for part in parts])
    dist.broadcast(sizes, src=0)
    longest = int(sizes.max())
    block = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(block, None if parts is None else [_pad(part, longest) for part in parts], src=0)
    return block.numpy()[: int(sizes[ranks.rank])].tobytes()


def _pad(data: bytes, size: int) -> torch.Tensor:
    block = np.zeros(size, np.uint8)
    block[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(block)


# --- agreement ----------------------------------------------------------------------------------------------


def run_agreed(
    ranks: Ranks,
    work: Callable[[], T],
    numbers: Callable[[T], Sequence[float]] | None = None,
    *,
    count: int = 0,
) -> Agreed[T]:
    """This rank's result of local work that may fail on one rank alone, and the `count` numbers that each
    rank's result gave. Work that is collective must not raise on one rank before its last exchange.

    Raises AgreedFailure on every rank if the work failed on any: on that rank with its error, elsewhere with
    a BackendError (or an OSError, if it was one) naming the first rank that failed.
    """
    value: T | None = None
    failure: BaseException | None = None
    given: Sequence[float] = [0.0] * count
    try:
        value = work()
        given = given if numbers is None else numbers(value)
    except BaseException as error:  # whatever it is, the others must hear of it, or they wait forever
        failure, given = error, [0.0] * count
    found = all_gather_floats(ranks, [float(failure is not None), *given])
    failed = np.flatnonzero(found[:, 0])
    if not len(failed):
        return Agreed(value, found[:, 1:])  # pyright: ignore[reportReturnType]  (work has returned)
    reports = all_gather_bytes(ranks, b"" if failure is None else encode_error(failure))
    raise AgreedFailure(failure or decode_error(int(failed[0]), reports[int(failed[0])]))


def encode_error(error: BaseException) -> bytes:
    """An error as another rank reads it."""
    text = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    return json.dumps([text, error.errno if isinstance(error, OSError) else None]).encode()


def decode_error(rank: int, report: bytes) -> Exception:
    """Another rank's error: an OSError stays one, so that a full disk is the same whichever rank met it."""
    text, number = json.loads(report)
    said = f"rank {rank} failed: {text}"
    return BackendError(said) if number is None else OSError(number, said)

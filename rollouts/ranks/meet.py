"""This process as one rank of a run, connected with the others after they were found to be alike.

    torchrun's store: "address" ─► the port of a TCPStore that rank 0 hosts, on which everything else happens
    hello/R of every rank: host, process, versions, device ─► alike? ─► process group ─► Channel

A restart gets a store of its own, so nothing that dead ranks have left is ever read. Only rank 0 answers
signals, by stopping: the launcher sends them to all, and a rank that went first would end the run without its
checkpoint.

Collectives of the ranks of one job: numbers, bytes, and whether local work has failed. On one rank they do
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
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import trio
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rollouts import __version__
from rollouts.device_thread import open_device_thread
from rollouts.errors import BackendError, ConfigError, RankLost
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.ranks.channel import BEAT_S, Channel, exit_on_lost
from rollouts.ranks.launch import LOOPBACK, Launch, identify_process
from rollouts.types import FloatArray, T, Texts

# --- the group ----------------------------------------------------------------------------------------------


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

    @property
    def error(self) -> BaseException:
        return self.args[0]


class Agreed(NamedTuple, Generic[T]):
    """Result of run_agreed."""

    value: T
    numbers: FloatArray  # [W, n] float64, those of every rank


def init_group(launch: Launch, store: Store, *, device: str, shard_size: int = 0) -> Ranks:
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
    cuda = device == "cuda"
    if cuda:  # pragma: gpu
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=launch.rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=COLLECTIVE_S),
    )
    whole = shard_size in (0, world_size)
    shape = (world_size,) if whole else (world_size // shard_size, shard_size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("shard",) if whole else ("replicate", "shard"))
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
    if ranks.store is None:
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
    mine = torch.tensor([values], dtype=torch.float64)
    if ranks.world_size == 1:
        return mine.numpy()
    found = torch.empty((ranks.world_size, len(values)), dtype=torch.float64)
    dist.all_gather(list(found), mine[0])
    return found.numpy()


def all_reduce(ranks: Ranks, tensors: Sequence[torch.Tensor]) -> None:
    """Each tensor becomes its sum over all ranks, in place, with the same bits on all."""
    if ranks.world_size == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def all_gather_bytes(ranks: Ranks, data: bytes) -> list[bytes]:
    """The bytes of every rank, on all ranks."""
    if ranks.world_size == 1:
        return [data]
    sizes = all_gather_floats(ranks, [len(data)])[:, 0].astype(int).tolist()
    blocks = torch.empty((ranks.world_size, max(sizes)), dtype=torch.uint8)
    dist.all_gather(list(blocks), _pad(data, max(sizes)))
    return [block.numpy()[:size].tobytes() for block, size in zip(blocks, sizes, strict=True)]


def scatter_bytes(ranks: Ranks, parts: Sequence[bytes] | None) -> bytes:
    """This rank's part of what rank 0 has for each; the others give None. For several ranks."""
    sizes = torch.tensor([len(part) for part in parts or [b""] * ranks.world_size])
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
    value = failure = None
    given = [0.0] * count
    try:
        value = work()
        if numbers:
            given = numbers(value)
    except BaseException as error:  # whatever it is, the others must hear of it, or they wait forever
        failure = error
    found = all_gather_floats(ranks, [failure is not None, *given])
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


# --- meeting ------------------------------------------------------------------------------------------------


COME_S = 300.0  # rank 0, which comes last, waits so long for the others
CONNECT_S = 5.0  # for one attempt to reach rank 0's store
FOREVER = dt.timedelta(days=24)  # as long as a socket can wait
DEVICE = "model.device"


class OpenRanks(NamedTuple):
    """What connects this process with the other ranks."""

    ranks: Ranks
    channel: Channel
    agents: tuple[str, ...] = ()  # of each rank: the launcher's process that has started it (see Launch)
    meeting: Any = None  # the launcher's store, which rank 0 hosts itself without torchrun


@asynccontextmanager
async def open_ranks(
    launch: Launch, *, shard_size: int = 0, choose_device: Callable[[], str] = lambda: "cpu"
) -> AsyncIterator[OpenRanks]:
    """This process connected with all others of the run, once they are there.

    Leaving ends the run for the others too: as complete on rank 0 without an exception, else as a failure. A
    rank that is lost ends this process with exit code 75. Raises ConfigError on all ranks where they run
    unlike versions, compute on unlike devices, or one cannot compute; and for a shard_size that does not
    divide them. Ranks other than 0 ignore SIGINT, SIGTERM and SIGHUP once they are connected.
    """
    if launch.rank:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait until the others come
    async with open_device_thread(name="ranks", torch_threads=1) as thread:
        opened = await thread.submit(lambda: connect(launch, shard_size, choose_device))
        if launch.rank:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        channel = opened.channel
        async with open_plain_nursery() as nursery:
            watching = trio.CancelScope(shield=True)  # a cancelled body may wait for a hanging device thread

            async def watch() -> None:
                with watching:
                    await channel.watch(partial(exit_on_lost, channel))

            nursery.start_soon(watch)
            try:
                yield opened
                await channel.close()
            except BaseException as error:
                with trio.CancelScope(shield=True):
                    await channel.report_failure(error)
                raise
            finally:
                channel.stop_watching()  # its thread must end before the interpreter does, unless it hangs
                watching.deadline = trio.current_time() + 3 * BEAT_S
        await thread.submit(close_group)


def connect(launch: Launch, shard_size: int, choose_device: Callable[[], str]) -> OpenRanks:
    """The process group and the channel of the run. Blocks until all ranks are there; raises as open_ranks,
    and RankLost naming a rank that did not come.
    """
    hello = {
        "host": socket.gethostname(),
        "process": identify_process(os.getpid()),
        "agent": launch.agent,
        "error": "",
        "same": {name: version(name) for name in ("torch", "transformers")} | {"rollouts-rl": __version__},
    }
    try:
        hello["same"][DEVICE] = choose_device()
    except ConfigError as error:
        hello["error"] = str(error)
    store, connect_again, meeting = open_store(launch)
    keys = [f"hello/{rank}" for rank in range(launch.world_size)]
    read = [f"read/{rank}" for rank in range(1, launch.world_size)]
    try:
        store.set(keys[launch.rank], json.dumps(hello))
        store.wait(keys)
        hellos = [json.loads(store.get(key)) for key in keys]
        if launch.rank:
            store.set(f"read/{launch.rank}", "1")
        elif read:  # rank 0 hosts the store, and goes on when all have read it
            store.wait(read)
    except DistError as error:
        missing = next((rank for rank, key in enumerate(keys) if not store.check([key])), 0)
        raise RankLost(missing, "start-up", f"it did not come within {COME_S:g} s") from error
    for rank, other in enumerate(hellos):
        if other["error"]:
            raise ConfigError(f"rank {rank} on {other['host']}: {other['error']}")
    hosts, values = [other["host"] for other in hellos], [other["same"] for other in hellos]
    if unlike := describe_difference(hosts, values):
        raise ConfigError(
            f"{unlike}; use alike machines with the same versions, or set model.device='cpu' for all"
        )
    store.set_timeout(dt.timedelta(seconds=COLLECTIVE_S))
    ranks = init_group(
        launch, PrefixStore("group", store), device=hello["same"][DEVICE], shard_size=shard_size
    )
    channel = Channel(launch.rank, connect_again, [other["process"] for other in hellos])
    return OpenRanks(ranks, channel, tuple(other["agent"] for other in hellos), meeting)


def open_store(launch: Launch) -> tuple[TCPStore, Callable[[], TCPStore], Store]:
    """A connection to the store that rank 0 hosts, what makes another one, and the launcher's store, which
    must live as long. Raises RankLost.
    """
    where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
    # rank 0 may have much to read before it comes
    patience = dt.timedelta(seconds=COLLECTIVE_S if launch.rank else COME_S)
    try:
        meeting = next(rendezvous("env://", launch.rank, launch.world_size, timeout=patience))[0]
        if launch.rank == 0:
            store = host_store(LOOPBACK if launch.on_one_node else "", patience)
            meeting.set("address", str(store.port))
            again = partial(TCPStore, LOOPBACK, store.port, wait_for_workers=False, timeout=FOREVER)
            return store, again, meeting
        host = LOOPBACK if launch.on_one_node else launch.master_addr
        until = time.monotonic() + patience.total_seconds()
        while True:  # the address may be that of a rank 0 that has ended
            port = int(meeting.get("address"))
            try:
                reach = partial(TCPStore, host, port, wait_for_workers=False)
                store = reach(timeout=dt.timedelta(seconds=CONNECT_S))
                store.set_timeout(patience)
                return store, partial(reach, timeout=FOREVER), meeting
            except DistError:
                if time.monotonic() > until:
                    raise
    except DistError as error:
        reason = f"not all ranks came to {where} within {patience.total_seconds():g} s ({error})"
        raise RankLost(0, "start-up", reason.split("\n", 1)[0]) from error


def host_store(host: str, timeout: dt.timedelta, size: int | None = None) -> TCPStore:
    """A TCPStore of this process on a port of its own, on the interface of `host`, "" for all: by itself it
    would listen on all of them, and it asks nobody for a key. `size`: of the group that meets there.
    """
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        options = {"master_listen_fd": listener.detach(), "is_master": True}
        return TCPStore(LOOPBACK, port, size, wait_for_workers=False, timeout=timeout, **options)


def describe_difference(hosts: Sequence[str], values: Sequence[Texts]) -> str:
    """The first name, sorted, whose value is not the same on all ranks, with both values and the first rank
    where it is not rank 0's; empty where all are alike.
    """
    for name in sorted({name for one in values for name in one}):
        for rank, one in enumerate(values):
            if one.get(name) != values[0].get(name):
                return (
                    f"{name} is {one.get(name)!r} on rank {rank} on {hosts[rank]} and"
                    f" {values[0].get(name)!r} on rank 0 on {hosts[0]}"
                )
    return ""

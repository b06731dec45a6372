"""This process as one rank of a run, connected with the others after they were found to be alike.

    torchrun's store: "address" ─► the port of a TCPStore that rank 0 hosts, on which everything else happens
    hello/R of every rank: host, process, versions, device ─► alike? ─► process group ─► Channel

A restart gets a store of its own, so nothing that dead ranks have left is ever read. Only rank 0 answers
SIGINT and SIGTERM, by stopping: the launcher sends them to all, and a rank that went first would end the run
without its checkpoint.
"""

import datetime as dt
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import trio
from torch.distributed import (
    DistError,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  (documented there)
)
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rollouts import __version__
from rollouts.device_thread import open_device_thread
from rollouts.errors import ConfigError, RankLost
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.ranks.channel import BEAT_S, Channel, exit_on_lost
from rollouts.ranks.group import COLLECTIVE_S, Ranks, close_group, init_group
from rollouts.ranks.launch import LOOPBACK, Launch, identify_process

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
    launch: Launch,
    *,
    shard_size: int = 0,
    choose_device: Callable[[], str] = lambda: "cpu",
) -> AsyncIterator[OpenRanks]:
    """This process connected with all others of the run, once they are there.

    Leaving ends the run for the others too: as complete on rank 0 without an exception, else as a failure. A
    rank that is lost ends this process with exit code 75. Raises ConfigError on all ranks where they run
    unlike versions, compute on unlike devices, or one cannot compute; and for a shard_size that does not
    divide them. Ranks other than 0 ignore SIGINT and SIGTERM once they are connected.
    """
    if launch.rank:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait until the others come
    async with open_device_thread(name="ranks", torch_threads=1) as thread:
        opened = await thread.submit(lambda: connect(launch, shard_size, choose_device))
        if launch.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    hello: dict[str, Any] = {
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
    hellos = exchange_hellos(launch, store, hello)
    for rank, other in enumerate(hellos):
        if other["error"]:
            raise ConfigError(f"rank {rank} on {other['host']}: {other['error']}")
    unlike = describe_difference([other["host"] for other in hellos], [other["same"] for other in hellos])
    if unlike:
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
        meeting: Store = next(rendezvous("env://", launch.rank, launch.world_size, timeout=patience))[0]
        if launch.rank == 0:
            host = LOOPBACK if launch.on_one_node else ""
            store = host_store(host, dt.timedelta(seconds=COME_S))
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
        options: dict[str, Any] = {"master_listen_fd": listener.detach(), "is_master": True}
        return TCPStore(LOOPBACK, port, size, wait_for_workers=False, timeout=timeout, **options)


def exchange_hellos(launch: Launch, store: Store, hello: Mapping[str, Any]) -> list[Any]:
    """What every rank says of itself, by rank. Returns on rank 0, which hosts the store, when all have read
    it. Raises RankLost naming a rank that did not come.
    """
    keys = [f"hello/{rank}" for rank in range(launch.world_size)]
    read = [f"read/{rank}" for rank in range(1, launch.world_size)]
    try:
        store.set(keys[launch.rank], json.dumps(hello))
        store.wait(keys)
        found = [json.loads(store.get(key)) for key in keys]
        if launch.rank:
            store.set(f"read/{launch.rank}", "1")
        elif read:
            store.wait(read)
        return found
    except DistError as error:
        missing = next((rank for rank, key in enumerate(keys) if not store.check([key])), 0)
        raise RankLost(missing, "start-up", f"it did not come within {COME_S:g} s") from error


def describe_difference(hosts: Sequence[str], values: Sequence[Mapping[str, str]]) -> str:
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

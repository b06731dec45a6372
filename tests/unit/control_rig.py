"""Both ends of a control channel over streams in memory, and a rank of which a test writes every byte."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from rollouts.distributed.connection import Connection, Frame, Kind
from rollouts.distributed.hub import ControlHub, open_hub
from rollouts.distributed.link import ControlLink, open_link
from rollouts.errors import RankLost

KEY = bytes(range(32))
SILENCE_S = 6.0
SOON_S = 3600.0  # virtual
Stream = trio.StapledStream


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Streams in memory in place of sockets."""

    def __init__(self) -> None:
        self.send, self.waiting = trio.open_memory_channel[trio.abc.Stream](math.inf)
        self.closed = trio.Event()

    def connect(self) -> Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        self.send.send_nowait(theirs)
        return ours

    async def accept(self) -> trio.abc.Stream:
        return await self.waiting.receive()

    async def aclose(self) -> None:
        self.closed.set()
        await trio.lowlevel.checkpoint()


@dataclass
class Rig:
    """A hub that is being opened and what each rank says about losses."""

    world_size: int
    listener: MemoryListener = field(default_factory=MemoryListener)
    lost: dict[int, list[RankLost]] = field(default_factory=dict)  # by the rank that said so
    on_lost: Callable[[RankLost], None] | None = None  # what everybody does instead of writing it down

    def says(self, rank: int) -> Callable[[RankLost], None]:
        return self.on_lost or self.lost.setdefault(rank, []).append

    def named(self) -> dict[int, list[int]]:
        """Rank that said so: the ranks it named."""
        return {rank: [one.rank for one in lost] for rank, lost in self.lost.items() if lost}

    def hub(self, *, startup_timeout_s: float = 60.0):
        return open_hub(
            [self.listener],
            KEY,
            world_size=self.world_size,
            silence_s=SILENCE_S,
            startup_timeout_s=startup_timeout_s,
            on_lost=self.says(0),
        )

    def link(self, rank: int, stream: Stream | None = None, *, key: bytes = KEY):
        stream = stream or self.listener.connect()
        return open_link(
            stream, key, rank=rank, silence_s=SILENCE_S, startup_timeout_s=60.0, on_lost=self.says(rank)
        )

    async def raw(self, rank: int, key: bytes = KEY) -> Raw:
        """A rank of which the test writes and reads every byte."""
        stream = self.listener.connect()
        await stream.send_all(frame(Kind.HELLO, key + struct.pack("<I", rank)))
        return Raw(stream, Connection(stream))


@dataclass
class Raw:
    stream: trio.abc.Stream
    connection: Connection

    async def skip_to(self, kind: Kind) -> Frame | None:
        with trio.fail_after(SOON_S):
            while (got := await self.connection.receive()) is not None and got.kind is not kind:
                pass
        return got


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack("<BI", kind, len(payload)) + payload


async def follow(
    rig: Rig, rank: int, told: list[str], *, phase: str = "waiting", stream: Stream | None = None
) -> None:
    """A rank that takes commands until there are no more."""
    async with rig.link(rank, stream) as link:
        link.set_phase(phase)
        async for command in link:
            told.append(command.name)


async def follow_and_lose(rig: Rig, rank: int, *, phase: str = "waiting") -> None:
    with pytest.raises(RankLost):
        await follow(rig, rank, [], phase=phase)


async def drive(rig: Rig, body: Callable[[ControlHub], Awaitable[object]]) -> None:
    """Rank 0, which does what `body` says."""
    async with rig.hub() as hub:
        await body(hub)


async def take_part(rig: Rig, rank: int, body: Callable[[ControlLink], Awaitable[object]]) -> None:
    """Another rank, which does what `body` says."""
    async with rig.link(rank) as link:
        await body(link)


async def wait_for_ever(control: ControlHub | ControlLink) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def raw_hub(rig: Rig) -> AsyncIterator[Raw]:
    """Rank 0 as far as one rank sees it, of which the test writes every byte."""
    stream = await rig.listener.accept()
    raw = Raw(stream, Connection(stream))
    assert await raw.connection.receive_first(Kind.HELLO, size=36) is not None
    await raw.connection.send(Kind.WELCOME)
    await raw.connection.send_text(Kind.BEAT, "generate of step 4")
    yield raw

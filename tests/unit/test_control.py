"""The control channel in virtual time: commands in order, strangers, goodbyes, and the bytes of it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.distributed.commands import Command
from rollouts.distributed.connection import PART_BYTES, Connection, Kind, Phase, send_beats, split_pieces
from rollouts.distributed.hub import ANSWER_CHARS, CLOSE_S, HELLO_S, ControlHub
from rollouts.errors import ControlError, RankLost
from tests.unit.control_rig import (
    KEY,
    Raw,
    Rig,
    Stream,
    drive,
    follow,
    follow_and_lose,
    frame,
)

# --- commands -----------------------------------------------------------------------------------------------


async def test_every_rank_gets_every_command_in_order_and_all_part_in_peace(
    autojump_clock: trio.testing.MockClock,
):
    rig, told = Rig(4), [[], [], []]
    async with trio.open_nursery() as nursery:
        for rank in (1, 2, 3):
            nursery.start_soon(follow, rig, rank, told[rank - 1])
        async with rig.hub() as hub:
            for number in range(200):
                hub.send(Command(f"step {number}"))
            assert hub.statistics() == {
                "ranks": 3,
                "commands": 200,
                "queued": 200,
                "received": hub.statistics()["received"],
            }
    assert told == [[f"step {number}" for number in range(200)]] * 3
    assert rig.named() == {}
    assert trio.current_time() < CLOSE_S, "nobody waited for a time-out"


async def test_rank_0_gets_the_answers_of_all_ranks_by_name_when_the_last_has_come(
    autojump_clock: trio.testing.MockClock,
):
    rig, longest = Rig(3), "ü" * ANSWER_CHARS

    async def answer(rank: int) -> None:
        async with rig.link(rank) as link:
            async for command in link:
                link.set_phase(f"working on {command.name}")
                await trio.sleep(10.0 * rank)
                link.answer(command.name, f"{rank}" if command.name == "first" else longest)

    async with trio.open_nursery() as nursery:
        for rank in (1, 2):
            nursery.start_soon(answer, rank)
        async with rig.hub() as hub:
            for name in ("first", "second"):
                hub.send(Command(name))
            assert await hub.wait_answers("second") == {1: longest, 2: longest}
            assert trio.current_time() == pytest.approx(40.0)
            assert await hub.wait_answers("first") == {1: "1", 2: "2"}, "they had come before"
    assert rig.named() == {}


async def test_whoever_waits_for_an_answer_hears_of_a_rank_that_is_lost(
    autojump_clock: trio.testing.MockClock,
):
    rig, heard = Rig(2), list[int]()

    async def wait(hub: ControlHub) -> None:
        with pytest.raises(RankLost) as caught:
            await hub.wait_answers("a thing")
        heard.append(caught.value.rank)

    async def drive_and_wait() -> None:
        async with trio.open_nursery() as waiting, rig.hub() as hub:
            waiting.start_soon(wait, hub)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose_soon, rig)
        with pytest.RaisesGroup(RankLost):
            await drive_and_wait()
    assert heard == [1]


async def lose_soon(rig: Rig) -> None:
    raw = await rig.raw(1)
    await trio.sleep(1.0)
    await raw.connection.close()


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\xa1a", b"\x92\xa1a\x01"])
async def test_an_answer_that_is_none_ends_the_run(autojump_clock: trio.testing.MockClock, payload: bytes):
    rig = Rig(2)

    async def answer() -> None:
        await (await rig.raw(1)).stream.send_all(frame(Kind.ANSWER, payload))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        with pytest.raises(RankLost, match="an ANSWER frame that says nothing"):
            await drive(rig, lambda hub: hub.wait_answers("x"))


async def test_commands_that_wait_are_still_received_after_rank_0_has_closed_the_channel(
    autojump_clock: trio.testing.MockClock,
):
    rig, got = Rig(2), list[int]()

    async def slow_rank() -> None:
        async with rig.link(1) as link:
            while True:
                try:
                    command = await link.receive()
                except trio.EndOfChannel:
                    return
                await trio.sleep(2.0)
                got.append(command.arrays["x"].item())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_rank)
        async with rig.hub() as hub:
            for number in range(3):
                hub.send(Command("x", {}, {"x": np.array(number)}))
        assert got == [0, 1, 2], "rank 0 leaves after the others"
    assert rig.named() == {}


async def test_a_rank_that_reads_nothing_holds_up_neither_rank_0_nor_another_rank(
    autojump_clock: trio.testing.MockClock,
):
    rig, told, release = Rig(3), list[str](), trio.Event()
    ours, theirs = trio.testing.lockstep_stream_pair()  # what is sent waits until it is read
    rig.listener.send.send_nowait(theirs)

    async def follow_one() -> None:
        with pytest.raises(RankLost):
            await follow(rig, 1, told)

    async def read_nothing() -> None:
        raw = Raw(ours, Connection(ours))
        await raw.connection.send(Kind.HELLO, KEY + struct.pack("<I", 2))
        await raw.connection.receive_first(Kind.WELCOME, size=0)
        while not release.is_set():
            await raw.connection.send_text(Kind.BEAT, "stuck")
            await trio.sleep(1.0)
        await raw.connection.close()

    async def send_many(hub: ControlHub) -> None:
        for number in range(50):
            hub.send(Command(f"step {number}"))
        await trio.sleep(20.0)
        assert told == [f"step {number}" for number in range(50)]
        release.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_one)
        nursery.start_soon(read_nothing)
        with pytest.raises(RankLost, match="rank 2 was lost during stuck"):
            await drive(rig, send_many)


class SlowStream(trio.abc.HalfCloseableStream):
    """A stream over which a part of a message takes 3 seconds."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | memoryview) -> None:
        await trio.sleep(3.0 * len(data) / PART_BYTES)
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self.stream.aclose()


async def test_a_command_that_takes_a_minute_is_no_silence_and_phases_pass_between_its_parts(
    autojump_clock: trio.testing.MockClock,
):
    rig, arrived = Rig(2), list[bool]()
    ours, theirs = trio.testing.memory_stream_pair()
    rig.listener.send.send_nowait(SlowStream(theirs))
    values = np.arange(20 * PART_BYTES // 8)

    async def rank() -> None:
        async with rig.link(1, ours) as link:
            with trio.move_on_after(30.0):
                await link.receive()
            assert link._hub_phase == "phase 20", "told while the command is under way"
            command = await link.receive()
            arrived.append(np.array_equal(command.arrays["values"], values))
            async for _ in link:
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank)
        async with rig.hub() as hub:
            hub.send(Command("big", {}, {"values": values}))
            await trio.sleep(20.0)
            hub.set_phase("phase 20")
    assert arrived == [True]
    assert 60.0 <= trio.current_time() < 120.0
    assert rig.named() == {}


async def test_nothing_can_be_sent_once_the_channel_is_closed_or_a_rank_is_lost(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, rig, 1, [])
        async with rig.hub() as hub:
            pass
        with pytest.raises(ControlError, match="command 'late' comes after the control channel was closed"):
            hub.send(Command("late"))
    async with trio.open_nursery() as nursery:
        rig = Rig(2)
        raw = await rig.raw(1)
        nursery.start_soon(raw.connection.close)
        with pytest.raises(RankLost):
            async with rig.hub() as hub:
                await trio.sleep_forever()
        with pytest.raises(RankLost, match="rank 1 was lost"):
            hub.send(Command("late"))


async def test_a_hub_without_others_does_nothing(autojump_clock: trio.testing.MockClock):
    rig = Rig(1)
    async with rig.hub() as hub:
        hub.send(Command("x"))
        hub.set_phase("alone")
    with pytest.raises(ValueError, match="own"):
        async with rig.hub():
            raise ValueError("own")
    assert trio.current_time() == 0.0


# --- strangers and start-up ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        frame(Kind.HELLO, bytes(32) + struct.pack("<I", 1)),  # another key
        frame(Kind.HELLO, KEY + struct.pack("<I", 0)),  # ranks that cannot be
        frame(Kind.HELLO, KEY + struct.pack("<I", 2)),
        frame(Kind.HELLO, KEY),
        frame(Kind.BEAT, b"hello"),
        struct.pack("<BI", Kind.HELLO, 2**32 - 1) + b"x" * 1000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x01",  # and no more
        b"",
    ],
)
async def test_a_stranger_is_dropped_and_the_run_goes_on(
    first: bytes, autojump_clock: trio.testing.MockClock
):
    rig, told = Rig(2), list[str]()
    stranger = rig.listener.connect()
    if first:
        await stranger.send_all(first)

    async def come_later() -> None:
        with trio.fail_after(2 * HELLO_S):
            assert await stranger.receive_some() == b"", "dropped without a word"
        await follow(rig, 1, told)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_later)
        async with rig.hub() as hub:
            hub.send(Command("go"))
    assert told == ["go"]
    assert rig.named() == {}
    assert rig.listener.closed.is_set()


async def test_rank_0_stops_listening_when_all_are_there(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, rig, 1, [])
        async with rig.hub():
            await rig.listener.closed.wait()
            assert trio.current_time() == 0.0


async def test_a_second_process_that_says_it_is_the_same_rank_is_dropped(
    autojump_clock: trio.testing.MockClock,
):
    rig, told = Rig(3), list[str]()

    async def come_second() -> None:
        await trio.sleep(1.0)
        with pytest.raises(
            RankLost,
            match="rank 0 was lost during start-up: it closed the connection before it accepted rank 1",
        ):
            await follow(rig, 1, [])
        rig.lost.clear()
        await follow(rig, 2, told)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, rig, 1, told)
        nursery.start_soon(come_second)
        async with rig.hub() as hub:
            hub.send(Command("go"))
    assert told == ["go", "go"]


async def test_ranks_that_never_connect_are_named_by_all_who_did(autojump_clock: trio.testing.MockClock):
    rig = Rig(5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_and_lose, rig, 1)
        nursery.start_soon(follow_and_lose, rig, 3)
        with pytest.raises(
            RankLost, match="rank 2 was lost during start-up: it did not connect within 60 s, nor did rank 4"
        ):
            async with rig.hub():
                pytest.fail("the body must not begin")
    assert rig.named() == {0: [2], 1: [2], 3: [2]}


async def test_rank_0_that_does_not_answer_is_named(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)
    with pytest.raises(
        RankLost, match="rank 0 was lost during start-up: it did not accept rank 1 within 60 s"
    ):
        async with rig.link(1):
            pytest.fail("the body must not begin")
    assert rig.named() == {1: [0]}


# --- bytes --------------------------------------------------------------------------------------------------


def test_pieces_are_split_into_stretches_and_only_those_of_several_pieces_are_copied():
    big = np.arange(10, dtype=np.uint8)
    parts = list(split_pieces([memoryview(b"ab"), big.data, memoryview(b""), memoryview(b"c")], 4))
    assert [bytes(part) for part in parts] == [b"ab\x00\x01", b"\x02\x03\x04\x05", b"\x06\x07\x08\x09", b"c"]
    assert [isinstance(part, memoryview) for part in parts] == [False, True, True, True]


async def test_a_stream_that_is_cut_at_any_byte_has_ended():
    whole = (
        frame(Kind.BEAT, b"x" * 5)
        + frame(Kind.MESSAGE, struct.pack("<Q", 3))
        + frame(Kind.PART, b"ab")
        + frame(Kind.PART, b"c")
    )
    for size in range(len(whole) + 1):
        ours, theirs = trio.testing.memory_stream_pair()
        if size:
            await ours.send_all(whole[:size])
        await ours.send_eof()
        connection = Connection(theirs)
        kinds: list[Kind] = []
        while (got := await connection.receive()) is not None:
            kinds.append(got.kind)
        assert kinds == [Kind.BEAT, Kind.MESSAGE][: (size >= 10) + (size == len(whole))]
        assert connection.received == size


async def test_a_phase_is_told_at_once_and_again_every_second(autojump_clock: trio.testing.MockClock):
    ours, theirs = trio.testing.memory_stream_pair()
    phase, told = Phase(), list[tuple[float, str]]()
    connection = Connection(theirs)

    async def listen() -> None:
        while (got := await connection.receive()) is not None:
            told.append((trio.current_time(), got.text))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_beats, Connection(ours), phase)
        nursery.start_soon(listen)
        await trio.sleep(1.5)
        phase.set("save")
        await trio.sleep(1.75)
        nursery.cancel_scope.cancel()
    assert told == [(0.0, "start-up"), (1.0, "start-up"), (1.5, "save"), (2.5, "save")]

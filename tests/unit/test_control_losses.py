"""The control channel in virtual time: whoever is lost is named by all the others, and nobody else is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
import trio.testing

from rollouts.distributed.connection import Kind, Phase, send_beats
from rollouts.distributed.hub import GRACE_S, NOTICE_S, STOPPED, ControlHub, encode_lost
from rollouts.distributed.link import ControlLink
from rollouts.errors import ControlError, RankLost
from tests.unit.control_rig import (
    SOON_S,
    Raw,
    Rig,
    drive,
    follow,
    follow_and_lose,
    frame,
    raw_hub,
    take_part,
    wait_for_ever,
)


async def lose(rig: Rig, play: Callable[[Raw], Awaitable[object]], *, after_s: float = 5.0) -> float:
    """Rank 1, which does what `play` says after some seconds in its phase, and rank 2, which follows; both
    hub and rank 2 are to lose a rank. The seconds from then until all is over.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: follow_and_lose(rig, 2))
        raw = await rig.raw(1)

        async def live_and_die() -> None:
            for _ in range(int(after_s)):
                await raw.connection.send_text(Kind.BEAT, "forward_backward of step 3")
                await trio.sleep(1.0)
            await play(raw)

        nursery.start_soon(live_and_die)
        with pytest.raises(RankLost):
            await drive(rig, wait_for_ever)
        took_s = trio.current_time() - after_s
        nursery.cancel_scope.deadline = trio.current_time() + 1.0
    return took_s


async def test_a_rank_whose_connection_ends_is_named_at_once_with_its_phase(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)
    took_s = await lose(rig, lambda raw: raw.connection.close())
    assert {str(lost) for ranks in rig.lost.values() for lost in ranks} == {
        (
            "rank 1 was lost during forward_backward of step 3: its connection ended, as when its process is"
            " killed"
        )
    }
    assert rig.named() == {0: [1], 2: [1]}
    assert took_s == 0.0


async def test_a_rank_that_falls_silent_is_named_after_silence_s(autojump_clock: trio.testing.MockClock):
    rig = Rig(3)

    async def fall_silent(raw: Raw) -> None:
        await trio.sleep_forever()

    took_s = await lose(rig, fall_silent)
    assert (
        str(rig.lost[2][0])
        == "rank 1 was lost during forward_backward of step 3: nothing was heard from it for 6 s"
    )
    assert rig.named() == {0: [1], 2: [1]}
    assert 4.9 <= took_s <= 6.5, "the last heartbeat was a second before"


async def test_single_bytes_are_signs_of_life(autojump_clock: trio.testing.MockClock):
    rig = Rig(3)

    async def trickle(raw: Raw) -> None:
        for byte in frame(Kind.BEAT, b"x" * 20):
            await raw.stream.send_all(bytes([byte]))
            await trio.sleep(5.0)
        await raw.connection.close()

    assert await lose(rig, trickle) == 125.0
    assert str(rig.lost[0][0]).startswith("rank 1 was lost during xxxx")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(10), "it sent a frame of kind 10 with 0 bytes"),
        (frame(Kind.BEAT, b"x" * (2**16 + 1)), "it sent a frame of kind 3 with 65537 bytes"),
        (frame(Kind.BYE), "it sent a BYE frame, which rank 0 does not expect now"),
        (frame(Kind.WELCOME), "it sent a WELCOME frame"),
        (frame(Kind.PART, b"x"), "it sent a part of 1 bytes, with 0 missing of the message"),
        (frame(Kind.MESSAGE, b"x"), "it sent a message of 0 bytes"),
        (frame(Kind.LOST, b"x"), "it sent a LOST frame that says nothing"),
    ],
)
async def test_a_rank_that_sends_nonsense_is_lost(
    sent: bytes, reason: str, autojump_clock: trio.testing.MockClock
):
    rig = Rig(3)
    await lose(rig, lambda raw: raw.stream.send_all(sent))
    assert rig.lost[2][0].reason.startswith(reason)


async def test_a_rank_that_reports_its_failure_is_named_with_what_it_said(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)

    async def fail(raw: Raw) -> None:
        await raw.connection.send_text(Kind.FAIL, "OutOfMemoryError: 3 GiB")
        assert (await raw.skip_to(Kind.LOST)) is not None, "it is told too"
        await raw.connection.close()

    took_s = await lose(rig, fail)
    assert str(rig.lost[2][0]) == "rank 1 was lost during forward_backward of step 3: OutOfMemoryError: 3 GiB"
    assert rig.named() == {0: [1], 2: [1]}
    assert took_s == GRACE_S


async def test_a_failure_that_another_ranks_death_explains_names_the_dead_rank(
    autojump_clock: trio.testing.MockClock,
):
    """Whoever is in a collective with a rank that dies fails too, and may be the first to say so."""
    rig = Rig(3)

    async def fail_early() -> None:
        with pytest.raises(RankLost):
            await take_part(rig, 2, report)

    async def report(link: ControlLink) -> None:
        await trio.sleep(3.0)
        link.fail("RuntimeError: connection closed by peer")
        await trio.sleep_forever()

    async def die_after_it() -> None:
        await trio.sleep(3.0 + GRACE_S / 2)
        await raw.connection.close()

    async with trio.open_nursery() as nursery:
        raw = await rig.raw(1)
        nursery.start_soon(fail_early)
        nursery.start_soon(die_after_it)
        with pytest.raises(RankLost, match="rank 1 was lost"):
            await drive(rig, wait_for_ever)
    assert rig.named() == {0: [1], 2: [1]}


async def test_a_rank_that_reports_its_failure_and_ends_is_named_with_what_it_said(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)

    async def fail_and_die(raw: Raw) -> None:
        await raw.connection.send_text(Kind.FAIL, "OutOfMemoryError: 3 GiB")
        await raw.connection.close()

    await lose(rig, fail_and_die)
    assert [lost.reason for lost in rig.lost[2]] == ["OutOfMemoryError: 3 GiB"]


@pytest.mark.parametrize(("takes_s", "waits_s"), [(0.25, 0.25), (1000.0, NOTICE_S)])
async def test_rank_0_goes_on_when_the_others_have_taken_note(
    takes_s: float, waits_s: float, autojump_clock: trio.testing.MockClock
):
    """If it ended earlier, what they have not yet read might be gone with it."""
    rig = Rig(3)
    dead, slow = await rig.raw(1), await rig.raw(2)

    async def take_note() -> None:
        await trio.sleep(2.0)
        await dead.connection.close()
        assert await slow.skip_to(Kind.LOST) is not None
        with trio.move_on_after(takes_s):
            await send_beats(slow.connection, Phase())
        await slow.connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_note)
        with pytest.raises(RankLost, match="rank 1 was lost"):
            await drive(rig, wait_for_ever)
        assert trio.current_time() == 2.0 + waits_s
        nursery.cancel_scope.cancel()


async def test_an_on_lost_that_raises_ends_the_context_too(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)
    raw = await rig.raw(1)

    def refuse(lost: RankLost) -> None:
        raise ZeroDivisionError

    rig.on_lost = refuse
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raw.connection.close)
        with pytest.raises(ExceptionGroup), trio.fail_after(SOON_S):
            await drive(rig, wait_for_ever)


async def test_a_body_that_cannot_be_cancelled_does_not_hold_up_on_lost(
    autojump_clock: trio.testing.MockClock,
):
    """As when it waits for a device thread that is in a collective with the rank that was lost."""
    rig, said = Rig(2), list[float]()
    raw = await rig.raw(1)
    rig.on_lost = lambda lost: said.append(trio.current_time())

    async def wait_shielded(hub: ControlHub) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(500.0)

    async def die() -> None:
        await trio.sleep(5.0)
        await raw.connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die)
        with trio.move_on_after(3.0):
            await drive(rig, wait_shielded)
    assert said == [5.0]


async def test_a_rank_takes_note_at_once_even_if_its_body_cannot_be_cancelled(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)
    dead = await rig.raw(1)

    async def wait_shielded(link: ControlLink) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(500.0)

    async def take_part_shielded() -> None:
        with pytest.raises(RankLost):
            await take_part(rig, 2, wait_shielded)

    async def die() -> None:
        await trio.sleep(5.0)
        await dead.connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_part_shielded)
        nursery.start_soon(die)
        with pytest.raises(RankLost):
            await drive(rig, wait_for_ever)
        assert trio.current_time() == 5.0
    assert rig.named() == {0: [1], 2: [1]}


async def test_a_rank_that_is_cancelled_says_so(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)

    async def take_part_for_a_while() -> None:
        with trio.move_on_after(5.0) as scope:
            await take_part(rig, 1, wait_for_ever)
        assert scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_part_for_a_while)
        with pytest.raises(RankLost, match="rank 1 was lost during start-up: was cancelled"):
            await drive(rig, wait_for_ever)


async def test_a_rank_whose_body_fails_raises_its_own_error_and_is_named_by_the_others(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)

    async def load(link: ControlLink) -> None:
        link.set_phase("loading")
        await trio.sleep(2.0)
        raise ValueError("cannot read\nshard 1")

    async def fail() -> None:
        with pytest.raises(ValueError, match="cannot read\nshard 1"):
            await take_part(rig, 1, load)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        nursery.start_soon(follow_and_lose, rig, 2)
        with pytest.raises(RankLost, match="rank 1 was lost during loading: ValueError: cannot read shard 1"):
            async with rig.hub():
                await trio.sleep_forever()
    assert rig.named() == {0: [1], 2: [1]}


async def test_a_rank_that_leaves_before_rank_0_has_closed_is_a_failure(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)

    async def leave() -> None:
        with pytest.raises(ControlError, match="rank 1 left the control channel before rank 0 closed it"):
            async with rig.link(1):
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        with pytest.raises(RankLost, match="rank 1 was lost during start-up: ControlError: rank 1 left"):
            async with rig.hub():
                await trio.sleep_forever()


async def test_a_rank_that_says_that_it_fails_before_its_body_has_ended_raises_its_own_error(
    autojump_clock: trio.testing.MockClock,
):
    """What it still writes may take long; the others end meanwhile."""
    rig = Rig(3)

    async def write(link: ControlLink) -> None:
        link.fail("OutOfMemoryError: 3 GiB")
        with trio.CancelScope(shield=True):
            await trio.sleep(1000.0)
        raise MemoryError("3 GiB")

    async def fail() -> None:
        with pytest.raises(MemoryError, match="3 GiB"):
            await take_part(rig, 1, write)
        assert trio.current_time() >= 1000.0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        nursery.start_soon(follow_and_lose, rig, 2)
        with pytest.raises(RankLost, match="rank 1 was lost during start-up: OutOfMemoryError: 3 GiB"):
            async with rig.hub():
                await trio.sleep_forever()
        assert trio.current_time() < 10.0
    assert rig.named() == {0: [1], 2: [1]}


async def test_rank_0_whose_body_fails_raises_its_own_error_and_is_named_by_the_others(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)

    async def generate(hub: ControlHub) -> None:
        hub.set_phase("generate of step 1")
        await trio.sleep(2.0)
        raise ValueError("bad reward")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_and_lose, rig, 1)
        nursery.start_soon(follow_and_lose, rig, 2)
        with pytest.raises(ValueError, match="bad reward"):
            await drive(rig, generate)
    assert {str(rig.lost[rank][0]) for rank in (1, 2)} == {
        "rank 0 was lost during generate of step 1: ValueError: bad reward"
    }
    assert rig.named() == {1: [0], 2: [0]}


async def test_rank_0_whose_body_fails_because_a_rank_died_names_that_rank(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)
    raw = await rig.raw(1)

    async def fail(hub: ControlHub) -> None:
        await trio.sleep(2.0)
        raise ValueError("connection closed by peer")

    async def die_after_it() -> None:
        await trio.sleep(2.0 + GRACE_S / 2)
        await raw.connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die_after_it)
        with pytest.raises(RankLost, match="rank 1 was lost") as caught:
            await drive(rig, fail)
    assert isinstance(caught.value.__cause__, ValueError)
    assert rig.named() == {0: [1]}


async def test_rank_0_that_is_cancelled_tells_the_others(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_and_lose, rig, 1)
        with trio.move_on_after(5.0) as scope:
            async with rig.hub():
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert rig.lost[1][0].reason == "was cancelled"


async def test_rank_0_that_falls_silent_is_named_and_told_in_case_it_was_only_stopped(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_and_lose, rig, 1)
        async with raw_hub(rig) as raw:
            told = await raw.skip_to(Kind.LOST)
    assert told is not None and msgspec.msgpack.decode(told.payload) == [
        0,
        "generate of step 4",
        "nothing was heard from it for 6 s",
    ]
    assert (
        str(rig.lost[1][0]) == "rank 0 was lost during generate of step 4: nothing was heard from it for 6 s"
    )


async def test_rank_0_that_wakes_after_it_was_given_up_names_itself(autojump_clock: trio.testing.MockClock):
    rig = Rig(3)
    await lose(
        rig,
        lambda raw: raw.connection.send(
            Kind.LOST, encode_lost(RankLost(0, "step 4", "nothing was heard from it for 6 s"))
        ),
    )
    assert rig.named() == {0: [0], 2: [0]}


async def test_rank_0_whose_connection_ends_is_named_but_not_after_its_goodbye(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_and_lose, rig, 1)
        async with raw_hub(rig) as raw:
            await raw.connection.close()
    assert str(rig.lost.pop(1)[0]).startswith(
        "rank 0 was lost during generate of step 4: its connection ended"
    )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, rig, 1, [])
        async with raw_hub(rig) as raw:
            await raw.connection.send(Kind.BYE)
            await raw.connection.close()
    assert rig.named() == {}


async def test_a_rank_that_dies_after_the_goodbye_is_still_named(autojump_clock: trio.testing.MockClock):
    rig = Rig(2)
    raw = await rig.raw(1)

    async def die() -> None:
        assert await raw.skip_to(Kind.BYE) is not None
        await raw.connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die)
        with pytest.raises(RankLost, match="rank 1 was lost"):
            async with rig.hub():
                pass


# --- a stop that ends by force ------------------------------------------------------------------------------


async def end_by_force(rig: Rig, after_s: float) -> tuple[dict[int, str], float]:
    """What the other ranks had been told when rank 0 could end, and how long that took it."""
    found: list[tuple[dict[int, str], float]] = []

    async def end(hub: ControlHub) -> None:
        await trio.sleep(after_s)
        began = trio.current_time()
        await hub.end_others()
        await hub.end_others()  # once is enough
        found.append(
            ({rank: str(lost[0]) for rank, lost in rig.lost.items() if lost}, trio.current_time() - began)
        )

    async with trio.open_nursery() as nursery:

        async def work(hub: ControlHub) -> None:
            hub.set_phase("save of step 4")
            nursery.start_soon(end, hub)
            await trio.sleep_forever()

        with pytest.raises(RankLost, match=STOPPED):  # a real rank 0 has ended its process
            await drive(rig, work)
    return found[0]


async def test_ranks_are_told_that_rank_0_ends_by_force_before_it_does(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(3)
    async with trio.open_nursery() as nursery:
        for rank in (1, 2):
            nursery.start_soon(lambda rank=rank: follow_and_lose(rig, rank))
        told, took_s = await end_by_force(rig, after_s=1.0)
    line = f"rank 0 was lost during save of step 4: {STOPPED}"
    assert told == {1: line, 2: line}, "rank 0 itself has lost nobody"
    assert took_s == 0.0


async def test_a_rank_that_takes_no_notice_holds_the_forced_end_up_for_a_second(
    autojump_clock: trio.testing.MockClock,
):
    rig = Rig(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.raw, 1)
        assert await end_by_force(rig, after_s=1.0) == ({}, NOTICE_S)

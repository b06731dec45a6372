"""Weight updates of a fleet, and members that come and go."""

from typing import Any

import pytest
import trio
import trio.testing

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import EngineError, EngineSetupError
from rollouts.types import Completion
from tests.support.text_tables import cases
from tests.unit.fleet_engines import (
    UNREACHABLE,
    FakeEngine,
    ask,
    asking,
    fail,
    fleet_of,
    gather,
    hang,
    state_of,
    update,
)


async def test_nothing_is_served_before_a_commit_and_nothing_announced(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a, commit=False) as fleet:
        with trio.move_on_after(10):
            await fleet.generate(ask("r"))
        assert not a.asked and not await fleet.health()
        with pytest.raises(trio.WouldBlock):
            fleet.stale_members.receive_nowait()


async def test_replies_during_an_update_are_held_until_the_commit(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a) as fleet, asking(fleet, "early") as early:
        fleet.close_admission(a)
        async with asking(fleet, "late") as late:
            a.version = 1  # the answer at 1.0 is already of the new weights, which nobody has verified
            await trio.sleep(10)
            assert not early and not late and a.asked == ["early"]
            fleet.commit(a, 1)
            fleet.publish(1)
            await trio.testing.wait_all_tasks_blocked()
            assert early and not late
        for answer in (early["early"], late["late"]):
            assert isinstance(answer, Completion) and answer.weight_versions.tolist() == [1]
        assert a.asked == ["early", "late"] and a.asked_at == [0, 10]


async def test_an_update_ends_a_check_under_way(autojump_clock):
    a, b = FakeEngine("a", fail(UNREACHABLE, times=1)), FakeEngine("b")
    a.health_hangs = True
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        fleet.close_admission(a)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "suspect" and a.checks == 1
        assert fleet.commit(a, 0)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "healthy" and a.checks == 1


async def test_a_failed_update_discards_what_was_held_and_sends_it_elsewhere(autojump_clock):
    a, b = map(FakeEngine, "ab")
    async with fleet_of(a, b) as fleet:
        async with asking(fleet, "r", "s"):
            for engine in (a, b):
                fleet.close_admission(engine)
            a.version = b.version = 1
            await trio.sleep(1.5)
            fleet.commit(b, 1)
            fleet.fail(a, EngineError("the probe does not match"))
            fleet.publish(1)
        assert a.asked == ["r"] and b.asked == ["s", "r"] and trio.current_time() == 2.5
        assert await fleet.stale_members.receive() is a
        assert 0.5 <= trio.current_time() - 1.5 <= 2  # after a back-off
        fleet.close_admission(a)
        fleet.fail(a, EngineError("again"))
        assert await fleet.stale_members.receive() is a


async def test_a_commit_for_an_engine_that_died_during_the_update_is_too_late(autojump_clock):
    a = FakeEngine("a", start_s=1)
    async with fleet_of(a, FakeEngine("b")) as fleet:
        fleet.close_admission(a)
        a.exited.set()
        assert await fleet.stale_members.receive() is a
        assert not fleet.commit(a, 1) and state_of(fleet, "a") == "stale"
        fleet.close_admission(a)
        assert fleet.commit(a, 1) and state_of(fleet, "a") == "healthy"


async def test_an_engine_that_cannot_be_updated_is_restarted(autojump_clock):
    a = FakeEngine("a", start_s=1)
    async with fleet_of(a, FakeEngine("b")) as fleet:
        for _ in range(3):
            fleet.close_admission(a)
            fleet.fail(a, EngineError("its update hangs"))
        assert state_of(fleet, "a") == "dead"
        await fleet.stale_members.receive()
        assert len(a.restarted_at) == 1


# --- coming and going --------------------------------------------------------------------------------------


async def test_a_member_that_joins_is_announced_and_serves_after_its_commit(autojump_clock):
    c = FakeEngine("c")
    async with fleet_of(FakeEngine("a")) as fleet:
        await fleet.join(Member(c))
        assert await fleet.stale_members.receive() is c
        await fleet.generate(ask("r"))
        assert not c.asked
        update(fleet, 1)
        await gather(fleet, "s", "t")
        assert len(c.asked) == 1
        with pytest.raises(EngineSetupError, match="'c'"):
            await fleet.join(Member(FakeEngine("c")))


async def test_a_member_that_leaves_finishes_or_hands_over(autojump_clock):
    a, b, c = FakeEngine("a", seconds=10), FakeEngine("b", seconds=10), FakeEngine("c")
    async with fleet_of(a, b) as fleet:
        async with asking(fleet, *"rstu"):
            await fleet.leave(a)
            assert trio.current_time() == 10 and len(a.asked) == 2
        b.script = hang
        async with asking(fleet, "v"):
            await fleet.join(Member(c))
            fleet.close_admission(c)
            fleet.commit(c, 0)
            await fleet.leave(b, grace_s=5)
            assert trio.current_time() == 15
        assert c.asked == ["v"] and set(fleet._members) == {"c"}
        assert not fleet.commit(b, 0)  # an update that outlives the member


async def test_the_fleet_is_as_weak_as_its_weakest():
    a = FakeEngine("a", context_length=32, gaps=("no seeds", "slow"), seeds=False)
    b = FakeEngine("b", keep_pause=False, gaps=("slow",), checksum=True)
    async with fleet_of(a, b) as fleet:
        features = fleet.features
    assert (features.name, features.context_length, features.gaps) == ("fleet", 32, ("no seeds", "slow"))
    assert not any((features.seeds, features.keep_pause, features.in_memory_update, features.checksum))


@cases("""
change                   | says
{"vocab_size": 99}       | vocabulary of 99
{"shares_weights": true} | own parameters
{"name": "a"}            | 'a'
null                     | at least one
""")
async def test_engines_that_do_not_fit_together_are_refused(change: Any, says):
    engines = [] if change is None else [FakeEngine("a"), FakeEngine(**{"name": "b"} | change)]
    with pytest.raises(EngineSetupError, match=says):
        async with open_fleet([*map(Member, engines)], warn=print):
            raise AssertionError("opened")

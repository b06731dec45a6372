"""Engines of a fleet die, are restarted and come back, are updated, join and leave; every request is answered
once.
"""

import random
from typing import Any

import numpy as np
import pytest
import trio
from trio import current_time
from trio.testing import wait_all_tasks_blocked

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import EngineError, EngineSetupError, EngineUnreachable, FleetDown, InfrastructureError
from rollouts.types import Completion
from tests.support.text_tables import cases
from tests.unit.fleet_engines import (
    GARBAGE,
    NAMES,
    UNREACHABLE,
    FakeEngine,
    ask,
    ask_in_vain,
    asking,
    fail,
    fleet_of,
    fleet_of_two,
    gather,
    hang,
    state_of,
    update,
)


async def test_what_is_in_flight_on_a_process_that_dies_is_retried_at_once(autojump_clock):
    a, b = FakeEngine("a", hang, start_s=5), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        async with asking(fleet, *NAMES[:6]):
            await trio.sleep(0.5)
            assert len(a.running) == 3
            a.exited.set()
            await wait_all_tasks_blocked()
            assert not a.running and len(b.running) == 6
        assert current_time() == 1.5
        assert await fleet.stale_members.receive() is a
        assert 5.5 + 0.5 <= current_time() <= 5.5 + 1.0  # back-off, then start_s
        assert state_of(fleet, "a") == "stale" and fleet.statistics()["engine/a/restarts"] == 1
        a.script = None
        update(fleet, 1)
        await gather(fleet, "s", "t")
        assert len(a.asked) == 4


@cases("start_s: 7 inf")
async def test_an_update_waits_for_a_member_that_restarts(autojump_clock, start_s: float):
    a = FakeEngine("a", start_s=start_s)
    async with fleet_of(a, down_limit_s=50) as fleet:
        assert await fleet.wait_members_for_update() == (a,)
        a.exited.set()
        await wait_all_tasks_blocked()
        assert fleet.members_for_update() == ()
        if start_s == 7:
            assert await fleet.wait_members_for_update() == (a,)
            assert 7.5 <= current_time() <= 8  # back-off, then start_s
        else:
            with pytest.raises(FleetDown, match=r"a: restarting.*nothing is in flight"):
                await fleet.wait_members_for_update()
            assert current_time() == 50


async def test_a_process_that_runs_but_answers_garbage_is_restarted_once(autojump_clock):
    a = FakeEngine("a", fail(GARBAGE, times=3), start_s=5)
    async with fleet_of(a) as fleet:
        async with asking(fleet, "r"):
            assert await fleet.stale_members.receive() is a
            await trio.sleep(100)
            assert state_of(fleet, "a") == "stale" and len(a.restarted_at) == 1
            update(fleet, 1)
        a.exited.set()  # and the new process is watched as the old one was
        await fleet.stale_members.receive()
        assert len(a.restarted_at) == 2


async def test_a_request_under_which_engine_after_engine_dies_is_given_up(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet.MAX_ATTEMPTS", 3)

    async def kill(engine, request):
        engine.exited.set()
        await trio.sleep_forever()

    a = FakeEngine("a", kill, start_s=1)
    async with fleet_of(a) as fleet, trio.open_nursery() as nursery:

        async def revive():
            async for _ in fleet.stale_members:
                update(fleet, 0)

        nursery.start_soon(revive)
        await ask_in_vain(fleet, InfrastructureError, "'r' was on it: signal 9")
        assert a.asked == ["r"] * 3
        nursery.cancel_scope.cancel()


async def test_restarts_back_off_and_are_bounded(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet_members.MAX_RESTARTS", 4)
    monkeypatch.setattr("rollouts.engines.fleet_members.RECOVER_CAP_S", 3)
    a, warnings = FakeEngine("a", start_s=0, fails=10**9), []
    async with fleet_of(a, FakeEngine("b"), warnings=warnings) as fleet:
        a.exited.set()
        await trio.sleep(1000)
        assert len(a.restarted_at) == 4 and state_of(fleet, "a") == "dead"
    waits = np.diff([0.0, *a.restarted_at])
    assert all(low / 2 <= wait <= low for wait, low in zip(waits, (1, 2, 3, 3), strict=True))
    assert "a stays dead after 4 restarts in a row: EngineSetupError: the port is taken" in warnings[-1]


async def test_a_url_that_is_gone_is_asked_with_back_off_and_comes_back_stale(autojump_clock):
    async with fleet_of_two(fail(UNREACHABLE, times=1)) as (fleet, a, _):
        a.health_error = EngineUnreachable("refused")
        await fleet.generate(ask("r"))
        await trio.sleep(1000)
        assert state_of(fleet, "a") == "dead" and a not in fleet.members_for_update()
        assert a.checks < 40
        a.health_error = None
        assert await fleet.stale_members.receive() is a
        assert current_time() <= 1000 + 1 + 60 and a in fleet.members_for_update()


async def test_an_outage_beyond_the_limit_is_a_typed_error_for_everyone(autojump_clock):
    a = FakeEngine("a", fail(UNREACHABLE))
    a.health_error = EngineUnreachable("refused")
    async with fleet_of(a, down_limit_s=100) as fleet:
        for error in await gather(fleet, "r", "s"):
            assert isinstance(error, FleetDown) and "a: dead" in str(error) and "refused" in str(error)
        await ask_in_vain(fleet, FleetDown)
        assert current_time() == 100
        a.script, a.health_error = None, None
        await fleet.stale_members.receive()
        update(fleet, 1)
        assert (await fleet.generate(ask("again"))).weight_versions.tolist() == [1]


async def test_updates_that_fail_do_not_prolong_an_outage(autojump_clock):
    a, warnings = FakeEngine("a"), []
    async with fleet_of(a, warnings=warnings) as fleet:
        fleet.close_admission(a)
        await trio.sleep(5000)  # it served, and is updated: no outage
        fleet.fail(a, EngineError("silent load"))
        ended = []

        async def wait():
            await ask_in_vain(fleet, FleetDown)
            ended.append(current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            for _ in range(3):
                fleet.close_admission(a)
                await trio.sleep(900)
                fleet.fail(a, EngineError("silent load"))
                await trio.sleep(60)
        assert ended == [5000 + 600]
        assert sum("no engine of the fleet" in text for text in warnings) > 20  # they go on


async def test_a_fleet_that_is_dead_for_good_says_so_at_once(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet_members.MAX_RESTARTS", 2)
    engines = [FakeEngine(name, start_s=5, fails=10**9) for name in "ab"]
    async with fleet_of(*engines, down_limit_s=10_000) as fleet:
        async with asking(fleet, *NAMES[:4]) as ends:
            for engine in engines:
                await trio.sleep(0.25)
                engine.exited.set()
        assert all(isinstance(end, FleetDown) and "no restart is left" in str(end) for end in ends.values())
        died_at = current_time()
        assert died_at < 100
        await ask_in_vain(fleet, FleetDown, "dead for good")
        with pytest.raises(FleetDown):
            await fleet.wait_members_for_update()
        assert current_time() == died_at
        await fleet.join(Member(FakeEngine("c")))  # someone new is a hope
        update(fleet, 1)
        assert (await fleet.generate(ask("again"))).weight_versions.tolist() == [1]


@cases("attempt", range(20))
async def test_service_that_returns_at_the_very_limit_leaks_no_seat(autojump_clock, attempt):
    """The order of the two is trio's draw; whichever comes first, the request has one end."""
    async with fleet_of(FakeEngine("a"), commit=False, down_limit_s=10) as fleet:
        async with asking(fleet, "r") as ends:
            await trio.sleep(10)
            update(fleet, 0)
        assert isinstance(ends["r"], (FleetDown, Completion))


async def test_ten_thousand_cancellations_leave_nothing(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet_members.IN_A_ROW", 10**9)
    draws = random.Random(3)

    async def sometimes(engine, request):
        await trio.sleep(draws.random())
        if draws.random() < 0.05:
            raise UNREACHABLE

    engines = [FakeEngine(name, sometimes) for name in "abc"]
    answered = 0
    async with fleet_of(*engines, max_concurrency=64) as fleet:

        async def one(name):
            nonlocal answered
            with trio.move_on_after(draws.random() * 4):
                await fleet.generate(ask(name, affinity=name[-1]))
                answered += 1

        async with trio.open_nursery() as nursery:
            for number, name in enumerate(NAMES):
                nursery.start_soon(one, name)
                if number % 100 == 0:
                    await trio.sleep(0.7 * draws.random())
        assert not fleet._queue
        assert answered > 500 and fleet.statistics()["fleet/retries"] > 50
    assert not any(engine.running for engine in engines)


# --- weight updates -----------------------------------------------------------------------------------------


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
            await wait_all_tasks_blocked()
            assert early and not late
        for answer in (early["early"], late["late"]):
            assert isinstance(answer, Completion) and answer.weight_versions.tolist() == [1]
        assert a.asked == ["early", "late"] and a.asked_at == [0, 10]


async def test_an_update_ends_a_check_under_way(autojump_clock):
    async with fleet_of_two(fail(UNREACHABLE, times=1)) as (fleet, a, _):
        a.health_hangs = True
        await fleet.generate(ask("r"))
        fleet.close_admission(a)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "suspect" and a.checks == 1
        assert fleet.commit(a, 0)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "healthy" and a.checks == 1


async def test_a_failed_update_discards_what_was_held_and_sends_it_elsewhere(autojump_clock):
    async with fleet_of_two() as (fleet, a, b):
        async with asking(fleet, "r", "s"):
            for engine in (a, b):
                fleet.close_admission(engine)
            a.version = b.version = 1
            await trio.sleep(1.5)
            fleet.commit(b, 1)
            fleet.fail(a, EngineError("the probe does not match"))
            fleet.publish(1)
        assert a.asked == ["r"] and b.asked == ["s", "r"] and current_time() == 2.5
        assert await fleet.stale_members.receive() is a
        assert 0.5 <= current_time() - 1.5 <= 2  # after a back-off
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
            assert current_time() == 10 and len(a.asked) == 2
        b.script = hang
        async with asking(fleet, "v"):
            await fleet.join(Member(c))
            fleet.close_admission(c)
            fleet.commit(c, 0)
            await fleet.leave(b, grace_s=5)
            assert current_time() == 15
        assert c.asked == ["v"] and [one.name for one in fleet._members] == ["c"]
        assert not fleet.commit(b, 0)  # an update that outlives the member


async def test_the_fleet_is_as_weak_as_its_weakest():
    a = FakeEngine("a", context_length=32, gaps=("no seeds", "slow"), seeds=False)
    async with fleet_of(a, FakeEngine("b", keep_pause=False, gaps=("slow",), checksum=True)) as fleet:
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

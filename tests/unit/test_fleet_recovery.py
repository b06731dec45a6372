"""Engines of a fleet die, are restarted and come back, and every request is answered once."""

import random

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.engines.fleet_members import Member
from rollouts.errors import EngineError, EngineUnreachable, FleetDown, InfrastructureError
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
            await trio.testing.wait_all_tasks_blocked()
            assert not a.running and len(b.running) == 6
        assert trio.current_time() == 1.5
        assert await fleet.stale_members.receive() is a
        assert 5.5 + 0.5 <= trio.current_time() <= 5.5 + 1.0  # back-off, then start_s
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
        await trio.testing.wait_all_tasks_blocked()
        assert fleet.members_for_update() == ()
        if start_s == 7:
            assert await fleet.wait_members_for_update() == (a,)
            assert 7.5 <= trio.current_time() <= 8  # back-off, then start_s
        else:
            with pytest.raises(FleetDown, match=r"a: restarting.*nothing is in flight"):
                await fleet.wait_members_for_update()
            assert trio.current_time() == 50


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
    a, b = FakeEngine("a", fail(UNREACHABLE, times=1)), FakeEngine("b")
    a.health_error = EngineUnreachable("refused")
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        await trio.sleep(1000)
        assert state_of(fleet, "a") == "dead" and a not in fleet.members_for_update()
        assert a.checks < 40
        a.health_error = None
        assert await fleet.stale_members.receive() is a
        assert trio.current_time() <= 1000 + 1 + 60 and a in fleet.members_for_update()


async def test_an_outage_beyond_the_limit_is_a_typed_error_for_everyone(autojump_clock):
    a = FakeEngine("a", fail(UNREACHABLE))
    a.health_error = EngineUnreachable("refused")
    async with fleet_of(a, down_limit_s=100) as fleet:
        for error in await gather(fleet, "r", "s"):
            assert isinstance(error, FleetDown) and "a: dead" in str(error) and "refused" in str(error)
        await ask_in_vain(fleet, FleetDown)
        assert trio.current_time() == 100
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
            ended.append(trio.current_time())

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
        died_at = trio.current_time()
        assert died_at < 100
        await ask_in_vain(fleet, FleetDown, "dead for good")
        with pytest.raises(FleetDown):
            await fleet.wait_members_for_update()
        assert trio.current_time() == died_at
        await fleet.join(Member(FakeEngine("c")))  # someone new is a hope
        update(fleet, 1)
        assert (await fleet.generate(ask("again"))).weight_versions.tolist() == [1]


@pytest.mark.parametrize("attempt", range(20))
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

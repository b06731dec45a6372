"""The fleet in virtual time: who is asked, what failures and overloads lead to, the fleet as an engine."""

from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import (
    EngineClosed,
    EngineOverloaded,
    ReplyError,
)
from rollouts.testing import engine_contracts
from rollouts.testing.fakes import ScriptedEngine
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
    find_member,
    fleet_of,
    fleet_of_two,
    gather,
    hang,
    state_of,
    update,
)


@cases("check: check_bad_requests_are_refused check_paused_engine_admits_nothing")
async def test_a_fleet_keeps_the_contract_of_an_engine(check, autojump_clock):
    @asynccontextmanager
    async def open_engine():
        async with open_fleet([Member(engine := ScriptedEngine())], warn=print) as fleet:
            fleet.close_admission(engine)
            assert fleet.commit(engine, 0)
            yield fleet

    await getattr(engine_contracts, check)(open_engine)


# --- routing -----------------------------------------------------------------------------------------------


async def test_a_group_stays_on_one_engine_until_that_is_much_busier(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet_members.AFFINITY_SLACK", 3)
    async with fleet_of_two() as (fleet, a, b):
        await gather(fleet, *NAMES[:7], affinity="g")
        # r0 pins a; a takes r1..r3 while it is at most 3 ahead of b (which has none), then b, then a again,
        # as b catches up
        assert a.asked == ["r0", "r1", "r2", "r3", "r5"] and b.asked == ["r4", "r6"]
        await gather(fleet, "later", affinity="g")
        assert a.asked[-1] == "later"


async def test_a_trajectory_stays_where_its_last_turn_was_answered_until_that_is_far_ahead_or_away(
    autojump_clock, monkeypatch
):
    monkeypatch.setattr("rollouts.engines.fleet_members.TRAJECTORY_SLACK", 2)
    monkeypatch.setattr("rollouts.engines.fleet.TRAJECTORIES", 4)
    async with fleet_of_two() as (fleet, a, b):
        fleet.close_admission(b)
        await gather(fleet, "w#0", "x#0", "y#0", "z#0")
        fleet.commit(b, 0)
        await gather(fleet, "w#1", "x#1", "y#1", "z#1")
        assert (a.asked[4:], b.asked) == (["w#1", "x#1", "y#1"], ["z#1"])
        await gather(fleet, "z#2", affinity="g")  # whose engine is a
        fleet.close_admission(a)
        await gather(fleet, "x#2")
        fleet.commit(a, 0)
        await gather(fleet, "x#3", "y#2")
        assert (b.asked[1:], a.asked[-1]) == (["z#2", "x#2", "x#3"], "y#2")  # x has moved, y has not
        await gather(fleet, "new#0")
        assert len(fleet._answered_by) == 4 and "new" in fleet._answered_by


async def test_requests_go_to_whoever_has_fewest_and_queue_in_order(autojump_clock):
    async with fleet_of_two(max_concurrency=1) as (fleet, a, b):
        await gather(fleet, *NAMES[:6])
    pairs = [sorted(pair) for pair in zip(a.asked, b.asked, strict=True)]
    assert pairs == [["r0", "r1"], ["r2", "r3"], ["r4", "r5"]] and a.asked_at == b.asked_at == [0, 1, 2]


# --- failures ----------------------------------------------------------------------------------------------


@cases("error: EngineUnreachable ReplyError EngineSilent InfrastructureError")
async def test_an_engines_failure_is_retried_elsewhere_and_the_engine_checked(
    autojump_clock, error: Exception
):
    async with fleet_of_two(fail(error, times=1)) as (fleet, a, b):
        completion = await fleet.generate(ask("r"))
        assert completion.finish_reason == "stop" and a.asked == b.asked == ["r"]
        assert (a.checks, b.checks, state_of(fleet, "a")) == (1, 0, "healthy")
        values = fleet.statistics()
        assert values["fleet/retries"] == values[f"fleet/failures/{type(error).__name__}"] == 1


async def test_a_suspect_gets_nothing_while_it_is_checked(autojump_clock):
    async with fleet_of_two(fail(UNREACHABLE, times=1)) as (fleet, a, b):
        a.health_hangs = True
        await gather(fleet, *NAMES[:8])
        assert state_of(fleet, "a") == "suspect"
        assert a.asked == ["r0"] and len(b.asked) == 8
        await trio.sleep(3 * 10 + 1 + 2)
        assert state_of(fleet, "a") == "dead"  # a check that hangs has a deadline


async def test_a_suspect_of_another_version_goes_stale_and_is_announced(autojump_clock):
    warnings = []
    async with fleet_of_two(fail(UNREACHABLE, times=1), warnings=warnings) as (fleet, a, _):
        a.version = -1  # its server was restarted by someone
        await fleet.generate(ask("r"))
        assert await fleet.stale_members.receive() is a
        assert state_of(fleet, "a") == "stale"
        await gather(fleet, *NAMES[:4])
        assert a.asked == ["r"]
        update(fleet, 1)
        assert state_of(fleet, "a") == "healthy"
    assert "a is out of service" in warnings[0]


async def test_a_reply_of_weights_nobody_committed_is_never_delivered(autojump_clock):
    async with fleet_of_two() as (fleet, a, _):
        for version in (4, -1):
            update(fleet, 3)
            a.version = version
            assert (await fleet.generate(ask("r"))).weight_versions.tolist() == [3]
    assert a.asked == ["r", "r"]


@cases("""
error
ReplyError: the log-prob of token 0 is nan
EngineError: gave 404
WeightVersionError: another version
EngineSetupError: flags
""")
async def test_an_engine_that_fails_every_request_at_once_draws_no_others_and_dies(
    autojump_clock, error: Exception
):
    """Though its health is fine."""
    a, b, warnings = FakeEngine("a", fail(error, wait_s=0.01)), FakeEngine("b", seconds=10), []
    async with fleet_of(a, b, warnings=warnings, max_concurrency=64) as fleet:
        assert all(isinstance(result, Completion) for result in await gather(fleet, *NAMES[:200]))
        assert state_of(fleet, "a") in ("dead", "stale") and len(a.asked) < 200
    assert warnings[0].startswith("a is dead: 3 failures without one success") and str(error) in warnings[0]


async def test_one_broken_moment_of_many_requests_is_one_failure(autojump_clock):
    async def break_at_5(engine, request):
        if trio.current_time() < 5:
            await trio.sleep_until(5)
            raise UNREACHABLE

    async with fleet_of(FakeEngine("a", break_at_5)) as fleet:
        await gather(fleet, *NAMES[:50])
        assert state_of(fleet, "a") == "healthy" and fleet.statistics()["engine/a/failures"] == 50


@cases("error: RequestRefused ValueError")
async def test_refusals_and_bugs_are_the_callers(autojump_clock, error: Exception):
    a, b = (FakeEngine(name, fail(error)) for name in "ab")
    async with fleet_of(a, b) as fleet:
        with pytest.raises(type(error)) as caught:
            await fleet.generate(ask("r"))
        assert caught.value is error and len(a.asked + b.asked) == 1
        assert state_of(fleet, "a") == state_of(fleet, "b") == "healthy"


async def test_a_request_that_fails_everywhere_gets_its_last_error(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet.MAX_ATTEMPTS", 5)
    engines = [FakeEngine(name, fail(GARBAGE)) for name in "abc"]
    async with fleet_of(*engines) as fleet:
        await ask_in_vain(fleet, ReplyError, "nan")
    assert sum(len(engine.asked) for engine in engines) == 5


# --- overload ----------------------------------------------------------------------------------------------


async def test_retry_after_is_respected_and_the_limit_halved_once_a_burst(autojump_clock):
    a = FakeEngine("a", fail(EngineOverloaded("429", retry_after_s=30), times=8, wait_s=1))
    async with fleet_of(a, max_concurrency=8) as fleet:
        await gather(fleet, *NAMES[:8])
        assert a.asked_at[:8] == [0] * 8 and min(a.asked_at[8:]) == 31 and a.asked_at.count(31) == 4
        assert a.checks == 0 and fleet.statistics()["fleet/failures/EngineOverloaded"] == 8


@cases("retry_after_s: null 0.0 4.0 1e6")
async def test_nothing_but_overload_is_given_up_after_the_limit(autojump_clock, retry_after_s: Any):
    a = FakeEngine("a", fail(EngineOverloaded("429", retry_after_s=retry_after_s)))
    async with fleet_of(a, down_limit_s=1000) as fleet:
        await ask_in_vain(fleet, EngineOverloaded, r"met nothing but overload for down_limit_s=1000.*429")
        assert 1000 <= trio.current_time() <= 1000 + 310  # a server may ask for 300 s of rest at most
        assert retry_after_s != 4.0 or len(a.asked) > 100  # no number of overloads ends it before
        assert len(a.asked) < 1000 and state_of(fleet, "a") == "healthy"


# --- the fleet as an engine --------------------------------------------------------------------------------


async def test_abort_all_answers_who_runs_who_is_between_two_tries_and_who_waits(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet.RETRY_S", 50)
    monkeypatch.setattr("rollouts.engines.fleet.RETRY_CAP_S", 50)
    a, b = FakeEngine("a", seconds=100), FakeEngine("b", fail(UNREACHABLE, times=1))
    b.health_hangs = True
    async with fleet_of(a, b, max_concurrency=2) as fleet:
        async with asking(fleet, *NAMES[:6]) as results:
            await trio.sleep(1)
            seen = fleet.statistics()
            assert (len(a.running), seen["engine/a/in_flight"], seen["fleet/queued"]) == (2, 2, 3)
            await fleet.abort_all()
        assert trio.current_time() == 1
        answers = [result for result in results.values() if isinstance(result, Completion)]
        assert sorted(len(answer.token_ids) for answer in answers) == [0, 0, 0, 0, 1, 1]
        assert {answer.finish_reason for answer in answers} == {"abort"}


@cases("attempt", range(10))
async def test_abort_all_catches_who_is_on_the_way_to_an_engine(autojump_clock, attempt):
    async with fleet_of(FakeEngine("a", seconds=100)) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("r"))
            while not find_member(fleet, "a").calls:
                await trio.lowlevel.checkpoint()
            await fleet.abort_all()
        assert trio.current_time() == 0


async def test_abort_all_does_not_wait_for_an_update(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a) as fleet:
        async with asking(fleet, "held"):
            fleet.close_admission(a)
            async with asking(fleet, "queued"):
                await trio.sleep(5)
                await fleet.abort_all()
        assert trio.current_time() == 5
        fleet.commit(a, 0)


async def test_leaving_the_fleet_ends_everyones_wait(autojump_clock):
    a = FakeEngine("a", hang)

    async def ask_until_closed(name):
        with pytest.raises(EngineClosed):
            await fleet.generate(ask(name))

    async with (
        trio.open_nursery() as nursery,
        open_fleet([Member(a)], max_concurrency=1, warn=print) as fleet,
    ):
        update(fleet, 0)
        for name in "rs":
            nursery.start_soon(ask_until_closed, name)
            await wait_all_tasks_blocked()
        assert a.asked == ["r"] and fleet.statistics()["fleet/queued"] == 1
    assert not fleet._calls and not a.running
    with pytest.raises(trio.EndOfChannel):
        await fleet.stale_members.receive()
    await ask_in_vain(fleet, EngineClosed)

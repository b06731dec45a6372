"""The fleet in virtual time: who is asked, what failures and overloads lead to, the fleet as an engine."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    WeightVersionError,
)
from rollouts.types import Completion, EngineLoad, GenerateRequest
from tests.unit.fleet_engines import (
    FakeEngine,
    ask,
    fail_first,
    fleet_of,
    garbage,
    gather,
    gather_with,
    hang,
    state_of,
    unreachable,
    update,
)

# --- routing -----------------------------------------------------------------------------------------------


async def test_requests_go_to_whoever_has_fewest(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(10)))
    assert len(a.asked) == len(b.asked) == 5


async def test_a_group_stays_on_one_engine_until_that_is_much_busier(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet_members.AFFINITY_SLACK", 3)
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        await gather(fleet, *(ask(f"r{i}", affinity="g") for i in range(7)))
        # r0 pins a; a takes r1..r3 while it is at most 3 ahead of b (which has none), then b, then a again,
        # as b catches up
        assert a.asked == ["r0", "r1", "r2", "r3", "r5"] and b.asked == ["r4", "r6"]
        await gather(fleet, ask("later", affinity="g"))
        assert a.asked[-1] == "later"


async def test_a_full_fleet_queues_in_order_of_arrival(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a, max_concurrency=1) as fleet:
        await gather(fleet, *(ask(f"r{i}", affinity="g" if i % 2 else "") for i in range(6)))
    assert a.asked == [f"r{i}" for i in range(6)]
    assert a.asked_at == [0, 1, 2, 3, 4, 5]


async def test_ids_are_unique_in_the_fleet(autojump_clock):
    async with fleet_of(FakeEngine("a"), FakeEngine("b")) as fleet:

        async def ask_again() -> None:
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RequestRefused, match="'r'"):
                await fleet.generate(ask("r"))

        await gather_with(fleet, ask_again, ask("r"))
        await fleet.generate(ask("r"))  # the first has been answered


# --- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [unreachable, garbage, lambda: EngineSilent("60 s"), lambda: InfrastructureError("500")]
)
async def test_an_engines_failure_is_retried_elsewhere_and_the_engine_checked(autojump_clock, error):
    a, b = FakeEngine("a", script=fail_first(1, error)), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        completion = await fleet.generate(ask("r"))
        assert completion.finish_reason == "stop" and a.asked == b.asked == ["r"]
        assert a.checks == 1 and b.checks == 0 and state_of(fleet, "a") == "healthy"
        values = fleet.statistics()
        assert values["fleet/retries"] == 1 and values[f"fleet/failures/{type(error()).__name__}"] == 1


async def test_a_suspect_gets_nothing_while_it_is_checked(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, unreachable)), FakeEngine("b")
    a.health_hangs = True
    async with fleet_of(a, b) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(8)))
        assert state_of(fleet, "a") == "suspect"
        assert a.asked == ["r0"] and len(b.asked) == 8


async def test_a_suspect_of_another_version_goes_stale_and_is_announced(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, unreachable)), FakeEngine("b")
    warnings: list[str] = []
    async with fleet_of(a, b, warnings=warnings) as fleet:
        a.version = -1  # its server was restarted by someone
        await fleet.generate(ask("r"))
        assert await fleet.stale_members.receive() is a
        assert state_of(fleet, "a") == "stale"
        await gather(fleet, *(ask(f"s{i}") for i in range(4)))
        assert a.asked == ["r"]
        update(fleet, 1)
        assert state_of(fleet, "a") == "healthy"
    assert "a is out of service" in warnings[0]


async def test_a_reply_of_weights_nobody_committed_is_never_delivered(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        update(fleet, 3)
        for version in (4, -1):
            a.version = version
            assert (await fleet.generate(ask(f"r{version}"))).weight_versions.tolist() == [3]
            update(fleet, 3)
    assert a.asked == ["r4", "r-1"]


async def test_an_engine_whose_answers_stay_garbage_dies_though_its_health_is_fine(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(10**9, garbage)), FakeEngine("b")
    warnings: list[str] = []
    async with fleet_of(a, b, warnings=warnings) as fleet:
        results = await gather(fleet, *(ask(f"r{i}") for i in range(12)))
        assert all(isinstance(result, Completion) for result in results.values())
        assert len(a.asked) == 3
    assert warnings[0].startswith("a is dead: 3 failures without one success") and "nan" in warnings[0]


async def test_one_broken_moment_of_many_requests_is_one_failure(autojump_clock):
    async def break_at_5(engine: FakeEngine, request: GenerateRequest) -> None:
        if trio.current_time() < 5:
            await trio.sleep_until(5)
            raise unreachable()

    a = FakeEngine("a", script=break_at_5)
    async with fleet_of(a) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(50)))
        assert state_of(fleet, "a") == "healthy"
        assert fleet.statistics()["engine/a/failures"] == 50


async def test_refusals_and_bugs_are_the_callers(autojump_clock):
    for error in (RequestRefused("too long"), ValueError("a bug")):

        async def script(engine: FakeEngine, request: GenerateRequest, error: Exception = error) -> None:
            raise error

        a, b = FakeEngine("a", script=script), FakeEngine("b", script=script)
        async with fleet_of(a, b) as fleet:
            with pytest.raises(type(error)) as caught:
                await fleet.generate(ask("r"))
            assert caught.value is error and len(a.asked) + len(b.asked) == 1
            assert state_of(fleet, "a") == state_of(fleet, "b") == "healthy"


@pytest.mark.parametrize(
    "error",
    [
        EngineError("generate gave 404"),
        WeightVersionError("another version"),
        EngineSetupError("other flags"),
    ],
)
async def test_a_server_that_answers_404_at_once_loses_no_request_and_draws_no_others(autojump_clock, error):
    async def refuse(engine: FakeEngine, request: GenerateRequest) -> None:
        await trio.sleep(0.01)
        raise error

    a, b = FakeEngine("a", script=refuse), FakeEngine("b", seconds=10)
    warnings: list[str] = []
    async with fleet_of(a, b, warnings=warnings, max_concurrency=64) as fleet:
        results = await gather(fleet, *(ask(f"r{i}") for i in range(200)))
        assert all(isinstance(result, Completion) for result in results.values())
        assert state_of(fleet, "a") in ("dead", "stale") and len(a.asked) < 200
    assert warnings[0].startswith("a is dead: 3 failures without one success") and str(error) in warnings[0]


async def test_a_request_that_fails_everywhere_gets_its_last_error(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet.MAX_ATTEMPTS", 5)
    engines = [FakeEngine(name, script=fail_first(10**9, garbage)) for name in "abc"]
    async with fleet_of(*engines) as fleet:
        with pytest.raises(ReplyError, match="nan"):
            await fleet.generate(ask("r"))
    assert sum(len(engine.asked) for engine in engines) == 5


# --- overload ----------------------------------------------------------------------------------------------


async def test_retry_after_is_respected_and_the_limit_halved_once_a_burst(autojump_clock):
    def overloaded() -> Exception:
        return EngineOverloaded("429", retry_after_s=30)

    a = FakeEngine("a", script=fail_first(8, overloaded, wait_s=1))
    async with fleet_of(a, max_concurrency=8) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(8)))
        assert a.asked_at[:8] == [0] * 8 and min(a.asked_at[8:]) == 31
        assert a.asked_at.count(31) == 4
        assert a.checks == 0 and fleet.statistics()["fleet/failures/EngineOverloaded"] == 8


async def test_a_request_waits_through_any_number_of_overloads(autojump_clock):
    a = FakeEngine("a", script=fail_first(40, lambda: EngineOverloaded("429", retry_after_s=4.0)))
    async with fleet_of(a) as fleet:
        assert (await fleet.generate(ask("r"))).finish_reason == "stop"
    assert len(a.asked) == 41


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 4.0, 1e6])
async def test_a_request_that_meets_nothing_but_overload_is_given_up_after_the_limit(
    autojump_clock, retry_after_s
):
    a = FakeEngine(
        "a", script=fail_first(10**9, lambda: EngineOverloaded("429", retry_after_s=retry_after_s))
    )
    async with fleet_of(a, down_limit_s=1000) as fleet:
        with pytest.raises(EngineOverloaded, match=r"met nothing but overload for down_limit_s=1000.*429"):
            await fleet.generate(ask("r"))
        assert 1000 <= trio.current_time() <= 1000 + 310  # a server may ask for 300 s of rest at most
        assert len(a.asked) < 1000 and state_of(fleet, "a") == "healthy"


# --- the fleet as an engine --------------------------------------------------------------------------------


async def test_abort_all_answers_everyone(autojump_clock, monkeypatch):
    monkeypatch.setattr("rollouts.engines.fleet.RETRY_S", 50)
    monkeypatch.setattr("rollouts.engines.fleet.RETRY_CAP_S", 50)
    a, b = FakeEngine("a", seconds=100), FakeEngine("b", script=fail_first(1, unreachable))
    b.health_hangs = True
    async with fleet_of(a, b, max_concurrency=2) as fleet:
        async with trio.open_nursery() as nursery:
            results: dict[str, Completion | Exception] = {}

            async def all_of_them() -> None:
                results.update(await gather(fleet, *(ask(f"r{i}") for i in range(6))))

            nursery.start_soon(all_of_them)
            await trio.sleep(1)  # two run on a, one is between two tries, the others wait
            assert len(a.running) == 2 and fleet.statistics()["fleet/queued"] == 3
            await fleet.abort_all()
        assert trio.current_time() == 1
        sizes = sorted(len(result.token_ids) for result in results.values() if isinstance(result, Completion))
        assert sizes == [0, 0, 0, 0, 1, 1]
        assert all(
            isinstance(result, Completion) and result.finish_reason == "abort" for result in results.values()
        )


@pytest.mark.parametrize("attempt", range(10))
async def test_abort_all_catches_who_is_on_the_way_to_an_engine(autojump_clock, attempt):
    a = FakeEngine("a", seconds=100)
    async with fleet_of(a) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("r"))
            while not fleet._members["a"].calls:
                await trio.lowlevel.checkpoint()
            await fleet.abort_all()
        assert trio.current_time() == 0


async def test_abort_all_does_not_wait_for_an_update(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("held"))
            await trio.sleep(0.5)
            fleet.close_admission(a)
            nursery.start_soon(fleet.generate, ask("queued"))
            await trio.sleep(5)
            await fleet.abort_all()
        assert trio.current_time() == 5.5
        fleet.commit(a, 0)


async def test_a_paused_fleet_admits_nothing(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        await fleet.pause("wait")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("r"))
            await trio.sleep(10)
            assert not a.asked and not b.asked
            await fleet.resume()
        assert a.calls == b.calls == ["pause wait", "resume"]


async def test_load_is_what_members_have_and_what_waits(autojump_clock):
    async with fleet_of(FakeEngine("a"), FakeEngine("b"), max_concurrency=2) as fleet:
        loads: list[EngineLoad] = []

        async def look() -> None:
            await trio.sleep(0.5)
            loads.append(await fleet.load())

        await gather_with(fleet, look, *(ask(f"r{i}") for i in range(7)))
        assert loads == [EngineLoad(running=2 + 2, waiting=3)]


async def test_leaving_the_fleet_ends_everyones_wait(autojump_clock):
    a = FakeEngine("a", script=hang)
    results: list[Exception] = []

    async def one(fleet: Fleet, name: str) -> None:
        try:
            await fleet.generate(ask(name))
        except EngineClosed as error:
            results.append(error)

    async with (
        trio.open_nursery() as nursery,
        open_fleet([Member(a)], max_concurrency=1, warn=print) as fleet,
    ):
        update(fleet, 0)
        for name in ("r", "s"):
            nursery.start_soon(one, fleet, name)
            await trio.testing.wait_all_tasks_blocked()
        assert a.asked == ["r"] and fleet.statistics()["fleet/queued"] == 1
    assert len(results) == 2 and not fleet._calls and not a.running
    with pytest.raises(trio.EndOfChannel):
        await fleet.stale_members.receive()
    with pytest.raises(EngineClosed):
        await fleet.generate(ask("late"))


async def test_a_caller_who_is_cancelled_already_keeps_no_seat(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a) as fleet:
        with trio.CancelScope() as scope:
            scope.cancel()
            await fleet.generate(ask("r"))
        assert scope.cancelled_caught and not a.asked

"""The live fleet in virtual time: engines fail, rest, die, come back and are updated, and every request is
answered once.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import FleetSettings, Member
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    FleetDown,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    WeightVersionError,
)
from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest, SamplingParams

FEATURES = EngineFeatures(
    vocab_size=100,
    context_length=64,
    in_memory_update=True,
    update_from_checkpoint=True,
    shares_weights=False,
    keep_pause=True,
    deterministic=True,
)
Script = Callable[["FakeEngine", GenerateRequest], Awaitable[None]]


@dataclass(eq=False)
class FakeEngine:
    """Answers one token of its version after `seconds`. `script` runs first and may raise or wait."""

    name: str
    version: int = 0
    seconds: float = 1.0
    script: Script | None = None
    healthy: bool = True
    health_error: EngineError | None = None
    health_hangs: bool = False
    slots: int = 1000  # beyond it, load() says, they wait
    features: EngineFeatures = field(init=False)
    asked: list[str] = field(default_factory=list)  # request ids
    asked_at: list[float] = field(default_factory=list)
    running: dict[str, trio.Event] = field(default_factory=dict)
    most_running: int = 0
    checks: int = 0
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.features = replace(FEATURES, name=self.name)

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.request_id not in self.running
        self.asked.append(request.request_id)
        self.asked_at.append(trio.current_time())
        aborted = self.running[request.request_id] = trio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.script is not None:
                await self.script(self, request)
            with trio.move_on_after(self.seconds):
                await aborted.wait()
        finally:
            del self.running[request.request_id]
        return make_completion(request, self.version, aborted=aborted.is_set())

    async def weight_version(self) -> int:
        return self.version

    async def health(self) -> bool:
        self.checks += 1
        if self.health_hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if self.health_error is not None:
            raise self.health_error
        return self.healthy

    async def load(self) -> EngineLoad:
        running = min(self.slots, len(self.running))
        return EngineLoad(
            running=running,
            waiting=len(self.running) - running,
            cache_usage=0.25 if self.name == "a" else None,
        )

    async def abort_all(self) -> None:
        self.calls.append("abort_all")
        for event in self.running.values():
            event.set()

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def release_memory(self) -> None:
        self.calls.append("release")

    async def restore_memory(self) -> None:
        self.calls.append("restore")

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> dict[str, Any]:
        self.version = version
        return {"path": str(path)}

    async def checksum(self) -> None:
        return None

    async def begin_update(self) -> None:
        raise AssertionError("never asked of a member by a fleet")

    def receive_bucket(self, bucket: Sequence[Any]) -> None:
        raise AssertionError("never asked of a member by a fleet")

    async def finish_update(self, version: int) -> None:
        raise AssertionError("never asked of a member by a fleet")

    def statistics(self) -> dict[str, float]:
        return {}


def make_completion(request: GenerateRequest, version: int, *, aborted: bool = False) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=np.array([7]),
        log_probs=np.array([-0.5], np.float32),
        weight_versions=np.array([version]),
        finish_reason="abort" if aborted else "stop",
    )


def ask(name: str, affinity: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([1]),
        sampling=SamplingParams(max_new_tokens=4),
        affinity=affinity,
    )


def fail_first(times: int, error: Callable[[], Exception], wait_s: float = 0.0) -> Script:
    """The first `times` requests fail."""
    count = 0

    async def script(engine: FakeEngine, request: GenerateRequest) -> None:
        nonlocal count
        count += 1
        if count <= times:
            await trio.sleep(wait_s)
            raise error()

    return script


async def hang(engine: FakeEngine, request: GenerateRequest) -> None:
    await trio.sleep_forever()


def unreachable() -> Exception:
    return EngineUnreachable("connection reset")


def garbage() -> Exception:
    return ReplyError("the log-prob of token 0 is nan")


@asynccontextmanager
async def fleet_of(
    *engines: FakeEngine | Member,
    settings: FleetSettings | None = None,
    commit: bool = True,
    warnings: list[str] | None = None,
) -> AsyncIterator[Fleet]:
    """In service at version 0, unless `commit` is off. Leaving checks that nothing is in flight or queued."""
    members = [engine if isinstance(engine, Member) else Member(engine) for engine in engines]
    said: list[str] = [] if warnings is None else warnings
    async with open_fleet(members, settings=settings or FleetSettings(), warn=said.append) as fleet:
        if commit:
            update(fleet, 0)
        yield fleet
        assert not fleet._requests.calls
        assert fleet.statistics()["fleet/queued"] == 0
        assert all(not live.calls for live in fleet._live.values())


def update(fleet: Fleet, version: int) -> None:
    for engine in fleet.members_for_update():
        fleet.close_admission(engine)
        assert isinstance(engine, FakeEngine)
        engine.version = version
        fleet.commit(engine, version)
    fleet.publish(version)


def state_of(fleet: Fleet, name: str) -> str:
    return fleet._live[name].condition


async def gather(fleet: Fleet, *requests: GenerateRequest) -> dict[str, Completion | Exception]:
    """Answers and errors by request id, all asked at once in this order."""
    results: dict[str, Completion | Exception] = {}

    async def one(request: GenerateRequest) -> None:
        try:
            results[request.request_id] = await fleet.generate(request)
        except EngineError as error:
            results[request.request_id] = error

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(one, request)
            await trio.testing.wait_all_tasks_blocked()
    return results


async def gather_with(fleet: Fleet, look: Callable[[], Awaitable[None]], *requests: GenerateRequest) -> None:
    """All requests at once, and `look` beside them."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for request in requests:
            nursery.start_soon(fleet.generate, request)


# --- routing ------------------------------------------------------------------------------------------------


async def test_requests_go_to_whoever_has_fewest(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(10)))
    assert len(a.asked) == len(b.asked) == 5


async def test_a_group_stays_on_one_engine_until_that_is_much_busier(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b, settings=FleetSettings(affinity_slack=3)) as fleet:
        await gather(fleet, *(ask(f"r{i}", affinity="g") for i in range(7)))
        # r0 pins a; a takes r1..r3 while it is at most 3 ahead of b (which has none), then b, then a again,
        # as b catches up
        assert a.asked == ["r0", "r1", "r2", "r3", "r5"] and b.asked == ["r4", "r6"]
        await gather(fleet, ask("later", affinity="g"))
        assert a.asked[-1] == "later"


async def test_a_full_fleet_queues_in_order_of_arrival(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a, settings=FleetSettings(max_concurrency=1)) as fleet:
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


# --- failures -----------------------------------------------------------------------------------------------


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


async def test_a_lone_engine_is_asked_again_after_a_back_off(autojump_clock):
    a = FakeEngine("a", script=fail_first(2, unreachable))
    async with fleet_of(a) as fleet:
        await fleet.generate(ask("r"))
    assert a.asked == ["r"] * 3
    first, second = np.diff(a.asked_at)
    assert 0.05 <= first <= 0.1 and 0.1 <= second <= 0.2


async def test_healthy_engines_are_not_polled(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a):
        await trio.sleep(80_000)
    assert a.checks == 0


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
        assert fleet._live["a"].ticket.life == 0


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
    async with fleet_of(a, b, warnings=warnings, settings=FleetSettings(max_concurrency=64)) as fleet:
        results = await gather(fleet, *(ask(f"r{i}") for i in range(200)))
        assert all(isinstance(result, Completion) for result in results.values())
        assert state_of(fleet, "a") in ("dead", "stale") and len(a.asked) < 200
    assert warnings[0].startswith("a is dead: 3 failures without one success") and str(error) in warnings[0]


async def test_a_404_everywhere_is_the_engines_failure_and_keeps_its_cause(autojump_clock):
    a = FakeEngine("a", script=fail_first(10**9, lambda: EngineError("generate gave 404")))
    async with fleet_of(a, settings=FleetSettings(max_attempts=2)) as fleet:
        with pytest.raises(InfrastructureError, match="a: EngineError: generate gave 404") as caught:
            await fleet.generate(ask("r"))
        assert type(caught.value.__cause__) is EngineError


async def test_a_request_that_fails_everywhere_gets_its_last_error(autojump_clock):
    engines = [FakeEngine(name, script=fail_first(10**9, garbage)) for name in "abc"]
    async with fleet_of(*engines, settings=FleetSettings(max_attempts=5, failures_to_dead=10)) as fleet:
        with pytest.raises(ReplyError, match="nan"):
            await fleet.generate(ask("r"))
    assert sum(len(engine.asked) for engine in engines) == 5


async def test_a_closed_member_is_gone(autojump_clock):
    def closed() -> Exception:
        return EngineClosed("a is closed")

    a, b = FakeEngine("a", script=fail_first(10**9, closed)), FakeEngine("b")
    a.healthy = False
    async with fleet_of(a, b) as fleet:
        assert (await fleet.generate(ask("r"))).finish_reason == "stop"
        assert state_of(fleet, "a") == "dead"


# --- overload -----------------------------------------------------------------------------------------------


async def test_retry_after_is_respected_and_the_limit_halved_once_a_burst(autojump_clock):
    def overloaded() -> Exception:
        return EngineOverloaded("429", retry_after_s=30)

    a = FakeEngine("a", script=fail_first(8, overloaded, wait_s=1))
    async with fleet_of(a, settings=FleetSettings(max_concurrency=8)) as fleet:
        await gather(fleet, *(ask(f"r{i}") for i in range(8)))
        assert a.asked_at[:8] == [0] * 8 and min(a.asked_at[8:]) == 31
        assert a.asked_at.count(31) == 4
        assert a.checks == 0 and fleet.statistics()["fleet/failures/EngineOverloaded"] == 8


async def test_an_overloaded_engine_is_bypassed(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, lambda: EngineOverloaded("503"))), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        assert a.asked == b.asked == ["r"] and state_of(fleet, "a") == "healthy"
        await trio.sleep(2)
        await gather(fleet, ask("s"), ask("t"))
        assert len(a.asked) == 2  # it is back


async def test_a_request_waits_through_any_number_of_overloads(autojump_clock):
    a = FakeEngine("a", script=fail_first(40, lambda: EngineOverloaded("429", retry_after_s=4.0)))
    async with fleet_of(a, settings=FleetSettings(max_attempts=3)) as fleet:
        assert (await fleet.generate(ask("r"))).finish_reason == "stop"
    assert len(a.asked) == 41


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 4.0, 1e6])
async def test_a_request_that_meets_nothing_but_overload_is_given_up_after_the_limit(
    autojump_clock, retry_after_s
):
    a = FakeEngine(
        "a", script=fail_first(10**9, lambda: EngineOverloaded("429", retry_after_s=retry_after_s))
    )
    async with fleet_of(a, settings=FleetSettings(down_limit_s=1000)) as fleet:
        with pytest.raises(
            EngineOverloaded, match=r"met nothing but overload for 1.* s, the last: 429.*down_limit_s=1000"
        ):
            await fleet.generate(ask("r"))
        assert 1000 <= trio.current_time() <= 1000 + 310  # a server may ask for 300 s of rest at most
        assert len(a.asked) < 1000 and state_of(fleet, "a") == "healthy"


# --- death and return ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Process:
    """A server process of a fake engine: dies when told, comes back `start_s` after restart()."""

    engine: FakeEngine
    start_s: float = 5.0
    fails: int = 0  # restarts that raise
    exited: trio.Event = field(default_factory=trio.Event)
    restarted_at: list[float] = field(default_factory=list)

    def die(self) -> None:
        self.exited.set()

    async def wait_exited(self) -> str:
        await self.exited.wait()
        return "signal 9; last lines: ..."

    async def restart(self) -> None:
        self.restarted_at.append(trio.current_time())
        await trio.sleep(self.start_s)
        if len(self.restarted_at) <= self.fails:
            raise EngineSetupError("the port is taken")
        self.engine.version = -1
        old, self.exited = self.exited, trio.Event()
        old.set()  # one that still ran is gone now

    def member(self) -> Member:
        return Member(self.engine, restart=self.restart, wait_exited=self.wait_exited)


async def test_what_is_in_flight_on_a_process_that_dies_is_retried_at_once(autojump_clock):
    a, b = FakeEngine("a", script=hang), FakeEngine("b")
    process = Process(a)
    async with fleet_of(process.member(), b) as fleet:
        async with trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(fleet.generate, ask(f"r{i}"))
            await trio.sleep(0.5)
            assert len(a.running) == 3
            process.die()
            await trio.testing.wait_all_tasks_blocked()
            assert not a.running and len(b.running) == 6
        assert trio.current_time() == 1.5
        assert await fleet.stale_members.receive() is a
        assert 5.5 + 0.5 <= trio.current_time() <= 5.5 + 1.0  # back-off, then start_s
        assert state_of(fleet, "a") == "stale" and fleet.statistics()["engine/a/restarts"] == 1
        a.script = None
        update(fleet, 1)
        await gather(fleet, ask("s"), ask("t"))
        assert len(a.asked) == 4


async def test_an_update_waits_for_a_member_that_restarts(autojump_clock):
    process = Process(FakeEngine("a"), start_s=7)
    async with fleet_of(process.member()) as fleet:
        assert await fleet.wait_members_for_update() == (process.engine,)
        process.die()
        await trio.testing.wait_all_tasks_blocked()
        assert fleet.members_for_update() == ()
        assert await fleet.wait_members_for_update() == (process.engine,)
        assert 7.5 <= trio.current_time() <= 8  # back-off, then start_s


async def test_an_update_of_a_fleet_that_stays_dead_ends_in_fleet_down(autojump_clock):
    process = Process(FakeEngine("a"), start_s=math.inf)
    async with fleet_of(process.member(), settings=FleetSettings(down_limit_s=50)) as fleet:
        process.die()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(FleetDown, match=r"a: restarting.*given weights"):
            await fleet.wait_members_for_update()
        assert trio.current_time() == 50


async def test_a_process_that_runs_but_answers_garbage_is_restarted_once(autojump_clock):
    process = Process(FakeEngine("a", script=fail_first(3, garbage)))
    async with fleet_of(process.member()) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("r"))
            assert await fleet.stale_members.receive() is process.engine
            await trio.sleep(100)
            assert state_of(fleet, "a") == "stale" and len(process.restarted_at) == 1
            update(fleet, 1)
        process.die()  # and the new process is watched as the old one was
        await fleet.stale_members.receive()
        assert len(process.restarted_at) == 2


async def test_a_request_under_which_engine_after_engine_dies_is_given_up(autojump_clock):
    process = Process(FakeEngine("a"), start_s=1)

    async def kill(engine: FakeEngine, request: GenerateRequest) -> None:
        process.die()
        await trio.sleep_forever()

    process.engine.script = kill
    async with (
        fleet_of(process.member(), settings=FleetSettings(max_attempts=3)) as fleet,
        trio.open_nursery() as nursery,
    ):

        async def revive() -> None:
            async for _ in fleet.stale_members:
                update(fleet, 0)

        nursery.start_soon(revive)
        with pytest.raises(InfrastructureError, match="'r' was on it: signal 9"):
            await fleet.generate(ask("r"))
        assert process.engine.asked == ["r"] * 3
        nursery.cancel_scope.cancel()


async def test_restarts_back_off_and_are_bounded(autojump_clock):
    process = Process(FakeEngine("a"), start_s=0, fails=10**9)
    warnings: list[str] = []
    settings = FleetSettings(max_restarts=4, recover_cap_s=3)
    async with fleet_of(process.member(), FakeEngine("b"), settings=settings, warnings=warnings) as fleet:
        process.die()
        await trio.sleep(1000)
        assert len(process.restarted_at) == 4 and state_of(fleet, "a") == "dead"
    waits = np.diff([0.0, *process.restarted_at])
    assert all(low / 2 <= wait <= low for wait, low in zip(waits, (1, 2, 3, 3), strict=True))
    assert "a stays dead after 4 restarts in a row: EngineSetupError: the port is taken" in warnings[-1]


async def test_a_url_that_is_gone_is_asked_with_back_off_and_comes_back_stale(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, unreachable)), FakeEngine("b")
    a.health_error = EngineUnreachable("refused")
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        await trio.sleep(1000)
        assert state_of(fleet, "a") == "dead" and a not in fleet.members_for_update()
        assert a.checks < 40
        a.health_error = None
        assert await fleet.stale_members.receive() is a
        assert trio.current_time() <= 1000 + 1 + 60 and a in fleet.members_for_update()


async def test_a_health_check_that_hangs_has_a_deadline(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, unreachable)), FakeEngine("b")
    a.health_hangs = True
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        await trio.sleep(3 * 10 + 1 + 2)
        assert state_of(fleet, "a") == "dead"


async def test_everyone_waits_through_an_outage(autojump_clock):
    processes = [Process(FakeEngine(name), start_s=90) for name in "ab"]
    warnings: list[str] = []
    async with fleet_of(*(process.member() for process in processes), warnings=warnings) as fleet:
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(fleet.generate, ask(f"r{i}"))
            await trio.sleep(0.5)
            for process in processes:
                process.die()
            for _ in processes:
                await fleet.stale_members.receive()
            update(fleet, 1)
        assert trio.current_time() < 0.5 + 1 + 90 + 1.5
    said = [text for text in warnings if "no engine" in text]
    assert (
        len(said) == 3
        and "restarting (signal 9" in said[0]
        and "4 requests wait" in said[0]
        and "for 30 s" in said[0]
    )


async def test_an_outage_beyond_the_limit_is_a_typed_error_for_everyone(autojump_clock):
    a = FakeEngine("a", script=fail_first(10**9, unreachable))
    a.health_error = EngineUnreachable("refused")
    async with fleet_of(a, settings=FleetSettings(down_limit_s=100)) as fleet:
        results = await gather(fleet, ask("r"), ask("s"))
        assert trio.current_time() == 100
        for error in results.values():
            assert isinstance(error, FleetDown) and "a: dead" in str(error) and "refused" in str(error)
        with pytest.raises(FleetDown):
            await fleet.generate(ask("late"))
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
        fleet.fail(a, "silent load")
        ended: list[float] = []

        async def wait() -> None:
            with pytest.raises(FleetDown):
                await fleet.generate(ask("r"))
            ended.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            for _ in range(3):
                fleet.close_admission(a)
                await trio.sleep(900)
                fleet.fail(a, "silent load")
                await trio.sleep(60)
        assert ended == [5000 + 600]
        assert sum("no engine of the fleet" in text for text in warnings) > 20  # they go on
        update(fleet, 1)
        assert (await fleet.generate(ask("again"))).weight_versions.tolist() == [1]


async def test_a_fleet_that_is_dead_for_good_says_so_at_once(autojump_clock):
    processes = [Process(FakeEngine(name), fails=10**9) for name in "ab"]
    async with fleet_of(
        *(process.member() for process in processes),
        settings=FleetSettings(max_restarts=2, down_limit_s=10_000),
    ) as fleet:

        async def die() -> None:
            for process in processes:
                await trio.sleep(0.25)
                process.die()

        ends: dict[str, Completion | Exception] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            ends |= await gather(fleet, *(ask(f"r{i}") for i in range(4)))
        assert all(
            isinstance(end, FleetDown) and "No restart is left (max_restarts=2)" in str(end)
            for end in ends.values()
        )
        died_at = trio.current_time()
        assert died_at < 100
        with pytest.raises(FleetDown, match="dead for good"):
            await fleet.generate(ask("late"))
        with pytest.raises(FleetDown):
            await fleet.wait_members_for_update()
        assert trio.current_time() == died_at
        c = FakeEngine("c")
        await fleet.join(Member(c))  # someone new is a hope
        update(fleet, 1)
        assert (await fleet.generate(ask("again"))).weight_versions.tolist() == [1]


@pytest.mark.parametrize("attempt", range(20))
async def test_service_that_returns_at_the_very_limit_leaks_no_seat(autojump_clock, attempt):
    """The order of the two is trio's draw; whichever comes first, the request has one end."""
    async with fleet_of(FakeEngine("a"), commit=False, settings=FleetSettings(down_limit_s=10)) as fleet:
        ends: dict[str, Completion | Exception] = {}

        async def one() -> None:
            ends.update(await gather(fleet, ask("r")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(10)
            update(fleet, 0)
        assert isinstance(ends["r"], (FleetDown, Completion))


async def test_before_the_first_update_requests_wait(autojump_clock):
    a = FakeEngine("a")
    async with fleet_of(a, commit=False, settings=FleetSettings(down_limit_s=100)) as fleet:
        await trio.sleep(1000)  # loading a model; nobody waits, so nobody is late
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("r"))
            await trio.sleep(50)
            assert not a.asked
            fleet.close_admission(a)
            await trio.sleep(5000)  # an update of all is no outage
            fleet.commit(a, 0)
        assert trio.current_time() == 1000 + 50 + 5000 + 1


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
    async with fleet_of(a) as fleet:
        done: list[tuple[str, float, int]] = []

        async def one(name: str) -> None:
            completion = await fleet.generate(ask(name))
            done.append((name, trio.current_time(), int(completion.weight_versions[0])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "early")
            await trio.sleep(0.5)
            fleet.close_admission(a)
            nursery.start_soon(one, "late")
            a.version = 1  # the answer at 1.0 is already of the new weights, which nobody has verified
            await trio.sleep(9.5)
            assert not done and a.asked == ["early"]
            fleet.commit(a, 1)
            fleet.publish(1)
        assert done == [("early", 10.0, 1), ("late", 11.0, 1)]


async def test_a_held_reply_of_other_weights_than_the_committed_is_discarded(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b", script=hang)
    async with fleet_of(a, b) as fleet:
        results: list[Completion] = []

        async def one() -> None:
            results.append(await fleet.generate(ask("r")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.5)
            assert a.asked == ["r"]
            fleet.close_admission(a)
            a.version = 7
            await trio.sleep(1)
            b.script, a.version = None, 1
            fleet.commit(a, 1)
        assert results[0].weight_versions.tolist() == [0] and b.asked == ["r"]


async def test_an_update_ends_a_check_under_way(autojump_clock):
    a, b = FakeEngine("a", script=fail_first(1, unreachable)), FakeEngine("b")
    a.health_hangs = True
    async with fleet_of(a, b) as fleet:
        await fleet.generate(ask("r"))
        assert state_of(fleet, "a") == "suspect"
        fleet.close_admission(a)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "suspect" and a.checks == 1
        assert fleet.commit(a, 0)
        await trio.sleep(100)
        assert state_of(fleet, "a") == "healthy" and a.checks == 1


async def test_a_failed_update_discards_what_was_held_and_sends_it_elsewhere(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        async with trio.open_nursery() as nursery:
            results: dict[str, Completion | Exception] = {}

            async def both() -> None:
                results.update(await gather(fleet, ask("r"), ask("s")))

            nursery.start_soon(both)
            await trio.sleep(0.5)
            for engine in (a, b):
                fleet.close_admission(engine)
            a.version = b.version = 1
            await trio.sleep(1)
            fleet.commit(b, 1)
            fleet.fail(a, "the probe does not match")
            fleet.publish(1)
        assert a.asked == ["r"] and b.asked == ["s", "r"] and trio.current_time() == 2.5
        assert await fleet.stale_members.receive() is a
        assert 0.5 <= trio.current_time() - 1.5 <= 2  # after a back-off
        fleet.close_admission(a)
        fleet.fail(a, "again")
        assert await fleet.stale_members.receive() is a


async def test_a_commit_for_an_engine_that_died_during_the_update_is_too_late(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    process = Process(a, start_s=1)
    async with fleet_of(process.member(), b) as fleet:
        fleet.close_admission(a)
        process.die()
        assert await fleet.stale_members.receive() is a
        assert not fleet.commit(a, 1) and state_of(fleet, "a") == "stale"
        fleet.close_admission(a)
        assert fleet.commit(a, 1) and state_of(fleet, "a") == "healthy"


async def test_an_engine_that_cannot_be_updated_is_restarted(autojump_clock):
    process = Process(FakeEngine("a"), start_s=1)
    async with fleet_of(process.member(), FakeEngine("b")) as fleet:
        for _ in range(3):
            fleet.close_admission(process.engine)
            fleet.fail(process.engine, "its update hangs")
        assert state_of(fleet, "a") == "dead"
        await fleet.stale_members.receive()
        assert len(process.restarted_at) == 1


async def test_publishing_takes_out_whoever_was_not_updated(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, b) as fleet:
        fleet.close_admission(a)
        fleet.commit(a, 1)
        fleet.publish(1)
        assert state_of(fleet, "b") == "stale" and await fleet.stale_members.receive() is b
        assert await fleet.weight_version() == fleet.published_version == 1


async def test_a_fleet_is_not_updated_as_one_engine(autojump_clock):
    async with fleet_of(FakeEngine("a")) as fleet:
        with pytest.raises(EngineError, match="weight_sync"):
            await fleet.begin_update()
        with pytest.raises(EngineError, match="weight_sync"):
            fleet.receive_bucket([])
        with pytest.raises(EngineError, match="weight_sync"):
            await fleet.finish_update(1)
        with pytest.raises(EngineError, match="no member"):
            fleet.close_admission(FakeEngine("z"))
        assert await fleet.checksum() is None


# --- coming and going ---------------------------------------------------------------------------------------


async def test_a_member_that_joins_is_announced_and_serves_after_its_commit(autojump_clock):
    a, c = FakeEngine("a"), FakeEngine("c")
    async with fleet_of(a) as fleet:
        await fleet.join(Member(c))
        assert await fleet.stale_members.receive() is c
        await fleet.generate(ask("r"))
        assert not c.asked
        update(fleet, 1)
        await gather(fleet, ask("s"), ask("t"))
        assert len(c.asked) == 1
        with pytest.raises(EngineSetupError, match="'c'"):
            await fleet.join(Member(FakeEngine("c")))


async def test_a_member_that_joins_before_the_first_publication_is_announced_by_it(autojump_clock):
    a, b = FakeEngine("a"), FakeEngine("b")
    async with fleet_of(a, commit=False) as fleet:
        fleet.close_admission(a)
        await fleet.join(Member(b))
        fleet.commit(a, 0)
        assert fleet.needs_update(b) and not fleet.needs_update(a)
        fleet.publish(0)
        with trio.fail_after(1):
            assert await fleet.stale_members.receive() is b


async def test_a_member_that_leaves_finishes_or_hands_over(autojump_clock):
    a, b = FakeEngine("a", seconds=10), FakeEngine("b", seconds=10)
    async with fleet_of(a, b) as fleet:
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(fleet.generate, ask(f"r{i}"))
            await trio.testing.wait_all_tasks_blocked()
            await fleet.leave(a)
            assert trio.current_time() == 10 and len(a.asked) == 2
        b.script = hang
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, ask("s"))
            await trio.testing.wait_all_tasks_blocked()
            await fleet.join(Member(c := FakeEngine("c")))
            fleet.close_admission(c)
            fleet.commit(c, 0)
            await fleet.leave(b, grace_s=5)
            assert trio.current_time() == 15
        assert c.asked == ["s"] and set(fleet._live) == {"c"}
        assert not fleet.commit(b, 0)  # an update that outlives the member


async def test_the_fleet_is_as_weak_as_its_weakest():
    a, b = FakeEngine("a"), FakeEngine("b")
    a.features = replace(a.features, context_length=32, gaps=("no seeds", "slow"), seeds=False)
    b.features = replace(b.features, keep_pause=False, gaps=("slow",), checksum=True)
    async with fleet_of(a, b) as fleet:
        features = fleet.features
    assert (features.name, features.context_length, features.seeds, features.keep_pause) == (
        "fleet",
        32,
        False,
        False,
    )
    assert features.gaps == ("no seeds", "slow") and not features.in_memory_update and not features.checksum


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 99}, "vocabulary of 99"),
        ({"shares_weights": True}, "needs no fleet"),
        ({"name": "a"}, "'a'"),
    ],
)
async def test_engines_that_do_not_fit_together_are_refused(change, says):
    a, b = FakeEngine("a"), FakeEngine("b")
    b.features = replace(b.features, **change)
    with pytest.raises(EngineSetupError, match=says):
        async with open_fleet([Member(a), Member(b)], warn=print):
            raise AssertionError("opened")


async def test_a_fleet_has_members():
    with pytest.raises(EngineSetupError, match="at least one"):
        async with open_fleet([], warn=print):
            raise AssertionError("opened")


async def test_an_error_inside_the_fleets_context_comes_out_as_it_is():
    with pytest.raises(FleetDown):
        async with open_fleet([Member(FakeEngine("a"))], warn=print):
            raise FleetDown("all of them")


# --- the fleet as an engine ---------------------------------------------------------------------------------


async def test_abort_all_answers_everyone(autojump_clock):
    a, b = FakeEngine("a", seconds=100), FakeEngine("b", script=fail_first(1, unreachable))
    b.health_hangs = True
    settings = FleetSettings(max_concurrency=2, retry_base_s=50, retry_cap_s=50)
    async with fleet_of(a, b, settings=settings) as fleet:
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
            while not fleet._live["a"].calls:
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
        await fleet.release_memory()
        await fleet.restore_memory()
        assert a.calls == b.calls == ["pause wait", "resume", "release", "restore"]


async def test_load_is_the_sum(autojump_clock):
    a, b = FakeEngine("a", slots=1), FakeEngine("b")
    async with fleet_of(a, b, settings=FleetSettings(max_concurrency=2)) as fleet:
        loads: list[EngineLoad] = []

        async def look() -> None:
            await trio.sleep(0.5)
            loads.append(await fleet.load())

        await gather_with(fleet, look, *(ask(f"r{i}") for i in range(7)))
        assert loads == [EngineLoad(running=1 + 2, waiting=1 + 3, cache_usage=0.25)]


async def test_leaving_the_fleet_ends_everyones_wait(autojump_clock):
    a = FakeEngine("a", script=hang)
    results: list[Exception] = []

    async def one(fleet: Fleet, name: str) -> None:
        try:
            await fleet.generate(ask(name))
        except EngineClosed as error:
            results.append(error)

    settings = FleetSettings(max_concurrency=1)
    async with (
        trio.open_nursery() as nursery,
        open_fleet([Member(a)], settings=settings, warn=print) as fleet,
    ):
        update(fleet, 0)
        for name in ("r", "s"):
            nursery.start_soon(one, fleet, name)
            await trio.testing.wait_all_tasks_blocked()
        assert a.asked == ["r"] and fleet.statistics()["fleet/queued"] == 1
    assert len(results) == 2 and not fleet._requests.calls and not a.running
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


# --- storms -------------------------------------------------------------------------------------------------


async def test_ten_thousand_cancellations_leave_nothing(autojump_clock):
    draws = random.Random(3)

    async def sometimes(engine: FakeEngine, request: GenerateRequest) -> None:
        await trio.sleep(draws.random())
        if draws.random() < 0.05:
            raise unreachable()

    engines = [FakeEngine(name, script=sometimes) for name in "abc"]
    answered = 0
    async with fleet_of(
        *engines, settings=FleetSettings(max_concurrency=64, failures_to_dead=10**9)
    ) as fleet:

        async def one(name: str) -> None:
            nonlocal answered
            with trio.move_on_after(draws.random() * 4):
                await fleet.generate(ask(name, affinity=name[-1]))
                answered += 1

        async with trio.open_nursery() as nursery:
            for i in range(10_000):
                nursery.start_soon(one, f"r{i}")
                if i % 100 == 0:
                    await trio.sleep(0.7 * draws.random())
        assert not fleet._requests.waiting and not fleet._requests._order
        assert answered > 500 and fleet.statistics()["fleet/retries"] > 50
    assert not any(engine.running for engine in engines)


async def test_many_requests_spread_over_many_engines(autojump_clock):
    """64 engines, 4,096 requests in flight at once, evenly spread."""
    engines = [FakeEngine(f"e{i}") for i in range(64)]
    async with fleet_of(*engines, settings=FleetSettings(max_concurrency=128)) as fleet:
        async with trio.open_nursery() as nursery:
            for i in range(4096):
                nursery.start_soon(fleet.generate, ask(f"r{i}"))
        assert {engine.most_running for engine in engines} == {64}
        assert trio.current_time() == 1.0


class Chaos:
    """A fleet of four processes in trouble, kept current by tasks like those of weight sync."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.processes = {name: Process(FakeEngine(name, script=self.trip), start_s=3) for name in "abcd"}
        self.lock = trio.Lock()
        self.answers: dict[str, list[int]] = {}
        self.newest = 0  # version that was ever committed

    async def trip(self, engine: FakeEngine, request: GenerateRequest) -> None:
        await trio.sleep(self.draws.expovariate(1))
        if self.draws.random() < 0.03:
            raise self.draws.choice(
                [unreachable(), garbage(), EngineOverloaded("429", retry_after_s=2), EngineOverloaded("503")]
            )

    async def ask_one(self, fleet: Fleet, name: str) -> None:
        completion = await fleet.generate(ask(name, affinity=self.draws.choice("xyz")))
        assert 0 <= completion.weight_versions[0] <= self.newest, "weights that nobody committed"
        self.answers.setdefault(name, []).append(int(completion.weight_versions[0]))

    async def bring_to(self, fleet: Fleet, engine: InferenceEngine, version: int) -> None:
        """An update that fails one time in five, and always when the process is another one at its end."""
        process = self.processes[engine.features.name]
        fleet.close_admission(engine)
        await trio.sleep(self.draws.random())
        exited, process.engine.version = process.exited, version
        await trio.sleep(self.draws.random())
        if self.draws.random() < 0.2 or process.exited is not exited:
            fleet.fail(engine, "not verified")
            return
        self.newest = max(self.newest, version)
        fleet.commit(engine, version)

    async def revive(self, fleet: Fleet) -> None:
        async for engine in fleet.stale_members:
            async with self.lock:
                await self.bring_to(fleet, engine, fleet.published_version)

    async def kill(self, fleet: Fleet) -> None:
        for process in iter(lambda: self.draws.choice([*self.processes.values()]), None):
            await trio.sleep(self.draws.expovariate(0.3))
            process.die()

    async def sync(self, fleet: Fleet) -> None:
        for version in range(1, 10_000):
            await trio.sleep(5)
            async with self.lock:
                async with trio.open_nursery() as nursery:
                    for engine in fleet.members_for_update():
                        nursery.start_soon(self.bring_to, fleet, engine, version)
                if any(fleet.statistics()[f"engine/{name}/version"] == version for name in self.processes):
                    fleet.publish(version)
            for live in fleet._live.values():
                assert not live.in_service or live.version == fleet.published_version

    async def run(self, fleet: Fleet, count: int) -> None:
        async with trio.open_nursery() as background:
            for task in (self.revive, self.kill, self.sync):
                background.start_soon(task, fleet)
            async with trio.open_nursery() as nursery:
                for i in range(count):
                    nursery.start_soon(self.ask_one, fleet, f"r{i}")
                    await trio.sleep(self.draws.expovariate(5))
            background.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(20))
async def test_chaos_answers_everything_once_and_only_from_committed_weights(autojump_clock, seed):
    """Random deaths, garbage, overloads and updates that fail: each of 300 requests gets one answer, of
    weights that were verified.
    """
    chaos = Chaos(seed)
    settings = FleetSettings(max_restarts=1000)
    async with fleet_of(
        *(process.member() for process in chaos.processes.values()), settings=settings
    ) as fleet:
        with trio.fail_after(3000):
            await chaos.run(fleet, 300)
    assert len(chaos.answers) == 300 and all(len(given) == 1 for given in chaos.answers.values())
    assert max(version for given in chaos.answers.values() for version in given) >= 3  # updates did happen

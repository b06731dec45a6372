"""Weight updates of a fleet, and members that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from rollouts.engines.fleet import open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    FleetDown,
)
from rollouts.types import Completion
from tests.unit.fleet_engines import (
    FakeEngine,
    Process,
    ask,
    fail_first,
    fleet_of,
    gather,
    hang,
    state_of,
    unreachable,
    update,
)

# --- weight updates ----------------------------------------------------------------------------------------


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
            fleet.fail(a, EngineError("the probe does not match"))
            fleet.publish(1)
        assert a.asked == ["r"] and b.asked == ["s", "r"] and trio.current_time() == 2.5
        assert await fleet.stale_members.receive() is a
        assert 0.5 <= trio.current_time() - 1.5 <= 2  # after a back-off
        fleet.close_admission(a)
        fleet.fail(a, EngineError("again"))
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
            fleet.fail(process.engine, EngineError("its update hangs"))
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
        for call in (fleet.begin_update, lambda: fleet.receive_bucket([]), lambda: fleet.finish_update(1)):
            with pytest.raises(EngineError, match="weight_sync"):
                call()
        assert await fleet.checksum() is None


# --- coming and going --------------------------------------------------------------------------------------


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
        assert c.asked == ["s"] and set(fleet._members) == {"c"}
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
        ({"shares_weights": True}, "own parameters"),
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

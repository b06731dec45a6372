"""An update counts only when the engine proves it, and an engine that fails harms no other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.errors import EngineSilent, EngineUnreachable, WeightSyncError
from rollouts.types import (
    Completion,
    EngineFeatures,
    EngineLoad,
    GenerateRequest,
)
from rollouts.weight_sync.probe import Proof, check_agreement, check_change, make_probe
from rollouts.weight_sync.update import (
    ProvenVersions,
    SilenceLimits,
    SyncReport,
    UpdatePlan,
    sync_weights_to_engines,
)

PROBE = make_probe(50, tolerance=1e-2)
LIMITS = SilenceLimits(pause=10, load=100, set_version=5, resume=5, probe=20)
PHASES = ("pause", "load", "set_version", "resume", "probe")
WHOLE = ["pause", "load", "set_version", "resume", "probe"]
NAMES = ("a", "b", "c")


# --- fakes in virtual time ----------------------------------------------------------------------------------


def score(weights: float) -> np.ndarray:
    """Log-probs of the probe by a model whose weights are one number: 0.001 nats for each unit."""
    places = np.arange(len(PROBE.tokens))
    return np.where(places > 0, -1 - 0.001 * weights - 0.01 * places, 0).astype(np.float32)


class Server:
    """An engine whose weights are a number. `faults` names, by phase, what becomes of the next calls: "fail",
    "hang", "" for nothing.
    """

    def __init__(
        self, name: str, *, keep_pause: bool = True, checksum: bool = False, in_memory: bool = False
    ) -> None:
        self.features = EngineFeatures(
            50, 512, in_memory, True, False, keep_pause, False, name=name, checksum=checksum
        )
        self.weights, self.version, self.paused = 0.0, -1, False
        self.calls: list[str] = []
        self.faults: dict[str, list[str]] = {}
        self.load_s = 1.0
        self.read = 0.0  # what statistics say of a load
        self.deaf = False  # answers 200 and keeps the old weights
        self.noise = 0.0
        self.answered_version: int | None = None
        self.scores = True

    async def phase(self, name: str) -> None:
        self.calls.append(name)
        await trio.sleep(0.1)
        fault = self.faults[name].pop(0) if self.faults.get(name) else ""
        if fault == "hang":
            await trio.sleep_forever()
        if fault == "fail":
            raise EngineUnreachable(f"{self.features.name} is gone")

    async def pause(self, mode: str) -> None:
        self.paused, self.mode = True, mode
        await self.phase("pause")

    async def resume(self) -> None:
        await self.phase("resume")
        self.paused = False

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> Mapping[str, Any]:
        assert self.paused
        await self.phase("load")
        for _ in range(10):
            await trio.sleep(self.load_s / 10)
            self.read += 1
        self.take(float(path.name.removeprefix("w")), version)
        return {}

    def take(self, weights: float, version: int) -> None:
        self.weights, self.version = self.weights if self.deaf else weights, version

    async def begin_update(self) -> None:
        await self.phase("load")

    def receive_bucket(self, bucket: Sequence[tuple[str, np.ndarray]]) -> None:
        self.new = float(bucket[0][1][0])

    async def finish_update(self, version: int) -> None:
        await trio.lowlevel.checkpoint()
        self.take(self.new, version)

    async def weight_version(self) -> int:
        await self.phase("set_version")
        return self.version

    async def generate(self, request: GenerateRequest) -> Completion:
        assert not self.paused
        await self.phase("probe")
        self.noise *= -1
        version = self.version if self.answered_version is None else self.answered_version
        return Completion(
            request_id=request.request_id,
            token_ids=np.asarray([1]),
            log_probs=np.asarray([-1], np.float32),
            weight_versions=np.asarray([version]),
            finish_reason="length",
            prompt_log_probs=score(self.weights) + np.float32(self.noise) if self.scores else None,
        )

    async def health(self) -> bool:
        await trio.sleep(0.1)
        return True

    async def load(self) -> EngineLoad:
        await trio.sleep(0.1)
        return EngineLoad(running=0, waiting=0)

    async def checksum(self) -> str | None:
        await self.phase("checksum")
        return f"sum of {self.weights}"

    def statistics(self) -> Mapping[str, float]:
        return {"read": self.read, "http/opened": trio.current_time()}


class Admissions:
    """An Admission that keeps a record."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.dead: set[str] = set()

    def close_admission(self, engine: Any) -> None:
        self.events.append(("close", engine.features.name))

    def commit(self, engine: Any, version: int) -> bool:
        self.events.append(("commit", engine.features.name, version))
        return engine.features.name not in self.dead

    def fail(self, engine: Any, error: Exception) -> None:
        self.events.append(("fail", engine.features.name))

    def publish(self, version: int) -> None:
        self.events.append(("publish", version))

    def those(self, kind: str) -> list[Any]:
        return sorted(event[1] for event in self.events if event[0] == kind)


class World:
    """Three servers and what one update needs of them."""

    def __init__(self, **server: Any) -> None:
        self.servers = [Server(name, **server) for name in NAMES]
        self.admission = Admissions()
        self.proven = ProvenVersions()
        self.warnings: list[str] = []

    async def update(self, version: int, weights: float, **options: Any) -> SyncReport:
        async def load(engine: Any) -> None:
            await engine.update_weights_from_checkpoint(Path(f"w{weights}"), version)

        plan = UpdatePlan(
            version=version,
            probe=PROBE,
            expected=score(weights),
            load=load,
            digest=f"digest of {weights}",
            proven=self.proven,
            admission=self.admission,
            limits=LIMITS,
            warn=self.warnings.append,
            **options,
        )
        return await sync_weights_to_engines(self.servers, plan)  # pyright: ignore[reportArgumentType]


def failures(report: SyncReport) -> list[tuple[str, str]]:
    return [(update.name, update.phase) for update in report.failed]


# --- every engine proves itself, or leaves ------------------------------------------------------------------


@pytest.mark.parametrize("keep_pause", [True, False])
async def test_every_engine_goes_through_all_phases_and_then_the_version_is_published(
    autojump_clock, keep_pause: bool
):
    world = World(keep_pause=keep_pause)
    report = await world.update(1, 3.0)
    for server in world.servers:
        assert server.calls == WHOLE and server.mode == ("keep" if keep_pause else "abort")
        assert (server.weights, server.version, server.paused) == (3.0, 1, False)
    assert world.admission.those("close") == world.admission.those("commit") == list(NAMES)
    assert world.admission.events[-1] == ("publish", 1)
    assert report.metrics() == {
        "time/weight_sync_pause": pytest.approx(1.4),  # 0.1 s a call and 1 s for the load
        "weight_sync/engines_updated": 3.0,
        "weight_sync/engines_failed": 0.0,
        "weight_sync/probe_difference/max": 0.0,
    }


@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("index", range(3))
async def test_an_engine_that_fails_in_any_phase_leaves_alone(
    autojump_clock, index: int, phase: str, fault: str
):
    world = World()
    await world.update(1, 3.0)
    world.admission.events.clear()
    world.servers[index].faults[phase] = [fault]
    report = await world.update(2, 4.0)
    assert [server.paused for server in world.servers] == [False] * 3
    assert world.admission.those("commit") == [name for name in NAMES if name != NAMES[index]]
    assert world.admission.those("fail") == [NAMES[index]]
    assert world.admission.events[-1] == ("publish", 2)
    assert failures(report) == [(NAMES[index], phase)]
    assert type(report.failed[0].error) is (EngineSilent if fault == "hang" else EngineUnreachable)
    assert report.metrics()["weight_sync/engines_failed"] == 1.0
    assert f"engine {NAMES[index]} is out of service" in world.warnings[0] and len(world.warnings) == 1
    assert (await world.update(3, 5.0)).failed == ()  # and the next update brings it back
    assert world.servers[index].weights == 5.0


@pytest.mark.parametrize("phase", PHASES)
async def test_an_engine_that_cannot_be_resumed_holds_nobody_up(autojump_clock, phase: str):
    world = World()
    world.servers[1].faults = {phase: ["fail"], "resume": ["fail", "hang"] if phase == "resume" else ["hang"]}
    with trio.fail_after(30):
        report = await world.update(1, 3.0)
    assert failures(report)[0][0] == "b"
    assert world.admission.those("commit") == ["a", "c"]


async def test_when_nobody_is_verified_nothing_is_published_and_each_failure_is_named(autojump_clock):
    world = World()
    for server, phase in zip(world.servers, ("pause", "load", "probe"), strict=True):
        server.faults[phase] = ["fail"]
    with pytest.raises(WeightSyncError, match=r"a: pause: (.|\n)*b: load: (.|\n)*c: probe: "):
        await world.update(4, 3.0)
    assert world.admission.those("publish") == []
    assert world.admission.those("fail") == list(NAMES)
    world.servers = []
    with pytest.raises(WeightSyncError, match="no engine that could be reached"):
        await world.update(4, 3.0)


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_update_leaves_nobody_paused_and_nobody_half_admitted(
    autojump_clock, phase: str, resumes: bool
):
    world = World()
    for server in world.servers:
        server.faults[phase] = ["hang"]
        if not resumes:
            server.faults.setdefault("resume", []).append("hang")
    started = trio.current_time()
    with trio.move_on_after(4.0) as scope:
        await world.update(1, 3.0)
    assert scope.cancelled_caught and trio.current_time() - started <= 4.0 + LIMITS.resume
    assert not resumes or [server.paused for server in world.servers] == [False] * 3
    assert world.admission.those("fail") == list(NAMES)
    assert world.admission.those("commit") == world.admission.those("publish") == []


async def test_a_load_that_makes_progress_may_take_any_time_and_a_silent_one_may_not(autojump_clock):
    world = World()
    world.servers[0].load_s = 900.0  # says something every 90 s; the limit is 100 s of silence
    world.servers[1].load_s = 2500.0
    report = await world.update(1, 3.0)
    assert failures(report) == [("b", "load")]
    assert str(report.failed[0].error) == "engine b: phase load took more than 100 s without any progress"
    assert report.engines[0].pause_s > 900


async def test_an_update_that_was_done_already_is_only_probed(autojump_clock):
    world = World()
    await world.update(1, 3.0)
    for server in world.servers:
        server.calls.clear()
    world.servers[2].version = 0  # restarted meanwhile, say
    assert (await world.update(1, 3.0)).failed == ()
    assert world.servers[0].calls == ["set_version", "probe"]
    assert world.servers[2].calls == ["set_version", *WHOLE]


async def test_engines_of_one_name_are_refused():
    world = World()
    world.servers[1] = Server("a")
    with pytest.raises(WeightSyncError, match="2 engines are named 'a'"):
        await world.update(1, 3.0)
    assert world.admission.events == []


# --- what counts as proof -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "phase", "says"),
    [
        ({}, {"deaf": True}, "probe", "scores the probe exactly as before, as at version 1"),
        ({"checksum": True}, {"deaf": True, "noise": 1e-4}, "probe", "still has the checksum sum of 3.0"),
        ({"checksum": True}, {"faults": {"checksum": ["fail"]}}, "probe", "gave no checksum of its weights"),
        ({}, {"noise": 0.05}, "probe", r"differs from the trainer by 0.05 nats .* tolerance is 0.01"),
        ({}, {"noise": math.nan}, "probe", "differs from the trainer by nan nats"),
        ({}, {"answered_version": 1}, "probe", "scored the probe with version 1 instead of 2"),
        ({}, {"scores": False}, "probe", "did not score the probe"),
        ({}, {"take": lambda weights, version: None}, "set_version", "reports weight version 1 after"),
    ],
)
async def test_an_engine_that_does_not_prove_the_new_weights_leaves(
    autojump_clock, kind: dict[str, bool], change: dict[str, Any], phase: str, says: str
):
    """The update moves log-probs by 0.0005 nats, which the tolerance of 0.01 hides."""
    world = World(**kind)
    await world.update(1, 3.0)
    for name, value in change.items():
        setattr(world.servers[1], name, value)
    report = await world.update(2, 3.5)
    assert failures(report) == [("b", phase)]
    with pytest.raises(WeightSyncError, match=says):
        raise report.failed[0].error or AssertionError


async def test_a_change_that_no_log_prob_shows_is_proven_by_a_checksum_or_not_at_all(autojump_clock):
    with_checksum, without = World(checksum=True), World()
    for world in (with_checksum, without):
        await world.update(1, 3.0)
        assert (await world.update(2, 3.0)).failed == ()  # equal snapshots need no proof of change
    assert (await with_checksum.update(3, 3.0 + 1e-7)).failed == ()
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        await without.update(3, 3.0 + 1e-7)


async def test_an_engine_that_never_gave_a_checksum_may_go_on_without(autojump_clock):
    world = World(checksum=True)
    world.servers[0].faults["checksum"] = ["fail", "fail"]
    await world.update(1, 3.0)
    assert (await world.update(2, 4.0)).failed == ()
    assert "a gave no checksum of its weights: EngineUnreachable" in world.warnings[0]


def proof(version: int, engine: list[float], trainer: list[float]) -> Proof:
    return Proof(
        version, np.asarray([0, *engine], np.float32), np.asarray([0, *trainer], np.float32), None, None
    )


def test_the_difference_is_the_mean_over_the_scored_tokens():
    assert proof(1, [-1, -2], [-1.5, -2.1]).difference == pytest.approx((0.5 + 0.1) / 2)
    for engine, trainer in (([-1, math.nan], [-1, -2]), ([-1, -2], [-1, math.nan])):
        with pytest.raises(WeightSyncError):
            check_agreement(proof(2, engine, trainer), tolerance=1e9)


def test_without_snapshots_the_trainers_log_probs_say_whether_the_weights_differ():
    check_change(proof(1, [-1, -2], [-1, -2]), proof(2, [-1, -2], [-1, -2]))
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        check_change(proof(1, [-1, -2], [-1, -2]), proof(2, [-1, -2], [-1, -2.0005]))


# --- weights that come to all at once -----------------------------------------------------------------------


class Broadcast:
    """A transfer to many engines in memory; `outcome` is the error of an engine by name."""

    def __init__(self, weights: float, version: int, **outcome: Exception) -> None:
        self.weights, self.version, self.outcome = weights, version, outcome
        self.given: list[str] = []

    async def __call__(self, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        self.given += [engine.features.name for engine in engines if engine.paused]
        await trio.sleep(1)
        for engine in engines:
            engine.take(self.weights, self.version)
        return {engine.features.name: self.outcome.get(engine.features.name) for engine in engines}


async def test_a_transfer_to_all_takes_those_that_paused_and_need_it(autojump_clock):
    world = World()
    world.servers[0].faults["pause"] = ["fail"]
    broadcast = Broadcast(3.0, 1, b=EngineUnreachable("b is gone"))
    report = await world.update(1, 3.0, load_together=broadcast)
    assert (sorted(broadcast.given), failures(report)) == (["b", "c"], [("a", "pause"), ("b", "load")])
    again = Broadcast(3.0, 1)
    assert (await world.update(1, 3.0, load_together=again)).failed == ()
    assert sorted(again.given) == ["a", "b"], "c has the weights"

    async def fall_apart(engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        raise EngineUnreachable("the group fell apart")

    with pytest.raises(WeightSyncError, match="the group fell apart"):
        await world.update(2, 4.0, load_together=fall_apart)
    assert [server.paused for server in world.servers] == [False] * 3

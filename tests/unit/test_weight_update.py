"""An update counts only when the engine proves it, and an engine that fails harms no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.errors import EngineSilent, EngineUnreachable, WeightSyncError
from rollouts.types import Completion, EngineFeatures, EngineLoad, GenerateRequest, RolloutBatch
from rollouts.weight_sync.probe import Proof, check_change, make_probe
from rollouts.weight_sync.snapshots import Snapshot
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import SilenceLimits

PROBE = make_probe(50, tolerance=1e-2)
LIMITS = SilenceLimits(pause=10, load=100, set_version=5, resume=5, probe=20)
PHASES = ["pause", "load", "set_version", "resume", "probe"]  # of one engine, in order
NAMES = ("a", "b", "c")


# --- fakes in virtual time: weights are a number ------------------------------------------------------------


def score(weights: float) -> np.ndarray:
    """Log-probs of the probe by a model whose weights are one number: 0.001 nats for each unit."""
    places = np.arange(len(PROBE.tokens))
    return np.where(places > 0, -1 - 0.001 * weights - 0.01 * places, 0).astype(np.float32)


class Server:
    """An engine. `faults` names, by phase, what becomes of the next calls: "fail", "hang", "" for nothing."""

    def __init__(self, name: str, *, checksum: bool = False, in_memory: bool = False) -> None:
        self.features = EngineFeatures(
            50, 512, in_memory, True, False, name != "b", False, name=name, checksum=checksum
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

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        assert self.paused
        await self.phase("load")
        for _ in range(10):
            await trio.sleep(self.load_s / 10)
            self.read += 1
        self.take(float(path.name.removeprefix("w")), version)

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
        return {"read": self.read}


class Later:
    """A TrainFuture that takes a second."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish

    async def result(self) -> Any:
        await trio.sleep(1)
        return self.finish()


class Trainer:
    """A backend."""

    def __init__(self) -> None:
        self.weights, self.weight_version, self.asked = 0.0, 0, 0
        self.failure: Exception | None = None

    def forward(self, batch: RolloutBatch) -> Later:
        self.asked += 1
        scored = score(self.weights)
        return Later(lambda: self.finish((scored,)))

    def stream_weights(self, sink: Any) -> Later:
        return Later(lambda: sink([("w", np.asarray([self.finish(self.weights)]))]))

    def finish(self, value: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return value

    def step(self, weights: float) -> int:
        self.weights, self.weight_version = weights, self.weight_version + 1
        return self.weight_version


class HeldNumber:
    def __init__(self, weights: float) -> None:
        self.weights = weights


class Keeper:
    """Snapshots that take no disk: w3.5 holds the weights 3.5."""

    def __init__(self) -> None:
        self.pruned: list[str] = []

    async def hold(self, trainer: Any) -> Any:
        await trio.sleep(0.5)
        return HeldNumber(trainer.weights)

    async def export(self, source: Any, version: int) -> Snapshot:
        await trio.sleep(1)
        return Snapshot(Path(f"w{source.weights}"), f"digest of {source.weights}", 1000)

    async def prune(self, keep: Path) -> None:
        self.pruned.append(keep.name)


class FakeFleet:
    """Keeps a record, and announces an engine again when an update of it has failed."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.features = EngineFeatures(50, 512, False, True, False, True, False, name="fleet")
        self.servers = servers
        self.serving: set[str] = set()
        self.events: list[tuple[Any, ...]] = []
        self.errors: dict[str, Exception] = {}
        self.send, self.stale_members = trio.open_memory_channel[Any](math.inf)

    def members_for_update(self) -> tuple[Any, ...]:
        return tuple(self.servers)

    def needs_update(self, engine: Any) -> bool:
        return engine.features.name not in self.serving

    def close_admission(self, engine: Any) -> None:
        self.events.append(("close", engine.features.name))

    def commit(self, engine: Any, version: int) -> bool:
        self.serving.add(engine.features.name)
        self.events.append(("commit", engine.features.name, version))
        return True

    def fail(self, engine: Any, error: Exception) -> None:
        self.events.append(("fail", engine.features.name))
        self.errors[engine.features.name] = error
        self.serving.discard(engine.features.name)
        self.send.send_nowait(engine)

    def publish(self, version: int) -> None:
        self.events.append(("publish", version))

    def those(self, kind: str) -> list[Any]:
        return sorted(event[1] for event in self.events if event[0] == kind)


class World:
    """A WeightSync over a fleet of three."""

    def __init__(self, *, checksum: bool = False, **options: Any) -> None:
        self.trainer: Any = Trainer()
        self.servers: Any = [Server(name, checksum=checksum) for name in NAMES]
        self.fleet: Any = FakeFleet(self.servers)
        self.keeper: Any = Keeper()
        self.warnings: list[str] = []
        options = {"fleet": self.fleet, "warn": self.warnings.append} | options
        self.sync = WeightSync(PROBE, keeper=self.keeper, limits=LIMITS, **options)

    async def step(self, weights: float) -> Mapping[str, float]:
        """The trainer takes a step, and the fleet follows."""
        return await self.update(self.trainer.step(weights))

    async def update(self, version: int) -> Mapping[str, float]:
        self.fleet.events.clear()
        return await self.sync(self.trainer, [self.fleet], version)

    async def step_and_leave(self, weights: float) -> tuple[Mapping[str, float], float]:
        """As step(), with a trainer that goes on as soon as it may; and when that was."""
        released, left_at = trio.Event(), math.nan

        async def leave() -> None:
            nonlocal left_at
            await released.wait()
            left_at = trio.current_time()
            self.trainer.step(weights + 70)  # 0.07 nats away; the tolerance is 0.01

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            step = self.trainer.step(weights)
            metrics = await self.sync(self.trainer, [self.fleet], step, released=released)
        return metrics, left_at

    def restart(self, server: Server) -> None:
        """The fleet notices that `server` came back with its first weights, and announces it."""
        server.version, server.weights = -1, 0.0
        self.fleet.serving.discard(server.features.name)
        server.calls.clear()
        self.fleet.events.clear()
        self.fleet.send.send_nowait(server)

    @asynccontextmanager
    async def keeping(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sync.keep_engines_current)
            yield
            nursery.cancel_scope.cancel()


# --- every engine proves itself, or leaves ------------------------------------------------------------------


async def test_every_engine_goes_through_all_phases_and_then_the_version_is_published(autojump_clock):
    world = World()
    metrics = await world.step(3.0)
    for server in world.servers:
        assert server.calls == PHASES and server.mode == ("abort" if server.features.name == "b" else "keep")
        assert (server.weights, server.version, server.paused) == (3.0, 1, False)
    assert world.fleet.those("close") == world.fleet.those("commit") == list(NAMES)
    assert world.fleet.events[-1] == ("publish", 1) and world.keeper.pruned == ["w3.0"]
    assert metrics == {
        "time/weight_sync_pause": pytest.approx(1.4),  # 0.1 s a call and 1 s for the load
        "weight_sync/engines_updated": 3.0,
        "weight_sync/engines_failed": 0.0,
        "weight_sync/probe_difference/max": 0.0,
        "weight_sync/bytes": 1000.0,
    }


@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_engine_that_fails_in_any_phase_leaves_alone(autojump_clock, phase: str, fault: str):
    world = World()
    await world.step(3.0)
    world.servers[1].faults[phase] = [fault]
    metrics = await world.step(4.0)
    assert [server.paused for server in world.servers] == [False] * 3
    assert (world.fleet.those("commit"), world.fleet.those("fail")) == (["a", "c"], ["b"])
    assert world.fleet.events[-1] == ("publish", 2)
    assert type(world.fleet.errors["b"]) is (EngineSilent if fault == "hang" else EngineUnreachable)
    assert metrics["weight_sync/engines_failed"] == 1.0
    (warning,) = world.warnings
    assert "engine b is out of service" in warning and f"failed in phase {phase}" in warning
    assert (await world.step(5.0))["weight_sync/engines_updated"] == 3.0, "the next update brings it back"
    assert world.servers[1].weights == 5.0


async def test_when_nobody_is_verified_nothing_is_published_and_each_failure_is_named(autojump_clock):
    world = World()
    for server, phase in zip(world.servers, ("pause", "load", "probe"), strict=True):
        server.faults[phase] = ["fail"]
    with pytest.raises(WeightSyncError, match=r"a: pause: (.|\n)*b: load: (.|\n)*c: probe: "):
        await world.step(3.0)
    assert (world.fleet.those("publish"), world.fleet.those("fail")) == ([], list(NAMES))
    for servers, says in (
        ([], "no engine that could be reached"),
        ([Server("a")] * 2, "2 engines are named 'a'"),
    ):
        world.fleet.servers = servers
        with pytest.raises(WeightSyncError, match=says):
            await world.step(3.0)


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("phase", ["pause", "load", "probe"])
async def test_a_cancelled_update_leaves_nobody_paused_and_nobody_half_admitted(
    autojump_clock, phase: str, resumes: bool
):
    world = World()
    for server in world.servers:
        server.faults = {phase: ["hang"]} | ({} if resumes else {"resume": ["hang"]})
    started = trio.current_time()
    with trio.move_on_after(5.0) as scope:
        await world.step(3.0)
    assert scope.cancelled_caught and trio.current_time() - started <= 5.0 + LIMITS.resume
    assert not resumes or [server.paused for server in world.servers] == [False] * 3
    assert world.fleet.those("fail") == list(NAMES)
    assert world.fleet.those("commit") == world.fleet.those("publish") == []


async def test_a_load_that_makes_progress_may_take_any_time_and_a_silent_one_may_not(autojump_clock):
    world = World()
    world.servers[0].load_s = 900.0  # says something every 90 s; the limit is 100 s of silence
    world.servers[1].load_s = 2500.0
    assert (await world.step(3.0))["time/weight_sync_pause"] > 900
    error = str(world.fleet.errors["b"])
    assert error == "engine b: phase load: no answer and no progress for 100 s"
    assert world.fleet.those("fail") == ["b"]


async def test_an_update_that_was_done_already_is_only_probed(autojump_clock):
    world = World()
    await world.step(3.0)
    for server in world.servers:
        server.calls.clear()
    world.servers[2].version = 0  # restarted meanwhile, say
    assert (await world.update(1))["weight_sync/engines_updated"] == 3.0
    assert world.servers[0].calls == ["set_version", "probe"]
    assert world.servers[2].calls == ["set_version", *PHASES]


# --- what counts as proof -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checksum", "change", "says"),
    [
        (False, {"deaf": True}, "scores the probe exactly as before, as at version 1"),
        (True, {"deaf": True, "noise": 1e-4}, "still has the checksum sum of 3.0"),
        (True, {"faults": {"checksum": ["fail"]}}, "gave no checksum of its weights"),
        (False, {"noise": 0.05}, r"differs from the trainer by 0.05 nats .* tolerance is 0.01"),
        (False, {"noise": math.nan}, "differs from the trainer by nan nats"),
        (False, {"answered_version": 1}, "scored the probe with version 1 instead of 2"),
        (False, {"scores": False}, "did not score the probe"),
        (False, {"take": lambda weights, version: None}, "reports weight version 1 after"),
    ],
)
async def test_an_engine_that_does_not_prove_the_new_weights_leaves(
    autojump_clock, checksum: bool, change: dict[str, Any], says: str
):
    """The update moves log-probs by 0.0005 nats, which the tolerance of 0.01 hides."""
    world = World(checksum=checksum)
    await world.step(3.0)
    for name, value in change.items():
        setattr(world.servers[1], name, value)
    await world.step(3.5)
    assert world.fleet.those("fail") == ["b"]
    with pytest.raises(WeightSyncError, match=says):
        raise world.fleet.errors["b"]


def test_without_snapshots_the_trainers_log_probs_say_whether_the_weights_differ():
    first, same, moved = (
        Proof(version, np.asarray([0, -1, -2], np.float32), np.asarray([0, -1, last], np.float32), None, None)
        for version, last in ((1, -2), (2, -2), (2, -2.0005))
    )
    check_change(first, same)
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        check_change(first, moved)


# --- weights that come to all at once -----------------------------------------------------------------------


class Transfer:
    """A Transport; `outcome` is the error of an engine by name, or one of the whole transfer."""

    def __init__(self) -> None:
        self.outcome: dict[str, Exception] | Exception = {}
        self.given: list[str] = []

    async def __call__(self, backend: Any, engines: Sequence[Any], version: int) -> Mapping[str, Any]:
        self.given = sorted(engine.features.name for engine in engines if engine.paused)
        await trio.sleep(1)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        for engine in engines:
            engine.take(backend.weights, version)
        return {engine.features.name: self.outcome.get(engine.features.name) for engine in engines}


async def test_a_transfer_to_all_takes_those_that_paused_and_need_it(autojump_clock):
    transfer = Transfer()
    world = World(transport=transfer)
    world.servers[0].faults["pause"] = ["fail"]
    transfer.outcome = {"b": EngineUnreachable("b is gone")}
    await world.step(3.0)
    assert (transfer.given, world.fleet.those("fail")) == (["b", "c"], ["a", "b"])
    transfer.outcome = {}
    await world.update(1)
    assert (transfer.given, world.fleet.those("fail")) == (["a", "b"], []), "c has the weights"
    transfer.outcome = EngineUnreachable("the group fell apart")
    with pytest.raises(WeightSyncError, match="the group fell apart"):
        await world.step(4.0)
    assert [server.paused for server in world.servers] == [False] * 3

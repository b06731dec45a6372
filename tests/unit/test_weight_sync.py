"""An update counts only when the engine proves it, an engine that fails harms no other, and one that comes
back is brought to what was published.
"""

import json
import math
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from rollouts.errors import BackendError, EngineSilent, EngineUnreachable, WeightSyncError
from rollouts.types import Completion, EngineFeatures
from rollouts.weight_sync.snapshots import Snapshot
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import Proof, SilenceLimits, check_change, make_probe
from tests.support.text_tables import cases

PROBE = make_probe(50, tolerance=1e-2)
LIMITS = SilenceLimits(pause=10, load=100, set_version=5, resume=5, probe=20)
PHASES = ["pause", "load", "set_version", "resume", "probe"]  # of one engine, in order
NAMES = ["a", "b", "c"]


# --- fakes in virtual time: weights are a number ------------------------------------------------------------


def score(weights):
    """Log-probs of the probe by a model whose weights are one number: 0.001 nats for each unit."""
    places = np.arange(len(PROBE.tokens))
    return np.where(places > 0, -1 - 0.001 * weights - 0.01 * places, 0).astype(np.float32)


class Server:
    """An engine. `faults` names, by phase, what becomes of the next calls: "fail", "hang", "" for nothing."""

    load_s, read = 1.0, 0.0  # of a load; what statistics say of it
    noise = 0.0  # in nats
    answered_version: int | None = None
    takes, deaf = True, False  # deaf: it answers 200, says the new version and keeps the old weights
    scores = True

    def __init__(self, name, checksum=False):
        self.features = EngineFeatures(50, 512, keep_pause=name != "b", name=name, checksum=checksum)
        self.weights, self.version, self.paused = 0.0, -1, False
        self.calls, self.faults = [], {}

    async def phase(self, name):
        self.calls.append(name)
        await trio.sleep(0.1)
        fault = self.faults[name].pop(0) if self.faults.get(name) else ""
        if fault == "hang":
            await trio.sleep_forever()
        if fault:
            raise EngineUnreachable(f"{self.features.name} is gone")

    async def pause(self, mode):
        self.paused, self.mode = True, mode
        await self.phase("pause")

    async def resume(self):
        await self.phase("resume")
        self.paused = False

    async def update_weights_from_checkpoint(self, path, version):
        assert self.paused
        await self.phase("load")
        for _ in range(10):
            await trio.sleep(self.load_s / 10)
            self.read += 1
        self.take(float(path.name.removeprefix("w")), version)

    def take(self, weights, version):
        if self.takes:
            self.weights, self.version = self.weights if self.deaf else weights, version

    async def weight_version(self):
        await self.phase("set_version")
        return self.version

    async def generate(self, request):
        assert not self.paused
        await self.phase("probe")
        self.noise *= -1
        version = self.version if self.answered_version is None else self.answered_version
        scores = score(self.weights) + np.float32(self.noise) if self.scores else None
        sampled = {"token_ids": np.ones(1, int), "log_probs": -np.ones(1), "finish_reason": "length"}
        versions = np.asarray([version])
        return Completion(request_id="x", weight_versions=versions, prompt_log_probs=scores, **sampled)

    async def checksum(self):
        await self.phase("checksum")
        return f"sum of {self.weights}"

    def statistics(self):
        return {"read": self.read}


class World:
    """A WeightSync over a fleet of three. The world is the trainer, the keeper of its snapshots (which take
    no disk: w3.5 holds the weights 3.5) and the fleet, which announces an engine again when an update of it
    has failed.
    """

    features = EngineFeatures(50, 512, name="fleet")

    def __init__(self, *, checksum=False, **options):
        self.weights, self.weight_version, self.asked = 0.0, 0, 0
        self.failure = None  # of the trainer
        self.servers = self.a, self.b, self.c = [Server(name, checksum) for name in NAMES]
        self.serving, self.errors = set(), {}
        self.events, self.warnings, self.pruned = [], [], []
        self.announce, self.stale_members = trio.open_memory_channel(math.inf)
        roles = {"keeper": self, "fleet": self, "warn": self.warnings.append}
        self.sync = WeightSync(PROBE, limits=LIMITS, **roles, **options)

    # the trainer

    async def forward(self, batch):
        self.asked += 1
        scored = score(self.weights)
        await trio.sleep(1)
        if self.failure is not None:
            raise self.failure
        return (scored,)

    def train(self, weights):
        self.weights, self.weight_version = weights, self.weight_version + 1
        return self.weight_version

    async def step(self, weights, **options):
        """The trainer takes a step, and the fleet follows."""
        return await self.update(self.train(weights), **options)

    async def update(self, version, **options):
        self.events.clear()
        return await self.sync(self, [self], version, **options)

    async def step_and_leave(self, weights):
        """As step(), with a trainer that goes on as soon as it may, at `left_at`."""
        released = trio.Event()

        async def leave():
            await released.wait()
            self.left_at = trio.current_time()
            self.train(weights + 70)  # 0.07 nats away; the tolerance is 0.01

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            return await self.step(weights, released=released)

    # the keeper

    async def hold(self, backend):
        await trio.sleep(0.5)
        return SimpleNamespace(weights=self.weights)

    async def export(self, source, version):
        await trio.sleep(1)
        return Snapshot(Path(f"w{source.weights}"), f"digest of {source.weights}", 1000)

    async def prune(self, keep):
        self.pruned.append(keep.name)

    # the fleet

    def members_for_update(self):
        return tuple(self.servers)

    def needs_update(self, engine):
        return engine.features.name not in self.serving

    def close_admission(self, engine):
        self.events.append(("close", engine.features.name))

    def commit(self, engine, version):
        self.serving.add(engine.features.name)
        self.events.append(("commit", engine.features.name))
        return True

    def fail(self, engine, error):
        name = engine.features.name
        self.events.append(("fail", name))
        self.errors[name] = error
        self.serving.discard(name)
        self.announce.send_nowait(engine)

    def publish(self, version):
        self.events.append(("publish", version))

    def those(self, kind):
        return sorted(event[1] for event in self.events if event[0] == kind)

    def paused(self):
        return [server.features.name for server in self.servers if server.paused]

    def restart(self, server):
        """The fleet notices that `server` came back with its first weights, and announces it."""
        server.version, server.weights = -1, 0.0
        self.serving.discard(server.features.name)
        server.calls.clear()
        self.events.clear()
        self.announce.send_nowait(server)

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
    assert world.those("close") == world.those("commit") == NAMES
    assert world.events[-1] == ("publish", 1) and world.pruned == ["w3.0"]
    # 0.1 s a call and 1 s for the load
    wanted = """{"time/weight_sync_pause": 1.4, "weight_sync/engines_updated": 3.0,
        "weight_sync/engines_failed": 0.0, "weight_sync/probe_difference/max": 0.0,
        "weight_sync/bytes": 1000.0}"""
    assert metrics == pytest.approx(json.loads(wanted))
    for server in world.servers:
        server.calls.clear()
    world.c.version = 0  # restarted meanwhile, say
    assert (await world.update(1))["weight_sync/engines_updated"] == 3.0
    assert world.a.calls == ["set_version", "probe"]  # what was done already is only probed
    assert world.c.calls == ["set_version", *PHASES]


@cases("fault: fail hang")
@cases("phase", PHASES)
async def test_an_engine_that_fails_in_any_phase_leaves_alone(autojump_clock, phase, fault):
    world = World()
    await world.step(3.0)
    world.b.faults[phase] = [fault]
    metrics = await world.step(4.0)
    assert (world.paused(), world.those("commit"), world.those("fail")) == ([], ["a", "c"], ["b"])
    assert world.events[-1] == ("publish", 2) and metrics["weight_sync/engines_failed"] == 1.0
    assert type(world.errors["b"]) is (EngineSilent if fault == "hang" else EngineUnreachable)
    (warning,) = world.warnings
    assert "engine b is out of service" in warning and f"failed in phase {phase}" in warning
    assert (await world.step(5.0))["weight_sync/engines_updated"] == 3.0  # the next update brings it back
    assert world.b.weights == 5.0


async def test_when_nobody_is_verified_nothing_is_published_and_each_failure_is_named(autojump_clock):
    world = World()
    for server, phase in zip(world.servers, ("pause", "load", "probe"), strict=True):
        server.faults[phase] = ["fail"]
    for servers, says in (
        (world.servers, r"a: pause: (.|\n)*b: load: (.|\n)*c: probe: "),
        ([], "no engine that could be reached"),
        ([Server("a")] * 2, "2 engines are named 'a'"),
    ):
        world.servers = servers
        with pytest.raises(WeightSyncError, match=says):
            await world.step(3.0)
        assert world.those("publish") == [] and world.serving == set()


@cases("phase: pause load probe")
async def test_a_cancelled_update_leaves_nobody_paused_and_nobody_half_admitted(autojump_clock, phase):
    world = World()
    for server in world.servers:
        server.faults[phase] = ["hang"]
    if phase != "probe":
        world.c.faults["resume"] = ["hang"]  # nothing helps
    with trio.move_on_after(5.0) as scope:
        await world.step(3.0)
    assert scope.cancelled_caught and trio.current_time() <= 5.0 + LIMITS.resume
    assert world.paused() == ["c"] * (phase != "probe")
    assert (world.those("fail"), world.those("commit"), world.those("publish")) == (NAMES, [], [])


async def test_a_load_that_makes_progress_may_take_any_time_and_a_silent_one_may_not(autojump_clock):
    world = World()
    world.a.load_s = 900.0  # says something every 90 s; the limit is 100 s of silence
    world.b.load_s = 2500.0
    assert (await world.step(3.0))["time/weight_sync_pause"] > 900
    assert world.those("fail") == ["b"]
    assert str(world.errors["b"]) == "engine b: phase load: no answer and no progress for 100 s"


@cases("""
checksum | change                              | says
no       | deaf = true                         | scores the probe exactly as before, as at version 1
yes      | deaf = true, noise = 1e-4           | still has the checksum sum of 3.0
yes      | faults = { checksum = ["fail"] }    | gave no checksum of its weights
no       | noise = 0.05                        | differs from the trainer by 0.05 nats .* tolerance is 0.01
no       | noise = nan                         | differs from the trainer by nan nats
no       | answered_version = 1                | scored the probe with version 1 instead of 2
no       | scores = false                      | did not score the probe
no       | takes = false                       | reports weight version 1 after
""")
async def test_an_engine_that_does_not_prove_the_new_weights_leaves(
    autojump_clock, checksum: bool, change: dict, says
):
    """The update moves log-probs by 0.0005 nats, which the tolerance of 0.01 hides."""
    world = World(checksum=checksum)
    await world.step(3.0)
    for name, value in change.items():
        setattr(world.b, name, value)
    await world.step(3.5)
    assert world.those("fail") == ["b"]
    with pytest.raises(WeightSyncError, match=says):
        raise world.errors["b"]


def test_that_some_weights_are_as_before_proves_nothing():
    before, now = (Proof(version, score(version), score(version), "same", str(version)) for version in (1, 2))
    check_change(before, now._replace(partial=True))
    with pytest.raises(WeightSyncError, match="still has the checksum same"):
        check_change(before, now)
    with pytest.raises(WeightSyncError, match="scores the probe exactly as before"):
        check_change(before, now._replace(partial=True, engine_log_probs=score(1)))


async def test_a_version_with_the_weights_of_the_one_before_is_served(autojump_clock):
    """As after an update that rl.kl_limit undid: from disk, and in memory."""
    for world in (World(), World(checksum=True), World(transport=Transfer())):
        for _ in range(2):
            await world.step(3.0)
        assert (world.those("fail"), world.those("commit")) == ([], NAMES)


# --- weights that come to all at once -----------------------------------------------------------------------


class Transfer:
    """A Transport; `outcome` is the error of an engine by name, or one of the whole transfer."""

    outcome = {}

    async def __call__(self, backend, engines, version):
        self.given = sorted(engine.features.name for engine in engines if engine.paused)
        await trio.sleep(1)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        for engine in engines:
            engine.take(backend.weights, version)
        return self.outcome


async def test_a_transfer_to_all_takes_those_that_paused_and_need_it(autojump_clock):
    transfer = Transfer()
    world = World(transport=transfer)
    world.a.faults["pause"] = ["fail"]
    transfer.outcome = {"b": EngineUnreachable("b is gone")}
    await world.step(3.0)
    assert (transfer.given, world.those("fail")) == (["b", "c"], ["a", "b"])
    transfer.outcome = {}
    await world.update(1)
    assert (transfer.given, world.those("fail")) == (["a", "b"], [])  # c has the weights
    transfer.outcome = EngineUnreachable("the group fell apart")
    with pytest.raises(WeightSyncError, match="the group fell apart"):
        await world.step(4.0)
    assert world.paused() == []


async def test_after_a_transfer_in_memory_there_is_a_snapshot_for_those_that_restart(autojump_clock):
    world = World(transport=Transfer())
    async with world.keeping():
        await world.step_and_leave(3.0)
        assert world.a.calls.count("load") == 0
        world.restart(world.a)
        await trio.sleep(100)
        assert (world.a.calls.count("load"), world.a.weights) == (1, 3.0)


# --- engines that come back ---------------------------------------------------------------------------------


async def test_a_restarted_engine_that_keeps_base_weights_within_the_tolerance_is_caught(
    autojump_clock, monkeypatch
):
    monkeypatch.setattr("rollouts.weight_sync.sync.MAX_REVIVALS", 1)
    world = World()
    async with world.keeping():
        for weights in range(7):  # 0.006 nats away at last; the tolerance is 0.01
            await world.step(float(weights))
        world.b.deaf = True
        world.restart(world.b)
        await trio.sleep(100)
        assert world.events == [("close", "b"), ("fail", "b")]
        assert "scores the probe exactly as before, as at version 1" in world.warnings[0]


async def test_an_engine_is_given_up_after_some_revivals_until_the_next_update(autojump_clock):
    world = World()
    async with world.keeping():
        world.announce.send_nowait(world.a)  # before the first update, which includes it
        await world.step(3.0)
        assert world.a.calls == PHASES
        world.c.faults["load"] = ["fail"] * 8
        world.restart(world.c)
        await trio.sleep(1000)
        assert world.c.calls.count("load") == 6
        assert "it waits for the next weight update" in world.warnings[-1]
        world.c.faults.clear()
        assert (await world.step(4.0))["weight_sync/engines_updated"] == 3.0


async def test_an_update_that_reaches_nobody_waits_for_an_engine_that_comes_back(autojump_clock):
    world = World(patience_s=300.0)
    await world.step(3.0)
    world.servers = []
    async with world.keeping():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.step, 4.0)
            await trio.sleep(20)
            assert "no engine that could be reached" in world.warnings[0]
            world.servers = [world.b]
            world.restart(world.b)
        assert (world.b.weights, world.events[-1]) == (4.0, ("publish", 2))
        world.b.calls.clear()
        world.b.faults["pause"] = ["fail"] * 1000
        started = trio.current_time()
        with pytest.raises(WeightSyncError, match="no engine could be brought"):
            await world.step(5.0)
        assert 300 <= trio.current_time() - started < 320
        assert 5 <= world.b.calls.count("pause") <= 10  # the pauses between tries grow


# --- the trainer: released early, failing -------------------------------------------------------------------


async def test_the_trainer_goes_on_once_its_weights_are_copied(autojump_clock):
    world = World(patience_s=500.0)
    for server in world.servers:
        server.faults["load"] = ["fail"]  # so the update is tried again without the trainer
    async with world.keeping():
        metrics = await world.step_and_leave(3.0)
    assert world.left_at == 1.5  # 1 s for the probe, 0.5 s for the copy
    wanted = {"weight_sync/engines_updated": 3.0, "weight_sync/probe_difference/max": 0.0}
    assert metrics.items() >= wanted.items()
    assert [(server.weights, server.version) for server in world.servers] == [(3.0, 1)] * 3
    assert (world.asked, world.weight_version) == (1, 2)


async def test_a_failure_of_the_trainer_ends_the_update_at_once_as_itself(autojump_clock):
    world = World()
    async with world.keeping():
        await world.step(3.0)
        world.failure = BackendError("out of memory")
        started = trio.current_time()
        with pytest.raises(BackendError, match="out of memory"):
            await world.step(4.0)
        assert trio.current_time() - started < 10 and world.warnings == []  # no engine is blamed
        assert world.paused() == []
        assert world.sync.published.version == 1

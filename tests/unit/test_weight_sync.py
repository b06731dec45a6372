"""WeightSync over fleets and over the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import BackendError, WeightSyncError
from rollouts.models.load import resolve_model
from rollouts.testing.fakes import ScriptedEngine, open_fake_backend
from rollouts.types import LossSpec, RolloutBatch
from rollouts.weight_sync.probe import Probe, make_probe
from rollouts.weight_sync.sync import WeightSync
from tests.unit.test_weight_update import (
    PHASES,
    Server,
    Transfer,
    World,
)

# --- engines that come back --------------------------------------------------------------------------------


@pytest.mark.parametrize("step_on", [False, True])
async def test_a_restarted_engine_is_brought_to_the_published_weights_whatever_the_trainer_has(
    autojump_clock, step_on: bool
):
    world = World()
    async with world.keeping():
        await world.step(3.0)
        asked = world.trainer.asked
        if step_on:
            world.trainer.step(80.0)
        world.restart(world.servers[1])
        await trio.sleep(100)
        assert (world.servers[1].weights, world.servers[1].version) == (3.0, 1)
        assert world.fleet.events == [("close", "b"), ("commit", "b", 1)]  # nothing is published anew
        assert world.trainer.asked == asked
        world.fleet.send.send_nowait(world.servers[0])  # serves when its turn comes
        await trio.sleep(100)
        assert len(world.fleet.events) == 2


async def test_a_restarted_engine_that_keeps_base_weights_within_the_tolerance_is_caught(autojump_clock):
    world = World(max_revivals=1)
    async with world.keeping():
        for weights in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0):  # 0.006 nats away at last; the tolerance is 0.01
            await world.step(weights)
        world.servers[1].deaf = True
        world.restart(world.servers[1])
        await trio.sleep(100)
        assert world.fleet.events == [("close", "b"), ("fail", "b")]
        assert "scores the probe exactly as before, as at version 1" in world.warnings[0]


async def test_an_engine_is_given_up_after_some_revivals_until_the_next_update(autojump_clock):
    world = World(max_revivals=3)
    async with world.keeping():
        world.fleet.send.send_nowait(world.servers[0])  # before the first update, which includes it
        await world.step(3.0)
        assert world.servers[0].calls == PHASES
        world.servers[2].faults["load"] = ["fail"] * 5
        world.restart(world.servers[2])
        await trio.sleep(1000)
        assert world.servers[2].calls.count("load") == 3
        assert "it waits for the next weight update" in world.warnings[-1]
        world.servers[2].faults.clear()
        assert (await world.step(4.0))["weight_sync/engines_updated"] == 3.0


async def test_an_update_that_reaches_nobody_waits_for_an_engine_that_comes_back(autojump_clock):
    world = World(patience_s=300.0)
    await world.step(3.0)
    servers, world.fleet.servers = world.servers, ()
    async with world.keeping():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.step, 4.0)
            await trio.sleep(20)
            assert "no engine that could be reached" in world.warnings[0]
            world.fleet.servers = servers[1:2]
            world.restart(servers[1])
        assert (servers[1].weights, servers[1].version) == (4.0, 2)
        assert world.fleet.events[-1] == ("publish", 2)
        world.fleet.servers = servers
        for server in servers:
            server.calls.clear()
            server.faults["pause"] = ["fail"] * 1000
        started = trio.current_time()
        with pytest.raises(WeightSyncError, match="no engine could be brought"):
            await world.step(5.0)
        assert 300 <= trio.current_time() - started < 320
        assert 5 <= servers[0].calls.count("pause") <= 10, "the pauses between tries grow"


@pytest.mark.parametrize("fault", ["hang", ""])
async def test_a_revival_gives_way_to_the_update_which_takes_its_engine_in(autojump_clock, fault: str):
    world = World()
    async with world.keeping():
        await world.step(3.0)
        world.servers[0].faults["load"] = [fault]
        world.servers[0].load_s = 50.0
        world.restart(world.servers[0])
        await trio.sleep(10)
        world.servers[0].load_s = 1.0
        started = trio.current_time()
        assert (await world.step(4.0))["weight_sync/engines_updated"] == 3.0
        assert trio.current_time() - started < 10
        await trio.sleep(100)  # its announcement by that failure comes to nothing: it serves
        assert world.servers[0].calls == ["set_version", "pause", "load", "resume", *PHASES]
        assert world.fleet.those("fail") == ["a"] and world.servers[0].weights == 4.0


# --- the trainer: released early, failing -------------------------------------------------------------------


async def test_the_trainer_goes_on_once_its_weights_are_copied(autojump_clock):
    world = World(patience_s=500.0)
    for server in world.servers:
        server.faults["load"] = ["fail"]  # so the update is tried again without the trainer
    async with world.keeping():
        metrics, left_at = await world.step_and_leave(3.0)
    assert left_at == 1.5, "1 s for the probe, 0.5 s for the copy"
    assert (metrics["weight_sync/engines_updated"], metrics["weight_sync/probe_difference/max"]) == (3.0, 0.0)
    assert [(server.weights, server.version) for server in world.servers] == [(3.0, 1)] * 3
    assert (world.trainer.asked, world.trainer.weight_version) == (1, 2)


@pytest.mark.parametrize("in_memory", [False, True])
async def test_a_failure_of_the_trainer_ends_the_update_at_once_as_itself(autojump_clock, in_memory: bool):
    def fail() -> None:
        raise BackendError("out of memory")

    world = World()
    await world.step(3.0)
    if in_memory:  # the trainer answers the probe and fails as it streams
        world.servers[0] = Server("a", in_memory=True)
        world.trainer.finish = lambda value: fail() if isinstance(value, float) else value
    else:
        world.trainer.failure = BackendError("out of memory")
    world.servers[2].load_s = 50.0
    async with world.keeping():
        started = trio.current_time()
        with pytest.raises(BackendError, match="out of memory"):
            await world.step(4.0)
        assert trio.current_time() - started < 10 and world.warnings == []  # no engine is blamed
        assert [server.paused for server in world.servers] == [False] * 3
        assert world.sync.published is not None and world.sync.published.version == 1


async def test_after_a_transfer_in_memory_there_is_a_snapshot_for_those_that_restart(autojump_clock):
    world = World(transport=Transfer())
    async with world.keeping():
        await world.step_and_leave(3.0)
        assert world.servers[0].calls.count("load") == 0
        world.restart(world.servers[0])
        await trio.sleep(100)
        assert (world.servers[0].calls.count("load"), world.servers[0].weights) == (1, 3.0)


# --- with the embedded engine -------------------------------------------------------------------------------

BATCH = RolloutBatch(tokens=(np.arange(1, 9),), loss_masks=(np.arange(8) >= 4,))


@asynccontextmanager
async def open_pair(cache: Path, *, kind: str = "byte") -> AsyncIterator[tuple[Any, Any]]:
    """A trainer, and an engine with a copy of its weights."""
    path = resolve_model(f"tiny:{kind}", cache_dir=cache)
    optim = OptimConfig(lr=1e-2)
    async with (
        open_pytorch_backend(path, optim=optim, total_steps=10, threads=1, autocast="off") as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=8) as engine,
    ):
        yield backend, engine


async def take_step(backend: Any) -> None:
    backend.forward_backward(BATCH, LossSpec("sft"))
    await backend.optim_step().result()
    await backend.set_weight_version(backend.weight_version + 1).result()


def exact_probe(engine: Any) -> Probe:
    return make_probe(engine.features.vocab_size, tolerance=1e-4)


async def test_a_shared_engine_has_nothing_to_load_and_must_report_the_version():
    async with open_fake_backend() as backend:
        engine = ScriptedEngine(shares_weights=True, version=2)
        sync = WeightSync(make_probe(256, tolerance=10.0))
        assert await sync(backend, [engine], 2) == {} and engine.requests == []
        with pytest.raises(WeightSyncError, match="reports weight version 2 after an update to version 4"):
            await sync(backend, [engine], 4)


@pytest.mark.parametrize("kind", ["byte", "gemma", "moe"])
async def test_an_embedded_engine_proves_new_weights_and_never_old_ones(tmp_path: Path, kind: str):
    async with open_pair(tmp_path, kind=kind) as (backend, engine):
        sync = WeightSync(exact_probe(engine))
        await sync(backend, [engine], 0)
        await take_step(backend)
        metrics = await sync(backend, [engine], 1)
        assert metrics["weight_sync/probe_difference/max"] < 1e-5
        assert await engine.weight_version() == 1
        await take_step(backend)
        take, engine.receive_bucket = engine.receive_bucket, lambda bucket: None
        old = await engine.copy_weights()
        begin = engine.begin_update

        async def begin_with_old() -> None:
            await begin()
            take(list(old.items()))

        engine.begin_update = begin_with_old
        with pytest.raises(WeightSyncError, match="differs from the trainer"):
            await sync(backend, [engine], 2)

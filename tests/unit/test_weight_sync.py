"""An update counts only when the engine proves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.schema import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import WeightSyncError
from rollouts.models.load import resolve_model
from rollouts.testing.fakes import ScriptedEngine, open_fake_backend
from rollouts.types import EngineFeatures, LossSpec, RolloutBatch
from rollouts.weight_sync.disk import export_snapshot
from rollouts.weight_sync.probe import Probe, ProbeReply, check_probe, make_probe_prompt
from rollouts.weight_sync.sync import WeightSync


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny:byte", cache_dir=tmp_path_factory.mktemp("models"))


BATCH = RolloutBatch(tokens=(np.arange(1, 9),), loss_masks=(np.arange(8) >= 4,))
OPTIM = OptimConfig(lr=1e-2)


def reply(version: int, engine: list[float], trainer: list[float]) -> ProbeReply:
    return ProbeReply(version, np.asarray([4, 5]), np.asarray(engine, np.float32), np.asarray(trainer, np.float32))


def test_an_engine_that_differs_from_the_trainer_is_refused():
    with pytest.raises(WeightSyncError, match=r"engine 3 at version 2 differs from the trainer by 0\.5 nats"):
        check_probe(reply(2, [-1, -2], [-1, -2.5]), None, tolerance=1e-3, engine_index=3)


def test_a_nan_from_an_engine_is_no_agreement():
    with pytest.raises(WeightSyncError):
        check_probe(reply(2, [-1, float("nan")], [-1, -2]), None, tolerance=1e-3, engine_index=0)


def test_an_engine_that_answers_as_before_while_the_trainer_moved_still_has_the_old_weights():
    before, after = reply(1, [-1, -2], [-1, -2]), reply(2, [-1, -2], [-1, -2.0005])
    with pytest.raises(WeightSyncError, match="still serves the old weights"):
        check_probe(after, before, tolerance=1e-3, engine_index=0)


def test_the_same_answer_is_right_when_the_trainer_did_not_move():
    check_probe(reply(2, [-1, -2], [-1, -2]), reply(1, [-1, -2], [-1, -2]), tolerance=1e-3, engine_index=0)


def test_the_probe_prompt_lies_inside_the_vocabulary():
    prompt = make_probe_prompt(50)
    assert len(prompt) == 8
    assert prompt.min() > 0
    assert prompt.max() < 49


async def test_an_engine_that_reports_another_version_is_refused():
    async with open_fake_backend() as backend:
        sync = WeightSync(Probe(make_probe_prompt(256), 10.0))
        with pytest.raises(WeightSyncError, match="reports weight version 0 after an update to version 4"):
            await sync(backend, [ScriptedEngine(shares_weights=True)], 4)


async def test_a_shared_engine_has_nothing_to_load():
    async with open_fake_backend() as backend:
        engine = ScriptedEngine(shares_weights=True, version=2)
        assert await WeightSync(Probe(make_probe_prompt(256), 10.0))(backend, [engine], 2) == {}
        assert engine.requests == []


async def test_a_copied_engine_follows_the_trainer_in_memory(model_path: Path):
    async with (
        open_pytorch_backend(model_path, optim=OPTIM, total_steps=10, threads=1, autocast="off") as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3))
        await sync(backend, [engine], 0)
        before = sync.replies[0]
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        await backend.set_weight_version(1).result()
        metrics = await sync(backend, [engine], 1)
        assert await engine.weight_version() == 1
        assert metrics["weight_sync/probe_difference/max"] < 1e-4
        assert not np.array_equal(sync.replies[0].engine_log_probs, before.engine_log_probs)


async def test_an_engine_that_says_the_version_without_the_weights_is_caught(model_path: Path):
    async with (
        open_pytorch_backend(model_path, optim=OPTIM, total_steps=10, threads=1, autocast="off") as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3))
        await sync(backend, [engine], 0)
        old_weights = await backend.get_weights()
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()

        class StaleStream:
            """A backend whose stream sends what it had before."""

            def __getattr__(self, name):
                return getattr(backend, name)

            def stream_weights(self, sink):
                return backend.device_thread.submit(lambda: sink(list(old_weights.items())))

        with pytest.raises(WeightSyncError, match="differs from the trainer"):
            await sync(StaleStream(), [engine], 1)  # pyright: ignore[reportArgumentType]


class DiskOnly:
    """An engine that has no transfer in memory."""

    def __init__(self, engine):
        self._engine = engine
        have = engine.features
        self.features = EngineFeatures(have.vocab_size, have.context_length, False, True, False, have.keep_pause, have.deterministic)

    def __getattr__(self, name):
        return getattr(self._engine, name)


async def test_an_engine_that_loads_only_from_disk_gets_a_snapshot_and_older_ones_go(model_path: Path, tmp_path: Path):
    async with (
        open_pytorch_backend(model_path, optim=OPTIM, total_steps=10, threads=1, autocast="off") as backend,
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(backend.model, device_thread=thread, mode="copied", max_rows=4) as engine,
    ):
        sync = WeightSync(Probe(make_probe_prompt(engine.features.vocab_size), 1e-3), snapshot_dir=tmp_path / "weights")
        await sync(backend, [DiskOnly(engine)], 0)
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        await sync(backend, [DiskOnly(engine)], 1)
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v1"]
        with pytest.raises(WeightSyncError, match="snapshot_dir"):
            await WeightSync(sync.probe)(backend, [DiskOnly(engine)], 2)


async def test_a_snapshot_holds_every_parameter_and_is_never_rewritten(model_path: Path, tmp_path: Path):
    async with open_pytorch_backend(model_path, optim=OPTIM, total_steps=10, threads=1, autocast="off") as backend:
        path = await export_snapshot(backend, tmp_path / "v3")
        weights = load_file(path / "model.safetensors")
        assert set(weights) == {name for name, _ in backend.model.named_parameters()}
        backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step().result()
        await export_snapshot(backend, tmp_path / "v3")
        kept = load_file(path / "model.safetensors")
        assert all((kept[name] == weights[name]).all() for name in weights)

"""A checkpoint that is saved between two weight updates has the weights of the engine too, and a resumed run
begins with them.
"""

from contextlib import asynccontextmanager

import pytest

from rollouts.errors import CheckpointError, EngineError
from rollouts.testing.fakes import ScriptedEngine
from rollouts.testing.torch_contracts import assert_weights_equal, make_batch, train
from rollouts.weight_sync.engine_weights import (
    ENGINE_FILE,
    hold_engine_weights,
    read_engine_weights,
    sync_as_saved,
)
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import make_probe
from tests.support.plain_backend import open_engine_of
from tests.unit.test_pytorch_backend import open_backend


@asynccontextmanager
async def open_both(mode="copied"):
    async with (
        open_backend() as backend,
        open_engine_of(backend, mode) as engine,
    ):
        yield backend, engine


def make_sync():
    return WeightSync(make_probe(64, tolerance=1e-3))


async def train_to(backend, version, *, seed):
    await train(backend, make_batch(seed))
    await backend.set_weight_version(version).result()


async def test_an_engine_that_is_behind_is_saved_and_restored_bit_for_bit_with_its_version(tmp_path):
    async with open_both() as (backend, engine):
        await train_to(backend, 1, seed=1)
        await make_sync()(backend, [engine], 1)
        served = await backend.get_weights()
        await train_to(backend, 2, seed=2)
        write = await hold_engine_weights(engine, 2)
        await train_to(backend, 3, seed=3)
        await make_sync()(backend, [engine], 3)
        await write(tmp_path)  # a copy: the engine has moved on
    found = read_engine_weights(tmp_path)
    assert found[1] == 1
    assert_weights_equal(served, found[0])
    async with open_both() as (backend, engine):
        await train_to(backend, 2, seed=7)
        # true: the trainer's weights are to be restored
        assert await sync_as_saved(backend, engine, make_sync(), tmp_path, 2)
        assert await engine.weight_version() == 1
        assert_weights_equal(served, await engine.copy_weights())


async def test_an_engine_that_has_the_trainers_weights_is_not_saved_and_is_updated_at_a_resume(tmp_path):
    async with open_both() as (backend, engine):
        assert await hold_engine_weights(engine, 0) is None
        await train_to(backend, 1, seed=1)
        # the trainer has its own weights still
        assert not await sync_as_saved(backend, engine, make_sync(), tmp_path, 1)
        assert await engine.weight_version() == 1
        assert_weights_equal(await backend.get_weights(), await engine.copy_weights())
        await train_to(backend, 2, seed=2)
        with pytest.raises(AssertionError):
            assert_weights_equal(await backend.get_weights(), await engine.copy_weights())
    async with open_both("shared") as (backend, engine):
        assert await hold_engine_weights(engine, 5) is None
        with pytest.raises(EngineError, match="shares the trainer's weights"):
            await engine.copy_weights()
    assert await hold_engine_weights(ScriptedEngine(), 5) is None  # a server keeps its own


def test_a_file_of_engine_weights_that_cannot_be_read_is_named(tmp_path):
    assert read_engine_weights(tmp_path) is None
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ENGINE_FILE).write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match=r"state/engine\.safetensors cannot be read"):
        read_engine_weights(tmp_path)

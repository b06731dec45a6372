"""Broadcasts to a real SGLang server. Needs ROLLOUTS_SGLANG_PYTHON, or SGLang in .venv-sglang."""

import os
import signal
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.errors import EngineError, EngineSetupError, InfrastructureError
from rollouts.testing.engine_contracts import LONG, disturb, make_request
from rollouts.types import RolloutBatch
from rollouts.weight_sync.broadcast import open_broadcast

from .conftest import open_engine, run_server
from .model_checks import load

pytestmark = pytest.mark.engines


@asynccontextmanager
async def open_all(server, snapshots, **options):
    """The server's engine, a trainer of the second model, and a broadcast from one to the other."""
    trained = open_pytorch_backend(
        snapshots[1], optim=OptimConfig(), total_steps=1, threads=1, autocast="off"
    )
    async with (
        open_engine(server) as engine,
        trained as backend,
        open_broadcast(**options) as transport,
    ):
        yield engine, backend, transport


async def send(transport, backend, engine):
    """The version that the backend's weights have on the engine now, sent in memory."""
    version = await engine.weight_version() + 1
    await engine.pause("wait")
    assert await transport(backend, [engine], version) == {}  # no engine failed
    await engine.resume()
    return version


async def score_by_trainer(backend, request, completion):
    tokens = np.concatenate([request.prompt_ids, completion.token_ids])
    mask = np.arange(len(tokens)) >= len(request.prompt_ids)
    (row,) = await backend.forward(RolloutBatch(tokens=(tokens,), loss_masks=(mask,)))
    return row[mask]


async def test_broadcast_gives_what_the_disk_gives_and_what_the_trainer_has(sglang_server, snapshots):
    request = make_request(prompt=(9, 8, 7), max_new_tokens=16, temperature=0.0)
    async with open_all(sglang_server, snapshots, bucket_bytes=50_000) as (engine, backend, transport):
        await load(engine, snapshots[1])
        by_disk, disk_sum = await engine.generate(request), await engine.checksum()
        await load(engine, snapshots[0])
        assert await engine.checksum() != disk_sum
        version = await send(transport, backend, engine)
        by_memory = await engine.generate(request)
        assert await engine.weight_version() == version
        assert by_memory.weight_versions.tolist() == [version] * 16
        assert by_memory.token_ids.tolist() == by_disk.token_ids.tolist()
        np.testing.assert_allclose(by_memory.log_probs, by_disk.log_probs, atol=1e-5)
        np.testing.assert_allclose(
            by_memory.log_probs, await score_by_trainer(backend, request, by_memory), atol=1e-4
        )
        assert await engine.checksum() == disk_sum
        weights = await backend.get_weights()
        await backend.load_weights({name: tensor * 1.1 for name, tensor in weights.items()})
        await send(transport, backend, engine)  # in the group of before
        again = await engine.generate(request)
        np.testing.assert_allclose(
            again.log_probs, await score_by_trainer(backend, request, again), atol=1e-4
        )
        assert np.abs(again.log_probs[0] - by_memory.log_probs[0]) > 1e-3


async def test_request_in_flight_over_a_broadcast_has_two_versions(sglang_server, snapshots):
    async with open_all(sglang_server, snapshots, bucket_bytes=50_000) as (engine, backend, transport):
        await load(engine, snapshots[0])

        async def update(answers):
            await engine.pause("keep")
            before = dict(answers)
            assert await transport(backend, [engine], await engine.weight_version() + 1) == {}
            assert answers == before
            await engine.resume()

        versions = (await disturb(engine, update)).weight_versions.tolist()
        old = versions.count(versions[0])
        assert versions == [versions[0]] * old + [await engine.weight_version()] * (LONG - old)


async def test_update_that_broke_off_in_the_middle_does_not_stand_in_the_way_of_the_next(
    sglang_server, snapshots
):
    async with open_all(sglang_server, snapshots) as (engine, backend, transport):
        assert await engine.dialect.begin_transfer()  # and nothing more: as if the trainer had died
        version = await send(transport, backend, engine)
        assert (await engine.generate(make_request())).weight_versions.tolist() == [version] * 4


@pytest.fixture(scope="module")
def other_server(snapshots, tmp_path_factory):
    """A server whose log-probs are not of the distribution sampled from."""
    folder, unscaled = tmp_path_factory.mktemp("other"), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    with run_server("sglang", snapshots[0], folder, **unscaled) as server:
        yield server


async def test_server_with_unscaled_log_probs_is_refused(other_server):
    with pytest.raises(EngineSetupError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        async with open_engine(other_server):
            pass


async def test_server_that_dies_or_stops_in_an_update_is_reported_and_the_trainer_goes_on(
    other_server, snapshots, monkeypatch
):
    # its log-probs do not matter here
    monkeypatch.setattr("rollouts.engines.sglang.refuse_settings", lambda *_: None)
    monkeypatch.setattr("rollouts.weight_sync.broadcast.PROGRESS_S", 5.0)
    async with open_all(other_server, snapshots) as (engine, backend, transport):
        await engine.pause("wait")
        name = engine.features.name
        assert await transport(backend, [engine], 1) == {}
        os.killpg(other_server.pid, signal.SIGSTOP)
        assert isinstance((await transport(backend, [engine], 2))[name], EngineError)
        os.killpg(other_server.pid, signal.SIGCONT)
        os.killpg(other_server.pid, signal.SIGKILL)
        assert isinstance((await transport(backend, [engine], 3))[name], InfrastructureError)
        assert len(await backend.get_weights())

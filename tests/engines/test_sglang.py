"""The SGLang engine and broadcasts to it on a real SGLang server. Needs ROLLOUTS_SGLANG_PYTHON, or SGLang in
.venv-sglang.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.backends.open import open_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.engines.server import ServerEngine
from rollouts.engines.sglang import open_sglang_engine
from rollouts.errors import EngineError, EngineSetupError, InfrastructureError, RequestRefused
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import LONG, disturb, make_request
from rollouts.types import Completion, GenerateRequest, RolloutBatch
from rollouts.weight_sync.broadcast_servers import open_broadcast

from .conftest import CONTEXT_LENGTH, VOCAB_SIZE, RunningServer, run_sglang
from .model_checks import (
    check_greedy_beside_sampled,
    check_log_probs,
    check_tokens_after_a_frozen_update,
    load,
)

pytestmark = pytest.mark.engines


def open_engine(server: RunningServer, **changes: Any) -> AbstractAsyncContextManager[ServerEngine]:
    settings = {"api_key": server.api_key, "vocab_size": VOCAB_SIZE} | changes
    return open_sglang_engine(server.url, **settings)


@asynccontextmanager
async def open_trainer(path: Path) -> AsyncIterator[PyTorchTrainingBackend]:
    async with open_pytorch_backend(
        path, optim=OptimConfig(), total_steps=1, threads=1, autocast="off"
    ) as backend:
        yield backend


async def send(transport: Any, backend: PyTorchTrainingBackend, engine: ServerEngine) -> int:
    """The version that the backend's weights have on the engine now, sent in memory."""
    version = await engine.weight_version() + 1
    await engine.pause("wait")
    assert await transport(backend, [engine], version) == {engine.features.name: None}
    await engine.resume()
    return version


async def score_by_trainer(
    backend: PyTorchTrainingBackend, request: GenerateRequest, completion: Completion
) -> np.ndarray:
    tokens = np.concatenate([request.prompt_ids, completion.token_ids])
    mask = np.arange(len(tokens)) >= len(request.prompt_ids)
    (row,) = await backend.forward(RolloutBatch(tokens=(tokens,), loss_masks=(mask,))).result()
    return row[mask]


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [*engine_contracts.CHECKS, *engine_contracts.MODEL_CHECKS])
async def test_contract(check: Any, sglang_server: RunningServer):
    await check(lambda: open_engine(sglang_server))


async def test_updates_show_in_version_log_probs_and_checksum(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    await engine_contracts.check_update_from_checkpoint(lambda: open_engine(sglang_server), *snapshots)


async def test_frozen_request_comes_back_whole_with_two_versions(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    await engine_contracts.check_keep_pause_spans_two_versions(
        lambda: open_engine(sglang_server), snapshots[1]
    )


async def test_bad_snapshots_change_nothing(
    sglang_server: RunningServer, snapshots: tuple[Path, Path], tmp_path: Path
):
    await engine_contracts.check_bad_snapshots_change_nothing(
        lambda: open_engine(sglang_server), snapshots[1], tmp_path
    )


async def test_abort_all_answers_frozen_requests_with_what_they_have(sglang_server: RunningServer):
    async with open_engine(sglang_server) as engine:

        async def freeze_and_abort(_: list[Completion]) -> None:
            await engine.pause("keep")
            await engine.abort_all()
            await engine.resume()

        answer = await disturb(engine, freeze_and_abort)
        assert answer.finish_reason == "abort"
        assert len(answer.token_ids) < LONG  # the server keeps its tokens by fifties
        assert len((await engine.generate(make_request())).token_ids) == 4


# --- log-probs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
async def test_log_probs_are_the_models_own_at_its_temperature(
    temperature: float, sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    request = make_request(prompt=(5, 6, 7, 8), max_new_tokens=24, temperature=temperature)
    await check_log_probs(lambda: open_engine(sglang_server), snapshots[0], request, atol=1e-4)


async def test_greedy_beside_sampled_requests_keeps_log_probs_of_temperature_1(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    await check_greedy_beside_sampled(lambda: open_engine(sglang_server), snapshots[0], atol=1e-4)


async def test_tokens_after_a_retracted_update_are_the_new_models_own(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    await check_tokens_after_a_frozen_update(lambda: open_engine(sglang_server), *snapshots, atol=1e-4)


# --- in memory ----------------------------------------------------------------------------------------------


async def test_broadcast_gives_what_the_disk_gives_and_what_the_trainer_has(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    request = make_request(prompt=(9, 8, 7), max_new_tokens=16, temperature=0.0)
    async with (
        open_engine(sglang_server) as engine,
        open_trainer(snapshots[1]) as backend,
        open_broadcast(bucket_bytes=50_000) as transport,
    ):
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
        weights = await backend.get_weights().result()
        await backend.load_weights({name: tensor * 1.1 for name, tensor in weights.items()}).result()
        await send(transport, backend, engine)  # in the group of before
        again = await engine.generate(request)
        np.testing.assert_allclose(
            again.log_probs, await score_by_trainer(backend, request, again), atol=1e-4
        )
        assert np.abs(again.log_probs[0] - by_memory.log_probs[0]) > 1e-3


async def test_request_in_flight_over_a_broadcast_has_two_versions(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    async with (
        open_engine(sglang_server) as engine,
        open_trainer(snapshots[1]) as backend,
        open_broadcast(bucket_bytes=50_000) as transport,
    ):
        await load(engine, snapshots[0])

        async def update(answers: list[Completion]) -> None:
            await engine.pause("keep")
            before = list(answers)
            assert await transport(backend, [engine], await engine.weight_version() + 1) == {
                engine.features.name: None
            }
            assert answers == before
            await engine.resume()

        versions = (await disturb(engine, update)).weight_versions.tolist()
        old = versions.count(versions[0])
        assert versions == [versions[0]] * old + [await engine.weight_version()] * (LONG - old)


async def test_update_that_broke_off_in_the_middle_does_not_stand_in_the_way_of_the_next(
    sglang_server: RunningServer, snapshots: tuple[Path, Path]
):
    async with (
        open_engine(sglang_server) as engine,
        open_trainer(snapshots[1]) as backend,
        open_broadcast() as transport,
    ):
        assert await engine.dialect.begin_transfer()  # and nothing more: as if the trainer had died
        version = await send(transport, backend, engine)
        assert (await engine.generate(make_request())).weight_versions.tolist() == [version] * 4


# --- keys and settings --------------------------------------------------------------------------------------


async def test_wrong_keys_are_refused_by_name(sglang_server: RunningServer):
    for changes, rule in (
        ({"api_key": "wrong"}, "is it SGLang 0.5.20 or later, and api_key its --api-key"),
        ({"api_key": None}, "is it SGLang 0.5.20 or later, and api_key its --api-key"),
        ({"vocab_size": VOCAB_SIZE + 1}, "serve the same model"),
        ({"context_length": CONTEXT_LENGTH + 1}, f"--context-length {CONTEXT_LENGTH + 1}"),
    ):
        with pytest.raises(EngineSetupError, match=rule) as raised:
            async with open_engine(sglang_server, **changes):
                pass
        assert sglang_server.api_key not in str(raised.value)


async def test_id_outside_the_vocabulary_never_leaves_the_client(sglang_server: RunningServer):
    # it would end the server
    async with open_engine(sglang_server) as engine:
        for token in (VOCAB_SIZE, -1):
            with pytest.raises(RequestRefused, match=f"prompt_ids holds {token}"):
                await engine.generate(make_request(prompt=(1, token)))
        assert await engine.health()


async def test_memory_that_the_server_cannot_give_back_is_said_so(sglang_server: RunningServer):
    async with open_engine(sglang_server) as engine:
        assert not engine.features.frees_memory
        with pytest.raises(EngineError, match="--enable-memory-saver"):
            await engine.release_memory()


async def test_server_left_paused_goes_on_for_who_comes_next(sglang_server: RunningServer):
    async with open_engine(sglang_server) as engine:
        await engine.pause("keep")
    async with open_engine(sglang_server) as engine:
        assert len((await engine.generate(make_request())).token_ids) == 4


@pytest.fixture(scope="module")
def other_server(
    sglang_python: Path, snapshots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server whose log-probs are not of the distribution sampled from."""
    folder, unscaled = tmp_path_factory.mktemp("other"), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    with run_sglang(sglang_python, snapshots[0], folder, environment=unscaled) as server:
        yield server


async def test_server_with_unscaled_log_probs_is_refused(other_server: RunningServer):
    with pytest.raises(EngineSetupError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        async with open_engine(other_server):
            pass


async def test_server_that_dies_or_stops_in_an_update_is_reported_and_the_trainer_goes_on(
    other_server: RunningServer, snapshots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    async def take_it(_: Any) -> None:
        """Its log-probs do not matter here."""

    monkeypatch.setattr("rollouts.engines.sglang._check_temperature", take_it)
    async with (
        open_engine(other_server) as engine,
        open_trainer(snapshots[1]) as backend,
        open_broadcast(progress_s=5.0) as transport,
    ):
        await engine.pause("wait")
        name = engine.features.name
        assert await transport(backend, [engine], 1) == {name: None}
        os.killpg(other_server.pid, signal.SIGSTOP)
        assert isinstance((await transport(backend, [engine], 2))[name], EngineError)
        os.killpg(other_server.pid, signal.SIGCONT)
        os.killpg(other_server.pid, signal.SIGKILL)
        assert isinstance((await transport(backend, [engine], 3))[name], InfrastructureError)
        assert len(await backend.get_weights().result())

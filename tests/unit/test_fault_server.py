"""The fault server speaks both dialects over real sockets, and breaks as the plan says: real clients meet it
here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from rollouts.engines.http import HttpReply, open_http_client
from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
    WeightVersionError,
)
from rollouts.protocols import InferenceEngine
from rollouts.testing.engine_contracts import CHECKS, make_request
from rollouts.types import Completion
from tests.support.fault_plan import (
    BAD_REPLY_KINDS,
    BadReply,
    BadStatus,
    Crash,
    CutBody,
    Fault,
    FaultPlan,
    Hang,
    StaleWeights,
    UpdateFails,
    WrongVersion,
)
from tests.support.fault_server import Dialect, FaultServer, open_fault_server
from tests.support.simulated_process import ServerSpeed, compute_log_probs, read_snapshot

VOCAB, CONTEXT = 300, 256
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang")


@asynccontextmanager
async def open_server(dialect: Dialect, *faults: Fault, **options: Any) -> AsyncIterator[FaultServer]:
    options = {"vocab_size": VOCAB, "context_length": CONTEXT} | options
    async with open_fault_server(FaultPlan(faults), dialect=dialect, **options) as server:
        yield server


@asynccontextmanager
async def open_client_engine(
    server: FaultServer, dialect: Dialect, **options: Any
) -> AsyncIterator[InferenceEngine]:
    opened = open_vllm_engine if dialect == "vllm" else open_sglang_engine
    async with opened(server.url, name="a", vocab_size=VOCAB, **options) as engine:  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        yield engine


@asynccontextmanager
async def open_both(
    dialect: Dialect,
    what: Any = None,
    *,
    at_request: int | None = None,
    at_update: int | None = None,
    silence_s: float = 60.0,
):
    """Server and engine; `at_request` counts from the first request after the handshake."""
    async with (
        open_server(dialect) as server,
        open_client_engine(server, dialect, silence_s=silence_s) as engine,
    ):
        if what is not None:
            after = None if at_request is None else at_request + len(server.process.requests)
            server.process.add_fault(Fault("a", what, at_request=after, at_update=at_update))
        yield server, engine


def write_snapshot(path: Path, value: float) -> Path:
    path.mkdir()
    save_file({"weight": np.full(2, value, np.float32)}, path / "model.safetensors")
    return path


async def update(engine: InferenceEngine, path: Path, version: int, *, mode: Any = "wait") -> None:
    await engine.pause(mode)
    try:
        await engine.update_weights_from_checkpoint(path, version)
    finally:
        await engine.resume()


async def call(server: FaultServer, method: str, path: str, body: object = None, **options: Any) -> HttpReply:
    async with open_http_client(server.url, **options) as client:
        return await client.request(
            method, path, body=None if body is None else json.dumps(body).encode(), silence_s=5.0
        )


def generate_body(
    dialect: Dialect, name: str = "r", *, tokens: int = 4, ids: tuple[int, ...] = (1, 2, 3)
) -> tuple[str, dict[str, Any]]:
    if dialect == "vllm":
        return "/inference/v1/generate", {
            "request_id": name,
            "token_ids": ids,
            "sampling_params": {"max_tokens": tokens, "seed": 1},
        }
    return "/generate", {
        "rid": name,
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "sampling_seed": 1},
    }


# --- the contract ---


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_real_engines_keep_their_contract_over_it(dialect, check):
    @asynccontextmanager
    async def open_fresh():
        async with open_server(dialect) as server, open_client_engine(server, dialect) as engine:
            yield engine

    await check(open_fresh)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_snapshot_on_disk_becomes_what_is_served(dialect, tmp_path):
    async with open_both(dialect) as (server, engine):
        assert await engine.weight_version() == -1
        base = await engine.checksum()
        path = write_snapshot(tmp_path / "v1", 1.0)
        await update(engine, path, 1)
        assert await engine.weight_version() == 1
        assert await engine.checksum() != base
        completion = await engine.generate(make_request())
        tokens = np.concatenate([[1, 2, 3], completion.token_ids])
        assert completion.log_probs.tolist() == compute_log_probs(read_snapshot(path), tokens)[3:].tolist()
        assert completion.weight_versions.tolist() == [1] * 4
        assert server.statistics()["faults"] == 0


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_request_that_is_kept_over_an_update_carries_both_versions(dialect, tmp_path):
    path = write_snapshot(tmp_path / "v1", 1.0)
    async with open_both(dialect) as (server, engine):
        answers: list[Completion] = []

        async def ask() -> None:
            answers.append(await engine.generate(make_request(max_new_tokens=200)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.process.wait_until(lambda: server.process.tokens >= 20)
            await update(engine, path, 1, mode="keep")
        versions = answers[0].weight_versions.tolist()
        assert versions == sorted(versions) and set(versions) == {-1, 1} and len(versions) == 200


# --- dialects ---


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_settings_that_falsify_training_are_told(dialect):
    settings = {"logprobs_mode": "raw_logprobs"} if dialect == "vllm" else {"version": "0.5.9"}
    async with open_server(dialect, settings=settings) as server:
        with pytest.raises(EngineSetupError):
            async with open_client_engine(server, dialect):
                pass


async def test_sglang_dies_of_an_id_outside_its_vocabulary_and_vllm_refuses_it():
    async with open_server("vllm") as server:
        assert (await call(server, "POST", *generate_body("vllm", ids=(1, VOCAB)))).status == 400
    async with open_server("sglang") as server:
        with pytest.raises(EngineUnreachable):
            await call(server, "POST", *generate_body("sglang", ids=(1, VOCAB)))
        assert "IndexError" in await server.wait_exited()


async def test_sglang_frozen_in_place_takes_weights_and_says_that_it_failed(tmp_path):
    path = write_snapshot(tmp_path / "v1", 1.0)
    async with open_server("sglang") as server:
        await call(server, "POST", "/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(path), "weight_version": "1"}
        assert (await call(server, "POST", "/update_weights_from_disk", body)).status == 400
        assert server.process.weights == read_snapshot(path)
        assert (
            await call(server, "POST", "/update_weights_from_disk", body | {"flush_cache": False})
        ).status == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_client_that_leaves_aborts_its_request(dialect):
    async with open_server(dialect, speed=ServerSpeed(token_s=0.5)) as server:
        with trio.move_on_after(0.2):
            await call(server, "POST", *generate_body(dialect, tokens=100))
        with trio.fail_after(5):
            await server.process.wait_idle()
        assert server.process.tokens < 5


# --- faults ---


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_bad_reply_becomes_a_completion(dialect):
    async with open_both(dialect) as (server, engine):
        for kind in BAD_REPLY_KINDS:
            server.process.add_fault(Fault("a", BadReply(kind), at_request=0))
            with pytest.raises(ReplyError):
                pytest.fail(f"{kind} became {await engine.generate(make_request())}")
            assert len((await engine.generate(make_request())).token_ids) == 4
        assert server.statistics()["faults"] == len(BAD_REPLY_KINDS)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_cut_at_any_byte_is_refused(dialect):
    async with open_both(dialect) as (server, engine):
        path, body = generate_body(dialect)
        length = len((await call(server, "POST", path, body)).body)
        for at_byte in [*range(0, length, 7), length - 1, length]:
            server.process.add_fault(Fault("a", CutBody(at_byte), at_request=0))
            with pytest.raises(InfrastructureError):
                await engine.generate(make_request())
        await engine.generate(make_request())


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_statuses_say_when_to_come_back(dialect):
    async with open_both(dialect, BadStatus(503, count=2, retry_after_s=7), at_request=0) as (_, engine):
        for _ in range(2):
            with pytest.raises(EngineOverloaded) as caught:
                await engine.generate(make_request())
            assert caught.value.retry_after_s == 7.0
        await engine.generate(make_request())


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_crash_breaks_connections_and_refuses_new_ones_until_restart(dialect, tmp_path):
    async with open_both(dialect, Crash(after_tokens=2), at_request=2) as (server, engine):
        await update(engine, write_snapshot(tmp_path / "v1", 1.0), 1)
        failures: list[Exception] = []

        async def ask(name: str) -> None:
            try:
                await engine.generate(make_request(name))
            except InfrastructureError as error:  # a ReplyError if the head of its answer was out already
                failures.append(error)

        url = server.url
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(ask, name)
        assert any(isinstance(failure, EngineUnreachable) for failure in failures)
        with pytest.raises(EngineUnreachable):
            await engine.weight_version()
        assert not await engine.health()
        assert "signal 9" in await server.wait_exited()
        await server.restart()
        assert server.url == url
        assert await engine.weight_version() == -1
        assert len((await engine.generate(make_request())).token_ids) == 4


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_hung_server_is_silent(dialect):
    async with open_both(dialect, Hang(), at_request=0, silence_s=0.2) as (_, engine):
        with pytest.raises(EngineSilent):
            await engine.generate(make_request())
        assert not await engine.health()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_request_that_the_server_forgot_is_given_up_when_nothing_else_moves(dialect):
    async with open_both(dialect, Hang(only_this_request=True), at_request=0, silence_s=0.2) as (_, engine):
        with pytest.raises(EngineSilent):
            await engine.generate(make_request())
        assert await engine.health()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("phase", ["pause", "load", "set_version", "resume", "probe"])
async def test_a_phase_of_an_update_fails_and_the_next_update_works(dialect, phase, tmp_path):
    path = write_snapshot(tmp_path / "v1", 1.0)
    async with open_both(dialect, UpdateFails(phase), at_update=0) as (_, engine):
        with pytest.raises(EngineError):
            await update_and_probe(engine, path)
        await update_and_probe(engine, path)


async def update_and_probe(engine: InferenceEngine, path: Path) -> None:
    await engine.pause("wait")
    await engine.update_weights_from_checkpoint(path, 1)
    await engine.resume()
    completion = await engine.generate(make_request())
    assert completion.weight_versions.tolist() == [1] * 4


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_stale_weights_are_seen_in_log_probs_alone(dialect, tmp_path):
    async with open_both(dialect, StaleWeights(), at_update=0) as (_, engine):
        before = await engine.generate(make_request(temperature=0.0))
        await update(engine, write_snapshot(tmp_path / "v1", 1.0), 1)
        after = await engine.generate(make_request(temperature=0.0))
        assert after.weight_versions.tolist() == [1] * 4
        assert after.log_probs.tolist() == before.log_probs.tolist()


async def test_a_wrong_version_is_noticed_where_the_client_looks_and_reported_where_not(tmp_path):
    path = write_snapshot(tmp_path / "v5", 1.0)
    async with open_both("vllm", WrongVersion(-1), at_update=0) as (_, engine):
        with pytest.raises(WeightVersionError, match="version 5 and says 4"):
            await update(engine, path, 5)
    async with open_both("sglang", WrongVersion(-1), at_update=0) as (_, engine):
        await update(engine, path, 5)
        assert await engine.weight_version() == 4
        assert (await engine.generate(make_request())).weight_versions.tolist() == [4] * 4

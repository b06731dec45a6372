"""A FaultyEngine without faults is an engine like any other; with them it fails as a real one fails."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.errors import (
    EngineError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
)
from rollouts.protocols import InferenceEngine
from rollouts.testing.engine_contracts import CHECKS, make_request
from rollouts.types import Completion
from tests.support.fault_plan import (
    Crash,
    Fault,
    FaultPlan,
    Hang,
    StaleWeights,
    UpdateFails,
    WrongVersion,
    draw_fault_plan,
)
from tests.support.faulty_engine import FaultyEngine, open_faulty_engine
from tests.support.simulated_process import (
    BadAnswer,
    ServerSpeed,
    compute_log_probs,
)

SECOND = ServerSpeed(slots=2, token_s=1.0)  # two requests at a time, a token a second
SNAPSHOTS = {"v1": "weights one", "v2": "weights two"}


def read_weights(path: Path) -> str:
    if path.name not in SNAPSHOTS:
        raise BadAnswer(400, f"nothing at {path}")
    return SNAPSHOTS[path.name]


def open_engine(*faults: Fault, speed: ServerSpeed = SECOND, silence_s: float = 60.0, **options):
    return open_faulty_engine(
        "a", FaultPlan(faults), speed=speed, silence_s=silence_s, read_weights=read_weights, **options
    )


async def update(engine: FaultyEngine, version: int) -> None:
    await engine.pause("wait")
    await engine.update_weights_from_checkpoint(Path(f"v{version}"), version)
    await engine.resume()


def accept(engine: InferenceEngine) -> None:
    """The type checker reads this."""


async def collect(
    engine: FaultyEngine, name: str, into: dict[str, Completion | Exception], **options
) -> None:
    try:
        into[name] = await engine.generate(make_request(name, **options))
    except EngineError as error:
        into[name] = error
    else:
        accept(engine)


# --- without faults ---


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract_of_an_engine(check, autojump_clock):
    @asynccontextmanager
    async def open_fresh():
        async with open_engine() as engine:
            yield engine

    await check(open_fresh)


async def test_log_probs_are_those_that_a_trainer_with_the_weights_computes(autojump_clock):
    async with open_engine() as engine:
        await update(engine, 1)
        completion = await engine.generate(make_request(seed=5))
        tokens = np.concatenate([[1, 2, 3], completion.token_ids])
        assert completion.log_probs.tolist() == compute_log_probs("weights one", tokens)[3:].tolist()
        assert completion.log_probs.tolist() != compute_log_probs("base", tokens)[3:].tolist()


# --- crashes, hangs and restarts ---


async def test_a_crash_breaks_what_is_in_flight_and_refuses_the_rest_until_restart(autojump_clock):
    async with open_engine(
        Fault("a", Crash(after_tokens=2), at_request=1), speed=ServerSpeed(slots=2, token_s=1.0, start_s=30.0)
    ) as engine:
        await update(engine, 1)
        answers: dict[str, Completion | Exception] = {}
        async with trio.open_nursery() as nursery:
            for name in "xyz":
                nursery.start_soon(collect, engine, name, answers)
        assert all(isinstance(answer, EngineUnreachable) for answer in answers.values()) and len(answers) == 3
        assert "signal 9" in await engine.wait_exited()
        calls = (
            engine.weight_version,
            engine.load,
            engine.checksum,
            lambda: engine.generate(make_request()),
            lambda: engine.pause("wait"),
        )
        for call in (*calls, engine.resume):
            with pytest.raises(EngineUnreachable):
                await call()
        assert not await engine.health()
        started = trio.current_time()
        await engine.restart()
        assert trio.current_time() - started == 30
        await engine.resume()  # the client still holds its gate closed from the pause that failed
        assert await engine.weight_version() == -1
        assert (await engine.generate(make_request())).weight_versions.tolist() == [-1] * 4


async def test_a_hung_engine_is_silent_for_requests_and_calls(autojump_clock):
    async with open_engine(Fault("a", Hang(), at_s=1.5), silence_s=10.0) as engine:
        answers: dict[str, Completion | Exception] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, engine, "x", answers)
            await trio.sleep(2)
            with pytest.raises(EngineSilent):
                await engine.load()
            assert not await engine.health()
        assert isinstance(answers["x"], EngineSilent)
        await engine.restart()
        assert len((await engine.generate(make_request())).token_ids) == 4


# --- answers ---


# --- updates ---


@pytest.mark.parametrize(
    ("phase", "served", "version"),
    [
        ("pause", "base", -1),
        ("load", "base", -1),
        ("set_version", "weights one", -1),
        ("resume", "weights one", 1),
    ],
)
async def test_a_phase_of_an_update_fails_once(phase, served, version, autojump_clock):
    async with open_engine(Fault("a", UpdateFails(phase), at_update=0)) as engine:
        with pytest.raises(InfrastructureError, match=f"phase {phase} of update 0"):
            await update(engine, 1)
        assert (engine.process.weights, await engine.weight_version()) == (served, version)
        await engine.resume()
        await update(engine, 2)
        assert (engine.process.weights, await engine.weight_version()) == ("weights two", 2)


async def test_stale_weights_carry_the_new_version_and_answer_as_before(autojump_clock):
    async with open_engine(Fault("a", StaleWeights(), at_update=1)) as engine:
        await update(engine, 1)
        before = await engine.generate(make_request(temperature=0.0))
        checksum = await engine.checksum()
        await update(engine, 2)
        after = await engine.generate(make_request(temperature=0.0))
        assert after.weight_versions.tolist() == [2] * 4
        assert after.log_probs.tolist() == before.log_probs.tolist()
        assert await engine.checksum() == checksum


async def test_a_wrong_version_is_reported_and_on_the_tokens(autojump_clock):
    async with open_engine(Fault("a", WrongVersion(-1), at_update=1)) as engine:
        await update(engine, 1)
        await update(engine, 2)
        assert engine.process.weights == "weights two"
        assert await engine.weight_version() == 1
        assert (await engine.generate(make_request())).weight_versions.tolist() == [1] * 4


# --- all together ---


@pytest.mark.parametrize("seed", range(40))
async def test_under_any_plan_every_request_ends_and_good_answers_are_good(seed, autojump_clock):
    """Whoever asks gets a completion that the weights explain, or an InfrastructureError; a restart brings
    the server back.
    """
    async with open_faulty_engine(
        "a",
        draw_fault_plan(seed, engines=["a"], most=6),
        speed=SECOND,
        silence_s=20.0,
        read_weights=lambda path: path.name,
    ) as engine:
        answers: dict[str, Completion | Exception] = {}
        for version in range(6):
            try:
                await engine.pause("wait")
                await engine.update_weights_from_checkpoint(Path(f"weights {version}"), version)
                await engine.resume()
            except InfrastructureError:
                await engine.restart()
                await engine.resume()
            async with trio.open_nursery() as nursery:
                for index in range(5):
                    nursery.start_soon(collect, engine, f"{version}-{index}", answers)
        assert len(answers) == 30
        assert all(isinstance(answer, Completion | InfrastructureError) for answer in answers.values())
        for answer in answers.values():
            if isinstance(answer, Completion):
                assert len(answer.token_ids) == 4
        assert engine.in_flight == 0

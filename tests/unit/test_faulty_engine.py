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
    EngineOverloaded,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.protocols import InferenceEngine
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import CHECKS, make_request
from rollouts.types import Completion, EngineLoad
from tests.support.fault_plan import (
    BAD_REPLY_KINDS,
    BadReply,
    BadStatus,
    Crash,
    CutBody,
    Fault,
    FaultPlan,
    Hang,
    Slow,
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
    draw_tokens,
    open_simulated_process,
    read_snapshot,
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


async def test_it_takes_nothing_in_memory_and_says_so(autojump_clock):
    await engine_contracts.check_update_in_memory(open_engine, [])


async def test_slots_decode_together_and_the_rest_wait(autojump_clock):
    async with open_engine() as engine:
        started = trio.current_time()
        finished: list[float] = []

        async def ask(name: str) -> None:
            await engine.generate(make_request(name))
            finished.append(trio.current_time() - started)

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(ask, name)
            await trio.sleep(2.5)
            assert await engine.load() == EngineLoad(running=2, waiting=1, cache_usage=1.0)
        assert finished == [4.0, 4.0, 8.0]  # four tokens a second each; the third waits for a slot


async def test_log_probs_are_those_that_a_trainer_with_the_weights_computes(autojump_clock):
    async with open_engine() as engine:
        await update(engine, 1)
        completion = await engine.generate(make_request(seed=5))
        tokens = np.concatenate([[1, 2, 3], completion.token_ids])
        assert completion.log_probs.tolist() == compute_log_probs("weights one", tokens)[3:].tolist()
        assert completion.log_probs.tolist() != compute_log_probs("base", tokens)[3:].tolist()


async def test_greedy_answers_are_the_same_under_all_weights_so_that_log_probs_can_be_compared(
    autojump_clock,
):
    async with open_engine() as engine:
        before = await engine.generate(make_request(temperature=0.0))
        await update(engine, 1)
        after = await engine.generate(make_request(temperature=0.0))
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert (before.log_probs != after.log_probs).all()
        assert (set(before.weight_versions), set(after.weight_versions)) == ({-1}, {1})


def test_answers_end_with_the_stop_token_or_are_cut():
    drawn = [
        draw_tokens(make_request(max_new_tokens=4, seed=seed, stop_token_ids=(7,)), 100)
        for seed in range(200)
    ]
    assert {len(tokens) for tokens in drawn} == {1, 2, 3, 4, 5}
    assert all(tokens[-1] == 7 for tokens in drawn)
    assert len(draw_tokens(make_request(max_new_tokens=4, seed=1), 100)) == 4


async def test_an_update_between_tokens_gives_both_versions(autojump_clock):
    async with open_engine() as engine:
        answers: dict[str, Completion | Exception] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, engine, "x", answers)
            await trio.sleep(2.5)
            await engine.pause("keep")
            await trio.sleep(100)
            await engine.update_weights_from_checkpoint(Path("v1"), 1)
            await engine.resume()
        completion = answers["x"]
        assert isinstance(completion, Completion)
        assert completion.weight_versions.tolist() == [-1, -1, 1, 1]


async def test_aborted_requests_are_answered_with_what_they_have(autojump_clock):
    for abort in (lambda engine: engine.abort_all(), lambda engine: engine.pause("abort")):
        async with open_engine() as engine:
            started = trio.current_time()
            answers: dict[str, Completion | Exception] = {}
            async with trio.open_nursery() as nursery:
                for name in "xyz":
                    nursery.start_soon(collect, engine, name, answers)
                await trio.sleep(2.5)
                await abort(engine)
                assert trio.current_time() - started == 2.5  # at once, in the middle of a token
            found = sorted(
                (len(answer.token_ids), answer.finish_reason)
                for answer in answers.values()
                if isinstance(answer, Completion)
            )
            assert found == [(0, "abort"), (2, "abort"), (2, "abort")]
            await engine.resume()


async def test_a_missing_snapshot_leaves_weights_and_version(autojump_clock):
    async with open_engine() as engine:
        await update(engine, 1)
        checksum = await engine.checksum()
        with pytest.raises(RequestRefused, match="nothing at v9"):
            await update(engine, 9)
        assert (await engine.weight_version(), await engine.checksum()) == (1, checksum)


def test_a_snapshot_directory_is_known_by_its_manifest_or_its_tensors(tmp_path):
    with pytest.raises(BadAnswer, match="neither"):
        read_snapshot(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = read_snapshot(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    second = read_snapshot(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert len({first, second, read_snapshot(tmp_path)}) == 3


async def test_an_exception_of_the_body_comes_out_as_it_is(autojump_clock):
    with pytest.raises(ZeroDivisionError):
        async with open_engine(Fault("a", Crash(), at_s=50.0)):
            raise ZeroDivisionError


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


async def test_a_crash_may_end_by_itself(autojump_clock):
    async with open_engine(Fault("a", Crash(restart_after_s=20.0), at_s=10.0)) as engine:
        await update(engine, 1)
        assert await engine.wait_exited()
        assert trio.current_time() == 10
        await trio.sleep(19.9)
        assert not await engine.health()
        await trio.sleep(0.2)
        assert await engine.health()
        assert await engine.weight_version() == -1


async def test_waiting_for_an_exit_begins_anew_after_a_restart(autojump_clock):
    async with open_engine() as engine:
        engine.crash("the first reason")
        assert "the first reason" in await engine.wait_exited()
        await engine.restart()
        with trio.move_on_after(1000) as waited:
            await engine.wait_exited()
        assert waited.cancelled_caught


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


async def test_a_hang_that_ends_costs_only_time(autojump_clock):
    async with open_engine(Fault("a", Hang(for_s=30.0), at_s=1.5)) as engine:
        assert len((await engine.generate(make_request())).token_ids) == 4
        assert trio.current_time() >= 31.5


async def test_one_forgotten_request_does_not_stop_the_others(autojump_clock):
    async with open_engine(Fault("a", Hang(only_this_request=True), at_request=0), silence_s=10.0) as engine:
        answers: dict[str, Completion | Exception] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, engine, "x", answers)
            await trio.sleep(0.1)
            nursery.start_soon(collect, engine, "y", answers)
        assert isinstance(answers["y"], Completion)
        assert isinstance(answers["x"], EngineSilent)


async def test_a_long_answer_of_a_server_that_makes_progress_is_awaited(autojump_clock):
    async with open_engine(silence_s=10.0) as engine:
        assert len((await engine.generate(make_request(max_new_tokens=100))).token_ids) == 100


async def test_slow_is_slow_for_its_time(autojump_clock):
    async with open_engine(Fault("a", Slow(10.0, for_s=15.0), at_request=0)) as engine:
        await engine.generate(make_request())
        assert trio.current_time() == 22  # two tokens begun within 15 s take 10 s each, two take 1 s


# --- answers ---


@pytest.mark.parametrize(
    ("status", "kind"), [(429, EngineOverloaded), (503, EngineOverloaded), (500, InfrastructureError)]
)
async def test_bad_statuses_come_in_a_row_and_end(status, kind, autojump_clock):
    async with open_engine(
        Fault("a", BadStatus(status, count=2, retry_after_s=7 if status == 429 else None), at_request=1)
    ) as engine:
        await engine.generate(make_request())
        for _ in range(2):
            with pytest.raises(kind, match=f"gave {status}") as caught:
                await engine.generate(make_request())
            assert getattr(caught.value, "retry_after_s", None) == (7.0 if status == 429 else None)
        await engine.generate(make_request())


@pytest.mark.parametrize("kind", BAD_REPLY_KINDS)
async def test_a_bad_reply_is_refused_and_the_next_one_is_good(kind, autojump_clock):
    async with open_engine(Fault("a", BadReply(kind), at_request=1)) as engine:
        await engine.generate(make_request())
        with pytest.raises(ReplyError):
            await engine.generate(make_request())
        assert len((await engine.generate(make_request())).token_ids) == 4


@pytest.mark.parametrize("at_byte", [0, 1, 20, 10_000])
async def test_an_answer_cut_anywhere_is_refused(at_byte, autojump_clock):
    async with open_engine(Fault("a", CutBody(at_byte), at_request=0)) as engine:
        with pytest.raises(ReplyError, match="cut after"):
            await engine.generate(make_request())


async def test_equal_faults_strike_one_after_the_other(autojump_clock):
    fault = Fault("a", BadReply("no_tokens"), at_request=0)
    async with open_engine(fault, fault) as engine:
        for _ in range(2):
            with pytest.raises(ReplyError):
                await engine.generate(make_request())
        await engine.generate(make_request())
        assert engine.process.struck == [fault, fault]


async def test_a_fault_whose_request_ends_early_strikes_the_next_one(autojump_clock):
    async with open_engine(Fault("a", BadReply("log_prob_nan"), at_request=0)) as engine:
        with trio.move_on_after(1.5):
            await engine.generate(make_request())
        assert engine.process.struck == []
        with pytest.raises(ReplyError, match="log-prob of token 0 is nan"):
            await engine.generate(make_request())


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


async def test_the_probe_fails_as_often_as_the_plan_says(autojump_clock):
    async with open_engine(Fault("a", UpdateFails("probe", count=2), at_update=1)) as engine:
        await update(engine, 1)
        await engine.generate(make_request())
        for _ in range(2):
            await update(engine, 2)
            with pytest.raises(InfrastructureError, match="phase probe"):
                await engine.generate(make_request())
        await update(engine, 2)
        await engine.generate(make_request())


@pytest.mark.parametrize("how", ["crash", "hang"])
async def test_an_update_may_take_the_server_down(how, autojump_clock):
    async with open_engine(Fault("a", UpdateFails("load", how), at_update=0), silence_s=10.0) as engine:
        await engine.pause("wait")
        with pytest.raises(EngineUnreachable if how == "crash" else EngineSilent):
            await engine.update_weights_from_checkpoint(Path("v1"), 1)
        await engine.restart()
        await update(engine, 1)
        assert await engine.weight_version() == 1


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


async def test_timers_of_a_process_end_with_it(autojump_clock):
    async with open_simulated_process("a", FaultPlan((Fault("a", Crash(), at_s=1000.0),))) as process:
        pass
    assert trio.current_time() == 0
    assert not process.up

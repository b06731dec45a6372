"""The engines of vLLM and SGLang servers over a fake of each, in virtual time:
handshake, requests, pauses, updates, aborts, silence, faults.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
    RequestRefused,
)
from rollouts.testing.engine_contracts import CHECKS, asked, make_request
from tests.support.fault_plan import BadStatus, Crash, CutBody
from tests.support.fault_server import Reply, open_fake_server
from tests.support.text_tables import cases
from tests.unit.server_engines import (
    BOTH,
    GENERATE,
    VLLM_MODEL,
    never,
    open_both,
    open_engine,
    strike,
    update,
    write_snapshot,
)

# --- the contract ------------------------------------------------------------------------


@BOTH
@cases("check", CHECKS, ids=lambda check: check.__name__)
async def test_engines_keep_their_contract(dialect, check, autojump_clock):
    await check(partial(open_engine, dialect))


async def ask_in_vain(engine, kind, match=None):
    with pytest.raises(kind, match=match) as raised:
        await engine.generate(make_request())
    return raised


@BOTH
async def test_faults_are_typed(dialect, autojump_clock):
    async with open_both(dialect, silence_s=2.0) as (server, engine):
        for length in (30, 0):
            strike(server, CutBody(length))
            await ask_in_vain(engine, ReplyError)
        strike(server, BadStatus(503, 7))
        assert (await ask_in_vain(engine, EngineOverloaded)).value.retry_after_s == 7.0
        strike(server, Crash())
        for _ in range(2):
            await ask_in_vain(engine, EngineUnreachable)
        await server.process.restart()
        await wait_all_tasks_blocked()
        assert await engine.weight_version() == -1
        server.process.hang()
        await ask_in_vain(engine, EngineSilent)
        assert not await engine.health()


@BOTH
async def test_a_cancelled_caller_frees_its_row(dialect, autojump_clock):
    async with open_both(dialect, token_s=0.5) as (server, engine):
        with trio.move_on_after(2):
            await engine.generate(make_request(max_new_tokens=100))
        assert server.process.tokens and not server.process.running


# --- handshake ----------------------------------------------------------------------------------------------


SGLANG_ANSWER = """{"output_ids": [5], "meta_info": {"id": "ID", "finish_reason": {"type": "length"},
"output_token_logprobs": [[-3.2, 5, null]],
"weight_versions": [{"version": "default", "start": 0, "end": 1}]}}"""


async def refuse(server, kind, named=None, **options):
    """What is said when no engine is opened for it."""
    with pytest.raises(kind, match=named) as raised:
        async with server.open_engine(**options):
            pass
    return str(raised.value)


# the server, what it says, and what it has to be started with
@cases("""
dialect | said                | named
vllm | {"/v1/models": 401} | --api-key
vllm | {"/v1/models": {"data": []}} | serves no model
vllm | {"/server_info": 404} | VLLM_SERVER_DEV_MODE=1
vllm | {"/server_info": {"vllm_config": {"model_config": {"model": "m"}}}} | 0.32
vllm | {"/inference/v1/generate": 403} | --enable-scale-out
vllm | {"/inference/v1/generate": 400} | vocabulary of 300
vllm | {"/inference/v1/generate": {"request_id": "x", "choices": [{}]}} | 0.32
vllm | {"/metrics": "python_info 1"} | --disable-log-stats
vllm | {"model_config": {"model": "m", "max_model_len": 256, "logprobs_mode": "raw"}} | processed_logprobs
vllm | {"model_config": {"model": "m", "max_model_len": 128, "logprobs_mode": "processed_logprobs"}} | len 256
vllm | {"parallel_config": {"_api_process_count": 2}} | --api-server-count 1
sglang | {"/model_info": 401} | --api-key
sglang | {"/v1/models": {"data": [{"id": "m"}]}} | 0.5.20
sglang | {"/v1/models": {"data": [{"id": "m", "max_model_len": 128}]}} | --context-length 256
sglang | {"version": "0.5.9"} | 0.5.20 or later
sglang | {"enable_watermark": true} | --enable-watermark
sglang | {"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 0.9} | threshold-acc 1.0
sglang | {"/model_info": {"model_path": "m", "weight_version": "1", "is_generation": false}} | --is-embedding
""")
async def test_a_setting_that_would_falsify_training_is_refused_by_its_flag(dialect, said: Any, named):
    """`said`: settings of the server, and by path its answers: bodies, text, or statuses."""
    async with open_fake_server(dialect, vocab_size=300, context_length=256, settings=said) as server:
        for path, answer in said.items():
            if path.startswith("/"):
                answer = answer.encode() if isinstance(answer, str) else answer
                server.overrides[path] = Reply(status=answer) if isinstance(answer, int) else answer
        await refuse(server, EngineSetupError, named, context_length=256)


async def test_log_probs_at_another_temperature_are_refused():
    async with open_fake_server("sglang", vocab_size=300) as server:

        def answer(body):
            assert body["sampling_params"]["temperature"] == 1e-3
            return SGLANG_ANSWER.replace("ID", body["rid"]).encode()

        server.overrides["/generate"] = answer
        await refuse(server, EngineSetupError, "SGLANG_RETURN_ORIGINAL_LOGPROB")


@BOTH
async def test_another_vocabulary_is_refused(dialect, tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    async with open_fake_server(dialect, vocab_size=300, model=str(tmp_path)) as server:
        async with server.open_engine() as engine:
            assert engine.features.vocab_size == 300
        await refuse(server, EngineSetupError, "the same model", vocab_size=400)


@BOTH
async def test_a_server_that_is_gone_or_busy_is_not_one_with_wrong_settings(dialect):
    async with open_fake_server(dialect) as server:
        for status in (503, 500):
            server.overrides["/server_info"] = Reply(status=status)
            await refuse(server, InfrastructureError)
        server.process.crash()
        await refuse(server, EngineUnreachable)


@BOTH
async def test_a_key_is_asked_for_sent_and_never_shown(dialect):
    async with open_fake_server(dialect, api_key="secret-1") as server:
        async with server.open_engine() as engine:
            await engine.generate(make_request())
        server.api_key = "secret-2"
        server.overrides["/server_info"] = b'{"api_key": "secret-2", "version": 3, "vllm_config": 4}'
        assert "secret" not in await refuse(server, EngineError)


@cases("""
dialect | settings                              | seeds | gap
vllm    | scheduler_config = {}                 | no    | --no-enable-chunked-prefill
vllm    | device_config = { device = "cuda" }   | yes   | --enable-sleep-mode
sglang  |                                       | no    | --enable-deterministic-inference
sglang  | enable_deterministic_inference = true | yes   | --enable-memory-saver
""")
async def test_features_say_what_the_server_can(dialect, settings: dict, seeds: bool, gap):
    async with open_both(dialect, settings=settings) as (server, engine):
        features = engine.features
        assert (features.seeds, features.context_length, features.checksum) == (seeds, 256, True)
        assert any(gap in sentence for sentence in features.gaps)
        await engine.generate(make_request(seed=7))
        # a seed would end a vLLM server on a CPU that computes prompts in parts
        assert ("seed" in server.calls[-1][1]["sampling_params"]) is (seeds and dialect == "vllm")


# --- requests -----------------------------------------------------------------------------------------------


async def test_what_no_server_may_be_sent_is_refused_before_it_is():
    async with open_both("sglang") as (server, engine):
        with pytest.raises(RequestRefused, match=r"prompt_ids holds \[300\]"):
            await engine.generate(make_request(prompt=(1, 300)))
        assert not server.calls


@BOTH
async def test_silence_ends_a_request_when_the_server_stands_still_or_lost_it(dialect, autojump_clock):
    async with open_both(dialect, silence_s=10.0, token_s=7.0) as (server, engine):
        assert len((await engine.generate(make_request(max_new_tokens=20))).token_ids) == 20
        server.process.hang()
        with trio.fail_after(60):
            await ask_in_vain(engine, EngineSilent)
        server.process.hang(0)
        server.overrides[GENERATE[dialect == "sglang"]] = never  # the server has lost it
        with trio.fail_after(60):
            await ask_in_vain(engine, EngineSilent)


@BOTH
async def test_the_first_request_of_a_server_that_warms_up_has_the_patience_of_its_start(
    dialect, autojump_clock, tmp_path
):
    path = write_snapshot(tmp_path / "v1")
    async with open_both(dialect, silence_s=20.0) as (server, engine):
        for version in (1, 2):
            server.process.hang(500)
            assert (await engine.generate(make_request())).finish_reason == "length"
            server.process.hang()
            began_s = trio.current_time()
            await ask_in_vain(engine, EngineSilent, r"engine\.args")
            assert trio.current_time() - began_s <= 45.0  # it has answered before
            await server.process.restart()
            await update(engine, path, version)  # finds out that it is another process


@BOTH
async def test_a_server_that_never_answers_its_first_request_is_given_up_after_its_start(
    dialect, autojump_clock
):
    async with open_fake_server(dialect, vocab_size=300, context_length=256) as server:
        server.overrides[GENERATE[dialect == "sglang"]] = never
        silent = r"no answer to its first request within 600 s; .*engine\.args"
        await refuse(server, EngineSilent, silent, context_length=256)


@BOTH
async def test_a_paused_server_may_be_silent(dialect, autojump_clock):
    async with open_both(dialect, silence_s=10.0, token_s=1.0) as (_, engine):
        async with asked(engine, make_request(max_new_tokens=8)) as answers:
            await trio.sleep(3.5)
            await engine.pause("keep")
            await trio.sleep(500)
            assert not answers
            await engine.resume()
        assert len(answers["a"].token_ids) == 8


async def test_ids_never_begin_with_one_another_and_two_runs_never_share_a_cache_of_one_version():
    async with open_fake_server("sglang") as server:
        for _ in range(2):
            async with server.open_engine() as engine:
                await engine.generate(make_request())
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert len({body["rid"] for body in bodies}) == 4 and {len(body["rid"]) for body in bodies} == {32}
    keys = [body["extra_key"] for body in bodies]
    assert keys[0] == keys[1] != keys[2] == keys[3]


# --- pause and abort ----------------------------------------------------------------------------------------


@BOTH
async def test_pause_wait_lets_requests_finish_before_the_server_is_paused(dialect, autojump_clock):
    async with open_both(dialect, token_s=1.0) as (server, engine):
        async with asked(engine, make_request(max_new_tokens=5)) as first:
            await engine.pause("wait")
            assert len(first["a"].token_ids) == 5 and server.process.paused is not None
        async with asked(engine, make_request("b")) as second:
            assert len(server.paths(*GENERATE)) == 1  # it waits at the gate
            await engine.abort_all()
        assert second["b"].finish_reason == "abort"
        await engine.resume()


@BOTH
@cases("mode: abort wait keep")
async def test_a_pause_or_resume_that_fails_or_is_cancelled_holds_nobody_up(dialect, mode, autojump_clock):
    paths = {"vllm": "/pause /resume", "sglang": "/pause_generation /continue_generation"}
    pause, resume = paths[dialect].split()
    async with open_both(dialect) as (server, engine):
        server.overrides = dict.fromkeys((pause, resume), Reply(b"no", status=500))
        with pytest.raises(InfrastructureError):
            await engine.pause(mode)
        server.overrides[pause] = never
        with trio.move_on_after(5):
            await engine.pause(mode)
        assert len((await engine.generate(make_request())).token_ids)
        del server.overrides[pause]
        await engine.pause(mode)
        with pytest.raises(InfrastructureError):
            await engine.resume()
        server.process.paused = None
        assert len((await engine.generate(make_request())).token_ids)


@BOTH
async def test_an_abort_that_the_server_ignores_or_refuses_leaves_nobody_in_flight(dialect, autojump_clock):
    path = "/abort_requests" if dialect == "vllm" else "/abort_request"
    refused = pytest.raises(InfrastructureError)
    async with open_both(dialect, token_s=30.0) as (server, engine):
        for said, expected in (({}, nullcontext()), (Reply(status=500), refused)):
            server.overrides[path] = said
            async with asked(engine, make_request()) as answers:
                with trio.fail_after(6.1), expected:
                    await engine.abort_all()
            assert (answers["a"].finish_reason, len(answers["a"].token_ids)) == ("abort", 0)


@BOTH
async def test_memory_is_released_only_while_nothing_runs_and_the_pause_survives(dialect, autojump_clock):
    if dialect == "vllm":
        model = VLLM_MODEL | {"enable_sleep_mode": True}
        settings = {"model_config": model, "device_config": {"device": "cuda"}}
        calls = "/sleep", "/wake_up", "/pause"
    else:
        settings = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        calls = "/release_memory_occupation", "/resume_memory_occupation", "/pause_generation"
    async with open_both(dialect, settings=settings) as (server, engine):
        server.overrides |= {path: {} for path in calls[:2]}
        with pytest.raises(EngineError, match="pause"):
            await engine.release_memory()
        await engine.pause("abort")
        await engine.release_memory()
        await engine.restore_memory()
        assert [path.split("?")[0] for path in server.paths()][-3:] == [*calls]
    async with open_both(dialect) as (_, engine):
        with pytest.raises(EngineError, match="keeps its memory"):
            await engine.release_memory()


async def test_closing_ends_whoever_waits(autojump_clock):
    async with trio.open_nursery() as nursery, open_both("vllm", token_s=30.0) as (_, engine):
        nursery.start_soon(ask_in_vain, engine, EngineClosed)
        await wait_all_tasks_blocked()

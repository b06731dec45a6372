"""What the vLLM engine makes of answers: bodies that a real server gave, whole and spoiled, and a server in
this process that misbehaves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import trio
import trio.testing

from rollouts.engines.http import HttpReply
from rollouts.engines.server import EngineServer
from rollouts.engines.server_engine import ServerEngine
from rollouts.engines.snapshot import check_same_model, read_tensor_shapes
from rollouts.engines.vllm import (
    SERVER_PREFIX,
    _shake_hands,
    make_generate_body,
    parse_generated,
    parse_metrics,
)
from rollouts.engines.wire import VersionSpan, make_completion, parse_version
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    EngineSetupError,
    EngineSilent,
    EngineUnreachable,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    SnapshotError,
    WeightVersionError,
)
from rollouts.testing.engine_contracts import make_request

# vLLM 0.32.0, SmolLM2-135M, prompt 1 2 3, temperature 1
REPLY = (
    b'{"request_id":"generate-tokens-abc","model":"policy","created":1795307680,"usage":{"prompt_tokens":3,"total_tokens":7,'
    b'"completion_tokens":4,"prompt_tokens_details":null,"completion_tokens_details":null},"prompt_logprobs":null,'
    b'"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,'
    b'"token_ids":[2118,30,378,6734],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":4}],'
    b'"logprobs":{"content":[{"token_id":2118,"logprob":-8.270934104919434,"rank":725,"top_logprobs":[{"token_id":2118,'
    b'"logprob":-8.270934104919434,"rank":725}]},{"token_id":30,"logprob":-1.3260724544525146,"rank":1,"top_logprobs":[{"token_id":30,'
    b'"logprob":-1.3260724544525146,"rank":1}]},{"token_id":378,"logprob":-2.4623680114746094,"rank":2,"top_logprobs":[{"token_id":378,'
    b'"logprob":-2.4623680114746094,"rank":2}]},{"token_id":6734,"logprob":-7.636433124542236,"rank":338,"top_logprobs":[{"token_id":6734,'
    b'"logprob":-7.636433124542236,"rank":338}]}]}}]}'
)
METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="policy"} 12.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 521.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="policy"} 521.0
vllm:iteration_tokens_total_count{engine="0",model_name="policy"} 521.0
vllm:iteration_tokens_total_created{engine="0",model_name="policy"} 1.7953076319402316e+09
python_gc_objects_collected_total{generation="0"} 15129.0
"""
VOCAB_SIZE = 49152


def parse(body: bytes, *, max_new_tokens: int = 4, server_id: str = "abc"):
    return parse_generated(
        body,
        make_request("r", max_new_tokens=max_new_tokens),
        server_id,
        vocab_size=VOCAB_SIZE,
        where="engine",
    )


def changed(edit: Callable[[Any], object]) -> bytes:
    """REPLY after `edit` did something to its only choice."""
    record = json.loads(REPLY)
    edit(record["choices"][0])
    return json.dumps(record).encode()


def test_a_real_answer_becomes_a_completion():
    completion = parse(REPLY)
    assert completion.request_id == "r"
    assert completion.token_ids.tolist() == [2118, 30, 378, 6734]
    np.testing.assert_allclose(completion.log_probs, [-8.270934, -1.3260725, -2.462368, -7.636433], rtol=1e-6)
    assert completion.weight_versions.tolist() == [-1] * 4
    assert completion.finish_reason == "length"


def test_an_answer_cut_at_any_byte_is_a_reply_error():
    for length in range(len(REPLY)):
        with pytest.raises(ReplyError):
            parse(REPLY[:length])


def test_a_byte_that_is_no_text_is_a_reply_error():
    with pytest.raises(ReplyError):
        parse(REPLY.replace(b"tokens-abc", b"tokens-\xffbc"))


@pytest.mark.parametrize(
    "number", [b"NaN", b"Infinity", b"-Infinity", b"null", b"1e999", b'"-1.3"', b"0.5", b"-9999.0", b"true"]
)
def test_a_log_prob_that_is_none_is_a_reply_error(number: bytes):
    assert REPLY.count(b"-1.3260724544525146") == 2
    with pytest.raises(ReplyError):
        parse(REPLY.replace(b"-1.3260724544525146", number, 1))


def set_tokens(*tokens: Any) -> Callable[[Any], object]:
    def edit(choice: Any) -> None:
        choice["token_ids"] = list(tokens)
        for entry, token in zip(choice["logprobs"]["content"], tokens, strict=False):
            entry["token_id"] = token

    return edit


def set_spans(*spans: tuple[str, int, int]) -> Callable[[Any], object]:
    return lambda choice: choice.update(
        weight_versions=[{"version": version, "start": start, "end": end} for version, start, end in spans]
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_tokens(2118, 30, 378, VOCAB_SIZE), "id 49152, outside the vocabulary of 49152"),
        (set_tokens(2118, -1, 378, 6734), "id -1, outside"),
        (set_tokens(2118, 30.5, 378, 6734), "Expected `int`"),
        (set_tokens(2118, None, 378, 6734), "Expected `int`"),
        (set_tokens(2118, 30, 378), "4 log-probs for 3 tokens"),
        (
            lambda choice: choice.update(finish_reason="stop"),
            r"'stop' after token 6734, which is none of stop_token_ids=\[\]",
        ),
        (set_tokens(), "no token, yet finish reason 'length'"),
        (lambda choice: choice["token_ids"].reverse(), "its log-prob is of token 2118"),
        (lambda choice: choice["logprobs"]["content"].pop(), "3 log-probs for 4 tokens"),
        (lambda choice: choice.update(logprobs=None), "Expected `object`"),
        (lambda choice: choice.pop("logprobs"), "missing required field `logprobs`"),
        (lambda choice: choice.update(weight_versions=None), "Expected `array`"),
        (set_spans(), "cover 0 of 4 tokens"),
        (set_spans(("7", 0, 3)), "cover 3 of 4 tokens"),
        (set_spans(("7", 0, 5)), "0..5"),
        (set_spans(("7", 1, 4)), "1..4"),
        (set_spans(("7", 0, 2), ("8", 3, 4)), "3..4"),
        (set_spans(("7", 0, 3), ("8", 2, 4)), "2..4"),
        (set_spans(("8", 0, 2), ("7", 2, 4)), "token 2 is of version 7"),
        (set_spans(("7", 0, 2), ("loading", 2, 4)), "token 2 is of version -1"),
        (lambda choice: choice.update(finish_reason="error"), "Invalid enum value 'error'"),
        (lambda choice: choice.update(finish_reason="repetition"), "Invalid enum value 'repetition'"),
        (lambda choice: choice.update(finish_reason=None), "Expected `str`"),
    ],
)
def test_an_impossible_answer_is_a_reply_error(edit: Callable[[Any], object], message: str):
    with pytest.raises(ReplyError, match=message):
        parse(changed(edit))


def test_an_answer_cut_short_is_not_called_one_that_reached_its_limit():
    with pytest.raises(ReplyError, match="4 tokens, yet finish reason 'length' for max_new_tokens=100"):
        parse(REPLY, max_new_tokens=100)


@pytest.mark.parametrize("number", [b"-1e5", b"-3.4e38", b"-1e39", b"-10001"])
def test_a_log_prob_that_stands_for_minus_infinity_is_a_reply_error(number: bytes):
    with pytest.raises(ReplyError, match="log-prob of token 1"):
        parse(REPLY.replace(b"-1.3260724544525146", number, 1))


def test_a_log_prob_is_bounded_in_every_dialect():
    def complete(log_prob: float) -> float:
        spans = [VersionSpan("1", 0, 4)]
        completion = make_completion(
            make_request("r"), [1] * 4, [-1.0, log_prob, -1.0, -1.0], spans, "length", vocab_size=2, where="s"
        )
        return float(completion.log_probs[1])

    assert complete(-1e4) == -1e4
    for log_prob in (-10000.5, -3.4e38, -1e39, float("-inf")):
        with pytest.raises(ReplyError, match="at least -10000"):
            complete(log_prob)


@pytest.mark.parametrize(("name", "version"), [("0", 0), ("7", 7), ("9" * 18, 10**18 - 1)])
def test_a_version_is_a_decimal_number(name: str, version: int):
    assert parse_version(name) == version


@pytest.mark.parametrize(
    "name", ["default", "", "-1", "+1", "07", "1.0", "1_0", " 1", "1\n", "١", "9" * 19, "9" * 10_000]
)
def test_any_other_name_of_a_version_is_of_weights_that_were_never_sent(name: str):
    assert parse_version(name) == -1


def test_more_tokens_than_asked_for_are_a_reply_error():
    with pytest.raises(ReplyError, match="more than max_new_tokens=3"):
        parse(REPLY, max_new_tokens=3)


def test_the_answer_to_another_request_is_a_reply_error():
    with pytest.raises(ReplyError, match="generate-tokens-abc"):
        parse(REPLY, server_id="abd")


def test_two_choices_are_a_reply_error():
    record = json.loads(REPLY)
    record["choices"] *= 2
    with pytest.raises(ReplyError, match="2 choices"):
        parse(json.dumps(record).encode())


def test_each_token_has_the_version_of_its_span():
    completion = parse(changed(set_spans(("default", 0, 1), ("7", 1, 3), ("12", 3, 4))))
    assert completion.weight_versions.tolist() == [-1, 7, 7, 12]


def test_an_abort_before_the_first_token_is_an_empty_completion():
    def edit(choice: Any) -> None:
        choice |= {
            "token_ids": [],
            "logprobs": {"content": []},
            "weight_versions": [],
            "finish_reason": "abort",
        }

    completion = parse(changed(edit))
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 0)


def test_only_the_requests_own_stop_tokens_end_it():
    body = make_generate_body(
        make_request(stop_token_ids=(2,), seed=2**64 - 1, top_k=5, top_p=0.9), "id", model="policy"
    )
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "logprobs": 0,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "detokenize": False,
        "seed": 2**63 - 1,
    }


def test_metrics_are_summed_over_engines():
    metrics = parse_metrics(METRICS, where="engine")
    assert metrics["vllm:num_requests_running"] == 5.0
    assert metrics["vllm:generation_tokens_total"] == 521.0
    assert not any(name.startswith("python") for name in metrics)
    assert parse_metrics(b"vllm:plain 3 1795307680\n", where="engine") == {"vllm:plain": 3.0}
    with pytest.raises(ReplyError, match="has no number"):
        parse_metrics(b'vllm:x{a="b"} one\n', where="engine")


@pytest.mark.parametrize("number", [b"NaN", b"+Inf", b"-Inf", b"1e999"])
def test_a_count_that_is_no_number_is_no_progress(number: bytes):
    with pytest.raises(ReplyError, match="no finite number"):
        parse_metrics(b"vllm:generation_tokens_total " + number, where="engine")


# --- a server in this process -------------------------------------------------------------------------------

CONFIG = {
    "model_config": {
        "model": "/elsewhere",
        "max_model_len": 512,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
    },
    "device_config": {"device": "cuda"},
    "parallel_config": {"_api_process_count": 1},
    "weight_transfer_config": None,
}


class Server:
    """Answers like vLLM. `answers` are put before its own: a reply, a body or an error by path."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = CONFIG | (config or {})
        self.answers: dict[str, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.version = "default"
        self.paused = False

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = 60.0,
    ) -> HttpReply:
        await trio.lowlevel.checkpoint()
        sent = None if body is None else json.loads(body)
        self.calls.append((path, sent))
        answer = self.answers.get(path.split("?")[0])
        if callable(answer):
            answer = answer(sent)
        if isinstance(answer, trio.Event):  # says nothing until it is set
            with trio.move_on_after(silence_s):
                await answer.wait()
            if not answer.is_set():
                raise EngineSilent(f"{path} said nothing")
            answer = None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, HttpReply):
            return answer
        return HttpReply(
            200,
            {},
            answer
            if isinstance(answer, bytes)
            else json.dumps(self.answer(path.split("?")[0], sent)).encode(),
        )

    def answer(self, path: str, sent: Any) -> Any:
        if path == "/pause":
            self.paused = True
        if path == "/resume":
            self.paused = False
        if path == "/update_weight_version":
            self.version = sent["new_version"]
        if path == "/inference/v1/generate":
            record = json.loads(REPLY)
            record["request_id"] = SERVER_PREFIX + sent.get("request_id", "")
            return record
        return {
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 512}]},
            "/server_info": {"vllm_config": self.config},
            "/weight_info": {"weight_version": self.version},
            "/is_paused": {"is_paused": self.paused},
            "/reset_prefix_cache": {"success": True},
        }.get(path, {})

    def statistics(self) -> dict[str, float]:
        return {}


def make_server(config: dict[str, Any] | None = None) -> Server:
    server = Server(config)
    server.answers["/metrics"] = METRICS
    return server


async def open_engine(
    server: Server, *, context_length: int | None = None, silence_s: float = 10.0
) -> ServerEngine:
    client = EngineServer(server, name="engine", silence_s=silence_s)
    return await _shake_hands(client, vocab_size=VOCAB_SIZE, context_length=context_length)


@pytest.mark.parametrize(
    ("device", "in_parts", "seeds"),
    [("cuda", True, True), ("cuda", False, True), ("cpu", False, True), ("cpu", True, False)],
)
async def test_a_seed_that_would_end_the_server_is_not_sent_and_the_engine_says_so(
    device: str, in_parts: bool, seeds: bool
):
    server = make_server(
        {"device_config": {"device": device}, "scheduler_config": {"enable_chunked_prefill": in_parts}}
    )
    engine = await open_engine(server)
    assert engine.features.seeds is seeds
    assert any("--no-enable-chunked-prefill" in gap for gap in engine.features.gaps) is not seeds
    body = make_generate_body(make_request(seed=7), "id", model="policy", seeds=engine.features.seeds)
    assert ("seed" in body["sampling_params"]) is seeds


def refusal(status: int) -> HttpReply:
    return HttpReply(status, {}, b"no")


@pytest.mark.parametrize(
    ("config", "answers", "named"),
    [
        ({}, {"/v1/models": refusal(401)}, "--api-key"),
        ({}, {"/server_info": refusal(404)}, "VLLM_SERVER_DEV_MODE=1"),
        ({}, {"/server_info": b'{"vllm_config":{"model_config":{"model":"m"}}}'}, "cannot be told"),
        ({}, {"/inference/v1/generate": refusal(403)}, "--enable-scale-out"),
        ({}, {"/inference/v1/generate": refusal(400)}, "vocabulary of 49152"),
        (
            {},
            {"/inference/v1/generate": changed(lambda choice: choice.update(weight_versions=None))},
            "weight_versions",
        ),
        ({}, {"/metrics": b"python_info 1\n"}, "--disable-log-stats"),
        (
            {"model_config": CONFIG["model_config"] | {"logprobs_mode": "raw_logprobs"}},
            {},
            "--logprobs-mode processed_logprobs",
        ),
        ({"model_config": CONFIG["model_config"] | {"max_model_len": 128}}, {}, "--max-model-len 256"),
        ({"parallel_config": {"_api_process_count": 2}}, {}, "--api-server-count 1"),
    ],
)
async def test_a_missing_setting_is_named_by_its_flag(
    config: dict[str, Any], answers: dict[str, Any], named: str
):
    server = make_server(config)
    server.answers |= answers
    with pytest.raises(EngineSetupError, match=named):
        await open_engine(server, context_length=256)


async def test_a_server_that_is_gone_or_busy_is_not_one_with_wrong_settings():
    for path in ("/v1/models", "/server_info", "/inference/v1/generate"):
        for failure, kind in (
            (EngineUnreachable("refused"), EngineUnreachable),
            (refusal(503), EngineOverloaded),
        ):
            server = make_server()
            server.answers[path] = failure
            with pytest.raises(kind):
                await open_engine(server)


async def test_features_say_what_the_server_tells():
    engine = await open_engine(
        make_server({"model_config": CONFIG["model_config"] | {"enable_sleep_mode": True}})
    )
    assert (engine.features.context_length, engine.features.frees_memory) == (512, True)
    assert (await open_engine(make_server(), context_length=100)).features.context_length == 100
    on_cpu = make_server(
        {
            "device_config": {"device": "cpu"},
            "model_config": CONFIG["model_config"] | {"enable_sleep_mode": True},
        }
    )
    assert not (await open_engine(on_cpu)).features.frees_memory


def write_snapshot(path: Path) -> Path:
    path.mkdir()
    safetensors.numpy.save_file({"w": np.zeros((2, 2), np.float32)}, path / "model.safetensors")
    return path


async def test_an_update_names_its_version_last_and_has_no_number_meanwhile(tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    await engine.pause("keep")
    server.calls.clear()
    await engine.update_weights_from_checkpoint(write_snapshot(tmp_path / "new"), 7)
    assert [(path, sent) for path, sent in server.calls if sent is not None or path.startswith("/reset")] == [
        ("/update_weight_version", {"new_version": "loading"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "new")}}),
        ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("/update_weight_version", {"new_version": "7"}),
    ]
    assert await engine.weight_version() == 7


async def test_a_cache_that_is_not_reset_fails_the_update_and_leaves_no_version(tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    await engine.pause("keep")
    server.answers["/reset_prefix_cache"] = b'{"success": false}'
    with pytest.raises(EngineError, match="prefix cache"):
        await engine.update_weights_from_checkpoint(write_snapshot(tmp_path / "new"), 7)
    assert await engine.weight_version() == -1


async def test_another_version_than_the_one_given_is_an_error(tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    await engine.pause("keep")
    server.answers["/weight_info"] = b'{"weight_version": "6"}'
    with pytest.raises(WeightVersionError, match="given version 7 and says 6"):
        await engine.update_weights_from_checkpoint(write_snapshot(tmp_path / "new"), 7)


@pytest.mark.parametrize("heals", [True, False])
async def test_a_load_that_fails_is_followed_by_the_weights_before(heals: bool, tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    old, new = write_snapshot(tmp_path / "old"), write_snapshot(tmp_path / "new")
    await engine.pause("keep")
    await engine.update_weights_from_checkpoint(old, 3)
    server.answers["/collective_rpc"] = lambda sent: (
        None if heals and sent["kwargs"]["weights_path"] == str(old) else refusal(500)
    )
    with pytest.raises(
        EngineError, match="has its version 3 back" if heals else "in pieces and must be restarted"
    ):
        await engine.update_weights_from_checkpoint(new, 4)
    assert await engine.weight_version() == (3 if heals else -1)


def fail_to_load(server: Server, *paths: Path) -> None:
    failing = [str(path) for path in paths]
    server.answers["/collective_rpc"] = lambda sent: (
        refusal(500) if sent["kwargs"]["weights_path"] in failing else None
    )


def loads(server: Server) -> list[str]:
    return [sent["kwargs"]["weights_path"] for path, sent in server.calls if path == "/collective_rpc"]


async def test_weights_of_an_earlier_run_are_not_confused_with_those_the_server_was_started_with(
    tmp_path: Path,
):
    server = make_server()
    server.version = "7"  # an earlier run's: its snapshot is nowhere
    engine = await open_engine(server)
    new = write_snapshot(tmp_path / "new")
    fail_to_load(server, new)
    await engine.pause("keep")
    with pytest.raises(
        EngineError, match=r"has the weights of /elsewhere, which are not of version 7 .* restart it"
    ):
        await engine.update_weights_from_checkpoint(new, 8)
    assert loads(server) == [str(new), "/elsewhere"]
    assert await engine.weight_version() == -1


async def test_weights_sent_in_memory_are_not_confused_with_a_snapshot(tmp_path: Path):
    server = make_server({"weight_transfer_config": {"backend": "nccl"}})
    engine = await open_engine(server)
    old, new = write_snapshot(tmp_path / "old"), write_snapshot(tmp_path / "new")
    await engine.pause("keep")
    await engine.update_weights_from_checkpoint(old, 4)
    await engine.dialect.start_weight_update()
    await engine.dialect.finish_weight_update(5)
    fail_to_load(server, new)
    with pytest.raises(EngineError, match="which are not of version 5"):
        await engine.update_weights_from_checkpoint(new, 6)
    assert await engine.weight_version() == -1


async def test_a_snapshot_that_was_pruned_is_not_loaded_again(tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    old, new = write_snapshot(tmp_path / "old"), write_snapshot(tmp_path / "new")
    await engine.pause("keep")
    await engine.update_weights_from_checkpoint(old, 3)
    shutil.rmtree(old)
    fail_to_load(server, new)
    with pytest.raises(EngineError, match="has the weights of /elsewhere, which are not of version 3"):
        await engine.update_weights_from_checkpoint(new, 4)
    assert loads(server)[-1] == "/elsewhere"
    assert await engine.weight_version() == -1


async def test_a_server_that_came_back_with_raw_log_probs_is_not_updated(tmp_path: Path):
    server = make_server()
    engine = await open_engine(server)
    new = write_snapshot(tmp_path / "new")
    await engine.pause("keep")
    await engine.update_weights_from_checkpoint(new, 3)
    server.version, server.config = (
        "default",
        CONFIG | {"model_config": CONFIG["model_config"] | {"logprobs_mode": "raw_logprobs"}},
    )
    with pytest.raises(EngineSetupError, match="--logprobs-mode processed_logprobs"):
        await engine.update_weights_from_checkpoint(new, 4)
    assert loads(server) == [str(new)]


async def test_a_key_among_the_settings_is_not_shown():
    server = make_server()
    server.answers["/server_info"] = b'{"api_key": "SECRET", "vllm_config": {"model_config": {"model": "m"}}}'
    with pytest.raises(EngineSetupError, match="max_model_len") as raised:
        await open_engine(server)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_pause_that_the_server_refuses_holds_nobody_up(mode: Any):
    server = make_server()
    engine = await open_engine(server)
    server.answers["/pause"] = refusal(500)
    with pytest.raises(InfrastructureError):
        await engine.pause(mode)
    with trio.fail_after(5):
        await engine.generate(make_request())


async def test_a_pause_that_is_cancelled_holds_nobody_up(autojump_clock: trio.testing.MockClock):
    server = make_server()
    engine = await open_engine(server)
    answered = trio.Event()
    server.answers["/inference/v1/generate"] = answered
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, make_request())
        await trio.testing.wait_all_tasks_blocked(0.1)
        with trio.move_on_after(1):
            await engine.pause("wait")
        answered.set()
    with trio.fail_after(5):
        await engine.generate(make_request())


async def test_a_resume_that_fails_holds_nobody_up():
    server = make_server()
    engine = await open_engine(server)
    await engine.pause("keep")
    server.answers["/resume"] = refusal(500)
    with pytest.raises(InfrastructureError):
        await engine.resume()
    with trio.fail_after(5):
        await engine.generate(make_request())


async def test_a_server_that_says_nothing_is_not_well_after_ten_seconds(
    autojump_clock: trio.testing.MockClock,
):
    server = make_server()
    server.answers["/health"] = trio.Event()
    begun_s = trio.current_time()
    assert not await (await open_engine(server, silence_s=60.0)).health()
    assert trio.current_time() - begun_s == pytest.approx(10.0)


async def test_silence_ends_a_request_only_when_the_server_stands_still(
    autojump_clock: trio.testing.MockClock,
):
    server = make_server()
    engine = await open_engine(server)
    done = 0

    def count(sent: Any) -> bytes:
        nonlocal done
        done += trio.current_time() < 100
        return METRICS.replace(b" 521.0", b" %d.0" % (521 + done))

    server.answers |= {"/metrics": count, "/inference/v1/generate": trio.Event()}
    with pytest.raises(EngineSilent):
        await engine.generate(make_request())
    assert 100 <= trio.current_time() <= 130  # silence_s is 10: it moved until 100, and was asked twice after


async def test_a_paused_server_may_be_silent(autojump_clock: trio.testing.MockClock):
    server = make_server()
    engine = await open_engine(server)
    answered = trio.Event()
    server.answers["/inference/v1/generate"] = answered
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, make_request())
        await trio.testing.wait_all_tasks_blocked(0.1)
        await engine.pause("keep")
        await trio.sleep(3600)
        await engine.resume()
        answered.set()


async def test_silence_during_pause_wait_is_a_failure(autojump_clock: trio.testing.MockClock):
    server = make_server()
    engine = await open_engine(server)
    server.answers["/inference/v1/generate"] = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(EngineSilent):
                    await engine.generate(make_request())

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.1)
            await engine.pause("wait")


async def test_an_abort_that_the_server_ignores_ends_after_the_grace(autojump_clock: trio.testing.MockClock):
    server = make_server()
    engine = await open_engine(server)
    server.answers["/inference/v1/generate"] = trio.Event()
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await engine.generate(make_request()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked(0.1)
        begun = trio.current_time()
        await engine.abort_all()
        assert trio.current_time() - begun == pytest.approx(5.0)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("abort", 0)]
    aborted = [sent["request_ids"] for path, sent in server.calls if path == "/abort_requests"]
    assert len(aborted) == 5  # said again every second
    assert all(len(ids) == 1 and ids[0].startswith(SERVER_PREFIX) for ids in aborted)


async def test_weight_transfer_calls_go_out_in_the_servers_shape():
    server = make_server({"weight_transfer_config": {"backend": "nccl"}})
    engine = await open_engine(server)
    await engine.dialect.init_weight_transfer({"master_port": 1})
    with pytest.raises(EngineError, match=r"call pause\(\)"):
        await engine.dialect.start_weight_update()
    await engine.pause("keep")
    server.calls.clear()
    await engine.dialect.start_weight_update()
    assert await engine.weight_version() == -1
    await engine.dialect.update_weights({"names": ["w"]})
    await engine.dialect.finish_weight_update(4)
    assert await engine.weight_version() == 4
    posts = [path for path, _ in server.calls if "update" in path]
    assert posts == [
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
    ]
    assert ("/update_weights", {"update_info": {"names": ["w"]}}) in server.calls


@pytest.mark.parametrize("config", [None, {"backend": "ipc"}])
async def test_weight_transfer_that_is_off_or_unsafe_names_the_flag(config: Any):
    engine = await open_engine(make_server({"weight_transfer_config": config}))
    with pytest.raises(EngineSetupError, match="nccl"):
        await engine.dialect.init_weight_transfer({})


async def test_memory_is_released_only_while_nothing_runs_and_the_pause_survives():
    server = make_server({"model_config": CONFIG["model_config"] | {"enable_sleep_mode": True}})
    engine = await open_engine(server)
    with pytest.raises(EngineError, match="pause"):
        await engine.release_memory()
    await engine.pause("wait")
    server.calls.clear()
    await engine.release_memory()
    await engine.restore_memory()
    assert [path for path, _ in server.calls] == ["/sleep?level=1&mode=wait", "/wake_up", "/pause?mode=keep"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestRefused), (429, EngineOverloaded), (500, InfrastructureError), (503, EngineOverloaded)],
)
async def test_statuses_of_a_generate_call_are_typed(status: int, kind: type[Exception]):
    server = make_server()
    engine = await open_engine(server)
    server.answers["/inference/v1/generate"] = refusal(status)
    with pytest.raises(kind):
        await engine.generate(make_request())


# --- snapshots ----------------------------------------------------------------------------------------------


def test_shapes_are_read_from_all_shards_of_the_index(tmp_path: Path):
    safetensors.numpy.save_file(
        {"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-1.safetensors", {"format": "pt"}
    )
    safetensors.numpy.save_file({"b": np.zeros((), np.float16)}, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    assert read_tensor_shapes(tmp_path) == {"a": (2, 3), "b": ()}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../a.safetensors"}}', "beside their index"),
        ("model.safetensors.index.json", b'{"weight_map": ["a"]}', "is damaged"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "gone.safetensors cannot be read",
        ),
        ("model.safetensors", b"", "cannot be read"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little"), "is cut"),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"a": 1}', "is cut"),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"a": 1}', "cannot be read"),
        ("pytorch_model.bin", b"pickle", r"has no \*.safetensors file"),
    ],
)
def test_damaged_snapshots_are_named(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SnapshotError, match=message):
        read_tensor_shapes(tmp_path)


def test_every_cut_of_a_snapshot_is_seen(tmp_path: Path):
    whole = (write_snapshot(tmp_path / "whole") / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            read_tensor_shapes(tmp_path)


def test_a_tied_output_layer_and_rotary_frequencies_may_be_missing(tmp_path: Path):
    check_same_model(
        {"w": (2,)},
        {"w": (2,), "lm_head.weight": (4, 2), "layers.0.rotary_emb.inv_freq": (1,)},
        path=tmp_path,
    )
    check_same_model({"w": (2,), "lm_head.weight": (4, 2)}, {"w": (2,)}, path=tmp_path)

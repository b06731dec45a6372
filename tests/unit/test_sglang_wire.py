"""What an SGLang server is sent, and what its answers must be: decoded or refused, never repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import trio
import trio.testing

from rollouts.engines.server import EngineServer
from rollouts.engines.server_engine import ServerEngine
from rollouts.engines.sglang import (
    SGLangServer,
    _ServerInfo,
    check_server_info,
    find_gaps,
    make_generate_body,
    open_sglang_engine,
    parse_generate_reply,
    read_server_info,
    read_vocab_size,
)
from rollouts.errors import EngineError, EngineOverloaded, EngineSetupError, InfrastructureError, ReplyError
from rollouts.testing import engine_contracts
from rollouts.types import Completion, EngineFeatures, GenerateRequest

SERVER_ID = "0123456789abcdef0123456789abcdef"
# what a 0.5.23 server answered to a request over whose three tokens its weights were exchanged
BODY = (
    b'{"text":"&x%","output_ids":[38,176,37],"meta_info":{"id":"0123456789abcdef0123456789abcdef","finish_reason":{"type":"length","length":3},'
    b'"prompt_tokens":3,"weight_version":"8","num_retractions":1,"input_token_logprobs":[],"output_token_logprobs":[[-5.23003625869751,38,null],'
    b'[-5.3935112953186035,176,null],[-5.519124507904053,37,null]],"output_token_logprobs_length":3,"reasoning_tokens":0,"completion_tokens":3,'
    b'"cached_tokens":2,"weight_versions":[{"version":"7","start":0,"end":1},{"version":"8","start":1,"end":3}],'
    b'"cached_tokens_details":{"device":2,"host":0},"dp_rank":null,"e2e_latency":0.02587,"response_sent_to_client_ts":1795307587.6366959}}'
)


def make_request(request_id: str = "r", **changes: Any) -> GenerateRequest:
    """One that BODY can answer."""
    options: Any = {"max_new_tokens": 3} | changes
    return engine_contracts.make_request(request_id, **options)


def parse(body: bytes, *, vocab_size: int = 259, ends_at: int | None = None, **changes: Any) -> Completion:
    request = make_request(**changes)
    return parse_generate_reply(
        body, request, SERVER_ID, vocab_size=vocab_size, where="s: POST /generate", ends_at=ends_at
    )


def change(**fields: Any) -> bytes:
    """BODY with `fields` of meta_info replaced, `ids` being output_ids; ... leaves a field out."""
    reply = json.loads(BODY)
    if (ids := fields.pop("ids", None)) is not None:
        reply["output_ids"] = ids
    reply["meta_info"] |= fields
    reply["meta_info"] = {name: value for name, value in reply["meta_info"].items() if value is not ...}
    return json.dumps(reply).encode()


def test_answer_becomes_a_completion_with_the_version_of_every_token():
    completion = parse(BODY)
    assert completion.token_ids.tolist() == [38, 176, 37]
    assert (
        completion.log_probs.tolist()
        == np.asarray([-5.23003625869751, -5.3935112953186035, -5.519124507904053], np.float32).tolist()
    )
    assert completion.weight_versions.tolist() == [7, 8, 8]
    assert completion.finish_reason == "length"


def test_every_cut_of_an_answer_is_refused():
    for length in range(len(BODY)):
        with pytest.raises(ReplyError, match="s: POST /generate"):
            parse(BODY[:length])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", "1e999", '"-5.2"', "0.5", "true"])
def test_log_prob_that_is_no_log_prob_is_refused(value: str):
    with pytest.raises(ReplyError):
        parse(BODY.replace(b"-5.23003625869751", value.encode()))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {
                "ids": [38, 259, 37],
                "output_token_logprobs": [[-1.0, 38, None], [-1.0, 259, None], [-1.0, 37, None]],
            },
            "outside the vocabulary of 259",
        ),
        (
            {
                "ids": [38, -1, 37],
                "output_token_logprobs": [[-1.0, 38, None], [-1.0, -1, None], [-1.0, 37, None]],
            },
            "outside the vocabulary",
        ),
        ({"ids": [38, 176]}, "3 log-probs for 2 tokens"),
        ({"ids": [38, 176, 37, 1, 2]}, "5 tokens, more than max_new_tokens=3"),
        ({"ids": [38, 177, 37]}, "token 1 has id 177, its log-prob is of id 176"),
        (
            {"ids": [], "output_token_logprobs": [], "weight_versions": []},
            "no token, yet finish reason 'length'",
        ),
        ({"output_token_logprobs": ...}, "0 log-probs for 3 tokens"),
        ({"weight_versions": ...}, "version spans cover 0 of 3 tokens"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 2}]}, "cover 2 of 3"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 3}]}, "does not follow 0"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 4}]}, "within 3 tokens"),
        (
            {
                "weight_versions": [
                    {"version": "8", "start": 0, "end": 1},
                    {"version": "7", "start": 1, "end": 3},
                ]
            },
            "token 1 is of version 7",
        ),
        (
            {"finish_reason": {"type": "matched_stop"}},
            "unknown finish reason 'matched_stop'; known: stop, length, abort",
        ),
        ({"finish_reason": None}, "finish_reason"),
        ({"id": "0123456789abcdef0123456789abcde"}, "the answer is to '0123456789abcdef0123456789abcde'"),
        ({"id": ...}, "missing required field `id`"),
    ],
)
def test_answer_that_breaks_a_rule_is_refused_by_name(fields: dict[str, Any], rule: str):
    with pytest.raises(ReplyError) as raised:
        parse(change(**fields))
    assert rule in str(raised.value)


def test_answer_that_contradicts_its_request_is_refused():
    with pytest.raises(ReplyError, match="3 tokens, yet finish reason 'length' for max_new_tokens=100"):
        parse(BODY, max_new_tokens=100)
    with pytest.raises(ReplyError, match="the request has no stop token"):
        parse(change(finish_reason={"type": "stop", "matched": 37}))
    assert (
        parse(
            change(finish_reason={"type": "stop", "matched": 37}), max_new_tokens=100, stop_token_ids=(37,)
        ).finish_reason
        == "stop"
    )


def test_answer_may_be_shorter_where_the_servers_context_ends():
    # make_request has a prompt of 3 tokens: with 3 more the server is full at 6
    assert parse(BODY, max_new_tokens=100, ends_at=6).finish_reason == "length"
    with pytest.raises(ReplyError, match="yet finish reason 'length'"):
        parse(BODY, max_new_tokens=100, ends_at=7)


def test_list_of_answers_is_refused():
    with pytest.raises(ReplyError, match=r"Expected `object`, got `array`"):
        parse(b"[" + BODY + b"]")


def test_request_aborted_before_it_ran_has_no_tokens():
    # such an answer lacks most fields
    meta = {"id": SERVER_ID, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    completion = parse(json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode())
    assert (completion.finish_reason, len(completion.token_ids), len(completion.weight_versions)) == (
        "abort",
        0,
        0,
    )


def test_aborted_request_keeps_what_it_has():
    completion = parse(
        change(finish_reason={"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
    )
    assert (completion.finish_reason, completion.token_ids.tolist()) == ("abort", [38, 176, 37])


@pytest.mark.parametrize(
    ("status", "kind"), [(503, EngineOverloaded), (429, EngineOverloaded), (500, InfrastructureError)]
)
def test_abort_that_is_the_servers_failure_is_no_completion(status: int, kind: type[Exception]):
    with pytest.raises(kind, match=f"status {status}: out of memory"):
        parse(change(finish_reason={"type": "abort", "message": "out of memory", "status_code": status}))


def test_weights_that_were_never_named_are_version_minus_1():
    assert parse(
        change(weight_versions=[{"version": "default", "start": 0, "end": 3}])
    ).weight_versions.tolist() == [-1, -1, -1]


def test_request_says_everything_that_a_server_has_defaults_for():
    request = make_request(
        prompt=(5, 6),
        max_new_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_token_ids=(2, 4),
        seed=2**63 + 5,
    )
    body = msgspec.json.decode(msgspec.json.encode(make_generate_body(request, SERVER_ID, salt="v3")))
    assert body == {
        "rid": SERVER_ID,
        "input_ids": [5, 6],
        "return_logprob": True,
        "extra_key": "v3",
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [2, 4],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "sampling_seed": 5,
        },
    }


def test_request_without_stop_tokens_runs_to_its_limit_over_all_tokens():
    params = make_generate_body(make_request(), SERVER_ID, salt="v0")["sampling_params"]
    assert (params["ignore_eos"], params["top_k"], "sampling_seed" in params) == (True, -1, False)


@pytest.mark.parametrize(
    ("info", "way_out"),
    [
        ({"version": "0.5.19"}, r"install 0\.5\.20 or later"),
        ({"version": "0.5.5.post3"}, r"install 0\.5\.20 or later"),
        ({"version": "0.5.23", "enable_watermark": True}, "without --enable-watermark"),
        (
            {"version": "0.5.23", "speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 0.9},
            "--speculative-accept-threshold",
        ),
    ],
)
def test_server_that_would_falsify_training_is_refused_naming_the_flag(info: dict[str, Any], way_out: str):
    with pytest.raises(EngineSetupError, match=way_out):
        check_server_info(msgspec.convert(info, _ServerInfo), who="s")


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23", "0.6.0rc1", "1.0"])
def test_newer_servers_are_taken(version: str):
    check_server_info(_ServerInfo(version=version), who="s")


def test_gaps_are_what_the_servers_settings_leave_open():
    def gaps(**settings: Any) -> str:
        return " ".join(find_gaps(_ServerInfo(version="0.5.23", **settings), knows_vocab=settings == {}))

    assert "seed" in gaps()
    assert "frees none" in gaps()
    assert "config.json" not in gaps()
    everything = gaps(
        enable_deterministic_inference=True, enable_memory_saver=True, enable_weights_cpu_backup=True
    )
    assert "seed" not in everything
    assert "memory" not in everything
    assert "config.json" in everything


def test_vocabulary_is_read_from_a_models_config(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    assert read_vocab_size(tmp_path) == 300
    (tmp_path / "config.json").write_text('{"vocab_size": 259}')
    assert read_vocab_size(tmp_path) == 259
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    assert read_vocab_size(tmp_path) is None
    assert read_vocab_size(tmp_path / "nowhere") is None


class ScriptedClient:
    """An HttpClient that notes what it is asked; it answers `/generate` when it is released."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.release = trio.Event()
        self.answers: dict[str, Any] = {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = 60.0,
    ) -> Any:
        from rollouts.engines.http import HttpReply

        self.calls.append((path, json.loads(body) if body else {}))
        answer: Any = self.answers.get(path, {"success": True})
        if path == "/generate":
            sent = self.calls[-1][1]
            await self.release.wait()
            answer = json.loads(BODY)
            answer["meta_info"]["id"] = sent["rid"]
        return HttpReply(200, {}, json.dumps(answer).encode())

    def statistics(self) -> dict[str, float]:
        return {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


def make_engine(client: ScriptedClient) -> ServerEngine:
    features = EngineFeatures(259, 2048, False, True, False, True, False, name="s")
    server = EngineServer(client, name="s", silence_s=60.0)
    dialect = SGLangServer(
        server, vocab_size=259, info=_ServerInfo("0.5.23"), shapes=None, ends_at=None, version="7"
    )
    return ServerEngine(server, features, dialect)


async def ask(engine: ServerEngine, request: GenerateRequest, answers: list[Completion]) -> None:
    answers.append(await engine.generate(request))


async def test_pause_wait_lets_requests_finish_before_the_server_is_paused(
    autojump_clock: trio.testing.MockClock,
):
    client, answers = ScriptedClient(), []
    engine = make_engine(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine, make_request(), answers)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(engine.pause, "wait")
        await trio.testing.wait_all_tasks_blocked()
        assert client.paths() == ["/generate"]
        client.release.set()
    assert client.calls[1:] == [("/pause_generation", {"mode": "retract"})]
    assert len(answers) == 1


async def test_ids_at_the_server_never_begin_with_one_another(autojump_clock: trio.testing.MockClock):
    # a server aborts every id that begins with the one it is given: our names "1" and "10" must not reach it
    client, answers = ScriptedClient(), []
    engine = make_engine(client)
    async with trio.open_nursery() as nursery:
        for name in ("1", "10", "100"):
            nursery.start_soon(ask, engine, make_request(name), answers)
        await trio.testing.wait_all_tasks_blocked()
        client.release.set()
    ids = [body["rid"] for _, body in client.calls]
    assert len(set(ids)) == 3
    assert {len(rid) for rid in ids} == {32}


async def test_cancelled_request_is_aborted_at_the_server(autojump_clock: trio.testing.MockClock):
    client = ScriptedClient()
    engine = make_engine(client)
    with trio.move_on_after(1):
        await engine.generate(make_request())
    assert client.calls[1] == ("/abort_request", {"rid": client.calls[0][1]["rid"]})
    assert engine.statistics()["running"] == 0


async def test_two_runs_never_share_what_they_cached_under_the_same_version():
    salts: list[str] = []
    for _ in range(2):
        client = ScriptedClient()
        client.release.set()
        await make_engine(client).generate(make_request())
        salts.append(client.calls[-1][1]["extra_key"])
    assert salts[0] != salts[1]


async def test_weights_have_no_version_while_they_are_sent_in_pieces():
    client = ScriptedClient()
    client.answers["/model_info"] = {"model_path": "m", "weight_version": "7"}
    await make_engine(client).dialect.begin_transfer()
    assert client.calls[1:] == [
        ("/update_weight_version", {"new_version": "loading", "abort_all_requests": False}),
        ("/begin_weight_update", {"selector": "all"}),
    ]


@pytest.mark.parametrize("way", ["disk", "memory"])
async def test_server_that_came_back_with_a_watermark_is_not_updated(way: str, tmp_path: Path):
    safetensors.numpy.save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    client = ScriptedClient()
    client.answers["/model_info"] = {"model_path": "m", "weight_version": "default"}
    client.answers["/server_info"] = {"version": "0.5.23", "enable_watermark": True, "api_key": "SECRET"}
    engine = make_engine(client)
    with pytest.raises(EngineSetupError, match="--enable-watermark"):
        await (
            engine.update_weights_from_checkpoint(tmp_path, 8)
            if way == "disk"
            else engine.dialect.begin_transfer()
        )
    assert client.paths() == ["/model_info", "/server_info"]


async def test_key_among_the_settings_is_not_shown():
    client = ScriptedClient()
    client.answers["/server_info"] = {"api_key": "SECRET"}
    with pytest.raises(ReplyError, match="version") as raised:
        await read_server_info(EngineServer(client, name="s", silence_s=60.0))
    assert "SECRET" not in str(raised.value)


async def test_memory_is_not_released_under_running_requests(autojump_clock: trio.testing.MockClock):
    client, answers = ScriptedClient(), []
    engine = make_engine(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine, make_request(), answers)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(EngineError, match="pause it before its memory is released"):
            await engine.release_memory()
        client.release.set()
    with pytest.raises(EngineError, match="pause it before its memory is released"):
        await engine.release_memory()  # the next request would end the server
    await engine.pause("wait")
    await engine.release_memory()
    await engine.restore_memory()
    await engine.restore_memory()
    assert client.paths()[2:] == ["/release_memory_occupation", "/resume_memory_occupation"]


async def test_snapshot_that_cannot_be_read_is_not_sent(tmp_path: Path):
    client = ScriptedClient()
    engine = make_engine(client)
    with pytest.raises(EngineError, match="nowhere"):
        await engine.update_weights_from_checkpoint(tmp_path / "nowhere", 1)
    assert client.calls == []


async def test_server_that_is_not_there_is_an_infrastructure_error():
    with pytest.raises(InfrastructureError, match="/model_info: no connection"):
        async with open_sglang_engine("http://127.0.0.1:9", vocab_size=259):
            pass

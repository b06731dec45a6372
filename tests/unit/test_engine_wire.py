"""What becomes of the answers of vLLM and SGLang: bodies that real servers gave, whole, cut and spoiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from rollouts.engines import sglang_wire as sglang
from rollouts.engines import vllm_wire as vllm
from rollouts.engines.calls import check_status
from rollouts.engines.snapshot import check_same_model, read_tensor_shapes
from rollouts.engines.wire import VersionSpan, make_completion, parse_version
from rollouts.errors import (
    EngineError,
    EngineOverloaded,
    InfrastructureError,
    ReplyError,
    RequestRefused,
    SnapshotError,
)
from rollouts.testing.engine_contracts import make_request
from rollouts.types import Completion

# vLLM 0.32.0, SmolLM2-135M, prompt 1 2 3, temperature 1
VLLM = (
    b'{"request_id":"generate-tokens-abc","model":"policy","created":1795307680,"usage":{"prompt_tokens"'
    b':3,"total_tokens":7,"completion_tokens":4,"prompt_tokens_details":null,"completion_tokens_details"'
    b':null},"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placehol'
    b'ders":null,"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"token'
    b's","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[2118,30,378,6734'
    b'],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"en'
    b'd":4}],"logprobs":{"content":[{"token_id":2118,"logprob":-8.270934104919434,"rank":725,"top_logpro'
    b'bs":[{"token_id":2118,"logprob":-8.270934104919434,"rank":725}]},{"token_id":30,"logprob":-1.32607'
    b'24544525146,"rank":1,"top_logprobs":[{"token_id":30,"logprob":-1.3260724544525146,"rank":1}]},{"to'
    b'ken_id":378,"logprob":-2.4623680114746094,"rank":2,"top_logprobs":[{"token_id":378,"logprob":-2.46'
    b'23680114746094,"rank":2}]},{"token_id":6734,"logprob":-7.636433124542236,"rank":338,"top_logprobs"'
    b':[{"token_id":6734,"logprob":-7.636433124542236,"rank":338}]}]}}]}'
)
# What a 0.5.23 server answered to a request over whose three tokens its weights were exchanged
SGLANG = (
    b'{"text":"&x%","output_ids":[38,176,37],"meta_info":{"id":"0123456789abcdef0123456789abcdef","finis'
    b'h_reason":{"type":"length","length":3},"prompt_tokens":3,"weight_version":"8","num_retractions":1,'
    b'"input_token_logprobs":[],"output_token_logprobs":[[-5.23003625869751,38,null],[-5.393511295318603'
    b'5,176,null],[-5.519124507904053,37,null]],"output_token_logprobs_length":3,"reasoning_tokens":0,"c'
    b'ompletion_tokens":3,"cached_tokens":2,"weight_versions":[{"version":"7","start":0,"end":1},{"versi'
    b'on":"8","start":1,"end":3}],"cached_tokens_details":{"device":2,"host":0},"dp_rank":null,"e2e_late'
    b'ncy":0.02587,"response_sent_to_client_ts":1795307587.6366959}}'
)
VLLM_ID, SGLANG_ID = "abc", "0123456789abcdef0123456789abcdef"
CASES = (("vllm", VLLM), ("sglang", SGLANG))


def parse(
    kind: str,
    body: bytes,
    *,
    vocab_size: int = 49152,
    ends_at: int | None = None,
    scored: bool = False,
    **changes: Any,
) -> Completion:
    request = make_request("r", **{"max_new_tokens": 4 if kind == "vllm" else 3} | changes)
    request = replace(request, score_prompt=scored)
    if kind == "vllm":
        return vllm.parse_generated(body, request, VLLM_ID, vocab_size=vocab_size, where="s")
    return sglang.parse_generate_reply(
        body, request, SGLANG_ID, vocab_size=vocab_size, where="s", ends_at=ends_at
    )


def spans(*entries: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in entries]


def change_vllm(**fields: Any) -> bytes:
    """VLLM with fields of its choice replaced; `entries` are its log-probs."""
    record = json.loads(VLLM)
    choice = record["choices"][0]
    if "entries" in fields:
        fields["logprobs"] = {
            "content": [{"token_id": token, "logprob": value} for token, value in fields.pop("entries")]
        }
    return json.dumps(record | {"choices": [choice | fields] * fields.pop("copies", 1)}).encode()


def change_sglang(**fields: Any) -> bytes:
    """SGLANG with fields of meta_info replaced; `ids` are output_ids; ... leaves a field out."""
    reply = json.loads(SGLANG)
    reply["output_ids"] = fields.pop("ids", reply["output_ids"])
    meta = reply["meta_info"] | fields
    return json.dumps(
        reply | {"meta_info": {name: value for name, value in meta.items() if value is not ...}}
    ).encode()


def test_a_real_answer_becomes_a_completion():
    completion = parse("vllm", VLLM)
    assert (completion.request_id, completion.finish_reason) == ("r", "length")
    assert completion.token_ids.tolist() == [2118, 30, 378, 6734]
    np.testing.assert_allclose(completion.log_probs, [-8.270934, -1.3260725, -2.462368, -7.636433], rtol=1e-6)
    assert completion.weight_versions.tolist() == [-1] * 4, "weights that nobody has named"
    completion = parse("sglang", SGLANG)
    assert completion.token_ids.tolist() == [38, 176, 37]
    np.testing.assert_allclose(completion.log_probs, [-5.230036, -5.393511, -5.519125], rtol=1e-6)
    assert completion.weight_versions.tolist() == [7, 8, 8]


@pytest.mark.parametrize(("kind", "body"), CASES)
def test_an_answer_cut_at_any_byte_is_a_reply_error(kind: str, body: bytes):
    for length in range(len(body)):
        with pytest.raises(ReplyError):
            parse(kind, body[:length])
    for spoiled in (b"[" + body + b"]", body.replace(b"abc", b"ab\xff"), b"null"):
        with pytest.raises(ReplyError):
            parse(kind, spoiled)


@pytest.mark.parametrize(("kind", "body"), CASES)
@pytest.mark.parametrize(
    "number",
    [b"NaN", b"-Infinity", b"null", b"1e999", b'"-1.3"', b"0.5", b"-9999.0", b"true", b"-1e5", b"-3.4e38"],
)
def test_a_log_prob_that_is_none_is_a_reply_error(kind: str, body: bytes, number: bytes):
    value = b"-1.3260724544525146" if kind == "vllm" else b"-5.23003625869751"
    with pytest.raises(ReplyError):
        parse(kind, body.replace(value, number, 1))


ENTRIES = [(2118, -1.0), (30, -1.0), (378, -1.0), (6734, -1.0)]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"token_ids": [2118, 30, 378, 49152], "entries": [*ENTRIES[:3], (49152, -1.0)]},
            "outside the vocab",
        ),
        ({"token_ids": [-1, 30, 378, 6734], "entries": [(-1, -1.0), *ENTRIES[1:]]}, "outside the vocabulary"),
        ({"token_ids": [2118, 30.5, 378, 6734]}, "Expected `int`"),
        ({"token_ids": [2118, 30, 378]}, "3 tokens are not those of the 4 log-probs"),
        ({"token_ids": [6734, 378, 30, 2118]}, "4 tokens are not those of the 4 log-probs"),
        (
            {"token_ids": [*range(5)], "entries": [(token, -1.0) for token in range(5)]},
            "more than max_new_tokens=4",
        ),
        ({"token_ids": [], "entries": [], "weight_versions": []}, "no token, yet finish reason 'length'"),
        ({"finish_reason": "stop"}, "stopped by 6734"),
        ({"finish_reason": "error"}, "Invalid enum value 'error'"),
        ({"copies": 2}, "2 choices"),
        ({"logprobs": None}, "Expected `object`"),
        ({"weight_versions": None}, "Expected `array`"),
        ({"weight_versions": []}, "cover 0 of 4 tokens"),
        ({"weight_versions": spans(("7", 0, 3))}, "cover 3 of 4 tokens"),
        ({"weight_versions": spans(("7", 0, 5))}, "does not follow 0 of 4"),
        ({"weight_versions": spans(("7", 1, 4))}, "does not follow 0 of 4"),
        ({"weight_versions": spans(("7", 0, 2), ("8", 3, 4))}, "does not follow 2 of 4"),
        ({"weight_versions": spans(("7", 0, 3), ("8", 2, 4))}, "does not follow 3 of 4"),
        ({"weight_versions": spans(("8", 0, 2), ("7", 2, 4))}, "of versions"),
        ({"weight_versions": spans(("7", 0, 2), ("loading", 2, 4))}, "of versions"),
    ],
)
def test_an_impossible_answer_of_vllm_is_a_reply_error(fields: dict[str, Any], rule: str):
    with pytest.raises(ReplyError, match=rule):
        parse("vllm", change_vllm(**fields))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"ids": [38, 177, 37]}, "are not those of the 3 log-probs"),
        ({"output_token_logprobs": ...}, "are not those of the 0 log-probs"),
        ({"weight_versions": ...}, "cover 0 of 3 tokens"),
        ({"finish_reason": {"type": "matched_stop"}}, "Invalid enum value 'matched_stop'"),
        ({"finish_reason": {"type": "stop"}}, "the request has no stop token"),
        ({"finish_reason": None}, "finish_reason"),
        ({"id": SGLANG_ID[:-1]}, "the answer is to"),
        ({"id": ...}, "missing required field `id`"),
    ],
)
def test_an_impossible_answer_of_sglang_is_a_reply_error(fields: dict[str, Any], rule: str):
    with pytest.raises(ReplyError, match=rule):
        parse("sglang", change_sglang(**fields))


def test_a_length_must_have_been_asked_for_unless_the_servers_context_ends():
    for kind, body in CASES:
        with pytest.raises(ReplyError, match="tokens, yet finish reason 'length' for max_new_tokens=100"):
            parse(kind, body, max_new_tokens=100)
    # the prompt has 3 tokens: with 3 more the server is full at 6
    assert parse("sglang", SGLANG, max_new_tokens=100, ends_at=6).finish_reason == "length"
    with pytest.raises(ReplyError, match="yet finish reason 'length'"):
        parse("sglang", SGLANG, max_new_tokens=100, ends_at=7)


def test_an_aborted_request_keeps_what_it_has():
    nothing = change_vllm(token_ids=[], entries=[], weight_versions=[], finish_reason="abort")
    assert len(parse("vllm", nothing).token_ids) == 0
    queued = {"id": SGLANG_ID, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    assert len(parse("sglang", json.dumps({"output_ids": [], "meta_info": queued}).encode()).token_ids) == 0
    some = parse("sglang", change_sglang(finish_reason={"type": "abort", "status_code": None}))
    assert (some.finish_reason, some.token_ids.tolist()) == ("abort", [38, 176, 37])


@pytest.mark.parametrize(("status", "kind"), [(503, EngineOverloaded), (500, InfrastructureError)])
def test_an_abort_that_is_the_servers_failure_is_no_completion(status: int, kind: type[Exception]):
    reason = {"type": "abort", "message": "out of memory", "status_code": status}
    with pytest.raises(kind, match=f"status {status}: out of memory"):
        parse("sglang", change_sglang(finish_reason=reason))


@pytest.mark.parametrize(
    ("name", "version"),
    [("0", 0), ("7", 7), ("9" * 18, 10**18 - 1)]
    + [(name, -1) for name in ("default", "", "-1", "+1", "07", "1.0", "1_0", " 1", "1\n", "١", "9" * 19)],
)
def test_a_version_is_a_decimal_number_as_we_write_it(name: str, version: int):
    assert parse_version(name) == version


def test_a_log_prob_is_bounded():
    for value, fits in (
        (-8999.0, True),
        (0.0005, True),
        (0.01, False),
        (-9001.0, False),
        (float("nan"), False),
    ):
        options: dict[str, Any] = {"vocab_size": 2, "where": "s"}
        arguments = make_request("r", max_new_tokens=1), [1], [(1, value)], [VersionSpan("1", 0, 1)], "length"
        if fits:
            assert make_completion(*arguments, **options).log_probs == np.float32(value)
        else:
            with pytest.raises(ReplyError, match="must be finite"):
                make_completion(*arguments, **options)


def test_prompts_are_scored_token_by_token():
    scores = [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.25}}]
    for given, expected in (
        (scores, [0.0, -0.5, -0.25]),
        (scores[:2], None),
        ([None, {"9": {"logprob": -1.0}}, None], None),
    ):
        body = json.dumps(json.loads(VLLM) | {"prompt_logprobs": given}).encode()
        if expected:
            found = parse("vllm", body, scored=True).prompt_log_probs
            assert found is not None and found.tolist() == expected
        else:
            with pytest.raises(ReplyError, match="the prompt's 3 tokens are scored"):
                parse("vllm", body, scored=True)


def test_a_request_says_everything_that_a_server_has_defaults_for():
    request = make_request(stop_token_ids=(2,), seed=2**64 - 1, top_k=5, top_p=0.9)
    body = vllm.make_generate_body(request, "id", model="policy", seeds=True)
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
    params = sglang.make_generate_body(request, "id", salt="s")["sampling_params"]
    assert params == {
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "sampling_seed": 2**31 - 1,
    }
    params = sglang.make_generate_body(make_request(), "id", salt="s")["sampling_params"]
    assert (params["ignore_eos"], params["top_k"]) == (True, -1), "without stop tokens it runs to its limit"


def test_metrics_are_summed_over_engines():
    page = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0 1795307631
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:created 1.7953076319402316e+09
python_gc_objects_collected_total{generation="0"} 15129.0
"""
    metrics = vllm.parse_metrics(page, where="s")
    assert metrics["vllm:num_requests_running"] == 5.0
    assert metrics["vllm:created"] == 1795307631.9402316
    for number in (b"NaN", b"", b"+Inf", b"many"):  # NaN differs from itself: it would look like progress
        with pytest.raises(ReplyError, match="no finite number"):
            vllm.parse_metrics(page.replace(b"1.7953076319402316e+09", number), where="s")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, EngineError),
        (400, RequestRefused),
        (401, EngineError),
        (404, EngineError),
        (408, InfrastructureError),
        (422, RequestRefused),
        (429, EngineOverloaded),
        (500, InfrastructureError),
        (503, EngineOverloaded),
    ],
)
def test_a_status_says_who_is_at_fault(status: int, kind: type[EngineError]):
    with pytest.raises(EngineError, match=f"gave {status}: 'no'") as raised:
        check_status(httpx.Response(status, headers={"Retry-After": "7"}, content=b"no"), where="s")
    assert type(raised.value) is kind
    assert not isinstance(raised.value, EngineOverloaded) or raised.value.retry_after_s == 7.0


# --- snapshots ----------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def test_shapes_are_read_from_all_shards_of_the_index(tmp_path: Path):
    safetensors.numpy.save_file(
        {"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-1.safetensors", {"x": "y"}
    )
    safetensors.numpy.save_file({"b": np.zeros((), np.float16)}, tmp_path / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert read_tensor_shapes(tmp_path) == {"a": (2, 3), "b": ()}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, b'{"weight_map": {"a": "../a.safetensors"}}', "beside"),
        (INDEX, b'{"weight_map": ["a"]}', "cannot be read"),
        (INDEX, b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little"), "model.safetensors"),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"a": 1}', "model.safetensors"),
        ("pytorch_model.bin", b"pickle", r"has no \*.safetensors file"),
    ],
)
def test_damaged_snapshots_are_named(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SnapshotError, match=message):
        read_tensor_shapes(tmp_path)


def test_every_cut_of_a_snapshot_is_seen(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(2, np.float32)}, file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            read_tensor_shapes(tmp_path)


def test_a_snapshot_of_another_model_is_named_but_for_tied_heads_and_rotary_frequencies(tmp_path: Path):
    tied = {"w": (2,), "lm_head.weight": (4, 2), "layers.0.rotary_emb.inv_freq": (1,)}
    check_same_model({"w": (2,)}, tied, path=tmp_path)
    check_same_model({"w": (2,), "lm_head.weight": (4, 2)}, {"w": (2,)}, path=tmp_path)
    for shapes, message in (
        ({"w": (3,)}, "tensor w"),
        ({"w": (2,), "v": (1,)}, "tensor v"),
        ({}, "shape None"),
    ):
        with pytest.raises(SnapshotError, match=message):
            check_same_model(shapes, {"w": (2,)}, path=tmp_path)

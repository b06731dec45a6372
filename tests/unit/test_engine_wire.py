"""What becomes of the answers of vLLM and SGLang: bodies that real servers gave, whole, cut and spoiled."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_allclose

from rollouts import errors
from rollouts.engines.sglang import ServerInfo, SGLangServer
from rollouts.engines.vllm import VLLMServer
from rollouts.engines.wire import (
    Server,
    check_same_model,
    check_status,
    parse_version,
    rank_tokens,
    read_tensor_shapes,
)
from rollouts.errors import EngineError, ModelError, ReplyError
from rollouts.testing.engine_contracts import make_request
from rollouts.types import EngineFeatures
from tests.support.text_tables import cases

# vLLM 0.32.0, SmolLM2-135M, prompt 1 2 3, temperature 1
VLLM = """{"request_id":"generate-tokens-abc","model":"policy","created":1795307680,"usage":{
"prompt_tokens":3,"total_tokens":7,"completion_tokens":4,"prompt_tokens_details":null,
"completion_tokens_details":null},
"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,
"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"tokens",
"choices":[{"index":0,
"finish_reason":"length","stop_reason":null,"token_ids":[2118,30,378,6734],"routed_experts":null,
"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":4}],"logprobs":{"content":[
{"token_id":2118,"logprob":-8.270934104919434,"rank":725,"top_logprobs":[{"token_id":2118,
"logprob":-8.270934104919434,"rank":725}]},{"token_id":30,"logprob":-1.3260724544525146,"rank":1,
"top_logprobs":[
{"token_id":30,"logprob":-1.3260724544525146,"rank":1}]},{"token_id":378,"logprob":-2.4623680114746094,
"rank":2,
"top_logprobs":[{"token_id":378,"logprob":-2.4623680114746094,"rank":2}]},{"token_id":6734,
"logprob":-7.636433124542236,"rank":338,"top_logprobs":[{"token_id":6734,"logprob":-7.636433124542236,
"rank":338}]}]}}]}"""
# What a 0.5.23 server answered to a request over whose three tokens its weights were exchanged
SGLANG = """{"text":"&x%","output_ids":[38,176,37],"meta_info":{"id":"0123456789abcdef0123456789abcdef",
"finish_reason":{"type":"length","length":3},"prompt_tokens":3,"weight_version":"8","num_retractions":1,
"input_token_logprobs":[],"output_token_logprobs":[[-5.23003625869751,38,null],[-5.3935112953186035,176,null],
[-5.519124507904053,37,null]],"output_token_logprobs_length":3,"reasoning_tokens":0,"completion_tokens":3,
"cached_tokens":2,"weight_versions":[{"version":"7","start":0,"end":1},{"version":"8","start":1,"end":3}],
"cached_tokens_details":{"device":2,"host":0},"dp_rank":null,"e2e_latency":0.02587,
"response_sent_to_client_ts":1795307587.6366959}}"""
BODIES = {"vllm": VLLM, "sglang": SGLANG}
BOTH = cases("kind", BODIES)
NOTHING = '{"finish_reason":"length","token_ids":[],"logprobs":{"content":[]},"weight_versions":[]}'


class Answering(Server):
    """A server that gives one answer to everything."""

    def __init__(self, answer=b""):
        self.name = "s"
        self.answer = answer if isinstance(answer, bytes) else answer.encode()
        self.sent = None

    async def call(self, method, path, body=None, **options):
        self.sent = body
        return self.answer


def make_dialect(kind, server, *, ends_at=None):
    features = EngineFeatures(49152, 1024)
    if kind == "vllm":
        return VLLMServer(server, features, "policy")
    return SGLangServer(server, features, ServerInfo("0.5.23"), ends_at=ends_at)


async def parse(kind, body, *, ends_at=None, scored=False, **changes):
    request = make_request("r", **{"max_new_tokens": 4 if kind == "vllm" else 3} | changes)
    request = replace(request, score_prompt=scored)
    server_id = "abc" if kind == "vllm" else "0123456789abcdef" * 2
    return await make_dialect(kind, Answering(body), ends_at=ends_at).ask(request, server_id)


async def test_a_real_answer_becomes_a_completion():
    completion = await parse("vllm", VLLM)
    assert (completion.request_id, completion.finish_reason) == ("r", "length")
    assert completion.token_ids.tolist() == [2118, 30, 378, 6734]
    assert_allclose(completion.log_probs, [-8.270934, -1.3260725, -2.462368, -7.636433], rtol=1e-6)
    assert completion.weight_versions.tolist() == [-1] * 4  # weights that nobody has named
    completion = await parse("sglang", SGLANG)
    assert completion.token_ids.tolist() == [38, 176, 37]
    assert_allclose(completion.log_probs, [-5.230036, -5.393511, -5.519125], rtol=1e-6)
    assert completion.weight_versions.tolist() == [7, 8, 8]


@BOTH
async def test_an_answer_cut_at_any_byte_is_a_reply_error(kind):
    body = BODIES[kind].encode()
    cuts = [body[:length] for length in range(len(body))]
    for spoiled in (*cuts, b"[" + body + b"]", body.replace(b"abc", b"ab\xff"), b"null"):
        with pytest.raises(ReplyError):
            await parse(kind, spoiled)


@BOTH
@cases('number: NaN -Infinity null 1e999 "-1.3" 0.5 -9999.0 true -1e5 -3.4e38')
async def test_a_log_prob_that_is_none_is_a_reply_error(kind, number):
    value = "-1.3260724544525146" if kind == "vllm" else "-5.23003625869751"
    with pytest.raises(ReplyError):
        await parse(kind, BODIES[kind].replace(value, number, 1))


# at each place what is listed of a token, how many are asked for, and the likeliest with their log-probs
@cases("""
listed | most | ids | values
[[[-2, 7, null], [-1, 8, null], [-3, 9, null]]] | 2 | [[8, 7]] | [[-1, -2]]
[[[-5, 4], [-1, 8], [-9999, 9]], [[-5, 4], [null, 8], [-7, 9]]] | 3 | [[8, 4, 9], [4, 9, 8]] \
| [[-1, -5, -Infinity], [-5, -7, -Infinity]]
[] | 2 | [] | []
""")
def test_the_likeliest_of_what_a_server_lists_are_sorted(listed: Any, most: int, ids: Any, values: Any):
    found = rank_tokens(listed, most, len(listed), where="s")
    assert found is not None and (found.token_ids.tolist(), found.log_probs.tolist()) == (ids, values)
    assert found.token_ids.shape == (len(listed), most) and found.log_probs.dtype == np.float32


@cases("""
listed | count
[[[-1, 8]]] | 1
[null] | 1
[[[-1, 8], [-2, 7]]] | 2
[[[-1, 8], [-2, 7]], [[-1, 8]]] | 2
""")
def test_fewer_than_were_asked_for_are_a_reply_error(listed: Any, count: int):
    assert rank_tokens(listed, 0, count, where="s") is None
    with pytest.raises(ReplyError, match=f"no 2 tokens at each of {count} places"):
        rank_tokens(listed, 2, count, where="s")


# a server, a part of its answer, what stands there instead, and the rule that this breaks
@cases("""
kind | part | instead | rule
vllm | 6734 | 49152 | outside the vocabulary
vllm | 2118 | -1 | outside the vocabulary
vllm | [2118,30, | [2118,30.5, | Expected `int`
vllm | ,6734] | ] | 3 tokens are not those of the 4 log-probs
vllm | [2118,30,378,6734] | [6734,378,30,2118] | 4 tokens are not those of the 4 log-probs
vllm | "length" | "stop" | stopped by 6734
vllm | "length" | "error" | Invalid enum value 'error'
vllm | "choices":[ | "choices":[NOTHING, | 2 choices
vllm | "choices": | "choices":[NOTHING],"x": | no token, yet finish reason 'length'
vllm | "logprobs": | "logprobs":null,"x": | Expected `object`
vllm | "weight_versions": | "weight_versions":null,"x": | Expected `array`
vllm | "weight_versions": | "weight_versions":[],"x": | cover 0 of 4 tokens
vllm | "end":4 | "end":3 | cover 3 of 4 tokens
vllm | "end":4 | "end":5 | does not follow 0 of 4
vllm | "start":0 | "start":1 | does not follow 0 of 4
vllm | 4} | 2},{"version":"8","start":3,"end":4} | does not follow 2 of 4
vllm | 4} | 3},{"version":"8","start":2,"end":4} | does not follow 3 of 4
vllm | default","start":0 | 8","start":0,"end":2},{"version":"7","start":2 | of versions
vllm | 4} | 0},{"version":"7","start":0,"end":2},{"version":"loading","start":2,"end":4} | of versions
sglang | [38,176,37] | [38,177,37] | are not those of the 3 log-probs
sglang | "output_token_logprobs" | "x" | are not those of the 0 log-probs
sglang | "weight_versions" | "x" | cover 0 of 3 tokens
sglang | "type":"length" | "type":"matched_stop" | Invalid enum value 'matched_stop'
sglang | "type":"length" | "type":"stop" | the request has no stop token
sglang | {"type":"length","length":3} | null | finish_reason
sglang | 0123456789abcdef" | " | the answer is to
sglang | "id" | "x" | missing required field `id`
""")
async def test_an_impossible_answer_is_a_reply_error(kind, part, instead, rule):
    assert part in BODIES[kind]
    with pytest.raises(ReplyError, match=rule):
        await parse(kind, BODIES[kind].replace(part, instead.replace("NOTHING", NOTHING)))


async def test_a_length_must_be_the_one_asked_for_unless_the_servers_context_ends():
    for kind, body in BODIES.items():
        with pytest.raises(ReplyError, match="tokens, yet finish reason 'length' for max_new_tokens=100"):
            await parse(kind, body, max_new_tokens=100)
        with pytest.raises(ReplyError, match="more than max_new_tokens=2"):
            await parse(kind, body, max_new_tokens=2)
    # the prompt has 3 tokens: with 3 more the server is full at 6
    assert (await parse("sglang", SGLANG, max_new_tokens=100, ends_at=6)).finish_reason == "length"
    with pytest.raises(ReplyError, match="yet finish reason 'length'"):
        await parse("sglang", SGLANG, max_new_tokens=100, ends_at=7)


async def test_an_aborted_request_keeps_what_it_has():
    nothing = f'{{"request_id":"generate-tokens-abc","choices":[{NOTHING}]}}'.replace("length", "abort")
    assert len((await parse("vllm", nothing)).token_ids) == 0
    aborted = SGLANG.replace('"length","length":3', '"abort","message":"Abort in waiting queue"')
    some = await parse("sglang", aborted)
    assert (some.finish_reason, some.token_ids.tolist()) == ("abort", [38, 176, 37])
    queued = aborted.replace("[38,176,37]", "[]").replace('"output_token_logprobs"', '"x"')
    assert len((await parse("sglang", queued.replace('"weight_versions"', '"y"'))).token_ids) == 0


@cases("""
status | kind
503    | EngineOverloaded
500    | InfrastructureError
""")
async def test_an_abort_that_is_the_servers_failure_is_no_completion(status, kind):
    reason = f'"abort","message":"out of memory","status_code":{status}'
    with pytest.raises(getattr(errors, kind), match=f"status {status}: out of memory"):
        await parse("sglang", SGLANG.replace('"length","length":3', reason))


@cases("name", ["default", "", "-1", "+1", "07", "1.0", "1_0", " 1", "1\n", "١", "9" * 19])
def test_a_version_is_a_decimal_number_as_we_write_it(name):
    assert parse_version(name) == -1
    assert [parse_version(number) for number in ("0", "7", "9" * 18)] == [0, 7, 10**18 - 1]


@cases("""
scores                                                  | expected
[null, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.25}}] | [0.0, -0.5, -0.25]
[null, {"2": {"logprob": -0.5}}]                        | null
[null, {"9": {"logprob": -1.0}}, null]                  | null
""")
async def test_prompts_are_scored_token_by_token(scores, expected: Any):
    body = VLLM.replace('"prompt_logprobs":null', f'"prompt_logprobs":{scores}')
    with (
        nullcontext() if expected else pytest.raises(ReplyError, match=r"3 tokens are scored|log-probs \[nan")
    ):
        assert (await parse("vllm", body, scored=True)).prompt_log_probs.tolist() == expected


async def send(kind, **sampling):
    """The sampling parameters with which a request goes out."""
    server = Answering()
    with pytest.raises(ReplyError):
        await make_dialect(kind, server).ask(make_request(**sampling), "id")
    assert server.sent.get("token_ids", server.sent.get("input_ids")) == [1, 2, 3]
    return server.sent["sampling_params"]


async def test_a_request_says_everything_that_a_server_has_defaults_for():
    request = {"stop_token_ids": (2,), "seed": 2**64 - 1, "top_k": 5, "top_p": 0.9}
    assert await send("vllm", **request) == json.loads(
        """{"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "logprobs": 0,
        "stop_token_ids": [2], "ignore_eos": true, "detokenize": false, "seed": 9223372036854775807,
        "stop": [], "include_stop_str_in_output": true, "skip_special_tokens": false,
        "spaces_between_special_tokens": false}"""
    )
    assert await send("sglang", **request) == json.loads(
        """{"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [2],
        "ignore_eos": false, "skip_special_tokens": false, "sampling_seed": 2147483647, "stop": []}"""
    )
    texts = ["é", "\n\nUser:"]
    params = await send("vllm", stop_texts=tuple(texts))
    assert (params["stop"], params["detokenize"]) == (texts, True)
    params = await send("sglang", stop_texts=tuple(texts))
    assert (params["stop"], params["stop_regex"]) == (texts, r"\Z.{15}")
    params = await send("sglang")  # without stop tokens it runs to its limit
    assert (params["ignore_eos"], params["top_k"]) == (True, -1)


async def test_the_work_of_a_vllm_server_is_its_counters_and_not_its_queue():
    page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="the policy"} 9.0
vllm:generation_tokens_total{engine="0",model_name="the policy"} 3.0
vllm:generation_tokens_total{engine="1",model_name="the policy"} 4.0
"""
    pages = (page, page.replace("running{", "waiting{"), page.replace(" 4.0", " 5.0"))
    first, idle, busy = [await make_dialect("vllm", Answering(each)).read_work() for each in pages]
    assert first == idle != busy


@cases("""
kind                | statuses
EngineError         | [302, 401, 404]
RequestRefused      | [400, 422]
InfrastructureError | [408, 500]
EngineOverloaded    | [429, 503]
""")
def test_a_status_says_who_is_at_fault(kind, statuses: Any):
    for status in statuses:
        with pytest.raises(EngineError, match=f"gave {status}: 'no'") as raised:
            check_status(httpx.Response(status, headers={"Retry-After": "7"}, content=b"no"), where="s")
        assert raised.typename == kind
        assert kind != "EngineOverloaded" or raised.value.retry_after_s == 7.0


# --- snapshots ----------------------------------------------------------------------------------------------


def test_shapes_are_read_from_all_shards_of_the_index(tmp_path):
    for name, shape in (("a", (2, 3)), ("b", ())):
        safetensors.numpy.save_file({name: np.zeros(shape, np.float32)}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a", "b": "b"}}')
    assert read_tensor_shapes(tmp_path) == {"a": (2, 3), "b": ()}


@cases("""
name | header | content | message
model.safetensors.index.json | | {"weight_map": {"a": "../a.safetensors"}} | beside
model.safetensors.index.json | | {"weight_map": {"a": "gone.safetensors"}} | gone.safetensors
model.safetensors | 1099511627776 | | model.safetensors
model.safetensors | 8 | {"a": 1} | model.safetensors
pytorch_model.bin | | pickle | model.safetensors cannot be read
""")
def test_damaged_snapshots_are_named(name, header, content, message, tmp_path):
    """header: how long a file says that its header is."""
    length = int(header).to_bytes(8, "little") if header else b""
    (tmp_path / name).write_bytes(length + content.encode())
    with pytest.raises(ModelError, match=message):
        read_tensor_shapes(tmp_path)


@cases("shapes", [{"w": (3,)}, {"w": (2,), "v": (1,)}, {}])
def test_a_snapshot_of_another_model_is_named_but_for_tied_heads_and_rotary_frequencies(shapes):
    own, here = {"w": (2,)}, Path("here")
    tied = own | {"lm_head.weight": (4, 2), "layers.0.rotary_emb.inv_freq": (1,)}
    check_same_model(own, tied, path=here)
    check_same_model(tied, own, path=here)
    with pytest.raises(ModelError, match=r"here: the tensor [wv] has"):
        check_same_model(shapes, own, path=here)

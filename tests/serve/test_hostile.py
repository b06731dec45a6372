"""What comes from outside and means no good: each gets an answer below 500, and the server goes on."""

import json
from urllib.parse import quote

import trio

from rollouts.serve.app import TINKER
from rollouts.serve.manage import MANAGE
from tests.serve.clients import KEY, MODEL, draw_batches, encode_train, make_datum
from tests.support.text_tables import read_cells

SETTINGS = {"request_bytes": 600_000}
ROUTES = [*(f"{method} /api/v1/{path}" for method, path in (key.split() for key in TINKER)), *MANAGE]
NAMES = [
    "..",
    "../../../etc/passwd",
    "%2e%2e",
    "a\0b",
    "é",
    "x" * 3000,
    "' OR 1=1 --",
    "{run}",
    "\udcff",
    "0",
]
BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"session_id": NaN}',
    b'{"session_id": "\\ud800"}',
    b'{"session_id": "a\\u0000", "model_id": "\\u0000", "request_id": "\\u0000"}',
    json.dumps({"model_id": "x" * 5000, "session_id": "x" * 5000, "request_id": "x" * 5000}).encode(),
    b'{"model_id": -1, "seq_id": "x", "session_id": 1}',
    b'{"model_id": "m", "seq_id": 1000000000000000000000000000000, "session_id": "s", "request_id": []}',
    b'{"model_id": "m", "seq_id": 1' + b"0" * 5000 + b"}",
]


async def test_no_route_breaks_on_any_name_or_body(client):
    async def ask(method, path, body):
        reply = await client.http.request(method, path, content=body)
        assert int(reply.headers["content-length"]) == len(reply.content)
        good = reply.status_code in (200, 400, 401, 403, 404, 405, 410, 422)
        assert good, (method, path[:80], body[:80], reply.status_code)

    for route in ROUTES:
        method, path = route.split()
        first, *parts = path.split("{")
        for body in BODIES:
            await ask(method, first + "".join(one.replace("}", "") for one in parts), body)
        for name in NAMES if parts else ():
            hostile = quote(name, safe="", errors="surrogateescape")
            await ask(method, first + "".join(hostile + one.partition("}")[2] for one in parts), b"{}")
    for number in ("-1", "x", "1" + "0" * 30, "1" + "0" * 5000, "", "1e3", "٣"):
        for path in ("training_runs", "checkpoints", "sessions"):
            for name in ("limit", "offset"):
                await ask("GET", f"/api/v1/{path}?{name}={quote(number)}", b"")
    await (await client.create()).step(draw_batches(1)[0])


AT_ONCE = """
create_model | {"model_seq_id": -1} | model_seq_id
create_model | {"model_seq_id": 9223372036854775808} | model_seq_id
create_model | {"lora_config": {"rank": -1}} | rank
create_model | {"lora_config": {"rank": 1000000000}} | rank
create_model | {"lora_config": {"rank": 4, "seed": 1180591620717411303424}} | seed
create_model | {"lora_config": {"rank": 4, "seed": -1180591620717411303424}} | seed
create_model | {"lora_config": {"rank": 4, "train_mlp": false, "train_attn": false}} | layer
create_model | {"base_model": "../../etc"} | not served here
create_model | {"optimizer_config": {"type": "dimuon"}} | dimuon
optim_step | {"seq_id": -1} | seq_id
create_sampling_session | {"sampling_session_seq_id": -1, "base_model": "tiny:byte"} | sampling_session_seq_id
create_sampling_session | {} | base_model
asample | {"num_samples": 0} | num_samples
asample | {"num_samples": 1000000} | num_samples
asample | {"sampling_params": {"temperature": -1}} | temperature
asample | {"sampling_params": {"top_p": 0}} | top_p
asample | {"sampling_params": {"top_p": 1.5}} | top_p
asample | {"sampling_params": {"max_tokens": -1}} | max_tokens
asample | {"sampling_params": {"stop": [1.5]}} | stop
asample | {"topk_prompt_logprobs": -1} | topk_prompt_logprobs
asample | {"prompt": {"chunks": [{"tokens": [-1]}]}} | tokens
"""
IN_ITS_TURN = """
{"prompt": {"chunks": []}} | empty
{"prompt": {"chunks": [{"tokens": [1000000]}]}} | token id 1000000
{"prompt": {"chunks": [{"type": "image", "data": "eA=="}]}} | text alone
{"sampling_params": {"max_tokens": 1000000}} | context holds
{"sampling_params": {"stop": [10000000]}} | stop
{"target_prompt_logprobs": {"data": [1], "shape": [4, 4]}} | target_prompt_logprobs
"""


async def test_numbers_beyond_reason_are_refused_by_name(client, model):
    sampler = await client.make_sampler()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}
    good = {
        "create_model": client.name_model(5, base_model=MODEL),
        "optim_step": {"model_id": model.name},
        "create_sampling_session": {"session_id": client.session, "sampling_session_seq_id": 1},
        "asample": sample,
    }
    refused = [(path, json.loads(change), says) for path, change, says in read_cells(AT_ONCE)]
    refused.append(("create_model", {"user_metadata": {"x" * 5000: "y"}}, "user_metadata"))
    for path, change, says in refused:
        reply = await client.ask("POST", path, json=good[path] | change, once=True)
        assert reply.status_code in (400, 422), (path, change, reply.status_code)
        assert says in reply.json()["detail"], reply.text
    # what is found out in its turn is a future that failed
    for number, (change, says) in enumerate(read_cells(IN_ITS_TURN), 100):
        made = await client.post("asample", sample | {"seq_id": number} | json.loads(change))
        await client.fails(made["request_id"], says)
    for seed in (0, 2**64 - 1, -1):  # of any 64 bits
        await client.draw(sampler, [1], max_tokens=1, seed=seed)


HEAD = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n".encode()


async def connect(server, said):
    """A connection on which this has been sent."""
    host, _, port = server.removeprefix("http://").partition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(said)
    return stream


async def test_bodies_that_are_too_large_or_compressed_are_not_read(server, client, model):
    large = encode_train(model.name, 1, [make_datum(range(200))] * 200)
    assert len(large) > 600_000
    reply = await client.ask("POST", "forward_backward", content=large)
    assert reply.status_code == 413
    assert "600000 bytes" in reply.json()["detail"]
    chunk = b"7530\r\n" + bytes(30_000) + b"\r\n"
    async with await connect(server, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk * 25) as stream:
        assert b" 413 " in await stream.receive_some()
    for encoding in ("gzip", "zstd", "br", "deflate, gzip"):
        headers = {"content-encoding": encoding}
        reply = await client.ask("POST", "forward_backward", content=b"x", headers=headers)
        assert reply.status_code == 415
    await model.step([make_datum(range(9))])  # a number of a request that was refused is not missed


async def test_clients_that_stop_in_the_middle_leave_nothing(server, client, model):
    head, (data,) = HEAD + b"content-length: 1000\r\n\r\n", draw_batches(1)
    for said in (b"", b"POST", head, head + b"x" * 500, b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n"):
        await (await connect(server, said)).aclose()
    request = await model.send(data, seq=2)
    with trio.move_on_after(0.2):  # a poll that is dropped
        await client.result(request)
    await model.send(data, seq=1)
    assert await client.result(request)

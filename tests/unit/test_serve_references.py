"""What a service's references answer is what the same models answer here."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import trio

from rollouts.data.scores import make_score_batch, read_scores
from rollouts.device_thread import open_device_thread
from rollouts.errors import ConfigError, EngineError, RequestRefused
from rollouts.models.load import load_tokenizer, resolve_model
from rollouts.preflight.checks import check_served, find_server_kind
from rollouts.reference.quantize import count_bytes_by_headers
from rollouts.reference.score import open_frozen_reference
from rollouts.reference.server import open_server_reference
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import RolloutBatch
from tests.serve.clients import KEY
from tests.serve.servers import open_server
from tests.support.plain_backend import save_scalar
from tests.support.text_tables import cases, read_cells

BATCH = make_batch(temperature=0.7)
MODEL, OTHER = "tiny:llama", "tiny:qwen3"
open_llama = partial(open_server, model=MODEL)


@asynccontextmanager
async def open_here(path, **options):
    async with (
        open_device_thread(name="here", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread, **options) as scorer,
    ):
        yield scorer


def open_there(client, name, key=KEY):
    url = f"{client.url}/references/{name}"
    return open_server_reference(url, kind="rollouts", vocab_size=40, api_key=key)


async def score_both(client, name, path, batch, **options):
    """The values there and here, of all rows one after the other."""
    async with open_there(client, name) as there, open_here(path, **options) as here:
        return [np.concatenate(await one.score(batch)) for one in (there, here)]


@cases("dtype: float32 bfloat16 8bit")
async def test_the_log_probs_are_those_of_the_frozen_model_bit_for_bit(dtype, tmp_path):
    async with open_llama(tmp_path, references={"other": OTHER}, reference_dtype=dtype) as client:
        for batch in (BATCH, replace(BATCH, temperature=1.0)):
            there, here = await score_both(client, "other", resolve_model(OTHER), batch, dtype=dtype)
            np.testing.assert_array_equal(there, here)
            assert there.any()


async def test_base_is_the_base_model_and_a_batch_is_sent_in_parts_that_the_service_takes(tmp_path):
    async with open_llama(tmp_path, request_tokens=40) as client:
        assert sum(map(len, BATCH.tokens)) > 80
        there, here = await score_both(client, "base", resolve_model(MODEL), BATCH)
        np.testing.assert_allclose(there, here, atol=1e-5)
        async with open_there(client, "base") as there:
            assert await there.score(RolloutBatch(tokens=(), loss_masks=())) == ()


async def test_a_reward_model_gives_the_score_of_each_row(tmp_path):
    path = save_scalar("llama", tmp_path / "scalar")
    batch = make_score_batch(BATCH.tokens)
    async with open_llama(tmp_path / "run", references={"judge": str(path)}) as client:
        there, here = await score_both(client, "judge", path, batch, head="scalar")
        tokens = [row.tolist() for row in BATCH.tokens]
        asked = await client.post("/references/judge/score", {"tokens": tokens})
        listed = (await client.get("/references"))["references"]
    np.testing.assert_array_equal(there, here)
    async with open_here(path, head="scalar") as scorer:
        np.testing.assert_array_equal(asked["scores"], read_scores(await scorer.score(batch), batch))
    assert [one["name"] for one in listed] == ["base", "judge"]


async def test_the_least_recently_used_reference_makes_room_for_the_next(tmp_path):
    held = max(count_bytes_by_headers(resolve_model(name), "float32") for name in (MODEL, OTHER))
    references = {"one": MODEL, "two": OTHER}
    async with open_llama(tmp_path, references=references, reference_bytes=held) as client:
        for name, loads in (("one", 1), ("one", 1), ("two", 2), ("one", 3)):
            await client.post(f"/references/{name}/score", {"tokens": [[5, 6, 7]]})
            metrics = await client.read_metrics()
            assert metrics["rollouts_references", "loads"] == loads
            assert metrics["rollouts_references", "peak_bytes"] <= held


REFUSED = [
    *read_cells(r"""
none | {} | 404 | there is no reference 'none'; there is base, gone, small
gone | {} | 400 | reference 'gone': .* is not a directory
small | {} | 400 | need .* bytes at once, and the cache's budget_bytes is 1000
base | {"tokens": [[5, 1000000]]} | 400 | tokens\[0\] has the token id 1000000
base | {"tokens": [[5, -1]]} | 400 | tokens\[0\] has the token id -1
base | {"masks": [[false, true], [true, true]]} | 400 | masks\[1\]
base | {"masks": [[true], [true]]} | 400 | as many values
base | {"tokens": [[]]} | 400 | at least one
base | {"temperature": 0} | 422 | temperature
base | {"tokens": [["x"]]} | 422 | Expected `int`, got `str`
"""),
    ("base", f'{{"tokens": {[[5] * 2049]}}}', 400, r"tokens\[0\] has 2049, and the model's context is 2048"),
    ("base", f'{{"tokens": {[[5] * 500] * 7}}}', 413, "rows have 3500 tokens, and one request at most 3000"),
]


async def test_what_cannot_be_scored_is_refused(tmp_path):
    references = {"gone": "/not/there", "small": OTHER}
    async with open_llama(
        tmp_path, references=references, reference_bytes=1000, request_tokens=3000
    ) as client:
        for name, change, status, says in REFUSED:
            body = {"tokens": [[5, 6], [5, 6]], **json.loads(change)}
            reply = await client.ask("POST", f"/references/{name}/score", json=body)
            assert reply.status_code == int(status), reply.text
            assert re.search(says, reply.json()["error"]), reply.text


async def test_a_name_that_is_not_there_a_key_that_is_wrong_and_refused_rows_are_errors(tmp_path):
    async with open_llama(tmp_path) as client:
        with pytest.raises(EngineError, match=r"404.*there is no reference"):
            async with open_there(client, "none"):
                pass
        with pytest.raises(EngineError, match=r"401.*the API key"):
            async with open_there(client, "base", key="tml-wrong"):
                pass
        async with open_there(client, "base") as there:
            with pytest.raises(RequestRefused, match="the token id 900"):
                await there.score(
                    RolloutBatch(tokens=(np.asarray([1, 900]),), loss_masks=(np.arange(2) > 0,))
                )


# --- by URL -------------------------------------------------------------------------------------------------


async def test_a_check_says_what_is_wrong_with_an_address(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_API_KEY", KEY)
    tokenizer = load_tokenizer(resolve_model(MODEL))
    other = SimpleNamespace(get_vocab=lambda: {"a": 0})
    async with open_llama(tmp_path, references={"gone": "/not/there"}) as client:

        async def check(name, *, of=tokenizer, **options):
            url = f"{client.url}/{name}"
            await trio.to_thread.run_sync(lambda: check_served("reference.where", url, of, **options))

        await check("references/base")
        for name, head, says in read_cells("""
            references/none | tokens | cannot be used: .*there is no reference 'none'; there is base
            references/gone | tokens | cannot be used: .*is not a directory
            references      | tokens | cannot be used
            references/base | scalar | has a head of 'tokens'; it takes one of 'scalar'
        """):
            with pytest.raises(ConfigError, match=says):
                await check(name, head=head)
        with pytest.raises(ConfigError, match="has other tokens than the policy"):
            await check("references/base", of=other)
        monkeypatch.setenv("ROLLOUTS_API_KEY", "tml-wrong")
        with pytest.raises(ConfigError, match=r"the API key is none of .*its key is in ROLLOUTS_API_KEY"):
            await check("references/base")


@cases("status, kind", [(200, "vllm"), (404, "sglang"), (401, "sglang")])
def test_another_server_is_known_by_its_answer_and_serves_no_reward_model(status, kind, monkeypatch):
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(status))
    assert find_server_kind("reference.where", "http://there:1") == kind
    check_served("reference.where", "http://there:1", None)
    with pytest.raises(ConfigError, match="is no training service, which alone serves reward models"):
        check_served("rl.rollout.reward_model", "http://there:1", None, head="scalar")


@cases("url: http://127.0.0.1:1 http://[ https://")
def test_a_server_that_does_not_answer_is_an_error(url):
    with pytest.raises(ConfigError, match="does not answer"):
        find_server_kind("reference.where", url)

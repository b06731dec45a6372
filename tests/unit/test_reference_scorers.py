"""A reference scores alike in the trainer and on a server; a server's answer is checked, never repaired."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import trio

from rollouts.device_thread import open_device_thread
from rollouts.engines.http import open_http_client
from rollouts.errors import ConfigError, DataError, EngineError, InfrastructureError, ReplyError
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.reference import server as server_module
from rollouts.reference.score import open_frozen_reference
from rollouts.reference.server import open_server_reference
from rollouts.testing.torch_contracts import make_batch, raised_by
from rollouts.types import RolloutBatch
from tests.support.plain_backend import score_plainly, score_row
from tests.support.text_tables import cases

KEY = "key of the reference"
BATCH = make_batch(groups=2, size=2)


@pytest.fixture
def path():
    return resolve_model("tiny:llama")


@pytest.fixture
def server(path, monkeypatch):
    """What every reference on a server is connected with; nobody waits before asking it again."""
    made = ReferenceServer(path)
    client = partial(open_http_client, transport=lambda: httpx.MockTransport(made.handle))
    monkeypatch.setattr(server_module, "open_http_client", client)
    monkeypatch.setattr(server_module, "RETRY_S", 0.0)
    return made


class ReferenceServer:
    """Answers as vLLM and SGLang do, with a model of its own."""

    def __init__(self, path):
        self.model = load_hf_model(path)
        self.asked, self.statuses = [], []  # what came; statuses of the next answers, 200 after them
        self.spoil = list  # what becomes of the tokens' entries

    def handle(self, request):
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return httpx.Response(401)
        if request.url.path == "/v1/models":
            return httpx.Response(200, text='{"data": [{"id": "policy", "max_model_len": 256}]}')
        body = json.loads(request.content)
        is_vllm = request.url.path == "/v1/completions"
        ids = body["prompt" if is_vllm else "input_ids"]
        self.asked.append(ids)
        with torch.no_grad():
            values = score_row(self.model, ids)[0][1:].tolist()
        pairs = zip(ids[1:], values, strict=True)
        if is_vllm:
            assert body.items() >= {"model": "policy", "max_tokens": 1, "prompt_logprobs": 0}.items()
            entries = [None, *({str(token): {"logprob": value, "rank": 3}} for token, value in pairs)]
            answer = {"choices": [{"index": 0, "text": "x", "prompt_logprobs": self.spoil(entries)}]}
        else:
            assert body["return_logprob"] and body["logprob_start_len"] == 0
            triples = [[None, ids[0], None], *([value, token, None] for token, value in pairs)]
            answer = {"meta_info": {"id": "1", "input_token_logprobs": self.spoil(triples)}}
        return httpx.Response(self.statuses.pop(0) if self.statuses else 200, json=answer)


@asynccontextmanager
async def open_trainer(path):
    async with (
        open_device_thread(name="reference", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as scorer,
    ):
        yield scorer


open_server = partial(open_server_reference, "http://reference:1", vocab_size=259, api_key=KEY)


@cases("place: trainer vllm sglang")
async def test_every_place_gives_the_models_own_log_probs(place, path, server):
    """0.0 outside the masks; many calls at once; rows and batches that train nothing; any temperature in the
    trainer, 1 on a server.
    """
    holes = tuple(mask & (np.arange(len(mask)) % 2 == 0) for mask in BATCH.loss_masks)
    nothing = tuple(map(np.zeros_like, BATCH.loss_masks))
    batches = [make_batch(seed, groups=2, size=2) for seed in range(3)]
    batches += [replace(BATCH, loss_masks=masks) for masks in (holes, nothing)]
    batches.append(RolloutBatch(tokens=(), loss_masks=()))
    warm = replace(BATCH, temperature=0.5)
    found = {}
    async with open_trainer(path) if place == "trainer" else open_server(kind=place) as scorer:

        async def score(index):
            found[index] = await scorer.score(batches[index])

        async with trio.open_nursery() as nursery:
            for index in range(len(batches)):
                nursery.start_soon(score, index)
        if place == "trainer":
            batches.append(warm)
            await score(index + 1)
        else:
            with pytest.raises(ConfigError, match="temperature 1 only"):
                await scorer.score(warm)
    for index, batch in enumerate(batches):
        wanted, _ = score_plainly(server.model, batch) if len(batch) else ((), ())
        for one, two in zip(found[index], wanted, strict=True):
            assert one.dtype == np.float32
            np.testing.assert_allclose(one, two[: len(one)].detach(), atol=1e-4)


async def test_only_the_tokens_up_to_the_last_trained_one_are_sent(server):
    masks = tuple(mask & (np.arange(len(mask)) < len(mask) - 1) for mask in BATCH.loss_masks)
    async with open_server(kind="vllm") as scorer:
        await scorer.score(replace(BATCH, loss_masks=masks))
    pairs = zip(BATCH.tokens, masks, strict=True)
    wanted = [row[: np.flatnonzero(mask)[-1] + 1].tolist() for row, mask in pairs if mask.any()]
    assert sorted(server.asked) == sorted(wanted)


def every(value, token=""):
    return lambda entries: [
        None, *({token or own: {"logprob": value} for own in entry} for entry in entries[1:])
    ]  # fmt: skip


@cases(
    "kind, spoil",
    [
        ("vllm", lambda entries: None),
        ("vllm", lambda entries: entries[:-1]),
        ("vllm", every(-1.0, "1000")),
        ("vllm", every(-9999.0)),
        ("vllm", every(0.5)),
        ("sglang", lambda triples: [[None, 1000, None]] * len(triples)),
        ("sglang", lambda triples: []),
    ],
)
async def test_an_answer_without_the_log_probs_of_the_tokens_is_an_error(kind, spoil, server):
    server.spoil = spoil
    async with open_server(kind=kind) as scorer:
        await raised_by(scorer.score(BATCH), ReplyError)


async def test_a_busy_server_is_asked_again_and_one_that_stays_so_is_an_error(server):
    async with open_server(kind="vllm") as scorer:
        server.statuses = [503, 200, 500]
        assert len(await scorer.score(BATCH)) == len(BATCH)
        server.statuses = [500] * 99
        with pytest.raises(InfrastructureError, match="gave 500"):
            await scorer.score(BATCH)


@cases("""
ids         | message
[5, 300, 7] | the id 300
[5, -1, 7]  | the id -1
[1, 2]      | first token
""")
async def test_what_cannot_be_scored_is_an_error_before_it_is_sent(server, ids: Any, message):
    with pytest.raises(EngineError, match="401"):
        async with open_server(kind="vllm", api_key="wrong"):
            pass
    async with open_server(kind="vllm") as scorer:
        tokens = np.asarray(ids)  # of which a first 5 does not train
        with pytest.raises(DataError, match=message):
            await scorer.score(RolloutBatch(tokens=(tokens,), loss_masks=(tokens != 5,)))
    assert not server.asked

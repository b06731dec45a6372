"""OpenAIEngine against an endpoint in this process: what it sends, what it makes of answers, and that nothing
of it can train.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio
import trio.testing

from rollouts.engines.openai import OpenAIEngine, make_completions_body, open_openai_engine, parse_completions
from rollouts.errors import (
    EngineError,
    EngineSetupError,
    ReplyError,
    RequestRefused,
)
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import make_request
from rollouts.types import EngineLoad, Sample

Answer = Callable[[dict[str, Any]], httpx.Response]


class Letters:
    """A tokenizer: the ids 1..26 are letters, 0 is the end of a turn."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("." if token == 0 else chr(96 + token) for token in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [0 if letter == "." else ord(letter) - 96 for letter in text]


def four_tokens(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(
        200, json={"choices": [{"text": "abcd", "finish_reason": "length", "token_ids": [1, 2, 3, 4]}]}
    )


def open_engine(
    answer: Answer = four_tokens, *, calls: list[Any] | None = None, **changes: Any
) -> AbstractAsyncContextManager[OpenAIEngine]:
    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        assert request.url.path == "/v1/completions"
        body = json.loads(request.content)
        if calls is not None:
            calls.append((body, request.headers.get("authorization")))
        return answer(body)

    options: dict[str, Any] = {
        "model": "m",
        "vocab_size": 27,
        "context_length": 64,
        "transport": lambda: httpx.MockTransport(handle),
    }
    return open_openai_engine("http://endpoint", **options | changes)


@pytest.mark.parametrize("check", engine_contracts.CHECKS)
async def test_contract(check: Any):
    await check(open_engine)


async def test_ids_go_out_and_come_back_without_a_tokenizer():
    calls: list[Any] = []
    async with open_engine(calls=calls, api_key="key") as engine:
        completion = await engine.generate(
            make_request(prompt=(5, 6), top_k=3, stop_token_ids=(7,), seed=2**63 + 1)
        )
    assert completion.token_ids.tolist() == [1, 2, 3, 4]
    assert np.isnan(completion.log_probs).all()
    assert completion.weight_versions.tolist() == [-1] * 4
    body, authorization = calls[0]
    assert authorization == "Bearer key"
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 3,
        "seed": 1,
        "stop_token_ids": [7],
        "return_token_ids": True,
    }


async def test_text_goes_out_and_comes_back_with_a_tokenizer():
    calls: list[Any] = []
    answer = httpx.Response(200, json={"choices": [{"text": "bad", "finish_reason": "stop"}]})
    async with open_engine(lambda body: answer, calls=calls, tokenizer=Letters()) as engine:
        completion = await engine.generate(make_request(prompt=(3, 1, 2, 0), stop_token_ids=(0,)))
        assert any("tokenized again" in gap for gap in engine.features.gaps)
    assert calls[0][0]["prompt"] == "cab."
    assert calls[0][0]["stop"] == ["."]
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([2, 1, 4], "stop")


async def test_no_sample_takes_its_log_probs_as_numbers():
    async with open_engine() as engine:
        assert not engine.features.log_probs
        completion = await engine.generate(make_request())
    with pytest.raises(ValueError, match="not finite"):
        Sample(
            id="a",
            prompt="",
            tokens=completion.token_ids,
            loss_mask=np.ones(4, np.bool_),
            rollout_log_probs=completion.log_probs,
        )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [({"top_k": 5}, "top_k=5"), ({"stop_token_ids": (1, 2, 3, 4, 5)}, "5 stop tokens")],
)
def test_what_the_api_cannot_say_in_text_is_refused(sampling: dict[str, Any], message: str):
    with pytest.raises(RequestRefused, match=message):
        make_completions_body(make_request(**sampling), model="m", tokenizer=Letters())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "0 choices"),
        ([{"text": "a", "finish_reason": "length"}], "needs a tokenizer"),
        (
            [{"text": "a", "finish_reason": "length", "token_ids": [27]}],
            "outside the vocabulary of 27",
        ),
        ([{"text": "a", "finish_reason": "tool_calls", "token_ids": [1]}], "Invalid enum value 'tool_calls'"),
        ([{"text": "a", "finish_reason": None, "token_ids": [1]}], "Expected `str`"),
        ([{"text": None, "finish_reason": "stop", "token_ids": [1]}], "Expected `str`"),
    ],
)
def test_answers_that_are_none_are_reply_errors(choices: list[Any], message: str):
    with pytest.raises(ReplyError, match=message):
        parse_completions(
            json.dumps({"choices": choices}).encode(), make_request(), None, vocab_size=27, where="e"
        )


def test_an_answer_withheld_by_a_filter_is_the_requests_fault():
    body = json.dumps({"choices": [{"text": "", "finish_reason": "content_filter"}]}).encode()
    with pytest.raises(RequestRefused, match="content filter"):
        parse_completions(body, make_request(), None, vocab_size=27, where="e")


async def test_more_ids_than_asked_for_are_a_reply_error():
    async with open_engine() as engine:
        with pytest.raises(ReplyError, match="4 token_ids for max_new_tokens=3"):
            await engine.generate(make_request(max_new_tokens=3))


async def test_a_model_that_is_not_served_is_refused_when_opening():
    with pytest.raises(EngineSetupError, match="does not serve 'other'; it has"):
        async with open_engine(model="other"):
            pass


async def test_abort_and_pause_abort_answer_what_is_on_its_way(autojump_clock: trio.testing.MockClock):
    async def never(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        await trio.sleep_forever()
        raise AssertionError

    async with open_engine(transport=lambda: httpx.MockTransport(never)) as engine:
        for end in (engine.abort_all, lambda: engine.pause("abort")):
            answers: list[Any] = []

            async def ask(answers: list[Any] = answers) -> None:
                answers.append(await engine.generate(make_request()))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                assert await engine.load() == EngineLoad(running=1, waiting=0)
                await end()
            assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("abort", 0)]
            await engine.resume()


async def test_what_an_endpoint_cannot_do_is_refused_by_name():
    async with open_engine() as engine:
        for call in (
            lambda: engine.update_weights_from_checkpoint(Path("x"), 1),
            engine.begin_update,
            lambda: engine.finish_update(1),
            engine.release_memory,
            lambda: engine.pause("keep"),
        ):
            with pytest.raises(EngineError, match="openai-endpoint"):
                await call()
        assert await engine.weight_version() == -1
        assert await engine.checksum() is None

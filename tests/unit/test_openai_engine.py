"""OpenAIEngine against an endpoint in this process: what it sends, what it makes of answers, and that nothing
of it can train.
"""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio
import trio.testing

from rollouts.engines.openai import open_openai_engine
from rollouts.errors import EngineError, EngineSetupError, ReplyError, RequestRefused
from rollouts.testing import engine_contracts
from rollouts.testing.engine_contracts import asked, make_request
from tests.support.text_tables import cases

FOUR_TOKENS = '{"text": "abcd", "finish_reason": "length", "token_ids": [1, 2, 3, 4]}'


class Letters:
    """A tokenizer: the ids 1..26 are letters, 0 is the end of a turn."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join("." if token == 0 else chr(96 + token) for token in token_ids)

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        return [0 if letter == "." else ord(letter) - 96 for letter in text]


def open_engine(choices=FOUR_TOKENS, *, calls=None, hangs=False, **changes):
    """The engine of an endpoint that answers these choices, JSON, to everything; `calls` gets bodies and
    keys.
    """

    async def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, text='{"data": [{"id": "m"}]}')
        assert request.url.path == "/v1/completions"
        if hangs:
            await trio.sleep_forever()
        if calls is not None:
            calls.append((json.loads(request.content), request.headers.get("authorization")))
        return httpx.Response(200, text=f'{{"choices": [{choices}]}}')

    options = {"model": "m", "vocab_size": 27, "context_length": 64, **changes}
    return open_openai_engine("http://endpoint", transport=lambda: httpx.MockTransport(handle), **options)


@cases("check", engine_contracts.CHECKS)
async def test_contract(check):
    await check(open_engine)


async def test_ids_go_out_and_come_back_without_a_tokenizer_and_without_numbers_to_train_on():
    calls = []
    async with open_engine(calls=calls, api_key="key") as engine:
        assert not engine.features.log_probs
        completion = await engine.generate(
            make_request(prompt=(5, 6), top_k=3, stop_token_ids=(7,), seed=2**63 + 1)
        )
    found = completion.token_ids, completion.log_probs, completion.weight_versions
    np.testing.assert_array_equal(found, [[1, 2, 3, 4], [np.nan] * 4, [-1] * 4])
    body = """{"model": "m", "prompt": [5, 6], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 3,
        "seed": 1, "stop_token_ids": [7], "return_token_ids": true}"""
    assert calls == [(json.loads(body), "Bearer key")]


async def test_text_goes_out_and_comes_back_with_a_tokenizer():
    calls = []
    answer = '{"text": "bad", "finish_reason": "stop"}'
    async with open_engine(answer, calls=calls, tokenizer=Letters()) as engine:
        completion = await engine.generate(make_request(prompt=(3, 1, 2, 0), stop_token_ids=(0,)))
        assert any("tokenized again" in gap for gap in engine.features.gaps)
    ((body, _),) = calls
    assert (body["prompt"], body["stop"]) == ("cab.", ["."])
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([2, 1, 4], "stop")


@cases("""
sampling | message
top_k = 5 | top_k=5
stop_token_ids = [1, 2, 3, 4, 5] | 5 stop tokens
stop_token_ids = [1, 2], stop_texts = ["a", "b", "c"] | 2 stop tokens and 3 stop texts
""")
async def test_what_the_api_cannot_say_in_text_is_refused(sampling: dict, message):
    async with open_engine(tokenizer=Letters()) as engine:
        with pytest.raises(RequestRefused, match=message):
            await engine.generate(make_request(**sampling))


@cases("""
choices | message
| 0 choices
{"text": "a", "finish_reason": "length"} | needs a tokenizer
{"text": "a", "finish_reason": "length", "token_ids": [1, 27]} | outside the vocabulary of 27
{"text": "a", "finish_reason": "tool_calls"} | Invalid enum value 'tool_calls'
{"text": "a", "finish_reason": null} | Expected `str`
{"text": null, "finish_reason": "length"} | Expected `str`
{"text": "a", "finish_reason": "length", "token_ids": [1, 2, 3, 4, 5]} | 5 token_ids for max_new_tokens=4
{"text": "", "finish_reason": "content_filter"} | content filter
""")
async def test_answers_that_are_none_are_typed_errors(choices, message):
    kind = RequestRefused if "filter" in message else ReplyError
    async with open_engine(choices) as engine:
        with pytest.raises(kind, match=message):
            await engine.generate(make_request())


async def test_a_model_that_is_not_served_is_refused_when_opening():
    with pytest.raises(EngineSetupError, match="does not serve 'other'; it has"):
        async with open_engine(model="other"):
            pass


async def test_abort_and_pause_abort_answer_what_is_on_its_way(autojump_clock):
    async with open_engine(hangs=True) as engine:
        for end in (engine.abort_all, lambda: engine.pause("abort")):
            async with asked(engine, make_request()) as answers:
                assert engine.statistics() == {"running": 1, "waiting": 0}
                await end()
            assert (answers["a"].finish_reason, len(answers["a"].token_ids)) == ("abort", 0)
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
        assert (await engine.weight_version(), await engine.checksum()) == (-1, None)

"""The default generate function: a prompt's tokens in, a sample with one value per token out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from rollouts.generation.generate import make_chat_generate
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply, fake_log_prob
from rollouts.types import Sample, SamplingParams, Status
from tests.unit.chat_tokenizers import family_tokenizer

SAMPLING = SamplingParams(max_new_tokens=4, stop_token_ids=(FAKE_END,), seed=5)
PENDING = Sample(id="g00000000-s000", prompt="hi", group_index=0, metadata={"answer": "x"})


async def generate(
    engine: ScriptedEngine, sample: Sample = PENDING, sampling: SamplingParams = SAMPLING, tokenizer=None
) -> Sample:
    generate: Any = make_chat_generate(tokenizer or FakeTokenizer())
    return await generate(sample, engine, sampling)


async def test_a_sample_has_the_prompt_and_the_sampled_tokens_with_one_value_each():
    sample = await generate(ScriptedEngine(lambda request: ScriptedReply(text="ok"), version=3))
    prompt_ids = FakeTokenizer().encode("<|start|>user\nhi<|end|><|start|>assistant\n")
    assert sample.tokens.tolist() == [*prompt_ids, ord("o"), ord("k"), FAKE_END]
    assert sample.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * 3  # the stop token trains
    assert sample.weight_versions.tolist() == [-1] * len(prompt_ids) + [3, 3, 3]
    expected = [fake_log_prob(5, position, 3) for position in range(3)]
    assert sample.rollout_log_probs.tolist() == [0.0] * len(prompt_ids) + [
        pytest.approx(value, abs=1e-7) for value in expected
    ]
    assert (sample.response, sample.status, sample.reward) == ("ok", Status.COMPLETED, None)
    assert (sample.id, sample.group_index, sample.metadata) == (PENDING.id, 0, {"answer": "x"})


@pytest.mark.parametrize(
    ("reply", "status", "length"),
    [
        (ScriptedReply(text="abc"), Status.COMPLETED, 4),
        (ScriptedReply(text="abcd"), Status.TRUNCATED, 4),
        (ScriptedReply(text="abc", finish="length"), Status.TRUNCATED, 3),
        (ScriptedReply(text="ab", finish="abort"), Status.ABORTED, 2),
        (ScriptedReply(text="", finish="abort"), Status.ABORTED, 0),
    ],
)
async def test_the_status_says_why_it_ended(reply: ScriptedReply, status: Status, length: int):
    sample = await generate(ScriptedEngine(lambda request: reply))
    assert (sample.status, sample.response_length) == (status, length)


async def test_messages_are_a_conversation_and_text_is_one_user_turn():
    engine = ScriptedEngine()
    await generate(engine, Sample(id="a", prompt="hi"))
    await generate(engine, Sample(id="b", prompt=({"role": "user", "content": "hi"},)))
    await generate(
        engine,
        Sample(id="c", prompt=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})),
    )
    text, messages, with_system = [
        FakeTokenizer().decode(request.prompt_ids.tolist(), skip_special_tokens=False)
        for request in engine.requests
    ]
    assert text == messages == "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert with_system == "<|start|>system\nbe brief<|end|>" + text


async def test_the_samples_of_a_prompt_share_one_tokenisation():
    tokenizer = FakeTokenizer()
    chat_generate = make_chat_generate(tokenizer)
    for prompt in (
        "hi",
        "hi",
        ({"role": "user", "content": "there"},),
        ({"role": "user", "content": "there"},),
    ):
        await chat_generate(Sample(id="s", prompt=prompt), ScriptedEngine(), SAMPLING)  # type: ignore[misc]
    assert len(tokenizer.encoded) == 2


CALLING = (
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "4 degrees", "tool_call_id": "1"},
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def test_tool_calls_of_the_prompt_and_tools_of_the_sample_reach_the_template():
    tokenizer = family_tokenizer("qwen2_5")
    engine = ScriptedEngine(vocab_size=len(tokenizer), context_length=2048)
    sample = Sample(id="a", prompt=CALLING, metadata={"tools": [TOOL]})  # type: ignore[arg-type]
    await make_chat_generate(tokenizer)(sample, engine, SAMPLING)  # type: ignore[misc]
    text = str(tokenizer.decode(engine.requests[0].prompt_ids.tolist()))
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_aborted_sample_goes_on_after_its_tokens(autojump_clock):
    engine = ScriptedEngine(
        lambda request: ScriptedReply(text="abc"[4 - request.sampling.max_new_tokens :], token_s=1.0),
        version=1,
    )
    aborted: list[Sample] = []

    async def first() -> None:
        aborted.append(await generate(engine))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.sleep(2.5)
        await engine.abort_all()
    assert (aborted[0].status, aborted[0].response) == (Status.ABORTED, "ab")
    engine.set_version(2)
    sample = await generate(engine, aborted[0])
    prompt_length = len(aborted[0].tokens) - 2
    assert (sample.status, sample.response) == (Status.COMPLETED, "abc")
    assert sample.tokens[:-2].tolist() == aborted[0].tokens.tolist()
    assert sample.weight_versions[prompt_length:].tolist() == [1, 1, 2, 2]
    assert sample.rollout_log_probs[: prompt_length + 2].tolist() == aborted[0].rollout_log_probs.tolist()
    first_request, second_request = engine.requests
    assert second_request.request_id == f"{PENDING.id}@2" and second_request.sampling.max_new_tokens == 2
    assert second_request.sampling.seed != first_request.sampling.seed, (
        "the second half would repeat the draws of the first"
    )


async def test_an_aborted_sample_without_a_sampled_token_starts_again():
    empty = await generate(ScriptedEngine(lambda request: ScriptedReply(text="", finish="abort")))
    engine = ScriptedEngine()
    assert (await generate(engine, empty)).response == "ok"
    assert engine.requests[0].request_id == PENDING.id

"""The default generate function: a prompt's tokens in, a sample with one value per token out."""

import json

import pytest

from rollouts.generation.generate import make_chat_generate
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply, fake_uniform
from rollouts.types import Sample, SamplingParams, Status
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import family_tokenizer, turn

SAMPLING = SamplingParams(max_new_tokens=4, stop_token_ids=(FAKE_END,), seed=5)
PENDING = Sample(id="g00000000-s000", prompt="hi", group_index=0, metadata={"answer": "x"})


async def generate(engine, sample=PENDING, tokenizer=None):
    return await make_chat_generate(tokenizer or FakeTokenizer())(sample, engine, SAMPLING)


async def test_a_sample_has_the_prompt_and_the_sampled_tokens_with_one_value_each():
    sample = await generate(ScriptedEngine(lambda request: ScriptedReply("ok"), version=3))
    prompt_ids = FakeTokenizer().encode("<|start|>user\nhi<|end|><|start|>assistant\n")
    count = len(prompt_ids)
    assert sample.tokens.tolist() == [*prompt_ids, ord("o"), ord("k"), FAKE_END]
    assert sample.loss_mask.tolist() == [False] * count + [True] * 3  # the stop token trains
    assert sample.weight_versions.tolist() == [-1] * count + [3, 3, 3]
    log_probs = [0.0] * count + [-2.0 * fake_uniform(5, position, 3) for position in range(3)]
    assert sample.rollout_log_probs == pytest.approx(log_probs, abs=1e-7)
    assert (sample.response, sample.status, sample.reward) == ("ok", Status.COMPLETED, None)
    assert (sample.id, sample.group_index, sample.metadata) == (PENDING.id, 0, {"answer": "x"})


@cases("""
text | finish | status    | length
abc  | stop   | completed | 4
abcd | stop   | truncated | 4
abc  | length | truncated | 3
ab   | abort  | aborted   | 2
     | abort  | aborted   | 0
""")
async def test_the_status_says_why_it_ended(text, finish, status, length: int):
    sample = await generate(ScriptedEngine(lambda request: ScriptedReply(text, finish=finish)))
    assert (sample.status, sample.response_length) == (status, length)


async def test_messages_are_a_conversation_text_is_one_user_turn_and_each_is_tokenized_once():
    engine, tokenizer, user = ScriptedEngine(), FakeTokenizer(), turn("user", "hi")
    chat_generate = make_chat_generate(tokenizer)
    prompts = ["hi", (user,), (turn("system", "be brief"), user)]
    for prompt in prompts * 2:  # the samples of a prompt share one tokenisation
        await chat_generate(Sample(id="s", prompt=prompt), engine, SAMPLING)
    asked = [
        tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False)
        for request in engine.requests
    ]
    text = "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert asked == [text, text, "<|start|>system\nbe brief<|end|>" + text] * 2
    assert len(tokenizer.encoded) == 3


CALLING = """[{"role": "user", "content": "Oslo?"},
{"role": "assistant", "tool_calls": [
    {"id": "1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
{"role": "tool", "content": "4 degrees", "tool_call_id": "1"}]"""
TOOL = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'


async def test_tool_calls_of_the_prompt_and_tools_of_the_sample_reach_the_template():
    tokenizer = family_tokenizer("qwen2_5")
    engine = ScriptedEngine(vocab_size=len(tokenizer), context_length=2048)
    sample = Sample(id="a", prompt=tuple(json.loads(CALLING)), metadata={"tools": [json.loads(TOOL)]})
    await generate(engine, sample, tokenizer)
    text = str(tokenizer.decode(engine.requests[0].prompt_ids.tolist()))
    assert f"<tools>\n{TOOL}\n</tools>" in text
    assert text.endswith(
        """<|im_start|>user
Oslo?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
4 degrees
</tool_response><|im_end|>
<|im_start|>assistant
"""
    )


async def test_an_aborted_sample_goes_on_after_its_tokens():
    first = ScriptedEngine(lambda request: ScriptedReply("ab", finish="abort"), version=1)
    aborted = await generate(first)
    engine = ScriptedEngine(lambda request: ScriptedReply("c"), version=2)
    sample = await generate(engine, aborted)
    assert (sample.status, sample.response) == (Status.COMPLETED, "abc")
    assert sample.tokens[:-2].tolist() == aborted.tokens.tolist()
    assert sample.weight_versions[sample.loss_mask].tolist() == [1, 1, 2, 2]
    assert sample.rollout_log_probs[:-2].tolist() == aborted.rollout_log_probs.tolist()
    (request,) = engine.requests
    assert request.request_id == f"{PENDING.id}@2" and request.sampling.max_new_tokens == 2
    assert request.sampling.seed != first.requests[0].sampling.seed  # it would repeat the draws of the first


async def test_an_aborted_sample_without_a_sampled_token_starts_again():
    empty = await generate(ScriptedEngine(lambda request: ScriptedReply("", finish="abort")))
    engine = ScriptedEngine()
    assert (await generate(engine, empty)).response == "ok"
    assert engine.requests[0].request_id == PENDING.id

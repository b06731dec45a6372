"""What trains on the chat templates of real models, written out by hand: ⟦ and ⟧ stand around every token
that does.
"""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from rollouts.data.chat import render_prompt, tokenize_conversation, tokenize_prompt
from rollouts.errors import DataError, ModelError
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import (
    CHATML,
    TALK,
    byte_tokenizer,
    family_sentencepiece,
    family_tokenizer,
    turn,
)


def call(name, arguments):
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


SYSTEM = turn("system", "Be brief.")
WEATHER = json.loads("""{"type": "function", "function": {"name": "weather", "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}""")
CALLS = json.loads("""[
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00001",
        "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}]},
    {"role": "tool", "content": "4 degrees", "tool_call_id": "call00001", "name": "weather"},
    {"role": "assistant", "content": "It is 4."}]""")
THOUGHTS = json.loads("""[
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7", "reasoning_content": "three, four"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "two, two"}]""")


def marked(messages, tokenizer, **options):
    """The text of all tokens, with ⟦ and ⟧ around those that train."""
    conversation = tokenize_conversation(messages, tokenizer, **options)
    mask = np.zeros(len(conversation.token_ids), np.bool_)
    for span in conversation.spans:
        mask[span] = True
    assert conversation.token_ids.dtype == np.int64
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    pieces = [str(tokenizer.decode(conversation.token_ids[a:b])) for a, b in itertools.pairwise(edges)]
    return "".join(
        f"⟦{piece}⟧" if mask[start] else piece for piece, start in zip(pieces, edges, strict=False)
    )


# --- talks of two answers -----------------------------------------------------------------------------------

TALKS = {
    "chatml": """<|im_start|>user
3+4?<|im_end|>
<|im_start|>assistant
⟦It is 7.<|im_end|>⟧
<|im_start|>user
2+2?<|im_end|>
<|im_start|>assistant
⟦4<|im_end|>⟧
""",
    "llama3_1": """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

<|eot_id|><|start_header_id|>user<|end_header_id|>

3+4?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦It is 7.<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>

2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦4<|eot_id|>⟧""",
    "qwen2_5": """<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
<|im_start|>user
3+4?<|im_end|>
<|im_start|>assistant
⟦It is 7.<|im_end|>⟧
<|im_start|>user
2+2?<|im_end|>
<|im_start|>assistant
⟦4<|im_end|>⟧
""",
    "gemma": """<bos><start_of_turn>user
3+4?<end_of_turn>
<start_of_turn>model
⟦It is 7.<end_of_turn>⟧
<start_of_turn>user
2+2?<end_of_turn>
<start_of_turn>model
⟦4<end_of_turn>⟧
""",
    "gemma3": """<bos><start_of_turn>user
3+4?<end_of_turn>
<start_of_turn>model
⟦It is 7.<end_of_turn>⟧
<start_of_turn>user
2+2?<end_of_turn>
<start_of_turn>model
⟦4<end_of_turn>⟧
""",
    "mistral_v2v3": "<s>[INST] 3+4?[/INST]⟦ It is 7.</s>⟧[INST] 2+2?[/INST]⟦ 4</s>⟧",
    "mistral_v3_tekken": "<s>[INST]3+4?[/INST]⟦It is 7.</s>⟧[INST]2+2?[/INST]⟦4</s>⟧",
    "deepseek_v3": (
        "<｜begin▁of▁sentence｜><｜User｜>3+4?<｜Assistant｜>⟦It is 7.<｜end▁of▁sentence｜>⟧"
        "<｜User｜>2+2?<｜Assistant｜>⟦4<｜end▁of▁sentence｜>⟧"
    ),
    "phi3": """<|user|>
3+4?<|end|>
<|assistant|>
⟦It is 7.<|end|>⟧
<|user|>
2+2?<|end|>
<|assistant|>
⟦4<|end|>⟧
<|endoftext|>""",
    "plain": "User: 3+4?\nAssistant:⟦ It is 7.</s>⟧\nUser: 2+2?\nAssistant:⟦ 4</s>⟧\n",
}


@cases("name", TALKS)
def test_both_answers_of_a_talk_train_with_their_end_tokens(name):
    assert marked(TALK, family_tokenizer(name)) == TALKS[name]


@cases("name", sorted({*TALKS, "phi_4", "qwen3", "qwen3_6", "gptoss"}))
def test_the_answer_follows_exactly_the_tokens_that_generation_begins_with(name):
    for tokenizer in (family_tokenizer(name), family_tokenizer(name, merges=[("Ġ", "I"), ("ĠI", "t")])):
        conversation = tokenize_conversation(TALK, tokenizer, train_on="last")
        (span,) = conversation.spans
        assert conversation.token_ids[: span.start].tolist() == tokenize_prompt(TALK[:3], tokenizer).tolist()


@cases("name: chatml llama3_1 gemma3 mistral_v2v3 mistral_v3_tekken phi3 plain")
def test_a_tokenizer_of_word_marks_trains_the_same_text(name):
    tokenizer = family_sentencepiece(name)
    conversation = tokenize_conversation(TALK, tokenizer)
    taught = [
        "".join(tokenizer.convert_ids_to_tokens(conversation.token_ids[s].tolist()))
        for s in conversation.spans
    ]
    end = TALKS[name].split("⟧")[0].rsplit("7.", 1)[1]
    space = "▁" if name in ("mistral_v2v3", "plain") else ""  # after the header
    assert taught == [f"{space}It▁is▁7.{end}", f"{space}4{end}"]


# --- tools --------------------------------------------------------------------------------------------------

QWEN_TOOLS = """<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters":\
 {"type": "object", "properties": {"city": {"type": "string"}}}}}
</tools>

For each function call, return a json object with function name and arguments within\
 <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""


def test_a_tool_call_trains_and_the_tools_and_its_result_do_not():
    assert marked(CALLS, family_tokenizer("qwen2_5"), tools=[WEATHER]) == (
        QWEN_TOOLS
        + """<|im_start|>user
Oslo?<|im_end|>
<|im_start|>assistant
⟦<tool_call>
{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
4 degrees
</tool_response><|im_end|>
<|im_start|>assistant
⟦It is 4.<|im_end|>⟧
"""
    )


WRITTEN = {
    "mistral_v2v3": (
        '<s>[INST] Oslo?[/INST]⟦[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo",'
        ' "days": 2}, "id": "call00001"}]</s>⟧[TOOL_RESULTS] {"content": 4 degrees, "call_id":'
        ' "call00001"}[/TOOL_RESULTS]⟦ It is 4.</s>⟧'
    ),
    # wants the arguments as text
    "deepseek_v3": """<｜begin▁of▁sentence｜><｜User｜>Oslo?<｜Assistant｜>⟦<｜tool▁calls▁begin｜>\
<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Oslo", "days": 2}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4\
 degrees<｜tool▁output▁end｜><｜tool▁outputs▁end｜>⟦It is 4.<｜end▁of▁sentence｜>⟧""",
    # opens the thinking in what generation begins with
    "qwen3_6": """<|im_start|>user
Oslo?<|im_end|>
<|im_start|>assistant
<think>
⟦
</think>

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
4 degrees
</tool_response><|im_end|>
<|im_start|>assistant
<think>
⟦
</think>

It is 4.<|im_end|>⟧
""",
}


@cases("name", WRITTEN)
def test_tool_calls_train_as_their_template_writes_them(name):
    expected = WRITTEN[name]
    assert marked(CALLS, family_tokenizer(name)) == expected
    as_text = CALLS[1] | {"tool_calls": [call("weather", '{"city": "Oslo", "days": 2}')]}
    no_content = {key: value for key, value in CALLS[1].items() if value != ""}
    for other in (as_text, no_content, CALLS[1] | {"content": None, "name": None}):
        assert marked([CALLS[0], other, *CALLS[2:]], family_tokenizer(name)) == expected


def test_a_template_that_would_write_arguments_in_the_notation_of_python_is_given_their_text():
    function = "message.tool_calls[0].function"
    written = f"({function}.name ~ {function}.arguments if message.tool_calls else '')"
    template = CHATML.replace("message['content'] +", f"message['content'] + {written} +")
    messages = [turn("user", "{'a': 'é'}"), turn("assistant", tool_calls=[call("f", {"a": "é", "b": None})])]
    assert marked(messages, byte_tokenizer(template)).endswith('⟦f{"a": "é", "b": null}<|im_end|>⟧\n')


# --- thinking -----------------------------------------------------------------------------------------------


def test_what_generation_is_given_does_not_train():
    assert (
        marked(THOUGHTS[:2], family_tokenizer("qwen3_6"))
        == """<|im_start|>user
3+4?<|im_end|>
<|im_start|>assistant
<think>
⟦three, four
</think>

7<|im_end|>⟧
"""
    )
    no_thinking = {"enable_thinking": False}
    for name in ("qwen3", "qwen3_6"):
        assert (
            marked(TALK[:2], family_tokenizer(name), params=no_thinking)
            == """<|im_start|>user
3+4?<|im_end|>
<|im_start|>assistant
<think>

</think>

⟦It is 7.<|im_end|>⟧
"""
        )


@cases("name: qwen3 qwen3_6")
def test_a_template_that_forgets_earlier_thinking_lets_only_the_last_answer_train(name):
    tokenizer = family_tokenizer(name)
    said = r"rewrites messages up to 1 when later turns follow \(at character 54: '<think>\\nthree, four.*'"
    with pytest.raises(ModelError, match=said + r" against '7<\|im_end"):
        tokenize_conversation(THOUGHTS, tokenizer)
    opened = "<think>\n⟦" if name == "qwen3_6" else "⟦<think>\n"
    assert (
        marked(THOUGHTS, tokenizer, train_on="last")
        == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\n2+2?"
        f"<|im_end|>\n<|im_start|>assistant\n{opened}two,"
        " two\n</think>\n\n4<|im_end|>⟧\n"
    )


# --- what is refused, and the parameters of a template ------------------------------------------------------

THINKS = TALK[1] | {"reasoning_content": "three, four"}
INLINE = turn("assistant", "<think>\nR\n</think>\n\nA1")
MESSAGES = {
    "calls": CALLS,
    "talk": TALK,
    "system": [SYSTEM, *TALK],
    "thinks": [TALK[0], THINKS],
    "inline": [TALK[0], INLINE],
}


@cases(
    r"""
problem                                               | names               | messages | options
every tool call of message 1 | chatml phi3 phi_4 plain deepseek_r1_distill  | calls    | {}
the row has tools, and the   | chatml gemma deepseek_v3 phi3 plain          | talk     | {"tools": [WEATHER]}
HEADER 1 than it does for generation .*'<think>\\n'   | deepseek_r1_distill | talk     | {}
HEADER 3 than it does for generation .*'<think>\\n'   | deepseek_r1_distill | talk     | {"train_on": "last"}
HEADER 2 than it does for generation .*'Be brief\.    | mistral_v2v3 mistral_v3_tekken | system | {}
thinking \(reasoning_content\) of message 1.*remove   | TALKS               | thinks   | {}
thinking at the beginning of the content of message 1 | deepseek_v3         | inline   | {}
""".replace("HEADER", "writes another header before message")
    .replace("TALKS", " ".join(TALKS))
    .replace("WEATHER", json.dumps(WEATHER))
)
def test_what_would_not_train_as_the_row_says_is_refused(problem, names, messages, options: Any):
    for name in names.split():
        with pytest.raises((DataError, ModelError), match=problem):
            tokenize_conversation(MESSAGES[messages], family_tokenizer(name), **options)


def test_parameters_reach_the_template():
    params = {"date_string": "1 May 2025"}
    assert "Today Date: 1 May 2025\n" in render_prompt("q", family_tokenizer("llama3_1"), params=params)


def test_a_parameter_that_the_template_does_not_read_is_refused_with_the_nearest():
    params = {"enable_thinkin": False}
    said = r"model\.template_params\.enable_thinkin: the chat template does not read it; did you mean"
    with pytest.raises(ModelError, match=said + r" enable_thinking\?"):
        render_prompt("q", family_tokenizer("qwen3"), params=params)


@cases("""
attack
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ cycler.__init__.__globals__.os.popen('id').read() }}
{{ messages.append(1) }}
{% include '/etc/passwd' %}
""")
def test_a_template_cannot_reach_out_of_its_sandbox(attack):
    with pytest.raises(DataError, match="the chat template refuses messages"):
        render_prompt("q", byte_tokenizer(attack + CHATML))


# --- ends ---------------------------------------------------------------------------------------------------


def test_an_added_token_that_is_not_special_may_end_a_turn():
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", "</turn>"))
    tokenizer.add_tokens(["</turn>"])
    assert marked(TALK[:2], tokenizer).endswith("⟦It is 7.</turn>⟧\n")


def test_content_in_the_thinking_does_not_hide_the_end():
    template = CHATML.replace(
        "message['content'] +",
        "(message.reasoning_content + '<|endoftext|>' if message.reasoning_content else '') +"
        " message['content'] +",
    )
    messages = [turn("user", "q"), turn("assistant", "7", reasoning_content="is it 7?")]
    assert marked(messages, byte_tokenizer(template)).endswith("⟦is it 7?<|endoftext|>7<|im_end|>⟧\n")
    messages = [turn("user", "q"), turn("assistant", "", reasoning_content="hm")]
    assert marked(messages, byte_tokenizer(template)).endswith("⟦hm<|endoftext|><|im_end|>⟧\n")


# --- content that a template leaves out ---------------------------------------------------------------------


@cases("content", ["<think>\nR\n</think>\n\nA1", "<think>R</think>A1"])
def test_thinking_that_the_generation_prompt_opens_is_written_there(content):
    text = marked([turn("user", "Q1"), turn("assistant", content)], family_tokenizer("qwen3_6"))
    assert text.endswith("<think>\n⟦R\n</think>\n\nA1<|im_end|>⟧\n")

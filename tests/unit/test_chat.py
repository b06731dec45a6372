"""Spans of assistant turns: exactly the content and its end token, whatever the chat template does around
them.
"""

import re
from typing import Any

import pytest

from rollouts.data.chat import render_prompt, tokenize_conversation
from rollouts.data.rows import parse_messages, parse_tools
from rollouts.errors import DataError, ModelError
from rollouts.types import Sample
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import CHATML, TALK, byte_tokenizer, turn


def taught(messages, tokenizer, **options):
    """The text of every span."""
    conversation = tokenize_conversation(messages, tokenizer, **options)
    return [tokenizer.decode(conversation.token_ids[span]) for span in conversation.spans]


# --- spans --------------------------------------------------------------------------------------------------


@cases(r"""
messages                                                                    | message
[{"role": "user", "content": "q"}]                                          | no assistant turn to train on
[]                                                                          | no messages
[{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]    | turn that says nothing
[{"role": "user", "content": "q"}, {"role": "assistant", "content": " \n"}] | turn that says nothing
""")
def test_a_conversation_that_teaches_nothing_is_refused(messages: Any, message):
    with pytest.raises(DataError, match=message):
        tokenize_conversation(messages, byte_tokenizer())


# --- templates that do more ---------------------------------------------------------------------------------


def test_a_template_that_changes_content_is_refused_with_the_first_difference():
    template = CHATML.replace("message['content']", "(message['content'] | upper)")
    with pytest.raises(
        DataError,
        match=r"does not write the content as it is of message 1.*at character 1: 't is 7.' against 'T IS 7.",
    ):
        taught(TALK, byte_tokenizer(template))


def test_a_turn_that_does_not_end_with_a_special_token_is_refused():
    for end in ("", "\\n", "<|im_end|>.", "</s>"):
        template = CHATML.replace("'<|im_end|>' + '\n'", f"'{end}'")
        with pytest.raises(ModelError, match="never learns to stop"):
            tokenize_conversation(TALK[:2], byte_tokenizer(template))


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(ModelError, match="no chat template"):
        render_prompt("q", byte_tokenizer(None))


# --- boundaries ---------------------------------------------------------------------------------------------


def test_content_that_melts_into_its_header_is_refused_by_name():
    tokenizer = byte_tokenizer(merges=[("Ċ", "Ċ")])
    assert taught([turn("user", "q"), turn("assistant", "a\n\n")], tokenizer) == ["a\n\n<|im_end|>"]
    with pytest.raises(
        DataError, match=r"(?s)message 3 begins within a token \(near 'assistant\\n\\nb.*strip white space"
    ):
        tokenize_conversation([*TALK[:3], turn("assistant", "\nb")], tokenizer)


# --- messages -----------------------------------------------------------------------------------------------

CALL = '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}'


@cases(
    """
given | stored
{"role": "assistant", "content": null, "tool_calls": [ONE]} | CALLED
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]} | CALLED
{"role": "user", "content": "q", "name": null, "tool_calls": null} | {"role": "user", "content": "q"}
{"role": "user", "content": "q", "tool_calls": []} | {"role": "user", "content": "q"}
{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}, "c"]} | \
{"role": "user", "content": "a bc"}
{"role": "assistant", "content": "c", "thinking": "t"} | \
{"role": "assistant", "content": "c", "reasoning_content": "t"}
""".replace("CALLED", '{"role": "assistant", "content": "", "tool_calls": [ONE]}').replace("ONE", CALL)
)
def test_a_message_of_another_form_becomes_one_of_ours(given: Any, stored: Any):
    assert parse_messages([given], where="messages") == [stored]
    assert Sample(id="s", prompt=(given,)).prompt == (stored,)
    assert parse_messages([stored], where="messages") == [stored]


CALLS = '{ "role": "assistant", "tool_calls": [{ "function": '


@cases(
    r"""
message | error
"hi" | m[0] is of type str; a chat message is an object with a role and a content
{"role": "user"} | m[0] has no content; a chat message is an object with a role and a content
{"role": "user", "content": null} | m[0].content is of type NoneType; it must be text
{"role": "", "content": "q"} | m[0].role is empty; it must be system, user, assistant or tool
{"role": "user", "content": [{"type": "image_url"}]} | m[0].content[0] is a part of type 'image_url'
{"role": "user", "content": "q", "tool_calls": [ONE]} | only an assistant's turn calls tools
{"role": "assistant", "content": "", "tool_calls": {}} | m[0].tool_calls is of type dict; it must be a list
CALLS {"name": ""}}]} | m[0].tool_calls[0].function.name is ''; it must be text
CALLS {"name": "f", "arguments": "{"}}]} | .arguments is '{', which is not the JSON text of an object
CALLS {"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}}]} | the key 'a' stands twice
CALLS {"name": "f", "arguments": "{\"a\": NaN}"}}]} | NaN is not a JSON number
{"role": "assistant", "content": "c", "reasoning_content": "a", "thinking": "b"} | another text in thinking
{"role": "assistant", "content": "c", "function_call": {}} | m[0].function_call is the old way to call a tool
{"role": "assistant", "content": "c", "weight": 0} | m[0].weight is 0, which is not read
{"role": "user", "content": "q", "score": Infinity} | m[0].score is inf; JSON has no such number
""".replace("CALLS", CALLS).replace("ONE", CALL)
)
def test_a_message_that_cannot_be_read_is_named_with_its_key(message: Any, error):
    with pytest.raises(DataError) as caught:
        parse_messages([message], where="m")
    assert error in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(error.replace("m[0]", "Sample.prompt[0]"))):
        Sample(id="s", prompt=(message,))


@cases(r"""
tools                              | error
"{"                                | t is text but not JSON
"[{\"name\": \"f\", \"name\": \"g\"}]" | t is text but not JSON .*'name' stands twice
{"name": "f"}                      | t is of type dict; it must be a list of tools
[{}]                               | t\[0\] is {}; a tool is an object
[{"name": NaN}]                    | t\[0\]\.name is nan
""")
def test_tools_that_cannot_be_read_are_named(tools: Any, error):
    with pytest.raises(DataError, match=error):
        parse_tools(tools, where="t")

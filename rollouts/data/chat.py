"""Conversations as token ids, with the exact span of what each assistant turn teaches.

A chat template is a program: it may add a system prompt, strip text, or change earlier turns once later ones
follow. So spans are found by rendering, never by searching for the content: what the template adds between
"prompt of turn k" and "conversation up to turn k" is turn k.

    <|im_start|>user\\n3+4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n
    └────────────── prompt of the turn ──────────────────────┘└─ span ─┘└ neither
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rollouts.config.spelling import did_you_mean
from rollouts.data.rows import Messages, parse_messages, parse_prompt, says_something
from rollouts.errors import DataError, ModelError
from rollouts.messages import JSONValue, parse_tool_arguments
from rollouts.types import ChatMessage, Fields, IntArray, JSONObject

Tools = Sequence[JSONObject]  # JSON schemas of the tools that a conversation may call


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    all_special_tokens: Any
    apply_chat_template: Any
    encode: Any
    decode: Any

    @property
    def added_tokens_decoder(self) -> Any: ...  # id → AddedToken


TemplateParams = Mapping[str, JSONValue]
"""What a run tells its chat template beside the messages, by name, such as enable_thinking."""

NO_PARAMS: TemplateParams = {}


class Template(NamedTuple):
    """A tokenizer's chat template with what it is given beside the messages, and the form in which it takes
    tool calls.
    """

    tokenizer: ChatTokenizer
    params: TemplateParams
    tools: Tools | None = None
    # most templates write arguments as JSON themselves; some want the text of it
    arguments_as_text: bool = False
    empty_content: str | None = ""  # of a turn with nothing but tool calls; some templates want none

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """What the template writes. Raises DataError if it refuses the messages."""
        params = {**self.params, "add_generation_prompt": add_generation_prompt}
        if self.tools:
            params["tools"] = [dict(tool) for tool in self.tools]
        try:
            turns = [self._in_form(message) for message in messages]
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **params)
        except Exception as error:  # a template raises what its author chose, and jinja adds its own
            raise DataError(
                "the chat template refuses messages with the roles"
                f" {', '.join(message['role'] for message in messages)}: {type(error).__name__}: {error}"
            ) from error

    def _in_form(self, message: ChatMessage) -> JSONValue:
        if "tool_calls" not in message:
            return message
        calls = []
        for call in message["tool_calls"]:
            given = call["function"]["arguments"]
            if not self.arguments_as_text:
                given = parse_tool_arguments(given)
            elif not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False)
            calls.append(_change(call, arguments=given))
        return {**message, "content": message["content"] or self.empty_content, "tool_calls": calls}


class TokenizedConversation(NamedTuple):
    """A conversation as the chat template writes it."""

    token_ids: IntArray  # [T]
    # token_ids[span] is what an assistant turn teaches, of those asked for in order: from after the
    # generation prompt to its end token, both the turn's own
    spans: tuple[slice, ...]


TrainOn = Literal["all", "last"]


def render_prompt(
    prompt: str | Messages,
    tokenizer: ChatTokenizer,
    *,
    params: TemplateParams = NO_PARAMS,
    tools: Tools | None = None,
) -> str:
    """The text that a model continues: `prompt` (text is one user turn) in the chat template, with the header
    of the assistant's turn.

    Raises ModelError if the tokenizer has no chat template or it does not read a parameter, DataError if the
    template refuses the messages or leaves out their tool calls or the tools.
    """
    messages = parse_messages(parse_prompt(prompt), where="the prompt")
    return make_template(messages, tokenizer, params, tools).render(messages, add_generation_prompt=True)


def tokenize_prompt(
    prompt: str | Messages,
    tokenizer: ChatTokenizer,
    *,
    params: TemplateParams = NO_PARAMS,
    tools: Tools | None = None,
) -> IntArray:
    """Token ids [T] of `render_prompt`. Special tokens come from the template alone."""
    text = render_prompt(prompt, tokenizer, params=params, tools=tools)
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)


def tokenize_conversation(
    messages: Messages,
    tokenizer: ChatTokenizer,
    *,
    train_on: TrainOn = "all",
    params: TemplateParams = NO_PARAMS,
    tools: Tools | None = None,
) -> TokenizedConversation:
    """The token ids of the whole conversation, and the spans of the assistant turns that train, all or the
    last: content and end token.

    A span is what the model is to write after the prompt that generation gives it: thinking, content and tool
    calls as the template writes them. The header of a turn and what the template writes after the end token
    (a newline) are in no span. Turns that do not train may be written as the template likes; some templates
    rewrite earlier turns, and then only the last can train. Raises ModelError if the template is missing,
    writes a turn that trains otherwise than it was generated, or ends it without a special token; DataError
    if the template refuses the messages or leaves out a part of what trains, there is no assistant turn, a
    turn that trains says nothing, or it begins or ends within a token.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    messages = parse_messages(list(messages))
    template = make_template(messages, tokenizer, params, tools)
    text = template.render(messages)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn to train on")
    if train_on == "last":
        turns = turns[-1:]
    marks = [mark for turn in turns for mark in _find_turn(messages, turn, text, template)]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    positions = []  # in tokens, of the marks
    for number, mark in enumerate(marks):
        # Generation gets all that is before a turn as one piece. The turn itself is tokenized alone, or with
        # what is before it by tokenizers that put a space before the first word of any text.
        pieces = [(0, 0)] if number % 2 == 0 else [(marks[number - 1], positions[-1]), (0, 0)]
        for begin, position in pieces:
            piece = tokenizer.encode(text[begin:mark], add_special_tokens=False)
            if token_ids[position : position + len(piece)] == piece:
                positions.append(position + len(piece))
                break
        else:
            raise DataError(
                f"message {turns[number // 2]} {'ends' if number % 2 else 'begins'} within a token (near"
                f" {text[max(0, mark - 10) : mark + 10]!r}): the model would never be asked for it that way;"
                " strip white space from both ends of the content, or use a template, or parameters of it,"
                " with another header"
            )
    spans = tuple(map(slice, positions[::2], positions[1::2]))
    return TokenizedConversation(np.asarray(token_ids, np.int64), spans)


# --- templates ----------------------------------------------------------------------------------------------


def make_template(
    messages: Messages, tokenizer: ChatTokenizer, params: TemplateParams, tools: Tools | None
) -> Template:
    """The template, ready for these messages. Raises if there is none, or it has no place for a parameter,
    the tools or a tool call.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template; use an instruct model, set model.chat_template, or put"
            " chat_template.jinja into the model directory"
        )
    if params:
        _check_params(params, tokenizer)
    template = Template(tokenizer, params, tools or None)
    if any(message.get("tool_calls") for message in messages):
        template = _choose_form(messages, template)
    if tools and template.render(messages) == template._replace(tools=None).render(messages):
        raise DataError(
            "the row has tools, and the chat template does not write them; describe them in the system prompt"
            " and remove `tools` from the row, or set model.chat_template to one that does"
        )
    return template


def _check_params(params: JSONObject, tokenizer: ChatTokenizer) -> None:
    """Raises ModelError for a parameter that the template does not read, or that is not the user's to set."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # comes with chat templates

    chat_template = tokenizer.chat_template
    sources = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]
    # transformers' own tag, which jinja does not know
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", "\n".join(map(str, sources)))
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template is no Jinja template: {error}") from error
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    readable = meta.find_undeclared_variables(tree) - own
    for name in params:
        if name not in readable:
            problem = "rollouts sets it" if name in own else "the chat template does not read it"
            raise ModelError(f"model.template_params.{name}: {problem}{did_you_mean(name, sorted(readable))}")


def _choose_form(messages: Messages, template: Template) -> Template:
    """The template in the first form in which it writes every tool call, tried with names and arguments that
    occur nowhere else.
    """
    marks = {}  # of every call, with the position of its message
    marked = []
    for index, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls", ()):
            mark = f"q{len(marks)}zq"
            marks[mark] = index
            calls.append(_change(call, name=f"name{mark}", arguments={f"key{mark}": f"value{mark}"}))
        marked.append({**message, "tool_calls": calls} if calls else message)
    problems = []
    for as_text, empty_content in ((False, ""), (True, ""), (False, None), (True, None)):
        tried = template._replace(arguments_as_text=as_text, empty_content=empty_content)
        try:
            text = tried.render(marked)
            # neither in Python's notation, nor as JSON text within JSON, nor in part
            lacking = [
                index
                for mark, index in marks.items()
                if f"{{'key{mark}'" in text
                or f'\\"key{mark}' in text
                or any(f"{part}{mark}" not in text for part in ("name", "key", "value"))
            ]
            if not lacking:
                return tried
            raise DataError(
                f"the chat template does not write every tool call of message {lacking[0]} (with its"
                " arguments); set model.chat_template to one that does, or leave the row out"
            )
        except DataError as error:
            problems.append(error)
    # the template's own refusal comes after what it leaves out, and text where an object is wanted comes last
    raise min(problems, key=lambda one: (one.__cause__ is not None) + isinstance(one.__cause__, TypeError))


def _change(call: Fields, **parts: Any) -> Fields:
    """A tool call with other parts of its function."""
    return {**call, "function": {**call["function"], **parts}}


# --- spans --------------------------------------------------------------------------------------------------


def _find_turn(messages: Messages, turn: int, text: str, template: Template) -> tuple[int, int]:
    """(start, end) in characters of what turn `turn` teaches."""
    if turn == 0:
        raise DataError("message 0 is an assistant turn; a conversation begins with a system or user turn")
    if not says_something(messages[turn]):
        raise DataError(
            f"message {turn} is an assistant turn that says nothing: no content, no thinking, no tool calls;"
            " leave the row out"
        )
    prompt = template.render(messages[:turn], add_generation_prompt=True)
    ended = text if turn == len(messages) - 1 else template.render(messages[: turn + 1])
    if not ended.startswith(prompt):
        raise ModelError(
            f"the chat template writes another header before message {turn} than it does for generation"
            f" ({_first_difference(prompt, ended)}); what trains would not be what the model is asked for;"
            " use another chat template"
        )
    body = ended[len(prompt) :]
    end = find_end(body, messages[: turn + 1], template)
    if end is None:
        raise ModelError(
            f"the chat template ends message {turn} with {body[-20:]!r}, not with a special token; a model"
            " trained on that never learns to stop; use a template that ends the assistant's turn"
        )
    trained = prompt + body[: end.end()]
    if not text.startswith(trained):
        raise ModelError(
            f"the chat template rewrites messages up to {turn} when later turns follow"
            f" ({_first_difference(trained, text)}); such a conversation cannot train on all turns at once:"
            ' set sft.train_on = "last", with one row per answer'
        )
    part = _find_unwritten(messages, turn, prompt, ended, template)
    if part is not None:
        raise DataError(
            f"the chat template does not write the {part} of message {turn}, so it would not train"
            f" ({_first_difference(messages[turn]['content'].strip(), body.lstrip())}); change the row"
            " (remove it there), or set model.chat_template to one that does"
        )
    return len(prompt), len(trained)


def _find_unwritten(messages: Messages, turn: int, prompt: str, ended: str, template: Template) -> str | None:
    """What the template leaves out of the turn: thinking, or content beside tool calls, that could be changed
    without changing what it writes; content that does not stand whole in it, white space aside.
    """
    message = messages[turn]
    content = message["content"]
    parts = {"thinking (reasoning_content)": "reasoning_content"}
    if message.get("tool_calls"):
        parts["content beside its tool calls"] = "content"
    for part, key in parts.items():
        value = str(message.get(key, "")).strip()
        other: Any = {**message, key: f"{value} {value}"}
        if value and template.render([*messages[:turn], other]) == ended:
            return part
    wanted, given, written = ("".join(text.split()) for text in (content, prompt, ended[len(prompt) :]))
    # it may begin in the prompt, but for its last character: some prompts open the thinking, or close it
    if wanted in given[max(0, len(given) - len(wanted) + 1) :] + written:
        return None
    thinks = content.lstrip().startswith("<think>")
    return "thinking at the beginning of the content" if thinks else "content as it is"


def find_end(body: str, messages: Messages, template: Template) -> re.Match[str] | None:
    """The end token of the last turn in what was written after its prompt; None if it ends without one.

    What follows the content, or the tool calls, must be added tokens and white space alone. If there is not
    one special token among them, as after a tool call, where a template closes the conversation too, or where
    the tokenizer does not mark the token as special, the one that ends a plain answer in this place is meant,
    otherwise the first special one.
    """
    special = match_added(template.tokenizer, lambda token: token.special)
    added = match_added(template.tokenizer, lambda token: token.content.strip())
    content = messages[-1]["content"].strip()
    begin = body.find(content) + len(content) if content in body else 0
    run = re.compile(rf"(?:(?:{added.pattern})\s*)+\Z").search(body, begin)
    tail = list(added.finditer(body, run.start())) if run else []
    ends = [found for found in tail if special.fullmatch(found[0])]
    if tail and len(ends) != 1:
        answer = ChatMessage(role="assistant", content="plain answer")
        with suppress(DataError):  # some templates refuse one there
            rest = template.render([*messages[:-1], answer]).rpartition(answer["content"])[2]
            usual = re.match(rf"\s*({added.pattern})", rest)
            ends = [found for found in tail if usual and found[0] == usual[1]] or ends
    return ends[0] if ends else None


def match_added(tokenizer: ChatTokenizer, counts: Callable[[Any], object]) -> re.Pattern[str]:
    """Any special token, and any other added one that counts."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if counts(token)}
    longest = sorted(filter(None, added.union(tokenizer.all_special_tokens)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _first_difference(first: str, second: str) -> str:
    at = len(os.path.commonprefix([first, second]))  # noqa: RUF071  (characters are meant)
    return f"at character {at}: {first[at : at + 20]!r} against {second[at : at + 20]!r}"

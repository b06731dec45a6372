"""A tokenizer's chat template: what it is given, the form in which it takes tool calls, and its text."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from rollouts.config.spelling import did_you_mean
from rollouts.errors import DataError, ModelError
from rollouts.messages import ChatMessage, JSONValue, parse_tool_arguments

Tools = Sequence[Mapping[str, JSONValue]]  # JSON schemas of the tools that a conversation may call


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    all_special_tokens: Any

    @property
    def added_tokens_decoder(self) -> Any: ...  # id → AddedToken

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = ..., add_generation_prompt: bool = ...
    ) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a run tells its chat template beside the messages."""

    params: Mapping[str, JSONValue] = field(default_factory=dict)  # by name, such as enable_thinking


DEFAULT_OPTIONS = TemplateOptions()


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with what it is given beside the messages, and the form in which it takes
    tool calls.
    """

    tokenizer: ChatTokenizer
    params: Mapping[str, JSONValue]
    tools: Tools | None = None
    # most templates write arguments as JSON themselves; some want the text of it
    arguments_as_text: bool = False
    empty_content: str | None = ""  # of a turn with nothing but tool calls; some templates want none

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False) -> str:
        """What the template writes. Raises DataError if it refuses the messages."""
        apply: Any = self.tokenizer.apply_chat_template
        params: dict[str, Any] = {**self.params, "add_generation_prompt": add_generation_prompt}
        if self.tools:
            params["tools"] = [dict(tool) for tool in self.tools]
        try:
            return apply([self._in_form(message) for message in messages], tokenize=False, **params)
        except Exception as error:  # a template raises what its author chose, and jinja adds its own
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template refuses messages with the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def _in_form(self, message: ChatMessage) -> ChatMessage:
        def form(arguments: Any) -> Any:
            if not self.arguments_as_text:
                return parse_tool_arguments(arguments, "arguments")
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

        if "tool_calls" not in message:
            return message
        calls = [_change(call, arguments=form) for call in message["tool_calls"]]
        content = message["content"] or self.empty_content
        return cast(ChatMessage, {**message, "content": content, "tool_calls": calls})


def _change(call: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A tool call with other parts of its function, made from those that it has."""
    function = call["function"]
    return {**call, "function": {**function, **{key: make(function[key]) for key, make in changes.items()}}}


def make_template(
    messages: Sequence[ChatMessage], tokenizer: ChatTokenizer, options: TemplateOptions, tools: Tools | None
) -> Template:
    """The template, ready for these messages. Raises if there is none, or it has no place for a parameter,
    the tools or a tool call.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template; use an instruct model, set model.chat_template, or put"
            " chat_template.jinja into the model directory"
        )
    if options.params:
        _check_params(options.params, tokenizer)
    template = Template(tokenizer, options.params, tools or None)
    if any(message.get("tool_calls") for message in messages):
        template = _choose_form(messages, template)
    if tools and template.render(messages) == replace(template, tools=None).render(messages):
        raise DataError(
            "the row has tools, and the chat template does not write them; describe them in the system prompt"
            " and remove `tools` from the row, or set model.chat_template to one that does"
        )
    return template


def _check_params(params: Mapping[str, JSONValue], tokenizer: ChatTokenizer) -> None:
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


def _choose_form(messages: Sequence[ChatMessage], template: Template) -> Template:
    """The template in the first form in which it writes every tool call, tried with names and arguments that
    occur nowhere else.
    """
    marked: list[ChatMessage] = []
    marks: list[tuple[int, str]] = []  # of every call, with the position of its message
    for index, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls", ()):
            mark = f"q{len(marks)}zq"
            marks.append((index, mark))
            arguments = {f"key{mark}": f"value{mark}"}
            calls.append(_change(call, name=lambda _, m=mark: f"name{m}", arguments=lambda _, a=arguments: a))
        marked.append(cast(ChatMessage, message | {"tool_calls": calls}) if calls else message)
    refusal: DataError | None = None
    lacking: int | None = None
    for as_text, empty_content in ((False, ""), (True, ""), (False, None), (True, None)):
        tried = replace(template, arguments_as_text=as_text, empty_content=empty_content)
        try:
            text = tried.render(marked)
        except DataError as error:
            if refusal is None or isinstance(refusal.__cause__, TypeError):  # text where an object is wanted
                refusal = error
            continue
        unwritten = next((index for index, mark in marks if not _writes_call(text, mark)), None)
        if unwritten is None:
            return tried
        lacking = unwritten if lacking is None else lacking
    if lacking is None and refusal is not None:
        raise refusal
    raise DataError(
        f"the chat template does not write every tool call of message {lacking} (with its arguments); set"
        " model.chat_template to one that does, or leave the row out"
    )


def _writes_call(text: str, mark: str) -> bool:
    """Whether the call with this mark is written in full, its argument neither in Python's notation nor as
    JSON text within JSON.
    """
    spoilt = (f"{{'key{mark}'", f'\\"key{mark}')
    return all(f"{part}{mark}" in text for part in ("name", "key", "value")) and not any(
        form in text for form in spoilt
    )

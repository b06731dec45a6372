"""A tokenizer's chat template: what it is given, the form in which it takes tool calls, and its text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from rollouts.config.spelling import nearest
from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.types import ChatMessage, JSONValue, check_json, parse_tool_arguments

Tools = Sequence[Mapping[str, JSONValue]]  # JSON schemas of the tools that a conversation may call

# parameters of apply_chat_template that are not the user's to set
OWN_PARAMS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)


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
    """What a run tells its chat template beside the messages. Raises ConfigError for a parameter that is not
    the user's to set.
    """

    params: Mapping[str, JSONValue] = field(default_factory=dict)  # by name, such as enable_thinking

    def __post_init__(self) -> None:
        for name, value in self.params.items():
            if name in OWN_PARAMS:
                raise ConfigError(f"the template parameter {name} is set by rollouts; leave it out")
            try:
                check_json(f"the template parameter {name}", value)
            except ValueError as error:
                raise ConfigError(str(error)) from error


DEFAULT_OPTIONS = TemplateOptions()


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with what it is given beside the messages, and the form in which it takes
    tool calls.
    """

    tokenizer: ChatTokenizer
    params: Mapping[str, JSONValue]
    tools: Tools | None = None
    arguments: Literal["object", "text"] = (
        "object"  # most templates write arguments as JSON themselves; some want the text of it
    )
    empty_content: str | None = ""  # of a turn with nothing but tool calls; some templates want none


FORMS: tuple[tuple[Literal["object", "text"], str | None], ...] = (
    ("object", ""),
    ("text", ""),
    ("object", None),
    ("text", None),
)


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
        _check_params(options.params, tokenizer.chat_template)
    template = Template(tokenizer, options.params, tools or None)
    if any(message.get("tool_calls") for message in messages):
        template = _choose_form(messages, template)
    if tools:
        _check_tools_are_written(messages, template)
    return template


def _check_params(params: Mapping[str, JSONValue], chat_template: object) -> None:
    """Raises ModelError for a parameter that the template does not read."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # comes with chat templates

    sources = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]
    source = "\n".join(map(str, sources))
    # transformers' own tag, which jinja does not know
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
        readable = sorted(meta.find_undeclared_variables(tree) - set(OWN_PARAMS))
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template is no Jinja template: {error}") from error
    for name in params:
        if name not in readable:
            close = nearest(name, readable)
            hint = f"; did you mean {close}?" if close else ""
            raise ModelError(f"model.template_params.{name}: the chat template does not read it{hint}")


def _check_tools_are_written(messages: Sequence[ChatMessage], template: Template) -> None:
    written = render(messages, template, add_generation_prompt=False)
    if written == render(messages, replace(template, tools=None), add_generation_prompt=False):
        raise DataError(
            "the row has tools, and the chat template does not write them; describe them in the system prompt"
            " and remove `tools` from the row, or set model.chat_template to one that does"
        )


def _choose_form(messages: Sequence[ChatMessage], template: Template) -> Template:
    """The template in the first form in which it writes every tool call, tried with names and arguments that
    occur nowhere else.
    """
    probe, marks = _mark_tool_calls(messages)
    refusals: list[DataError] = []
    lacking: int | None = None
    for arguments, empty_content in FORMS:
        tried = replace(template, arguments=arguments, empty_content=empty_content)
        try:
            text = render(probe, tried, add_generation_prompt=False)
        except DataError as error:
            refusals.append(error)
            continue
        unwritten = next((index for index, mark in marks if not _writes_call(text, mark)), None)
        if unwritten is None:
            return tried
        lacking = unwritten if lacking is None else lacking
    if lacking is None:
        mistyped = [
            isinstance(error.__cause__, TypeError) for error in refusals
        ]  # text where an object is wanted, or the other way round
        raise refusals[mistyped.index(False) if False in mistyped else 0]
    raise DataError(
        f"the chat template does not write every tool call of message {lacking} (with its arguments); set"
        " model.chat_template to one that does, or leave the row out"
    )


def _mark_tool_calls(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[tuple[int, str]]]:
    """The messages with a mark for every call's name and its one argument, and those marks with the positions
    of their messages.
    """
    marked: list[ChatMessage] = []
    marks: list[tuple[int, str]] = []
    for index, message in enumerate(messages):
        calls: list[dict[str, JSONValue]] = []
        for call in message.get("tool_calls", ()):
            mark = f"q{len(marks)}zq"
            marks.append((index, mark))
            calls.append(
                {
                    **call,
                    "function": {
                        **call["function"],
                        "name": f"name{mark}",
                        "arguments": {f"key{mark}": f"value{mark}"},
                    },
                }
            )
        marked.append(cast(ChatMessage, message | {"tool_calls": calls}) if calls else message)
    return marked, marks


def _writes_call(text: str, mark: str) -> bool:
    """Whether the call with this mark is written in full, its argument neither in Python's notation nor as
    JSON text within JSON.
    """
    spoilt = (f"{{'key{mark}'", f'\\"key{mark}')
    return all(f"{part}{mark}" in text for part in ("name", "key", "value")) and not any(
        form in text for form in spoilt
    )


def render(messages: Sequence[ChatMessage], template: Template, *, add_generation_prompt: bool) -> str:
    apply: Any = template.tokenizer.apply_chat_template
    given = {"tools": [dict(tool) for tool in template.tools]} if template.tools else {}
    turns = [_in_form(message, template) for message in messages]
    try:
        text = apply(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt, **given, **template.params
        )
    except Exception as error:  # a template raises what its author chose, and jinja adds its own
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"the chat template refuses messages with the roles {roles}: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(text, str), type(text)
    return text


def _in_form(message: ChatMessage, template: Template) -> dict[str, Any]:
    turn: dict[str, Any] = dict(message)
    if "tool_calls" not in turn:
        return turn
    turn["content"] = turn["content"] or template.empty_content
    turn["tool_calls"] = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": _form_arguments(call["function"]["arguments"], template.arguments),
            },
        }
        for call in turn["tool_calls"]
    ]
    return turn


def _form_arguments(arguments: object, form: Literal["object", "text"]) -> object:
    if form == "object":
        return parse_tool_arguments(arguments, "arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

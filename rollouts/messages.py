"""Chat messages and JSON values, checked as they come from files and servers."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, NotRequired, TypedDict, cast

JSONValue = Any  # None, bool, int, finite float, str, and lists and str-keyed dicts of these
JSONObject = Mapping[str, JSONValue]
CALL_FORM = '{"type": "function", "function": {"name": "…", "arguments": {…}}}'
OTHER_THINKING_KEYS = ("reasoning", "thinking")  # names that some datasets give to reasoning_content
LARGEST_BITS = 14_000  # of an integer; Python writes no more than 4300 digits
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")


class ChatMessage(TypedDict):
    """One turn of a conversation. A row's other keys stay beside these, and the chat template sees them."""

    role: str  # system, user, assistant, tool, or what else the chat template knows
    content: str  # "" where the turn is nothing but tool calls
    reasoning_content: NotRequired[str]  # the thinking before the content
    tool_calls: NotRequired[
        list[dict[str, JSONValue]]
    ]  # {"type": "function", "function": {"name", "arguments"}}, arguments an object or its text
    tool_call_id: NotRequired[str]  # of a tool's turn: the call that it answers
    name: NotRequired[str]  # of who speaks, mostly the tool


def check_json(name: str, value: object) -> None:
    """Raises ValueError, naming the path, if `value` is not JSON (None, bool, int, finite float, str, list,
    str-keyed dict).
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; JSON has no such number")
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError(f"{name} is an integer of {value.bit_length()} bits; write it as text")
    if isinstance(value, int | float | str | None):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; keys must be strings")
            check_json(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_json(f"{name}[{index}]", inner)
    else:
        raise ValueError(
            f"{name} is a {type(value).__name__}; it must be a JSON value (numpy scalars: call .item())"
        )


def checked_messages(messages: object, name: str) -> list[ChatMessage]:
    """The chat messages of a list, each as `checked_message` gives it. Raises ValueError, beginning with
    `name`, for anything else and for an empty list.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"{name} is of type {type(messages).__name__}; it must be a list of chat messages")
    if not messages:
        raise ValueError(f"{name} is an empty list; it must hold at least one chat message")
    checked = []
    for index, message in enumerate(messages):
        try:
            checked.append(checked_message(message))
        except ValueError as error:
            raise ValueError(f"{name}[{index}]{error}") from error
    return checked


def checked_message(message: object) -> ChatMessage:
    """A copy of `message` as one turn, with every key that has a value.

    A content of text parts becomes one text, the parts put together with nothing between them. No content
    beside tool calls becomes "". A null elsewhere, or an empty list of tool calls, is an absent key.
    `reasoning` and `thinking` become reasoning_content. Raises ValueError with a text that goes on after the
    message's name, such as ".content is of type int; it must be text".
    """
    form = "a chat message is an object with a role and a content"
    if not isinstance(message, Mapping):
        raise ValueError(f" is of type {type(message).__name__}; {form}")
    turn = drop_none(message)
    calls = turn.pop("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise ValueError(f".tool_calls is of type {type(calls).__name__}; it must be a list of tool calls")
    calls = [_checked_tool_call(call, f".tool_calls[{index}]") for index, call in enumerate(calls)]
    if calls:
        turn.setdefault("content", "")
    for key in ("role", "content"):
        if key not in turn and key not in message:
            raise ValueError(f" has no {key}; {form}")
    turn["content"] = _checked_content(turn.get("content"))
    for key in OTHER_THINKING_KEYS:
        if key in turn and turn.setdefault("reasoning_content", turn[key]) != turn.pop(key):
            raise ValueError(f" has another text in {key} than in reasoning_content; keep one of them")
    turn.setdefault("role", None)
    for key in ("role", "reasoning_content", "tool_call_id", "name"):
        if key in turn and not isinstance(turn[key], str):
            raise ValueError(f".{key} is of type {type(turn[key]).__name__}; it must be text")
    if not turn["role"]:
        raise ValueError(".role is empty; it must be system, user, assistant or tool")
    _refuse_unread_keys(turn)
    if calls:
        turn["tool_calls"] = calls
        if turn["role"] != "assistant":
            raise ValueError(
                f" has the role {turn['role']} and tool_calls; only an assistant's turn calls tools"
            )
    return cast(ChatMessage, turn)


def _checked_content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f".content is of type {type(content).__name__}; it must be text")
    if not content:
        raise ValueError(".content is an empty list; it must be text, or a list of text parts")
    parts = []
    for index, part in enumerate(content):
        fields = part if isinstance(part, Mapping) else {"text": part}
        if fields.get("type", "text") != "text":
            raise ValueError(
                f".content[{index}] is a part of type {fields['type']!r}; only text can train, so leave such"
                " rows out"
            )
        if not isinstance(fields.get("text"), str):
            raise ValueError(f'.content[{index}] has no text; a part is {{"type": "text", "text": "…"}}')
        parts.append(fields["text"])
    return "".join(parts)


def _refuse_unread_keys(turn: Mapping[str, Any]) -> None:
    for key, value in turn.items():
        if key in MEDIA_KEYS and value:
            raise ValueError(f".{key}: only text can train, so leave such rows out")
        if key == "function_call":
            raise ValueError(f".{key} is the old way to call a tool; write tool_calls: [{CALL_FORM}]")
        if key in ("weight", "train") and value in (0, False):
            raise ValueError(
                f".{key} is {value!r}, which is not read; the turns that train are chosen by sft.train_on"
            )
        if not isinstance(key, str):
            raise ValueError(f" has the key {key!r}; keys must be text")
        check_json(f".{key}", value)


def _checked_tool_call(call: object, name: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise ValueError(f"{name} has no function; a tool call is {CALL_FORM}")
    if (call.get("type") or "function") != "function":
        raise ValueError(f"{name}.type is {call['type']!r}; a tool call is {CALL_FORM}")
    called = function.get("name")
    if not isinstance(called, str) or not called:
        raise ValueError(f"{name}.function.name is {called!r}; it must be text that is not empty")
    parse_tool_arguments(function.get("arguments"), f"{name}.function.arguments")
    check_json(name, call)
    return {"type": "function", **drop_none(call), "function": dict(function)}


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """What has a value, by name."""
    return {name: value for name, value in values.items() if value is not None}


def parse_tool_arguments(arguments: object, name: str = "arguments") -> dict[str, Any]:
    """The arguments of a tool call as an object, from one or from its JSON text. Raises ValueError, beginning
    with `name`, for others.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{name} is {arguments!r}, which is not the JSON text of an object ({error})"
            ) from error
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} is {arguments!r}; it must be an object or its JSON text, {{}} for no arguments"
        )
    check_json(name, value)
    return dict(value)


def parse_json(text: str) -> JSONValue:
    """The value of a JSON text. Raises ValueError also for what json.loads takes and RFC 8259 does not: NaN,
    Infinity, and a key twice in one object; RecursionError for one that is too deep.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_make_unique)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {key!r} stands twice in one object")
        unique[key] = value
    return unique

"""What a row is, and what is wrong with one that is malformed.

A row is a JSON object with `prompt` (text or chat messages), or `messages` (a conversation with its answers),
and whatever else a reward function reads, such as `answer`. Rows of preferences have the columns of TRL's
datasets:

    pair      prompt + chosen + rejected; or chosen and rejected alone, two whole conversations that begin
              alike
    labelled  prompt + completion + label; or completion and label alone, a whole conversation
    scored    the same with a score in place of the label

A response is text, or chat messages of which the last is the assistant's. Once parsed, `prompt` holds every
message before the response, as chat messages, and each response column a list of one message.
"""

import datetime as dt
import decimal
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from rollouts.config.spelling import did_you_mean, nearest_names
from rollouts.errors import DataError, ModelError
from rollouts.messages import checked_messages, parse_json
from rollouts.types import ChatMessage, Fields, JSONValue, check_json

Row = dict[str, Any]
Messages = Sequence[ChatMessage]

# of a row as UTF-8 JSON: no model reads a longer one, and one broken line would fill the memory
MAX_ROW_BYTES = 2**20
MAX_DEPTH = 64  # lists and objects inside each other


RowUse = Literal["any", "prompt", "conversation", "pair", "labelled", "scored"]
"""prompt: RL and evaluation generate from it; conversation: SFT trains on it; pair: preference losses and
reward models; labelled: KTO; scored: reward models too.
"""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts `where` before the message of a DataError or ModelError that is raised inside."""
    try:
        yield
    except (DataError, ModelError) as error:
        raise type(error)(f"{where}: {error}") from error


def parse_row(
    value: object,
    use: RowUse = "any",
    *,
    columns: Mapping[str, str] = {},
    system_prompt: str | None = None,
) -> Row:
    """What a source gave as a row that is good for its use: columns renamed, values as JSON, the responses of
    preferences apart from their prompt, the system prompt in place. Raises DataError.
    """
    if not isinstance(value, Mapping):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"the row is {kind}; it must be an object with `prompt` or `messages`")
    taken = {ours: _look_up(value, theirs) for ours, theirs in columns.items() if theirs}
    # a field that got another name loses its own; a name of "" leaves a field out
    moved = {*columns, *columns.values()}
    row = to_json(taken | {key: inner for key, inner in value.items() if key not in moved})
    if use in RESPONSES:
        row = _split_responses(row, use)
    turns = {"prompt": read_prompt, "messages": parse_messages}
    asked = {key: read(row[key]) for key, read in turns.items() if key in row}
    if not asked:
        hint = next(filter(None, (did_you_mean(key, turns) for key in row)), "")
        raise DataError(f"neither `prompt` nor `messages`; the row has {', '.join(row) or 'no fields'}{hint}")
    parse_tools(row.get("tools"))
    if use == "prompt" and "prompt" not in row:
        raise DataError("no `prompt`; RL and evaluation rows need one (`messages` alone is for SFT)")
    if use == "conversation":
        row_to_conversation(row)
    if len(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()) > MAX_ROW_BYTES:
        raise DataError(f"the row has more than {MAX_ROW_BYTES} bytes as JSON; shorten it or leave it out")
    for key, messages in asked.items():
        if system_prompt is not None and not any(turn["role"] == "system" for turn in messages):
            row = {**row, key: [ChatMessage(role="system", content=system_prompt), *messages]}
    return row


# --- values -------------------------------------------------------------------------------------------------


AS_TEXT = (np.datetime64, np.timedelta64, decimal.Decimal, uuid.UUID, dt.timedelta)


def to_json(value: object, field: str = "", depth: int = 0) -> Any:
    """`value` as JSON: numpy values as numbers and lists, times as ISO 8601 text, decimals and UUIDs as text.
    Raises DataError for others.
    """
    top = re.split(r"[.\[]", field)[0]
    if isinstance(value, dt.date | dt.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, AS_TEXT):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{field} has half a surrogate pair at character {error.start}, which is no text"
            ) from error
        return value
    if not isinstance(value, Mapping | list | tuple | np.ndarray):
        try:
            check_json(field, value)
        except ValueError as error:
            raise DataError(f'{error}; convert it, or leave the field out with columns.{top} = ""') from error
        return value
    if depth >= MAX_DEPTH:
        raise DataError(f"{top} has more than {MAX_DEPTH} lists and objects inside each other")
    if not isinstance(value, Mapping):
        return [to_json(inner, f"{field}[{index}]", depth + 1) for index, inner in enumerate(value)]
    for key in value:
        if not isinstance(key, str):
            raise DataError(f"{field or 'the row'} has the key {key!r}; keys must be text")
    inside = f"{field}." if field else ""
    return {to_json(key, field): to_json(inner, f"{inside}{key}", depth + 1) for key, inner in value.items()}


def _look_up(row: Mapping[str, Any], path: str) -> JSONValue:
    if path in row:
        return row[path]
    value: Any = row
    parts = path.split(".")
    for number, part in enumerate(parts):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (LookupError, TypeError, ValueError) as error:
            owner = f"{'.'.join(parts[:number])} of the row" if number else "the row"
            has = f"is {repr(value)[:80]}"
            if isinstance(value, Mapping):
                has = f"has {', '.join(map(str, value)) or 'no fields'}{did_you_mean(part, map(str, value))}"
            raise DataError(f"there is no {path}: {owner} {has}") from error
    return value


# --- prompts and conversations ------------------------------------------------------------------------------


def parse_messages(messages: object, *, where: str = "messages") -> list[ChatMessage]:
    """The chat messages of a row in one form: every content a text, every other key as the row has it (see
    types.checked_message).

    Raises DataError, beginning with `where`, that names the message and the key, if `messages` is no list of
    chat messages or is empty.
    """
    try:
        return checked_messages(messages, where)
    except ValueError as error:
        raise DataError(str(error)) from error


def parse_prompt(prompt: str | Messages) -> list[ChatMessage]:
    """A prompt as messages; text is one user turn."""
    return [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


def parse_tools(tools: object, *, where: str = "tools") -> list[Fields] | None:
    """The tools of a row, from a list of JSON schemas or its JSON text; None if there are none (null, or an
    empty list).

    Raises DataError, beginning with `where`, if it is something else.
    """
    rule = "it must be a list of tools as JSON schemas"
    try:
        value = parse_json(tools) if isinstance(tools, str) else tools
        check_json(where, value)
    except (ValueError, RecursionError) as error:
        problem = f"{where} is text but not JSON ({error}); {rule}"
        raise DataError(problem if isinstance(tools, str) else str(error)) from error
    if not isinstance(value, list | tuple | None):
        raise DataError(f"{where} is of type {type(value).__name__}; {rule}")
    for index, tool in enumerate(value or ()):
        if not isinstance(tool, Mapping) or not tool:
            raise DataError(
                f'{where}[{index}] is {tool!r}; a tool is an object such as {{"type": "function", "function":'
                ' {"name": "…"}}'
            )
    return [dict(tool) for tool in value or ()] or None


def read_prompt(prompt: object) -> list[ChatMessage]:
    """A prompt as chat messages; text is the user's turn. Raises DataError unless every user's turn asks
    something.
    """
    if prompt is None:
        raise DataError("prompt is null; it must be text or chat messages")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("prompt is empty; it must be text or chat messages")
        return parse_prompt(prompt)
    messages = parse_messages(prompt, where="prompt")
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            raise DataError(f"prompt[{index}].content is empty; a user's turn asks something")
    return messages


def row_to_conversation(row: Row) -> list[ChatMessage]:
    """The messages that SFT trains on: row["messages"], or the prompt followed by row["answer"] as the
    assistant's turn. Raises DataError if there is no assistant turn to train on.
    """
    if "messages" in row:
        messages = parse_messages(row["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError("messages has no assistant turn; SFT trains on assistant turns")
        return messages
    if "answer" not in row:
        raise DataError(
            "no `messages` and no `answer`; an SFT row has messages with an assistant turn, or a prompt and"
            " an answer"
        )
    answer = row["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"answer is {repr(answer)[:80]}; SFT trains on it, so it must be text that is not empty"
        )
    return [*read_prompt(row["prompt"]), ChatMessage(role="assistant", content=answer)]


# --- preferences --------------------------------------------------------------------------------------------


RESPONSES = {
    # by use: the columns that a row must have, the responses first, and the rule; the column beside the
    # responses, its types and what it must be
    "pair": (
        ("chosen", "rejected"),
        "a pair has a prompt, a chosen and a rejected response",
        "margin",
        (int, float, type(None)),
        "a number: how much better the chosen response is",
    ),
    "labelled": (
        ("completion", "label"),
        "a KTO row has a prompt, a completion and a label",
        "label",
        (bool,),
        "true for a good completion and false for a bad one",
    ),
    "scored": (
        ("completion", "score"),
        "a scored row has a prompt, a completion and a score",
        "score",
        (int, float),
        "a number: how good the completion is",
    ),
}


def _split_responses(row: Row, use: RowUse) -> Row:
    """The row with its prompt and its responses apart. Raises DataError if one is missing, empty or of
    another type, the responses answer different prompts, or label, score or margin is of another type.
    """
    needed, rule, column, types, what = RESPONSES[use]
    for field in needed:
        if field not in row:
            close = nearest_names(field, (key for key in row if key not in needed), count=1)
            hint = f'; is it {close[0]}? Then set columns.{field} = "{close[0]}"' if close else ""
            raise DataError(f"no `{field}`; {rule}. The row has {', '.join(row) or 'no fields'}{hint}")
    responses = needed if use == "pair" else needed[:1]
    turns = {field: _join(row, field) for field in responses}
    first, second = turns[responses[0]], turns[responses[-1]]
    if first[:-1] != second[:-1]:
        pairs = zip_longest(first[:-1], second[:-1])
        same = next(at for at, (one, other) in enumerate(pairs) if one != other)
        raise DataError(
            f"chosen and rejected differ in message {same} already; both must answer the same prompt with"
            " their last turn"
        )
    if type(row.get(column)) not in types:
        raise DataError(f"{column} is {repr(row.get(column))[:80]}; it must be {what}")
    return {**row, "prompt": first[:-1], **{field: whole[-1:] for field, whole in turns.items()}}


def _join(row: Row, field: str) -> list[ChatMessage]:
    """The whole conversation of which the last message is the response in `field`."""
    value = row[field]
    if isinstance(value, str):
        value = {"role": "assistant", "content": value}
    turns = parse_messages([value] if isinstance(value, Mapping) else value, where=field)
    last, first_role = turns[-1], turns[0]["role"]
    if last["role"] != "assistant":
        raise DataError(
            f"{field} ends with a turn of the role {last['role']}; its last turn is the assistant's response"
        )
    if not says_something(last):
        raise DataError(f"{field} is empty, or its last turn says nothing; leave the row out")
    if row.get("prompt") is None:
        if first_role != "assistant":
            return turns
        raise DataError(
            f"no `prompt`; then {field} must be a whole conversation as chat messages, which begins with a"
            " user's turn"
        )
    prompt = read_prompt(row["prompt"])
    if first_role == "assistant":
        return [*prompt, *turns]
    asked = {turn["content"].strip() for turn in turns[:-1]}
    if turns[: len(prompt)] == prompt or (isinstance(row["prompt"], str) and row["prompt"].strip() in asked):
        return turns
    raise DataError(
        f"{field} begins with a {first_role}'s turn, but not with the row's prompt; give the response alone,"
        " or a whole conversation that begins with the prompt"
    )


def says_something(turn: ChatMessage) -> bool:
    """Whether the turn has content, thinking or a tool call."""
    texts = turn["content"], turn.get("reasoning_content", "")
    return any(map(str.strip, texts)) or bool(turn.get("tool_calls"))

"""What a row is, and what is wrong with one that is malformed.

A row is a JSON object with `prompt` (text or chat messages), or `messages` (a conversation with its answers),
and whatever else a reward function reads, such as `answer`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from rollouts.config.spelling import nearest
from rollouts.data.messages import check_messages, parse_messages, parse_tools
from rollouts.errors import DataError
from rollouts.types import ChatMessage, JSONValue, check_json

Row = dict[str, Any]

# of a row as UTF-8 JSON: no model reads a longer one, and one broken line would fill the memory
MAX_ROW_BYTES = 2**20
MAX_DEPTH = 64  # lists and objects inside each other
SHOWN = 5  # malformed rows that an error lists


RowUse = Literal["any", "prompt", "conversation", "pair", "labelled"]
"""prompt: RL and evaluation generate from it; conversation: SFT trains on it; pair, labelled: see
rollouts.data.preference_rows.
"""
USE_OF_STAGE: Mapping[str, RowUse] = {
    "sft": "conversation",
    "rl": "prompt",
    "eval": "prompt",
    "preference": "pair",
    "reward_model": "pair",
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """One malformed row: where it is and what is wrong with it."""

    position: int  # among all rows of its source, from 0
    file: str  # or the data set or function it came from
    number: int  # the line from 1 where `by_line`, otherwise the row of the file from 0
    by_line: bool
    field: str  # dotted, such as messages[0].content; empty when the row as a whole is wrong
    problem: str  # a sentence

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.number}: {self.problem}"
            if self.by_line
            else f"{self.file} row {self.number}: {self.problem}"
        )


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one source in its own order, with a hole where one is malformed."""

    name: str  # of the source in a mixture
    weight: float  # relative to the other sources of the mixture
    rows: tuple[Row | None, ...]  # None: malformed, and in `bad`
    bad: tuple[BadRow, ...] = ()

    @property
    def good_count(self) -> int:
        """Rows that are no holes."""
        return sum(row is not None for row in self.rows)


class RowProblem(Exception):
    """What makes one row malformed. Never leaves this folder: it becomes a BadRow or a DataError."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def require_good_rows(found: SourceRows, *, max_bad_fraction: float, name: str) -> None:
    """Raises DataError, with the counts and the first malformed rows, if none is good or more than that share
    of all rows is malformed.
    """
    count = len(found.rows)
    if found.good_count and len(found.bad) <= max_bad_fraction * count:
        return
    shown = "".join(f"\n  {bad}" for bad in found.bad[:SHOWN]) + (
        f"\n  and {len(found.bad) - SHOWN} more" if len(found.bad) > SHOWN else ""
    )
    rule = (
        f"more than max_bad_fraction={max_bad_fraction:g} allows"
        if found.good_count
        else "so nothing is left"
    )
    raise DataError(
        f"{name}: {len(found.bad)} of {count} rows {'is' if len(found.bad) == 1 else 'are'} malformed,"
        f" {rule}; mend them{f', or set {name}.max_bad_fraction' if found.good_count else ''}:{shown}"
    )


# --- checks -------------------------------------------------------------------------------------------------


def check_row(row: Mapping[str, Any], *, where: str) -> None:
    """Raises DataError, beginning with `where`, if the row has neither prompt nor messages, or one that is
    empty or of another type.
    """
    try:
        check_asked(row)
    except RowProblem as problem:
        raise DataError(f"{where}: {problem}") from problem.__cause__
    try:
        check_json("row", row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def check_asked(row: Mapping[str, Any]) -> None:
    """Raises RowProblem unless the row has a prompt or messages, and what it has can be used."""
    if "prompt" not in row and "messages" not in row:
        close = next((found for key in row if (found := nearest(key, ["prompt", "messages"]))), None)
        hint = f"; did you mean {close}?" if close else ""
        raise RowProblem(
            "prompt", f"neither `prompt` nor `messages`; the row has {', '.join(row) or 'no fields'}{hint}"
        )
    if "prompt" in row:
        check_prompt(row["prompt"])
    if "messages" in row:
        check_chat(row["messages"], "messages")
    if "tools" in row:
        check_chat(row["tools"], "tools")


def check_prompt(prompt: object) -> None:
    """Raises RowProblem unless it is text or chat messages that ask something."""
    if prompt is None:
        raise RowProblem("prompt", "prompt is null; it must be text or chat messages")
    if not isinstance(prompt, str):
        check_chat(prompt, "prompt")
        _check_questions(as_messages(cast(Any, prompt)))
    elif not prompt.strip():
        raise RowProblem("prompt", "prompt is empty; it must be text or chat messages")


def _check_questions(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            field = f"prompt[{index}].content"
            raise RowProblem(field, f"{field} is empty; a user's turn asks something")


def check_chat(value: object, field: str) -> None:
    """Raises RowProblem, naming the place, unless `value` is a list of chat messages, or of tools where
    `field` says so.
    """
    check = parse_tools if field == "tools" else check_messages
    try:
        check(value, where=field)
    except DataError as error:
        named = re.match(r"\w+(\[\d+\])?(\.\w+(\[\d+\])*)*", str(error))
        raise RowProblem(named.group() if named else field, str(error)) from error


def require_prompts(rows: Iterable[Mapping[str, Any] | None], *, name: str) -> None:
    """Raises DataError naming the first row that has no `prompt`: RL and evaluation generate from one. Holes
    are passed over.
    """
    for index, row in enumerate(rows):
        if row is not None and "prompt" not in row:
            raise DataError(
                f"{name}: row {index} has no prompt; RL and evaluation rows need one (`messages` alone is for"
                " SFT)"
            )


# --- values -------------------------------------------------------------------------------------------------


def parse_row(
    value: object,
    columns: Mapping[str, str],
    system_prompt: str | None,
    reshape: Callable[[Row], Row] | None = None,
) -> Row:
    """What a source gave as a row: columns renamed, values as JSON, put into another shape, the system prompt
    in place. Raises RowProblem.
    """
    if not isinstance(value, Mapping):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise RowProblem("", f"the row is {kind}; it must be an object with `prompt` or `messages`")
    row = {key: to_json(inner, str(key)) for key, inner in take_columns(value, columns).items()}
    check_keys(row, "the row")
    row = row if reshape is None else reshape(row)
    check_asked(row)
    if len(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()) > MAX_ROW_BYTES:
        raise RowProblem(
            "", f"the row has more than {MAX_ROW_BYTES} bytes as JSON; shorten it or leave it out"
        )
    return row if system_prompt is None else with_system_prompt(row, system_prompt)


AS_TEXT = (np.datetime64, np.timedelta64, decimal.Decimal, uuid.UUID, dt.timedelta)


def to_json(value: object, field: str, depth: int = 1) -> JSONValue:
    """`value` as JSON: numpy values as numbers and lists, times as ISO 8601 text, decimals and UUIDs as text.
    Raises RowProblem for others.
    """
    if isinstance(value, AS_TEXT):
        return str(value)
    if isinstance(value, dt.date | dt.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _checked_text(value, field)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowProblem(field, f"{field} is {value}; JSON has no such number")
        return value
    top = re.split(r"[.\[]", field)[0]
    if depth >= MAX_DEPTH:
        raise RowProblem(top, f"more than {MAX_DEPTH} lists and objects inside each other")
    if isinstance(value, Mapping):
        check_keys(value, field)
        return {str(key): to_json(inner, f"{field}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [to_json(inner, f"{field}[{index}]", depth + 1) for index, inner in enumerate(value)]
    rule = f'JSON has no such value; leave the field out with columns.{top} = "", or convert it'
    raise RowProblem(field, f"{field} is of type {type(value).__name__}; {rule}")


def _checked_text(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(
            field, f"{field} has half a surrogate pair at character {error.start}, which is no text"
        ) from error
    return str(text)


def check_keys(value: Mapping[Any, Any], field: str) -> None:
    """Raises RowProblem unless every key is text."""
    for key in value:
        if not isinstance(key, str):
            raise RowProblem(field, f"{field} has the key {key!r}; keys must be text")
        _checked_text(key, field)


def take_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names. A field that got another name loses its own; a name of "" leaves a field out.
    Raises RowProblem.
    """
    taken = {ours: _look_up(row, theirs) for ours, theirs in columns.items() if theirs}
    moved = set(columns.values())
    return {**taken, **{key: value for key, value in row.items() if key not in moved and key not in columns}}


def _look_up(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    seen: list[str] = []
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise RowProblem(path, describe_missing(path, part, ".".join(seen), value))
        seen.append(part)
    return value


def describe_missing(path: str, part: str, inside: str, value: object) -> str:
    """That there is no `part` in `value`, what there is instead, and what was probably meant."""
    owner = f"{inside} of the row" if inside else "the row"
    if not isinstance(value, Mapping):
        size = f" with {len(value)} items" if isinstance(value, list) else ""
        kind = "null" if value is None else f"of type {type(value).__name__}{size}"
        return f"there is no {path}: {owner} is {kind}"
    close = nearest(part, map(str, value))
    has = ", ".join(map(str, value)) or "no fields"
    return f"there is no {path}: {owner} has {has}{f'; did you mean {close}?' if close else ''}"


# --- prompts and conversations ------------------------------------------------------------------------------


def as_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """A prompt as chat messages; text is the user's turn."""
    return (
        [ChatMessage(role="user", content=prompt)]
        if isinstance(prompt, str)
        else parse_messages(prompt, where="messages")
    )


def with_system_prompt(row: Row, system_prompt: str) -> Row:
    """The row with that system message before its prompt and its messages, where they have none."""
    changed = dict(row)
    for key in ("prompt", "messages"):
        if key in row:
            messages = as_messages(row[key])
            has_one = any(message["role"] == "system" for message in messages)
            changed[key] = (
                messages if has_one else [ChatMessage(role="system", content=system_prompt), *messages]
            )
    return changed


def check_use(row: Mapping[str, Any], use: RowUse) -> None:
    """Raises RowProblem if the row is not what it will be used for."""
    if use == "prompt" and "prompt" not in row:
        raise RowProblem(
            "prompt", "no `prompt`; RL and evaluation rows need one (`messages` alone is for SFT)"
        )
    if use == "conversation":
        _make_conversation(row)


def row_to_conversation(row: Mapping[str, Any], *, where: str = "row") -> list[ChatMessage]:
    """The messages that SFT trains on: row["messages"], or the prompt followed by row["answer"] as the
    assistant's turn.

    Raises DataError, beginning with `where`, if there is no assistant turn to train on.
    """
    try:
        return _make_conversation(row)
    except RowProblem as problem:
        raise DataError(f"{where}: {problem}") from problem.__cause__


def _make_conversation(row: Mapping[str, Any]) -> list[ChatMessage]:
    if "messages" in row:
        messages = as_messages(row["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise RowProblem("messages", "messages has no assistant turn; SFT trains on assistant turns")
        return messages
    if "answer" not in row:
        raise RowProblem(
            "answer",
            "no `messages` and no `answer`; an SFT row has messages with an assistant turn, or a prompt and"
            " an answer",
        )
    if not isinstance(row["answer"], str) or not row["answer"].strip():
        raise RowProblem(
            "answer",
            f"answer is {repr(row['answer'])[:80]}; SFT trains on it, so it must be text that is not empty",
        )
    return [*as_messages(row["prompt"]), ChatMessage(role="assistant", content=row["answer"])]

"""Chat messages and tools as rows hold them: checked where they enter, so that every later line may rely on
their form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollouts.errors import DataError
from rollouts.types import ChatMessage, check_json, checked_message


def parse_messages(messages: object, *, where: str) -> list[ChatMessage]:
    """The chat messages of a row in one form: every content a text, every other key as the row has it (see
    types.checked_message).

    Raises DataError, beginning with `where`, that names the message and the key, if `messages` is no list of
    chat messages or is empty.
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"{where} is of type {type(messages).__name__}; it must be a list of chat messages")
    if not messages:
        raise DataError(f"{where} is an empty list; it must hold at least one chat message")
    parsed: list[ChatMessage] = []
    for index, message in enumerate(messages):
        try:
            parsed.append(checked_message(message))
        except ValueError as error:
            raise DataError(f"{where}[{index}]{error}") from error
    return parsed


def check_messages(messages: object, *, where: str) -> None:
    """Raises DataError, beginning with `where`, unless `messages` is a list, not empty, of chat messages that
    `parse_messages` takes.
    """
    parse_messages(messages, where=where)


def parse_tools(tools: object, *, where: str) -> list[dict[str, Any]] | None:
    """The tools of a row, from a list of JSON schemas or its JSON text; None if there are none (null, or an
    empty list).

    Raises DataError, beginning with `where`, if it is something else.
    """
    value: object = tools
    if isinstance(tools, str):
        try:
            value = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is text but not JSON ({error}); it must be a list of tools as JSON schemas"
            ) from error
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{where} is of type {type(value).__name__}; it must be a list of tools as JSON schemas"
        )
    for index, tool in enumerate(value):
        if not isinstance(tool, Mapping) or not tool:
            raise DataError(
                f'{where}[{index}] is {tool!r}; a tool is an object such as {{"type": "function", "function":'
                ' {"name": "…"}}'
            )
    try:
        check_json(where, list(value))
    except ValueError as error:
        raise DataError(str(error)) from error
    return [dict(tool) for tool in value] or None

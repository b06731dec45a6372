"""Chat messages and tools as rows hold them: checked where they enter, so that every later line may rely on
their form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollouts.errors import DataError, ModelError
from rollouts.messages import ChatMessage, check_json, checked_messages


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts `where` before the message of a DataError or ModelError that is raised inside."""
    try:
        yield
    except (DataError, ModelError) as error:
        kind = ModelError if isinstance(error, ModelError) else DataError
        raise kind(f"{where}: {error}") from error


def parse_messages(messages: object, *, where: str) -> list[ChatMessage]:
    """The chat messages of a row in one form: every content a text, every other key as the row has it (see
    types.checked_message).

    Raises DataError, beginning with `where`, that names the message and the key, if `messages` is no list of
    chat messages or is empty.
    """
    try:
        return checked_messages(messages, where)
    except ValueError as error:
        raise DataError(str(error)) from error


def parse_tools(tools: object, *, where: str) -> list[dict[str, Any]] | None:
    """The tools of a row, from a list of JSON schemas or its JSON text; None if there are none (null, or an
    empty list).

    Raises DataError, beginning with `where`, if it is something else.
    """
    rule = "it must be a list of tools as JSON schemas"
    try:
        value: Any = json.loads(tools) if isinstance(tools, str) else tools
        check_json(where, value)
    except (ValueError, RecursionError) as error:
        is_text = isinstance(error, json.JSONDecodeError)
        raise DataError(
            f"{where} is text but not JSON ({error}); {rule}" if is_text else str(error)
        ) from error
    if not isinstance(value, list | tuple | None):
        raise DataError(f"{where} is of type {type(value).__name__}; {rule}")
    for index, tool in enumerate(value or ()):
        if not isinstance(tool, Mapping) or not tool:
            raise DataError(
                f'{where}[{index}] is {tool!r}; a tool is an object such as {{"type": "function", "function":'
                ' {"name": "…"}}'
            )
    return [dict(tool) for tool in value or ()] or None

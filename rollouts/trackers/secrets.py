"""What must not leave the environment: keys, tokens and passwords, found by the names of what holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|key|token|secret|pass|credentials?|auth|authorization|cookie|dsn|headers)$|(password|passwd|passphrase|connection_?string)$",
    re.IGNORECASE,
)
USER_INFO = re.compile(r"(?<=://)[^/\s\"']+(?=@)")  # user:password of an address
SHORTEST = 6  # characters of a secret: a shorter value is a part of too much else


def remove_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with *** for text whose name is one of a secret, also in a command's arguments, and for
    users and passwords in addresses.
    """
    return {name: _remove(name, value) for name, value in settings.items()}


def _remove(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return remove_secrets(value)
    if isinstance(value, list):
        return _remove_from_list(name, value)
    if not isinstance(value, str):
        return value
    return HIDDEN if value and SECRET_NAME.search(name) else USER_INFO.sub(HIDDEN, value)


def _remove_from_list(name: str, items: list[Any]) -> list[Any]:
    """An item that is an option, as --api-key, is the name of the next one, or of what follows its own equals
    sign.
    """
    removed: list[Any] = []
    option = ""
    for item in items:
        own, equals, value = (
            item.partition("=") if isinstance(item, str) and item.startswith("-") else ("", "", "")
        )
        removed.append(
            f"{own}={_remove(own, value)}" if equals else item if own else _remove(option or name, item)
        )
        option = own if own and not equals else ""
    return removed


def find_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values of variables whose names are those of secrets, whole and in their parts (`name=value,…`), as
    they are and without percent signs, the longest first.
    """
    found: set[str] = set()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            found |= {
                part for text in (value, unquote(value)) for part in (text, *re.split(r"[=,;\s]+", text))
            }
        found |= {part for match in USER_INFO.findall(value) for part in (match, *match.split(":"))}
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def hide_secrets(text: str, secrets: list[str]) -> str:
    """The text with *** for each secret."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return USER_INFO.sub(HIDDEN, text)

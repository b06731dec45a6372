"""What must not leave the environment: keys, tokens and passwords, found by the names of what holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
SECRET_NAME = re.compile(r"(^|[_.-])(api_?key|key|token|secret|password|passwd|pass|credentials?|auth|authorization|dsn|headers)$", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/\s\"']+(?=@)")  # user:password of an address
SHORTEST = 6  # characters of a secret: a shorter value is a part of too much else


def remove_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with *** for text whose name is one of a secret, and for users and passwords in addresses."""
    return {name: _remove(name, value) for name, value in settings.items()}


def _remove(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return remove_secrets(value)
    if isinstance(value, list):
        return [_remove(name, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and SECRET_NAME.search(name) else USER_INFO.sub(HIDDEN, value)


def find_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values of variables whose names are those of secrets, whole and in their parts (`name=value,…`), as they are and without
    percent signs, the longest first."""
    found: set[str] = set()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            found |= {part for text in (value, unquote(value)) for part in (text, *re.split(r"[=,;\s]+", text))}
        found |= {part for match in USER_INFO.findall(value) for part in (match, *match.split(":"))}
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def hide_secrets(text: str, secrets: list[str]) -> str:
    """The text with *** for each secret."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return USER_INFO.sub(HIDDEN, text)

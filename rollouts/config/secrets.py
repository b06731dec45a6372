"""Keys, tokens and passwords, found by the names of what holds them, and texts without them."""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from rollouts.types import Fields, Texts

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|key|token|secret|pass|credentials?|auth|authorization|cookie|dsn|headers)$"
    r"|(password|passwd|passphrase|connection_?string)$",
    re.IGNORECASE,
)
USER_INFO = re.compile(r"(?<=://)[^/\s\"']+(?=@)")  # user:password of an address
SHORTEST = 6  # characters of a secret: a shorter value is a part of too much else


def remove_secrets(name: str, value: Any) -> Any:
    """The setting with *** for text whose name is one of a secret, also in a command's arguments, and for
    users and passwords in addresses.
    """
    if isinstance(value, Mapping):
        return {key: remove_secrets(key, inner) for key, inner in value.items()}
    if isinstance(value, list):  # an option, as --api-key, is the name of the item after it
        names = [name, *(item if str(item).startswith("-") else name for item in value)]
        return [remove_secrets(own, item) for own, item in zip(names, value, strict=False)]
    if not isinstance(value, str) or not value:
        return value
    option, equals, text = value.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={remove_secrets(option, text)}"
    return HIDDEN if SECRET_NAME.search(name) else USER_INFO.sub(HIDDEN, value)


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key; the tables of a list are numbered."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {key: value}
    flat = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{key}.{name}".lstrip("."))
    return flat


def flatten_settings(table: Fields) -> dict[str, str]:
    """The settings of a record as text, by dotted name."""
    return {
        key: value if value and isinstance(value, str) else json.dumps(value, default=str)
        for key, value in flatten(table).items()
    }


def find_secrets(environment: Texts) -> list[str]:
    """The values of variables whose names are those of secrets, whole and in their parts (`name=value,…`), as
    they are and without percent signs, and the users and passwords of addresses; the longest first.
    """
    found = set()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            for text in (value, unquote(value)):
                found |= {text, *re.split(r"[=,;\s]+", text)}
        for match in USER_INFO.findall(value):
            found |= {match, *match.split(":")}
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def hide_secrets(text: str, secrets: list[str]) -> str:
    """The text with *** for each secret."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return USER_INFO.sub(HIDDEN, text)

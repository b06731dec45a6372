"""The settings of runs, flat, and those in which runs differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|key|token|secret|password|passwd|pass|credentials?|auth|authorization|dsn|headers)$",
    re.IGNORECASE,
)
URL_LOGIN = re.compile(r"(?<=://)[^/\s\"]+@")  # to the last @: a password may hold one
HIDDEN = "(hidden)"
NOT_COMPARED = frozenset({"output.dir"})


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Each setting's value as text, by its dotted name; of a list of tables each entry by its number. Secrets
    are not shown.
    """
    flat: dict[str, str] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for number, entry in enumerate(value):
                flat |= flatten_settings(entry, f"{key}.{number}.")
        else:
            flat[key] = format_setting(key, value)
    return flat


def format_setting(key: str, value: Any) -> str:
    """The value as JSON, or a remark in place of a secret; a login in an address is left out."""
    if isinstance(value, str) and value and SECRET_NAME.search(key):
        return HIDDEN
    return URL_LOGIN.sub("", json.dumps(value, ensure_ascii=False, default=str))


def find_differences(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """Settings that are not the same in all runs, with each run's value, None where it has none."""
    names = dict.fromkeys(name for run in settings for name in run if name not in NOT_COMPARED)
    values = {name: [run.get(name) for run in settings] for name in names}
    return [(name, found) for name, found in values.items() if len(set(found)) > 1]

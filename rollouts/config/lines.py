"""Where in a TOML file each setting stands. tomllib does not say, so the file is read once more, a statement
at a time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any


def find_lines(text: str) -> dict[str, int]:
    """The line, from 1, on which each key and table of a TOML text is set, by dotted key; items of a list of
    tables have a number: rl.data.0.path.

    Where such a list has one item, its keys are there without the number too. The text must be TOML.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}  # items so far of each list of tables
    prefix = ""
    for number, statement in _statements(text):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            prefix = _open_table(parsed, counts)
            lines.setdefault(prefix, number)
        else:
            for dotted in _flatten(parsed, ""):
                lines.setdefault(f"{prefix}.{dotted}" if prefix else dotted, number)
    for table, count in counts.items():
        if count == 1:
            for dotted in [key for key in lines if f"{key}.".startswith(f"{table}.0.")]:
                lines.setdefault(table + dotted[len(table) + 2 :], lines[dotted])
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line of its beginning, its text) of each header and each key: the shortest run of lines that is TOML
    by itself.
    """
    waiting = ""
    begin = 1
    for number, line in enumerate(text.split("\n"), start=1):
        if not waiting:
            begin = number
        waiting += line + "\n"
        try:
            tomllib.loads(waiting)
        except tomllib.TOMLDecodeError:
            continue
        if waiting.strip() and not waiting.lstrip().startswith("#"):
            yield begin, waiting
        waiting = ""


def _open_table(parsed: Mapping[str, Any], counts: dict[str, int]) -> str:
    """The dotted name of the table that a header opens, with the numbers of the list items it is in."""
    dotted = ""
    value: Any = parsed
    while value:
        name, value = next(iter(value.items()))
        dotted = f"{dotted}.{name}" if dotted else name
        if isinstance(value, list):  # [[name]]: a new item
            counts[dotted] = counts.get(dotted, 0) + 1
            value = value[0]
        if dotted in counts:
            dotted = f"{dotted}.{counts[dotted] - 1}"
    return dotted


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in table.items():
        dotted = f"{prefix}{name}"
        yield dotted
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{dotted}.")
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from _flatten(item, f"{dotted}.{index}.") if isinstance(item, Mapping) else ()

"""What every setting is, and where its value comes from, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollouts.config.fields import Section
from rollouts.config.keys import ConfigKey, config_keys, describe_unknown_key, without_numbers
from rollouts.errors import ConfigError

MARKDOWN_HEAD = """# Settings

Written by `python -m rollouts explain --markdown` from `rollouts/config/schema.py`.

Settings stand in a TOML file, and each can be given on the command line as `--section.key value`, which wins.
Paths in a file are relative to the file, paths on the command line to the working directory. TOML has no
null: the word `"none"` switches off a setting that allows it. A table in double brackets may occur several
times; a flag names one of several by its number: `--rl.data.0.size 100`.
"""


class SetValue(NamedTuple):
    """What a setting is in one config."""

    text: str  # as TOML
    origin: str  # run.toml, a flag, or "default"


def explain_config(prefix: str = "", values: Mapping[str, SetValue] | None = None) -> str:
    """One line per setting: its default, meaning and type; only those at or under `prefix`.

    Tables of one kind are written out once. With the `values` of a config, its settings alone, with where
    they come from. Raises ConfigError, with the nearest key in its text, if there is nothing at `prefix`.
    """
    if without_numbers(prefix) not in config_keys() and prefix:
        raise ConfigError(describe_unknown_key(prefix))
    if values is not None:
        chosen = {key: value for key, value in values.items() if _is_under(key, prefix)}
        return "".join(f"{key} = {value.text}  ({value.origin})\n" for key, value in chosen.items())
    lines: list[str] = []
    for table, inside in _tables(prefix):
        if table is not None:
            lines += ["", f"{_header(table)}  {table.meaning}{_same_as(table, inside)}".rstrip()]
        width = max((len(key.key) for key in inside), default=0)
        lines += [f"{key.key:<{width}}  {key.default}  {key.meaning}  ({key.type_text})" for key in inside]
    return "\n".join(lines).strip() + "\n"


def explain_markdown() -> str:
    """All settings as a Markdown page, a table per section."""
    parts = [MARKDOWN_HEAD]
    for table, inside in _tables(""):
        if table is not None:
            parts.append(f"\n## `{_header(table)}`\n\n{table.meaning}{_same_as(table, inside)}\n")
        if inside:
            rows = [(f"`{key.name}`", key.type_text, f"`{key.default}`", key.meaning) for key in inside]
            head = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
            parts.append("\n".join([*head, *lines]) + "\n")
    return "\n".join(parts)


def _tables(prefix: str) -> list[tuple[ConfigKey | None, Sequence[ConfigKey]]]:
    """Each table with the settings to be written out under it: none where a table of that kind came
    before.
    """
    keys = [key for key in config_keys().values() if _is_under(key.key, without_numbers(prefix))]
    found: list[tuple[ConfigKey | None, Sequence[ConfigKey]]] = []
    seen: set[type[Section]] = set()
    loose = [key for key in keys if not key.is_table and not _is_under(key.table, prefix)]
    if (prefix and loose) or not prefix:
        found.append((None, loose if prefix else [key for key in keys if not key.table and not key.is_table]))
    for table in (key for key in keys if key.is_table):
        inside = [key for key in keys if key.table == table.key and not key.is_table]
        found.append((table, [] if table.section in seen else inside))
        seen.add(table.section)
    return found


def _same_as(table: ConfigKey, inside: Sequence[ConfigKey]) -> str:
    """A note on the table itself: whether it may be left out, and where its settings are written out."""
    note = {"unset": " May be left out.", "required": " Required."}.get(table.default, "")
    settings = [key for key in config_keys().values() if key.table == table.key and not key.is_table]
    if inside or not settings:
        return note
    first = next(key for key in config_keys().values() if key.is_table and key.section is table.section)
    others = [
        f"{key.name} = {key.default}"
        for key in settings
        if config_keys()[f"{first.key}.{key.name}"].default != key.default
    ]
    return f"{note} As [{first.key}]{', but ' + ', '.join(others) if others else ''}."


def _is_under(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def _header(key: ConfigKey) -> str:
    return f"[[{key.key}]]" if key.is_list else f"[{key.key}]"

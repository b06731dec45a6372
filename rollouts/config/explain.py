"""Every setting by its dotted name, with its type in words, its default and its meaning; and which setting a
wrong name means.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from rollouts.config.aliases import find_alias, find_removed
from rollouts.config.schema import RunConfig
from rollouts.config.spelling import nearest_names
from rollouts.config.tables import NONE, Section
from rollouts.errors import ConfigError

MARKDOWN_HEAD = """# Settings

Written by `python -m rollouts explain --markdown` from `rollouts/config/schema.py`.

Settings stand in a TOML file, and each can be given on the command line as `--section.key value`, which wins.
Paths in a file are relative to the file, paths on the command line to the working directory. TOML has no
null: the word `"none"` switches off a setting that allows it. A table in double brackets may occur several
times; a flag names one of several by its number: `--rl.data.0.size 100`. Settings that several tables have
stand under the names of all of them.
"""


class ConfigKey(NamedTuple):
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    table: str  # the dotted name of the table that holds it; empty at the top
    name: str  # the last part of the key
    field: FieldInfo
    schema: Mapping[str, Any]  # its values as JSON schema
    section: type[Section] | None  # what a table holds; None: not a table of the schema
    default: str  # as TOML, "required" or "unset"; of a table "required", "unset" (may be absent) or ""
    meaning: str  # one line

    @property
    def takes_any_key(self) -> bool:
        """A table whose keys the schema leaves to the user."""
        return not self.section and self.schema.get("type") == "object"


@cache
def config_keys() -> Mapping[str, ConfigKey]:
    """Every setting and table by its dotted key, in the order of the schema."""
    return {key.key: key for key in _walk(RunConfig, "", None)}


def _walk(section: type[Section], table: str, defaults: Section | None) -> Iterator[ConfigKey]:
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        key, inner = f"{table}.{name}".strip("."), _find_section(field.annotation)
        value = getattr(defaults, name) if defaults else field.default
        default = "" if inner else format_value(value)
        if field.is_required() or value is None or (inner and value == []):
            default = "required" if field.is_required() else "unset"
        text = (inspect.getdoc(inner) or "").partition("\n\n")[0] if inner else field.description or ""
        yield ConfigKey(key, table, name, field, schemas[name], inner, default, " ".join(text.split()))
        if inner:
            yield from _walk(inner, key, value if isinstance(value, Section) else None)


def _find_section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, by itself or in a list or union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_find_section, get_args(annotation))), None)


def format_value(value: object) -> str:
    """A value as TOML writes it, cut to one short line; a table as JSON."""
    value = NONE if value is None else value
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "object": "a table"}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def describe_type(schema: Mapping[str, Any]) -> str:
    """A JSON schema with its bounds in words: "a whole number, at least 1"."""
    if "anyOf" in schema:
        return ", or ".join(map(describe_type, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(format_value, schema["enum"]))
    if "items" in schema:
        return f"a list of {describe_type(schema['items'])}"
    words = (TYPES | {"null": '"none"'}).get(schema["type"], "text")
    return words + "".join(f", {said} {schema[name]}" for name, said in BOUNDS.items() if name in schema)


def without_numbers(dotted: str) -> str:
    """A key without the numbers of list items: rl.data.0.path is rl.data.path."""
    return re.sub(r"\.\d+(?=\.|$)", "", dotted)


def list_around(dotted: str) -> list[str]:
    """The key and the tables around it, the innermost first."""
    parts = dotted.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def find_key(dotted: str) -> ConfigKey | None:
    """The setting of that name; for a key that the user may choose freely, the table that holds it."""
    names = list_around(without_numbers(dotted))
    key = next((config_keys()[name] for name in names if name in config_keys()), None)
    return key if key and (key.key == names[0] or key.takes_any_key) else None


# --- which setting a wrong name means -----------------------------------------------------------------------


def describe_unknown_key(dotted: str) -> str:
    """What is wrong with a key that is no setting: removed, another framework's name, misspelt, misplaced."""
    plain = without_numbers(dotted)
    if removed := find_removed(plain):
        return f"{dotted} is no setting any more: {removed}"
    keys, alias = config_keys(), find_alias(plain)
    near = nearest_names(plain.rpartition(".")[2], {key.name for key in keys.values()}, count=1)
    close = nearest_names(plain, [key.key for key in keys.values() if key.name in near], at_least=0)
    if alias or close:
        meant = list(dict.fromkeys([*(alias.keys if alias else ()), *close]))[:3]
        note = f" ({alias.note})" if alias and alias.note else ""
        return f"unknown key {dotted}; did you mean {' or '.join(meant)}{note}?"
    wrong = next(name for name in reversed(list_around(plain)) if name not in keys)
    table = wrong.rpartition(".")[0]
    valid = [key.name for key in keys.values() if key.table == table]
    return f"unknown key {wrong}; valid {f'in [{table}]' if table else 'at the top'}: {', '.join(valid)}"


# --- as text ------------------------------------------------------------------------------------------------


class SetValue(NamedTuple):
    """What a setting is in one config."""

    text: str  # as TOML
    origin: str  # run.toml, a flag, or "default"


def explain_config(prefix: str = "", values: Mapping[str, SetValue] | None = None) -> str:
    """One line per setting: its default, meaning and type; only those at or under `prefix`; and how many.

    Settings that several tables share are written out once. With the `values` of a config, its settings
    alone, with where they come from. Raises ConfigError, with the nearest key in its text, if there is
    nothing at `prefix`.
    """
    plain = without_numbers(prefix)
    if plain and plain not in config_keys():
        raise ConfigError(describe_unknown_key(prefix))
    if values is not None:
        chosen = {key: value for key, value in values.items() if not prefix or prefix in list_around(key)}
        return "".join(f"{key} = {value.text}  ({value.origin})\n" for key, value in chosen.items())
    lines: list[str] = []
    count = 0
    for header, meaning, settings in _list_blocks(plain):
        lines += ["", f"{header}  {meaning}".strip()] if header else []
        width = max((len(key.key) for key, _ in settings), default=0)
        for key, note in settings:
            lines.append(f"{key.key:<{width}}  {key.default}  {note}  ({describe_type(key.schema)})")
        count += len(settings)
    return "\n".join([*lines, *([] if prefix else ["", f"{count} settings"])]).strip() + "\n"


def explain_markdown() -> str:
    """All settings as a Markdown page, a table per section."""
    page, count = MARKDOWN_HEAD, 0
    for header, meaning, settings in _list_blocks(""):
        page += "".join(f"\n{line}\n" for line in (f"## `{header}`" if header else "", meaning) if line)
        page += "\n| setting | type | default | meaning |\n| --- | --- | --- | --- |\n" if settings else ""
        for key, note in settings:
            cells = (f"`{key.name}`", describe_type(key.schema), f"`{key.default}`", note)
            page += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        count += len(settings)
    return f"{page}\n{count} settings.\n"


def _list_blocks(prefix: str) -> Iterator[tuple[str, str, list[tuple[ConfigKey, str]]]]:
    """(names of tables, their meaning, the settings that they and no others have, each with its meaning)."""
    same: dict[
        tuple[str, str], list[ConfigKey]
    ] = {}  # tables of one meaning, settings of one name and meaning
    for key in config_keys().values():
        if not prefix or prefix in list_around(key.key):
            same.setdefault(("" if key.section else key.name, key.meaning), []).append(key)
    blocks: dict[tuple[str, ...], list[tuple[ConfigKey, str]]] = {}
    for (name, meaning), keys in same.items():
        if not name:
            blocks.setdefault(tuple(key.key for key in keys), [])
            continue
        others = [f"{key.default} in [{key.table}]" for key in keys if key.default != keys[0].default]
        block = blocks.setdefault(tuple(key.table for key in keys), [])
        block.append((keys[0], "; ".join([meaning, *others])))
    for names, settings in blocks.items():
        tables = [config_keys()[name] for name in names if name]
        header = " ".join(
            f"[[{table.key}]]" if "items" in table.schema else f"[{table.key}]" for table in tables
        )
        presence = {"unset": " May be left out.", "required": " Required."}
        about = {f"{table.meaning}{presence.get(table.default, '') * (len(names) == 1)}" for table in tables}
        yield header, about.pop() if len(about) == 1 else "", settings

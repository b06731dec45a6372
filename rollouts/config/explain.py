"""Every setting by its dotted name, with its type in words, its default and its meaning; and which setting a
wrong name means.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from rollouts.config.schema import RunConfig
from rollouts.config.spelling import ALIASES, REMOVED, find_name, nearest_names
from rollouts.config.tables import NONE, Section
from rollouts.errors import ConfigError
from rollouts.types import Fields

HEAD = """# Settings

Settings stand in a TOML file, and each can be given on the command line as `--section.key value`, which wins.
Paths in a file are relative to the file, paths on the command line to the working directory. TOML has no
null: the word `"none"` switches off a setting that allows it. Of several tables of one name a flag names one
by its number: `--rl.data.0.size 100`. Settings that several tables have stand under the names of all of them.
This page is what `python -m rollouts explain` says of the settings in `rollouts/config`."""


OPEN_TABLE = "a table"  # whose keys the schema leaves to the user


class ConfigKey(NamedTuple):
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    table: str  # the dotted name of the table that holds it; empty at the top
    name: str  # the last part of the key
    field: FieldInfo
    kind: str  # its type in words
    section: type[Section] | None  # what a table holds; None: not a table of the schema
    default: str  # as TOML, "required" or "unset"; of a table "required", "unset" (may be absent) or ""
    meaning: str  # one line


@cache
def config_keys() -> Mapping[str, ConfigKey]:
    """Every setting and table by its dotted key, in the order of the schema."""
    return {key.key: key for key in _walk(RunConfig, "", None)}


def _walk(section: type[Section], table: str, defaults: Section | None) -> Iterator[ConfigKey]:
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        key, inner = f"{table}.{name}".strip("."), _find_section(field.annotation)
        value = getattr(defaults, name, field.default)
        default = "" if inner else format_value(value)
        if field.is_required() or value is None or (inner and value in ([], {})):
            default = "required" if field.is_required() else "unset"
        text = str(inner.__doc__).partition("\n\n")[0] if inner else field.description or ""
        kind = "" if inner else describe_type(schemas[name])
        yield ConfigKey(key, table, name, field, kind, inner, default, " ".join(text.split()))
        if inner:
            yield from _walk(inner, key, value if isinstance(value, Section) else None)


def _find_section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, by itself or in a list or union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_find_section, get_args(annotation))), None)


def format_value(value: object) -> str:
    """A value as TOML writes it, cut to one short line; a table as JSON."""
    text = json.dumps(NONE if value is None else value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": OPEN_TABLE,
    "null": '"none"',
    "string": "text",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def describe_type(schema: Fields) -> str:
    """A JSON schema with its bounds in words: "a whole number, at least 1"."""
    if "anyOf" in schema:
        return ", or ".join(map(describe_type, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(format_value, schema["enum"]))
    if "items" in schema:
        return f"a list of {describe_type(schema['items'])}"
    bounds = (f", {said} {schema[name]}" for name, said in BOUNDS.items() if name in schema)
    return TYPES[schema["type"]] + "".join(bounds)


def without_numbers(dotted: str) -> str:
    """A key without the numbers of list items, and the names of parts: rl.data.0.path is rl.data.path."""
    return re.sub(r"\.\d+(?=\.|$)|(?<=rollout\.rewards)\.\w+(?=\.)", "", dotted)


def list_around(dotted: str) -> list[str]:
    """The key and the tables around it, the innermost first."""
    return [*accumulate(dotted.split("."), "{}.{}".format)][::-1]


def find_key(dotted: str) -> ConfigKey | None:
    """The setting of that name; for a key that the user may choose freely, the table that holds it."""
    names = list_around(without_numbers(dotted))
    key = next(filter(None, map(config_keys().get, names)), None)
    return key if key and (key.key == names[0] or key.kind == OPEN_TABLE) else None


# --- which setting a wrong name means -----------------------------------------------------------------------


def describe_unknown_key(dotted: str) -> str:
    """What is wrong with a key that is no setting: removed, another framework's name, misspelt, misplaced."""
    plain, keys = without_numbers(dotted), config_keys()
    if removed := find_name(REMOVED, plain):
        return f"{dotted} is no setting any more: {removed}"
    ours, note = find_name(ALIASES, plain) or ([], "")
    last = nearest_names(plain.rpartition(".")[2], {key.name for key in keys.values()}, count=1)
    named = [key.key for key in keys.values() if key.name in last]
    close = nearest_names(plain, named or ([] if ours else keys), at_least=0)
    return (
        f"unknown key {dotted}; did you mean {' or '.join(list(dict.fromkeys([*ours, *close]))[:3])}{note}?"
    )


# --- as text ------------------------------------------------------------------------------------------------


SetValue = tuple[str, str]  # of a setting in one config: its text as TOML; run.toml, a flag, or "default"


def explain_config(prefix: str = "", values: Mapping[str, SetValue] | None = None) -> str:
    """Markdown: each table at or under `prefix` with its settings, a line each; without a prefix also how
    many there are. Settings that several tables share are written out once.

    With the `values` of a config, its settings alone, with where they come from. Raises ConfigError, with the
    nearest key in its text, if there is nothing at `prefix`.
    """
    plain = without_numbers(prefix)
    if plain and plain not in config_keys():
        raise ConfigError(describe_unknown_key(prefix))
    if values is not None:
        return "".join(
            f"{key} = {text}  ({origin})\n"
            for key, (text, origin) in values.items()
            if not prefix or prefix in list_around(key)
        )
    # tables of one meaning, settings of one name and meaning
    same = {}
    for key in config_keys().values():
        if not plain or plain in list_around(key.key):
            same.setdefault(("" if key.section else key.name, key.meaning), []).append(key)
    blocks = {}  # by the tables that have them, and no others
    for (name, meaning), keys in same.items():
        block = blocks.setdefault(tuple(key.table if name else key.key for key in keys), [])
        others = (f"; {key.default} in [{key.table}]" for key in keys if key.default != keys[0].default)
        line = f"- `{keys[0].key}` = `{keys[0].default}`: {meaning}{''.join(others)} ({keys[0].kind})"
        block.append(line if name else f"{meaning}\n")
    pages = []
    for tables, lines in blocks.items():
        heading = " ".join(f"[{table}]" for table in tables if table)
        pages.append("\n".join([f"## {heading}\n" if heading else "", *lines]).strip())
    if not prefix:
        pages = [HEAD, *pages, f"{sum(bool(name) for name, _ in same)} settings"]
    return "\n\n".join(pages) + "\n"

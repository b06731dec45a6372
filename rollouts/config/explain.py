"""Every setting by its dotted name, with its type in words, its default and its meaning; and which setting a
wrong name means.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rollouts.config.aliases import REMOVED, find_alias
from rollouts.config.schema import RunConfig
from rollouts.config.spelling import nearest_names
from rollouts.config.tables import Section
from rollouts.errors import ConfigError

MARKDOWN_HEAD = """# Settings

Written by `python -m rollouts explain --markdown` from `rollouts/config/schema.py`.

Settings stand in a TOML file, and each can be given on the command line as `--section.key value`, which wins.
Paths in a file are relative to the file, paths on the command line to the working directory. TOML has no
null: the word `"none"` switches off a setting that allows it. A table in double brackets may occur several
times; a flag names one of several by its number: `--rl.data.0.size 100`. Settings that several tables have
stand under the names of all of them.
"""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    section: type[Section]  # that a setting is declared in; of a table what it holds
    field: FieldInfo
    default: str  # as TOML, "required" or "unset"; of a table "required", "unset" (may be absent) or ""
    meaning: str  # one line; empty when the name says it
    is_table: bool  # holds further settings of the schema

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def table(self) -> str:
        """The dotted name of the table that holds it; empty at the top."""
        return self.key.rpartition(".")[0]

    @property
    def type_text(self) -> str:
        """The type with its bounds: "a whole number, at least 1"."""
        return describe_type(self.field.annotation, self.field.metadata)

    @property
    def is_list(self) -> bool:
        """A table that may occur several times, as [[key]]."""
        return self.is_table and any(get_origin(one) is list for one in members_of(self.field.annotation))

    @property
    def takes_any_key(self) -> bool:
        """A table whose keys the schema leaves to the user."""
        return any(get_origin(member) is dict for member in members_of(self.field.annotation))


@cache
def config_keys() -> Mapping[str, ConfigKey]:
    """Every setting and table by its dotted key, in the order of the schema."""
    keys: dict[str, ConfigKey] = {}
    _add_keys(keys, RunConfig, "", None)
    return types.MappingProxyType(keys)


def _add_keys(
    keys: dict[str, ConfigKey], section: type[Section], prefix: str, defaults: Section | None
) -> None:
    for name, field in section.model_fields.items():
        key, value = f"{prefix}{name}", getattr(defaults, name) if defaults else field.default
        inner = section_of(field.annotation)
        default = "required" if field.is_required() else "unset" if field.default is None else ""
        if inner is None:
            owner = [base for base in section.__mro__ if name in getattr(base, "model_fields", {})][-1]
            meaning = owner.model_fields[name].description or ""
            text = default or format_value(value)
            keys[key] = ConfigKey(key, owner, field, text, " ".join(meaning.split()), False)
        else:
            keys[key] = ConfigKey(key, inner, field, default, _describe_section(inner), True)
            _add_keys(keys, inner, f"{key}.", value if isinstance(value, Section) else None)


def _describe_section(section: type[Section]) -> str:
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, unwrapped from Annotated; otherwise the annotation itself."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    return (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, by itself or in a list."""
    for member in members_of(annotation):
        inner = members_of(get_args(member)[0])[0] if get_origin(member) is list else member
        if isinstance(inner, type) and issubclass(inner, Section):
            return inner
    return None


def format_value(value: object) -> str:
    """A value as TOML writes it, cut to one short line."""
    if value is None:
        text = '"none"'
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key} = {format_value(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(format_value, value)) + "]"
    else:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type with its bounds in words: "a whole number, at least 1"."""
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return describe_type(base, [*inner, *metadata])
    if get_origin(annotation) in (Union, types.UnionType):
        return ", or ".join(describe_type(member, metadata) for member in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(format_value, get_args(annotation)))
    if get_origin(annotation) is list:
        return f"a list of {describe_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a table"
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): '"none"'}
    words = names.get(annotation, "text")
    for one in (one for item in metadata for one in getattr(item, "metadata", [item])):
        for kind, name, said in (
            (Ge, "ge", "at least"),
            (Gt, "gt", "above"),
            (Le, "le", "at most"),
            (Lt, "lt", "below"),
        ):
            if isinstance(one, kind) and annotation in (int, float):
                words += f", {said} {getattr(one, name)}"
    return words


def without_numbers(dotted: str) -> str:
    """A key without the numbers of list items: rl.data.0.path is rl.data.path."""
    return ".".join(part for part in dotted.split(".") if not part.isdecimal())


def find_key(dotted: str) -> ConfigKey | None:
    """The setting of that name; for a key that the user may choose freely, the table that holds it."""
    plain = without_numbers(dotted)
    key = config_keys().get(plain)
    while key is None and plain:
        plain = plain.rpartition(".")[0]
        holder = config_keys().get(plain)
        key = holder if holder is not None and holder.takes_any_key else None
    return key


# --- which setting a wrong name means -----------------------------------------------------------------------


def describe_unknown_key(dotted: str) -> str:
    """What is wrong with a key that is no setting: removed, another framework's name, misspelt, misplaced."""
    plain = without_numbers(dotted)
    if find_removed(plain):
        return f"{dotted} is no setting any more: {find_removed(plain)}"
    meant, note = suggest_keys(plain)
    if meant:
        return f"unknown key {dotted}; did you mean {' or '.join(meant)}{f' ({note})' if note else ''}?"
    parts = plain.split(".")
    around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    wrong = next(name for name in around if name not in config_keys())
    table = wrong.rpartition(".")[0]
    valid = [key.name for key in config_keys().values() if key.table == table]
    return f"unknown key {wrong}; valid {f'in [{table}]' if table else 'at the top'}: {', '.join(valid)}"


def find_removed(dotted: str) -> str:
    """What replaces a setting of an earlier version; empty if there was none of that name."""
    parts = dotted.split(".")
    return next((REMOVED[name] for n in range(len(parts)) if (name := ".".join(parts[n:])) in REMOVED), "")


def suggest_keys(dotted: str) -> tuple[list[str], str]:
    """(at most three settings that a wrong name may mean, the likeliest first; what differs if the name is
    another framework's).
    """
    keys = config_keys()
    plain = dotted.lower().replace("-", "_")
    table, _, name = plain.rpartition(".")
    alias = find_alias(plain)
    namesakes = [key for key, setting in keys.items() if setting.name == name]
    siblings = {setting.name: key for key, setting in keys.items() if setting.table == table}
    close = [siblings[found] for found in nearest_names(name, siblings, count=1)]
    if alias and not close and not namesakes:
        return list(alias.keys), alias.note
    found = [*close, *nearest_names(plain, namesakes)]
    section = plain.partition(".")[0]
    for pool in ([key for key in keys if key.startswith(f"{section}.")], list(keys)):
        names = nearest_names(name, {keys[key].name for key in pool}, count=1)
        found = found or [key for key in pool if keys[key].name in names]
    return list(dict.fromkeys([*found, *(alias.keys if alias else ())]))[:3], alias.note if alias else ""


# --- as text ------------------------------------------------------------------------------------------------


class SetValue(NamedTuple):
    """What a setting is in one config."""

    text: str  # as TOML
    origin: str  # run.toml, a flag, or "default"


class _Block(NamedTuple):
    """Settings that are declared together."""

    tables: list[ConfigKey]  # that have them
    meaning: str
    settings: list[ConfigKey]  # those of the first table

    @property
    def header(self) -> str:
        return " ".join(f"[[{key.key}]]" if key.is_list else f"[{key.key}]" for key in self.tables)

    def meaning_of(self, setting: ConfigKey) -> str:
        """Its meaning, and its default in the other tables where that differs."""
        keys = config_keys()
        others = {table.key: keys[f"{table.key}.{setting.name}"].default for table in self.tables}
        notes = [f"{text} in [{key}]" for key, text in others.items() if text != setting.default]
        return "; ".join(filter(None, [setting.meaning, *notes]))


def explain_config(prefix: str = "", values: Mapping[str, SetValue] | None = None) -> str:
    """One line per setting: its default, meaning and type; only those at or under `prefix`; and how many.

    Settings that several tables share are written out once. With the `values` of a config, its settings
    alone, with where they come from. Raises ConfigError, with the nearest key in its text, if there is
    nothing at `prefix`.
    """
    if without_numbers(prefix) not in config_keys() and prefix:
        raise ConfigError(describe_unknown_key(prefix))
    if values is not None:
        chosen = {key: value for key, value in values.items() if _is_under(key, prefix)}
        return "".join(f"{key} = {value.text}  ({value.origin})\n" for key, value in chosen.items())
    lines: list[str] = []
    blocks = _list_blocks(without_numbers(prefix))
    for block in blocks:
        lines += ["", f"{block.header}  {block.meaning}".rstrip()] if block.tables else []
        width = max((len(key.key) for key in block.settings), default=0)
        lines += [
            f"{key.key:<{width}}  {key.default}  {block.meaning_of(key)}  ({key.type_text})"
            for key in block.settings
        ]
    count = sum(len(block.settings) for block in blocks)
    return "\n".join([*lines, *([] if prefix else ["", f"{count} settings"])]).strip() + "\n"


def explain_markdown() -> str:
    """All settings as a Markdown page, a table per section."""
    parts, blocks = [MARKDOWN_HEAD], _list_blocks("")
    for block in blocks:
        if block.tables:
            parts.append(f"\n## `{block.header}`\n\n{block.meaning}\n")
        if block.settings:
            parts.append("| setting | type | default | meaning |\n| --- | --- | --- | --- |")
            for key in block.settings:
                row = (f"`{key.name}`", key.type_text, f"`{key.default}`", block.meaning_of(key))
                parts[-1] += "\n| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            parts[-1] += "\n"
    return "\n".join([*parts, f"\n{sum(len(block.settings) for block in blocks)} settings.\n"])


def _list_blocks(prefix: str) -> list[_Block]:
    """Every declaration of settings under `prefix` once, with the tables that have it."""
    chosen = [key for key in config_keys().values() if _is_under(key.key, prefix)]
    tables, settings = ([key for key in chosen if key.is_table is is_table] for is_table in (True, False))
    loose = [key for key in settings if key.table not in {table.key for table in tables}]
    blocks = [_Block([], "", loose)] if loose else []
    seen: set[type] = {Section}
    for table in tables:
        for owner in table.section.__mro__:
            inside = [key for key in settings if key.table == table.key and key.section is owner]
            if owner in seen or not (inside or owner is table.section):
                continue
            seen.add(owner)
            sharing = [other for other in tables if issubclass(other.section, owner)]
            note = {"unset": " May be left out.", "required": " Required."}.get(table.default, "")
            note = note if owner is table.section and len(sharing) == 1 else ""
            blocks.append(_Block(sharing, _describe_section(owner) + note, inside))
    return blocks


def _is_under(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}.")

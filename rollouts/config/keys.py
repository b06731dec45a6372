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
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rollouts.config.aliases import REMOVED, find_alias
from rollouts.config.fields import Section
from rollouts.config.schema import RunConfig
from rollouts.config.spelling import nearest_names

BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    section: type[Section]  # that has the field, or of a table what it holds
    annotation: Any  # of the field, without Annotated
    type_text: str  # "a whole number, at least 1"
    default: (
        str  # as TOML, "required" or "unset"; of a table "required", "unset" (may be absent) or "present"
    )
    meaning: str  # one line; empty when the name says it
    is_table: bool = False  # holds further settings of the schema
    is_list: bool = False  # a table that may occur several times, as [[key]]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def table(self) -> str:
        """The dotted name of the table that holds it; empty at the top."""
        return self.key.rpartition(".")[0]

    @property
    def takes_any_key(self) -> bool:
        """A table whose keys the schema leaves to the user."""
        return any(get_origin(member) is dict for member in members_of(self.annotation))


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
        dotted = f"{prefix}{name}"
        value = getattr(defaults, name) if defaults else field.default
        inner = section_of(field.annotation)
        if inner is None:
            keys[dotted] = ConfigKey(
                dotted,
                section,
                field.annotation,
                describe_type(field.annotation, field.metadata),
                "unset" if value is None and field.default is None else _default_text(field, value),
                " ".join((field.description or "").split()),
            )
            continue
        default = "unset" if field.default is None else "required" if field.is_required() else "present"
        meaning = " ".join((inspect.getdoc(inner) or "").partition("\n\n")[0].split())
        is_list = any(get_origin(member) is list for member in members_of(field.annotation))
        keys[dotted] = ConfigKey(dotted, inner, field.annotation, "a table", default, meaning, True, is_list)
        _add_keys(keys, inner, f"{dotted}.", value if isinstance(value, Section) else None)


def _default_text(field: FieldInfo, value: object) -> str:
    return "required" if field.is_required() else format_value(value)


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
        *words, last = (describe_type(member, metadata) for member in get_args(annotation))
        return ", or ".join([" or ".join(words), last]) if words else last
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(format_value(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"a list of {describe_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a table"
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): '"none"'}
    if annotation in (type(None), bool):
        return names[annotation]
    flat = [one for item in metadata for one in getattr(item, "metadata", [item])]
    bounds = [(BOUNDS[type(one)], one) for one in flat if type(one) in BOUNDS]
    return names.get(annotation, "text") + "".join(
        f", {words} {getattr(one, attribute)}" for (attribute, words), one in bounds
    )


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
    removed = find_removed(plain)
    if removed:
        return f"{dotted} is no setting any more: {removed}"
    meant, note = suggest_keys(plain)
    if meant:
        return f"unknown key {dotted}; did you mean {' or '.join(meant)}{f' ({note})' if note else ''}?"
    wrong = next(name for name in (*_tables_around(plain), plain) if name not in config_keys())
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


def _tables_around(dotted: str) -> list[str]:
    parts = dotted.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]

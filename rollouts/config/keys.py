"""Every setting by its dotted name: its type in words, its default and its meaning, read from the schema."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from rollouts.config.schema import RunConfig, Section


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    annotation: Any  # of the field
    type_text: str  # "a whole number, at least 1"
    # as TOML, "required", or "unset"; of a table "required", "unset" (absent unless the file has it) or
    # "present"
    default: str
    meaning: str  # one line; empty when the name says it
    is_table: bool  # holds further settings of the schema
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
    _add_keys(keys, RunConfig, "")
    return types.MappingProxyType(keys)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, unwrapped from Annotated; otherwise the annotation itself."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    return (annotation,)


def is_nullable(annotation: Any) -> bool:
    """Whether the setting may be switched off by the word "none"; text settings cannot, for the word would be
    their value.
    """
    members = members_of(annotation)
    return type(None) in members and str not in members and not any(_is_section(member) for member in members)


def format_value(value: object) -> str:
    """A value as TOML writes it, cut to one short line."""
    text = (
        {True: "true", False: "false", None: '"none"'}[value]
        if value is None or isinstance(value, bool)
        else _plain_text(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_text(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(inner) for inner in value) + "]"
    return repr(value) if isinstance(value, int | float) else str(value)


# --- reading the schema -------------------------------------------------------------------------------------


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """(the section that a field holds, whether it holds a list of them)."""
    for member in members_of(annotation):
        inner = members_of(get_args(member)[0])[0] if get_origin(member) is list else member
        if _is_section(inner):
            return inner, inner is not member
    return None, False


def _add_keys(
    keys: dict[str, ConfigKey], section: type[Section], prefix: str, defaults: Section | None = None
) -> None:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        inner, is_list = _section_of(field.annotation)
        value = getattr(defaults, name) if defaults else field.default
        if inner is None:
            off = '"none":' if is_nullable(field.annotation) else "unset:"
            meaning = " ".join((field.description or "").split()).replace("None:", off)
            default = (
                "required"
                if field.is_required()
                else "unset"
                if value is None and field.default is None
                else format_value(value)
            )
            keys[dotted] = ConfigKey(
                dotted,
                field.annotation,
                describe_type(field.annotation, field.metadata),
                default,
                meaning,
                False,
            )
            continue
        meaning = " ".join((inspect.getdoc(inner) or "").partition("\n\n")[0].split())
        default = "unset" if field.default is None else "required" if field.is_required() else "present"
        keys[dotted] = ConfigKey(dotted, field.annotation, "a table", default, meaning, True, is_list)
        _add_keys(keys, inner, f"{dotted}.", value if isinstance(value, Section) else None)


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type with its bounds in words: "a whole number, at least 1"."""
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return describe_type(
            base,
            [constraint for item in inner for constraint in getattr(item, "metadata", [item])]
            + list(metadata),
        )
    if get_origin(annotation) in (Union, types.UnionType):
        return _describe_union(get_args(annotation), metadata, nullable=is_nullable(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(format_value(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"a list of {describe_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a table"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        annotation, "any value"
    )
    return words + "".join(_describe_bound(constraint) for constraint in metadata)


def _describe_union(members: Sequence[Any], metadata: Sequence[Any], *, nullable: bool) -> str:
    words = [describe_type(member, metadata) for member in members if member is not type(None)]
    return " or ".join(words) + (', or "none"' if nullable else "")


def _describe_bound(constraint: object) -> str:
    match constraint:
        case Ge(ge=bound):
            return f", at least {bound}"
        case Gt(gt=bound):
            return f", above {bound}"
        case Le(le=bound):
            return f", at most {bound}"
        case Lt(lt=bound):
            return f", below {bound}"
        case _:
            return ""

"""What every setting is and where its value comes from, as text; and which setting a wrong name means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollouts.config.aliases import ALIASES, Alias, find_alias
from rollouts.config.keys import ConfigKey, config_keys
from rollouts.config.spelling import edit_distance, nearest, nearest_names

__all__ = [
    "describe_unknown_key",
    "explain_config",
    "explain_key",
    "explain_markdown",
    "nearest",
    "suggest_keys",
]  # nearest: for other rooms

LISTED = 8  # valid keys named in a message: the nearest ones; `explain` lists all
MARKDOWN_HEAD = """# Settings

Written by `python -m rollouts explain --markdown`; change the comments in `rollouts/config/schema.py` instead.

Settings stand in a TOML file, and each can be given on the command line as `--section.key value`, which wins. Paths in a file are relative
to the file, paths on the command line to the working directory. TOML has no null: the word `"none"` switches off a setting that allows it.
"""
LIST_NOTE = (
    "One table, or several `[[{key}]]`{what}; a flag names one of several by its number: `--{key}.0.NAME"
    " VALUE`."
)


@dataclass(frozen=True, slots=True)
class SetValue:
    """What a setting is in one config."""

    text: str  # as TOML
    origin: str  # run.toml:12, a flag, or "default"


# --- what a setting is --------------------------------------------------------------------------------------


def explain_config(prefix: str = "", values: Mapping[str, SetValue] | None = None) -> str:
    """A table of text: one line per setting with its default, meaning and type; only those under `prefix`
    when it is given.

    With the `values` of a config, those and their origins stand in place of the defaults.
    Raises KeyError, with the nearest key in its text, if nothing lies under `prefix`.
    """
    chosen = [
        key
        for key in config_keys().values()
        if not prefix or key.key == prefix or key.key.startswith(f"{prefix}.")
    ]
    if not chosen:
        raise KeyError(describe_unknown_key(prefix))
    rows = [(key, *_value_columns(key, values)) for key in chosen]
    key_width = max(len(key.key) for key in chosen)
    value_width = max((len(value) for key, value, _ in rows if not key.is_table), default=0)
    lines = []
    for key, value, origin in rows:
        if key.is_table:
            lines += ["", f"{_header(key)}  {key.meaning}{_table_note(key)}"]
        else:
            lines.append(
                f"{key.key:<{key_width}}  {value:<{value_width}}  {key.meaning}  ({key.type_text}{origin})"
            )
    return "\n".join(lines).strip() + "\n"


def explain_key(dotted: str, values: Mapping[str, SetValue] | None = None) -> str:
    """Everything about one setting: meaning, type, default, its value in a config and where that comes from,
    related settings.

    A table is explained by its settings. Raises KeyError, with the nearest key in its text, if there is no
    such setting.
    """
    key = config_keys().get(without_numbers(dotted))
    if key is None:
        raise KeyError(describe_unknown_key(dotted))
    if key.is_table:
        return explain_config(key.key, values)
    lines = [
        key.key,
        f"  meaning   {key.meaning}",
        f"  type      {key.type_text}",
        f"  default   {key.default}",
    ]
    for name, value in values_of(key, values or {}).items():
        if dotted in (key.key, name):
            which = f"{name} = " if name != key.key else ""
            lines.append(f"  value     {which}{value.text}  ({value.origin})")
    related = _related(key)
    if related:
        lines.append(f"  see also  {', '.join(related)}")
    elsewhere = {
        name: alias.note for name, alias in ALIASES.items() if key.key in alias.keys and "." not in name
    }
    for note in dict.fromkeys(elsewhere.values()):
        names = [name for name, other in elsewhere.items() if other == note]
        lines.append(f"  called    {', '.join(names[:LISTED])} elsewhere{f' ({note})' if note else ''}")
    return "\n".join(lines) + "\n"


def explain_markdown() -> str:
    """All settings as a Markdown page, a table per section."""
    parts = [
        MARKDOWN_HEAD,
        _markdown_table([key for key in config_keys().values() if not key.table and not key.is_table]),
    ]
    for table in (key for key in config_keys().values() if key.is_table):
        inside = [key for key in config_keys().values() if key.table == table.key and not key.is_table]
        notes = [f"{table.meaning}{_table_note(table)}", *([_list_note(table)] if table.is_list else [])]
        parts.append(f"\n## `{_header(table)}`\n\n" + "\n\n".join(notes) + "\n")
        if inside:
            parts.append(_markdown_table(inside))
    return "\n".join(parts)


def without_numbers(dotted: str) -> str:
    """A key without the numbers of list items: rl.data.0.path is rl.data.path."""
    return ".".join(part for part in dotted.split(".") if not part.isdecimal())


def _value_columns(key: ConfigKey, values: Mapping[str, SetValue] | None) -> tuple[str, str]:
    if values is None or key.is_table:
        return key.default, ""
    found = values_of(key, values)
    if not found:
        is_there = not key.table or any(without_numbers(name).startswith(f"{key.table}.") for name in values)
        return ("unset", "; default") if is_there else ("-", f"; the file has no [{key.table}]")
    origins = list(dict.fromkeys(value.origin for value in found.values()))
    return " | ".join(value.text for value in found.values()), f"; {', '.join(origins)}"


def values_of(key: ConfigKey, values: Mapping[str, SetValue]) -> dict[str, SetValue]:
    """The values of a setting by their dotted names: several for a list of tables, and for a table whose keys
    are the user's.
    """
    names = {name: without_numbers(name) for name in values}
    return {
        name: values[name]
        for name, plain in names.items()
        if plain == key.key or (key.takes_any_key and plain.startswith(f"{key.key}."))
    }


def _header(key: ConfigKey) -> str:
    return f"[[{key.key}]]" if key.is_list else f"[{key.key}]"


def _list_note(table: ConfigKey) -> str:
    return LIST_NOTE.format(key=table.key, what=", which are a mixture" if table.name == "data" else "")


def _table_note(key: ConfigKey) -> str:
    return {
        "unset": " Left out unless the file has this table.",
        "required": " Needed where the table around it is there.",
    }.get(key.default, "")


def _markdown_table(keys: Iterable[ConfigKey]) -> str:
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        cells = (
            f"`{key.name}`",
            key.type_text,
            key.default if key.default in ("required", "unset") else f"`{key.default}`",
            key.meaning,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _related(key: ConfigKey) -> list[str]:
    """Settings that name this one in their meaning, or that it names, nearby; and its namesakes in other
    tables.
    """
    others = [other for other in config_keys().values() if not other.is_table and other.key != key.key]
    namesakes = [other.key for other in others if other.name == key.name and len(key.name) > 2]
    near = [other for other in others if other.key.partition(".")[0] == key.key.partition(".")[0]]
    mentioned = [
        other.key for other in near if _mentions(key.meaning, other) or _mentions(other.meaning, key)
    ]
    return list(dict.fromkeys([*mentioned, *namesakes]))


def _mentions(meaning: str, key: ConfigKey) -> bool:
    return "_" in key.name and re.search(rf"\b{key.name}\b", meaning) is not None


# --- which setting a wrong name means -----------------------------------------------------------------------


def describe_unknown_key(dotted: str) -> str:
    """`unknown key rl.rollout.temperture; did you mean temperature? Valid here: …, with the nearest of the
    valid keys first.`
    """
    wrong, table = _first_wrong_part(dotted)
    siblings = [key.name for key in config_keys().values() if key.table == table]
    suggested, note = suggest_keys(dotted)
    names = [
        (
            key.removeprefix(f"{table}.")
            if key.rpartition(".")[0] == table and wrong == without_numbers(dotted)
            else key
        )
        for key in suggested
    ]
    question = f"; did you mean {_join_or(names)}{f' ({note})' if note else ''}?" if names else "."
    where = "here" if table else "at the top"
    ordered = sorted(
        siblings, key=lambda name: (edit_distance(wrong.rpartition(".")[2], name), siblings.index(name))
    )
    more = len(ordered) - LISTED
    rest = f" and {more} more: python -m rollouts explain{f' {table}' if table else ''}" if more > 0 else ""
    return f"unknown key {wrong}{question} Valid {where}: {', '.join(ordered[:LISTED])}{rest}"


def suggest_keys(dotted: str) -> tuple[list[str], str]:
    """(the settings that a wrong dotted name may mean, the likeliest first and at most three; what differs if
    it is another framework's).
    """
    wrong, table = _first_wrong_part(dotted)
    plain = without_numbers(dotted).lower().replace("-", "_")
    if plain in config_keys():
        return [plain], ""
    if plain != dotted:
        return suggest_keys(plain)
    name = wrong.rpartition(".")[2]
    rest = dotted[len(wrong) + 1 :]
    siblings = {key.name: key.key for key in config_keys().values() if key.table == table}
    if name in siblings:
        return _continue([siblings[name]], rest), ""
    close = [siblings[found] for found in nearest_names(name, list(siblings))]
    slips = [key for key in close if edit_distance(name, key.rpartition(".")[2]) <= 1]
    alias = _exact_alias(dotted if rest else wrong)
    if alias and (rest or any(key in siblings.values() for key in alias.keys)):
        return _nearest_in_tree(alias.keys, table), alias.note
    named = [key for key in config_keys().values() if key.name == name]
    around = [key.key for key in named if f"{table}.".startswith(f"{key.table}." if key.table else "")]
    namesakes = list(dict.fromkeys([*_nearest_in_tree([key.key for key in named], table), *around]))
    if slips or namesakes:
        found = [*slips, *namesakes] if len(name) > 2 or not namesakes else [*namesakes, *slips]
        return _continue(list(dict.fromkeys([*found, *(alias.keys if alias else ())])), rest)[:3], ""
    if alias:
        return _nearest_in_tree(alias.keys, table), alias.note
    if close:
        return _continue(close, rest)[:3], ""
    elsewhere = nearest_names(name, [key.name for key in config_keys().values()])
    alias = find_alias(dotted)
    if alias and (not elsewhere or edit_distance(name, elsewhere[0]) > 1):
        return _nearest_in_tree(alias.keys, table), alias.note
    return (
        _continue(
            _nearest_in_tree([key.key for key in config_keys().values() if key.name in elsewhere], table),
            rest,
        ),
        "",
    )


def _first_wrong_part(dotted: str) -> tuple[str, str]:
    """(the name up to its first part that is wrong, the table that part was looked for in)."""
    known = config_keys()
    parts = without_numbers(dotted).split(".")
    length = next(
        (length for length in range(1, len(parts) + 1) if ".".join(parts[:length]) not in known), len(parts)
    )
    return ".".join(parts[:length]), ".".join(parts[: length - 1])


def _exact_alias(dotted: str) -> Alias | None:
    parts = dotted.split(".")
    return next(
        (
            ALIASES[name]
            for count in range(len(parts), 0, -1)
            if (name := ".".join(parts[-count:])) in ALIASES
        ),
        None,
    )


def _continue(keys: Sequence[str], rest: str) -> list[str]:
    """The keys with the part after the wrong one, where that makes a setting."""
    return [
        f"{key}.{rest}" if rest and f"{key}.{rest}" in config_keys() else key for key in dict.fromkeys(keys)
    ]


def _nearest_in_tree(keys: Sequence[str], table: str) -> list[str]:
    """Those of the keys that are nearest to a table: below it first, there the least deep; else those that
    share most of its path; at most three.
    """
    below = {key: key.startswith(f"{table}.") for key in keys}
    rank = {
        key: (below[key], _shared_parts(key, table), -key.count(".") if below[key] else 0) for key in keys
    }
    best = max(rank.values(), default=None)
    return [key for key in keys if rank[key] == best][:3]


def _shared_parts(first: str, second: str) -> int:
    shared = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        shared += 1
    return shared


def _join_or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

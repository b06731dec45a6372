"""A TOML file and the flags of a command line become one RunConfig, and back.

A path or file.py:function is taken relative to the file that names it; one given by a flag, relative to the
working directory. Both are made absolute, so that the resolved config means the same wherever it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rollouts.config.aliases import find_alias
from rollouts.config.explain import (
    ConfigKey,
    SetValue,
    config_keys,
    describe_unknown_key,
    find_key,
    find_removed,
    format_value,
    members_of,
    without_numbers,
)
from rollouts.config.schema import RunConfig
from rollouts.config.spelling import nearest
from rollouts.config.tables import NONE, Section
from rollouts.errors import ConfigError, RunDirError

# On resume: what a run writes and how long it goes on, not what it computes.
MAY_CHANGE = (
    *("name", "output", "distributed", "sft.steps", "sft.eval_every", "rl.steps", "rl.eval_every"),
    *("preference.steps", "preference.eval_every", "reward_model.steps", "reward_model.eval_every"),
    "rl.rollout.reward_timeout_s",
    "model.device",  # a run that promised equal bits has only one
)
# How fast it computes may change too, unless the run promised equal bits: these change the order of sums.
CHANGES_BITS = (
    *("model.threads", "model.compile", "engine.max_rows", "rl.share_prefix"),
    *(f"{stage}.micro_batch_tokens" for stage in ("sft", "rl", "preference", "reward_model")),
)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings in `path` after `overrides` (`--section.key value` or `--section.key=value`), checked,
    with absolute paths.

    An override is read as its setting's type asks: text stays text, everything else is a TOML value (true,
    0.5, ["a", "b"]). Raises ConfigError naming the file or flag, the key, the value and the rule; all
    problems of the file and flags, one a line.
    """
    return load_with_origins(path, overrides)[0]


def load_with_origins(
    path: Path | str, overrides: Sequence[str] = ()
) -> tuple[RunConfig, dict[str, SetValue]]:
    """`load_config`, and every setting's value with where it comes from. Raises ConfigError alike."""
    settings = read_toml(Path(path))
    origins = dict.fromkeys(flatten(settings), str(path))
    problems: list[str] = []
    for flag, text in _split_overrides(overrides, problems):
        try:
            origins[_apply_override(settings, flag.removeprefix("--"), text)] = flag
        except ConfigError as error:
            problems.append(f"{flag}: {error}")

    def source_of(key: str) -> str:
        return next((origins[name] for name in _and_around(key) if name in origins), str(path))

    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(settings, context=Path(path).absolute().parent)
    except ValidationError as error:
        described = (_describe_problem(detail, settings) for detail in error.errors(include_url=False))
        first = dict(reversed(list(described)))  # of each key: a union has a problem for each member
        problems += [f"{source_of(key)}: {message}" for key, message in reversed(first.items())]
    if problems or config is None:
        one = len(problems) == 1
        raise ConfigError(problems[0] if one else "\n  ".join([f"{len(problems)} problems:", *problems]))
    values = flatten(_plain(config))
    return config, {key: SetValue(format_value(values[key]), origins.get(key, "default")) for key in values}


def load_recorded(path: Path) -> RunConfig:
    """The config that a run of this or an earlier version has written: what replaces a removed setting has
    its value, and where nothing does the setting is left out.

    Raises ConfigError.
    """
    settings = read_toml(path)
    _replace_removed(settings, "")
    try:
        return RunConfig.model_validate(settings, context=path.absolute().parent)
    except ValidationError as error:
        problems = [_describe_problem(detail, settings)[1] for detail in error.errors(include_url=False)]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error


def _replace_removed(table: Any, prefix: str) -> None:
    for item in table if isinstance(table, list) else [table]:
        if not isinstance(item, dict):
            continue
        cap = item.pop("importance_cap", None)
        if cap is not None and item.get("recompute_old") and "correction" not in item.get("loss_params", {}):
            item["loss_params"] = {"importance_cap": cap, **item.get("loss_params", {})}
        if item.get("subset") and "dataset" in item:
            item["dataset"] = f"{item['dataset']}:{item['subset']}"
        rule = {key: item[key] for key in ("every", "policy_weight") if key in item}
        for name, numbers in (("kl_control", item.get("kl_control_params")), ("update", rule)):
            if numbers and item.get(name, "none") != "none":
                item[name] += f"({', '.join(f'{key}={value}' for key, value in numbers.items())})"
        for name in list(item):
            if f"{prefix}{name}" not in config_keys() and find_removed(f"{prefix}{name}"):
                del item[name]
            elif (key := config_keys().get(f"{prefix}{name}")) and key.is_table:
                _replace_removed(item[name], f"{prefix}{name}.")


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError for one that cannot be read or is not TOML."""
    try:
        settings = tomllib.loads(file.read_bytes().decode("utf-8"))
        flatten(settings)  # raises RecursionError where tables are nested too deep for everything else
        return settings
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; name a TOML file with --config FILE") from error
    except (OSError, ValueError, RecursionError) as error:  # a NUL in the name, not UTF-8, not TOML
        raise ConfigError(f"{str(file)!r} cannot be read as TOML: {error}") from error


def dump_config(config: RunConfig) -> str:
    """TOML that `load_config` reads back equal: every setting written out, unset ones left out.

    Raises ConfigError if data.params holds a value that TOML cannot write.
    """
    try:
        return tomli_w.dumps(_plain(config))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the config cannot be written as TOML: {error}; data.params and loss_params hold TOML values"
            " only"
        ) from error


def training_digest(config: RunConfig) -> str:
    """SHA-256, in hex, of every setting that decides what is trained: two configs that check_same_run takes
    for one run have the same.

    Of a path only its last part counts, so that a run may be copied to another place. A setting that has its
    default is left out, so that a version with one setting more or less takes the checkpoints of the version
    before; what changed a default is not seen here, but by check_same_run.
    """
    free = _free_on_resume(config)
    decisive = {
        key: _last_part(value) for key, value in _set_apart(config).items() if not _is_within(key, free)
    }
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _set_apart(config: RunConfig) -> dict[str, Any]:
    """The settings without their default values, by dotted key. A table that is there though it may be left
    out is a key too.
    """
    apart: dict[str, Any] = {}
    for dotted, value in flatten(_plain(config)).items():
        key = config_keys().get(without_numbers(dotted))
        if key is not None and key.is_table:  # an empty list of tables
            continue
        if dotted.startswith("rl.changes.") or key is None or format_value(value) != key.default:
            apart[dotted] = value
        for around in _and_around(dotted):
            table = config_keys().get(without_numbers(around))
            numbered = dotted[len(around) + 1 :].partition(".")[0].isdecimal()
            if table and table.is_table and (table.default or table.is_list) and not numbered:
                apart[around] = {}
    return apart


def _free_on_resume(saved: RunConfig) -> tuple[str, ...]:
    return MAY_CHANGE if saved.deterministic else MAY_CHANGE + CHANGES_BITS


def _is_within(key: str, tables: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in tables)


def _last_part(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _last_part(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_last_part(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(os.sep) else value


def check_same_run(saved: RunConfig, now: RunConfig) -> None:
    """Raises RunDirError, naming each setting, if a run with `saved` may not go on with `now`.

    What a run writes and how many steps it takes may change, and how fast it computes (MAY_CHANGE,
    CHANGES_BITS); what it computes may not. With a linear or cosine schedule, more steps stretch the rest of
    it.
    """
    free = _free_on_resume(saved)
    lines = [
        f"  {line}" for key, line in _differences(saved, now, "then", "now") if not _is_within(key, free)
    ]
    if lines:
        raise RunDirError(
            "the run directory was made with other settings; go on with those, or name another"
            " --output.dir:\n" + "\n".join(lines)
        )


def check_same_config(config: RunConfig, dumped: str, *, whose: str) -> None:
    """Raises ConfigError, naming the first setting, where `config` differs from the one that dump_config
    wrote as `dumped`.
    """
    other = RunConfig.model_validate(tomllib.loads(dumped))
    for _, line in _differences(config, other, "here", f"on {whose}"):
        raise ConfigError(f"{line}; start all ranks with the same config file and flags")


def _differences(one: RunConfig, two: RunConfig, here: str, there: str) -> Iterable[tuple[str, str]]:
    before, after = flatten(_plain(one)), flatten(_plain(two))
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            first, second = (format_value(s[key]) if key in s else "unset" for s in (before, after))
            yield key, f"{key}: {first} {here}, {second} {there}"


# --- flags --------------------------------------------------------------------------------------------------


def _split_overrides(overrides: Sequence[str], problems: list[str]) -> Iterable[tuple[str, str]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not word.startswith("--") or word == "--":
            problems.append(f"{word}: a stray word; settings are given as --section.key value")
        elif equals:
            yield flag, text
        elif not words or words[0].startswith("--"):
            problems.append(f"{flag}: has no value; write {flag} VALUE")
        else:
            yield flag, words.pop(0)


def _apply_override(settings: dict[str, Any], dotted: str, text: str) -> str:
    """Puts the value into the tables of the file. Returns the key that it set. Raises ConfigError."""
    key = find_key(dotted)
    if key is None:
        raise ConfigError(describe_unknown_key(dotted))
    if key.is_table or (key.takes_any_key and key.key == dotted):
        raise ConfigError(f"{dotted} is a table; set one of its keys, as --{dotted}.NAME VALUE")
    section, *path = dotted.split(".")
    if path and section not in settings and config_keys()[section].default == "unset":
        raise ConfigError(f"the file has no [{section}] table; add one, or leave the flag out")
    table: Any = settings
    for part in [*dotted.split(".")[:-1], ""]:  # the last step takes the only table of a list
        if isinstance(table, list) or part.isdecimal():
            items = table if isinstance(table, list) else [table]
            if not part.isdecimal() and len(items) > 1:
                raise ConfigError(f"there are {len(items)} of {key.table}; number them: --{key.table}.0.…")
            if part.isdecimal() and int(part) >= len(items):
                raise ConfigError(f"{key.table} has {len(items)} tables in the file, numbered from 0")
            table = items[int(part) if part.isdecimal() else 0]
            part = "" if part.isdecimal() else part
        if isinstance(table, dict) and part:
            table = table.setdefault(part, {})
    if isinstance(table, dict):  # else the file has a value where a table belongs, and pydantic says so
        table[dotted.rpartition(".")[2]] = _parse_override(text, key)
    return dotted


def _parse_override(text: str, key: ConfigKey) -> object:
    """The value of a flag; a path or function in it is relative to the working directory."""
    if _is_text_only(members_of(key.field.annotation)) and not text.startswith(('"', "'")):
        value: object = text
    else:
        try:
            [value] = tomllib.loads(f"value = {text}").values()
        except ValueError:  # no TOML, or a second line
            value = text
    if key.takes_any_key:
        return value
    try:
        return TypeAdapter(key.field.rebuild_annotation()).validate_python(value, context=Path.cwd())
    except ValidationError:
        return value  # which is reported with everything else


def _is_text_only(members: Sequence[Any]) -> bool:
    kinds = {type(value) for member in members if get_origin(member) is Literal for value in get_args(member)}
    kinds |= {member for member in members if get_origin(member) is not Literal}
    return kinds - {type(None)} == {str}


# --- problems -----------------------------------------------------------------------------------------------


def _and_around(key: str) -> Iterable[str]:
    """The key and the tables around it, the innermost first."""
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def _describe_problem(detail: ErrorDetails, settings: Mapping[str, Any]) -> tuple[str, str]:
    """(dotted key, message) of one pydantic error."""
    dotted = _locate(detail["loc"], settings)
    value, kind, message = detail["input"], detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        inside = flatten({dotted: value}) if isinstance(value, Mapping) else {}
        aliases = [(name, alias) for name in inside if (alias := find_alias(name)) is not None]
        named = [f"; {name} is {' or '.join(alias.keys)} here" for name, alias in aliases]
        return dotted, describe_unknown_key(dotted) + "".join(named)
    if kind == "missing":
        return dotted, f"{dotted} is missing"
    if kind == "value_error":
        rule = str(detail.get("ctx", {}).get("error", message))
        return dotted, f"{dotted}: {rule}" if dotted else rule
    if kind == "literal_error" and isinstance(value, str):
        key = find_key(dotted)
        choices = (
            [choice for member in members_of(key.field.annotation) for choice in get_args(member)]
            if key
            else []
        )
        close = nearest(value, [choice for choice in choices if isinstance(choice, str)])
        message += f"; did you mean {format_value(close)}?" if close else ""
    return dotted, f"{dotted} = {format_value(value)}: {message}"


def _locate(loc: Sequence[int | str], settings: Mapping[str, Any]) -> str:
    """The dotted key that a pydantic location means, without the members of unions that pydantic appends, and
    without the number of a list item where the file has a single table.
    """
    parts: list[str] = []
    value: Any = settings
    for part in loc:
        if isinstance(value, Mapping) and isinstance(part, str):
            parts.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and value and isinstance(value[0], Mapping):
            parts += [str(part)] if len(value) > 1 else []
            value = value[part]
        elif not (isinstance(value, Mapping) and isinstance(part, int)):
            break
    return ".".join(parts)


# --- plain values -------------------------------------------------------------------------------------------


def _plain(config: Section) -> dict[str, Any]:
    """Values that TOML knows: unset settings are left out; one that is off, but not by default, is the word
    "none".
    """
    plain: dict[str, Any] = {}
    for name in config.given():
        value = getattr(config, name)
        if isinstance(value, Section):
            plain[name] = _plain(value)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            tables = [_plain(item) for item in value]
            plain[name] = tables if len(tables) > 1 else tables[0]
        elif value is not None:
            plain[name] = value
        elif type(config).model_fields[name].default is not None:
            plain[name] = NONE
    return plain


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key; the items of a list of tables are numbered."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                flat |= flatten(item, f"{prefix}{name}.{index}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat

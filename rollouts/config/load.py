"""A TOML file and the flags of a command line become one RunConfig, and back.

A path or file.py:function is taken relative to the file that names it; one given by a flag, relative to the
working directory. Both are made absolute, so that the resolved config means the same wherever it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rollouts.config.aliases import find_alias, find_removed
from rollouts.config.explain import (
    ConfigKey,
    SetValue,
    config_keys,
    describe_unknown_key,
    find_key,
    format_value,
    list_around,
    without_numbers,
)
from rollouts.config.schema import RunConfig
from rollouts.config.secrets import flatten
from rollouts.config.spelling import nearest
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
    words = list(overrides)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        try:
            if not flag.startswith("--"):
                raise ConfigError("a stray word; settings are given as --section.key value")
            if not equals and (not words or words[0].startswith("--")):
                raise ConfigError(f"has no value; write {flag} VALUE")
            dotted = flag.removeprefix("--")
            _apply_override(settings, dotted, text if equals else words.pop(0))
            origins[dotted] = flag
        except ConfigError as error:
            problems.append(f"{flag}: {error}")
    config, found = _validate(settings, Path(path))
    for key, message in found.items():
        origin = next((origins[name] for name in list_around(key) if name in origins), path)
        problems.append(f"{origin}: {message}")
    if problems or not config:
        count = [f"{len(problems)} problems:"] if len(problems) > 1 else []
        raise ConfigError("\n  ".join([*count, *problems]))
    values = flatten(config.model_dump())
    return config, {key: SetValue(format_value(values[key]), origins.get(key, "default")) for key in values}


def load_recorded(path: Path) -> RunConfig:
    """The config that a run of this or an earlier version has written: what replaces a removed setting has
    its value, and where nothing does the setting is left out.

    Raises ConfigError.
    """
    settings = read_toml(path)
    _replace_removed(settings, "")
    config, problems = _validate(settings, path)
    if not config:
        raise ConfigError(f"{path}: {'; '.join(problems.values())}")
    return config


def _validate(settings: Mapping[str, Any], path: Path) -> tuple[RunConfig | None, dict[str, str]]:
    """The config, or None and what is wrong by dotted key."""
    try:
        return RunConfig.model_validate(settings, context=path.absolute().parent), {}
    except ValidationError as error:
        problems: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            for key, message in _describe_problem(detail, settings):
                problems.setdefault(key, message)  # of a union the first: it has one for each member
        return None, problems


def _replace_removed(table: Any, prefix: str) -> None:
    for item in table if isinstance(table, list) else [table]:
        if not isinstance(item, dict):
            continue
        cap, params = item.get("importance_cap"), item.get("loss_params", {})
        if cap is not None and item.get("recompute_old") and "correction" not in params:
            item["loss_params"] = {"importance_cap": cap, **params}
        if item.get("subset") and "dataset" in item:
            item["dataset"] += f":{item['subset']}"
        numbers = item.get("kl_control_params") or {
            key: item[key] for key in ("every", "policy_weight") if key in item
        }
        for name in ("kl_control", "update"):
            if numbers and item.get(name, "none") != "none":
                item[name] += f"({', '.join(f'{key}={value}' for key, value in numbers.items())})"
        for name in list(item):
            key = config_keys().get(dotted := f"{prefix}{name}")
            if key and key.section:
                _replace_removed(item[name], f"{dotted}.")
            elif not key and find_removed(dotted):
                del item[name]


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
        return tomli_w.dumps(config.model_dump())
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
    before; what changed a default is not seen here, but by check_same_run. A table that may be left out is a
    key too.
    """
    decisive: dict[str, Any] = {}
    for dotted, value in flatten(config.model_dump()).items():
        key, *tables = [config_keys().get(without_numbers(name)) for name in list_around(dotted)]
        if _may_change(dotted, config) or (key and key.section):
            continue
        if not key or key.default != format_value(value) or dotted.startswith("rl.changes."):
            decisive[dotted] = _last_part(value)
        for table, name in zip(tables, list_around(dotted)[1:], strict=True):
            if table and table.section and table.default and not re.match(r"\.\d", dotted[len(name) :]):
                decisive[name] = {}
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _may_change(key: str, saved: RunConfig) -> bool:
    free = MAY_CHANGE if saved.deterministic else MAY_CHANGE + CHANGES_BITS
    return any(name in free for name in list_around(key))


def _last_part(value: Any) -> Any:
    if isinstance(value, list):
        return [_last_part(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(os.sep) else value


def check_same_run(saved: RunConfig, now: RunConfig) -> None:
    """Raises RunDirError, naming each setting, if a run with `saved` may not go on with `now`.

    What a run writes and how many steps it takes may change, and how fast it computes (MAY_CHANGE,
    CHANGES_BITS); what it computes may not. With a linear or cosine schedule, more steps stretch the rest of
    it.
    """
    lines = [
        f"\n  {line}" for key, line in _differences(saved, now, "then", "now") if not _may_change(key, saved)
    ]
    if lines:
        raise RunDirError(
            "the run directory was made with other settings; go on with those, or name another"
            f" --output.dir:{''.join(lines)}"
        )


def check_same_config(config: RunConfig, dumped: str, *, whose: str) -> None:
    """Raises ConfigError, naming the first setting, where `config` differs from the one that dump_config
    wrote as `dumped`.
    """
    other = RunConfig.model_validate(tomllib.loads(dumped))
    for _, line in _differences(config, other, "here", f"on {whose}"):
        raise ConfigError(f"{line}; start all ranks with the same config file and flags")


def _differences(one: RunConfig, two: RunConfig, here: str, there: str) -> Iterable[tuple[str, str]]:
    before, after = flatten(one.model_dump()), flatten(two.model_dump())
    for key in before | after:
        if before.get(key) != after.get(key):
            first, second = (format_value(s[key]) if key in s else "unset" for s in (before, after))
            yield key, f"{key}: {first} {here}, {second} {there}"


# --- flags --------------------------------------------------------------------------------------------------


def _apply_override(settings: dict[str, Any], dotted: str, text: str) -> None:
    """Puts the value into the tables of the file. Raises ConfigError."""
    key = find_key(dotted)
    if key is None:
        raise ConfigError(describe_unknown_key(dotted))
    if key.section or (key.takes_any_key and key.key == dotted):
        raise ConfigError(f"{dotted} is a table; set one of its keys, as --{dotted}.NAME VALUE")
    parts = dotted.split(".")
    if len(parts) > 1 and parts[0] not in settings and config_keys()[parts[0]].default == "unset":
        raise ConfigError(f"the file has no [{parts[0]}] table; add one, or leave the flag out")
    holder, table = settings, cast(Any, settings)
    for part in parts:
        if isinstance(table, list) or part.isdecimal():
            items = table if isinstance(table, list) else [table]
            number = int(part) if part.isdecimal() else 0
            if number >= len(items) or (len(items) > 1 and not part.isdecimal()):
                raise ConfigError(
                    f"{key.table} has {len(items)} tables in the file, numbered from 0: --{key.table}.0.…"
                )
            table = items[number]
        if not isinstance(table, dict):
            return  # the file has a value where a table belongs, and pydantic says so
        if not part.isdecimal():
            holder, table = table, table.setdefault(part, {})
    holder[parts[-1]] = _parse_override(text, key)


def _parse_override(text: str, key: ConfigKey) -> object:
    """The value of a flag, as TOML or else as text; a path or function in it is relative to the working
    directory. What the setting does not take stays as it is, and is reported with everything else.
    """
    try:
        [value] = tomllib.loads(f"value = {text}").values()
    except ValueError:  # no TOML, or a second line
        value = text
    if key.takes_any_key:
        return value
    for meant in (value, text):
        try:
            return TypeAdapter(key.field.rebuild_annotation()).validate_python(meant, context=Path.cwd())
        except ValidationError:
            continue
    return value


# --- problems -----------------------------------------------------------------------------------------------


def _describe_problem(detail: ErrorDetails, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of one pydantic error; of an unknown table, also for each
    key in it that is another framework's.
    """
    dotted = _locate(detail["loc"], settings)
    value, kind, message = detail["input"], detail["type"], detail["msg"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        foreign = (key for key in flatten(value, dotted) if find_alias(key))
        yield from ((key, describe_unknown_key(key)) for key in (dotted, *foreign))
    elif kind == "missing":
        yield dotted, f"{dotted} is missing"
    elif kind == "value_error":
        yield dotted, f"{dotted}: {context['error']}".removeprefix(": ")
    else:
        close = kind == "literal_error" and nearest(str(value), re.findall("'(.*?)'", context["expected"]))
        hint = f"; did you mean {format_value(close)}?" if close else ""
        yield dotted, f"{dotted} = {format_value(value)}: {message}{hint}"


def _locate(loc: Sequence[Any], settings: Any) -> str:
    """The dotted key that a pydantic location means, without the members of unions that pydantic appends, and
    without the number of a list's only item.
    """
    parts: list[str] = []
    for part in loc:
        if isinstance(settings, Mapping) and isinstance(part, str):
            parts.append(part)
            settings = settings.get(part)
        elif isinstance(settings, list) and isinstance(part, int):
            parts += [str(part)] if len(settings) > 1 else []
            settings = settings[part]
    return ".".join(parts)

"""A TOML file and the flags of a command line become one RunConfig, and back. Every problem is named in one
ConfigError.

A path or file.py:function is taken relative to the file that names it; one given by a flag, relative to the
working directory. Both are made absolute, so that the resolved config means the same wherever it is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollouts.config.aliases import find_alias
from rollouts.config.explain import SetValue, describe_unknown_key
from rollouts.config.keys import ConfigKey, config_keys, format_value, is_nullable, members_of
from rollouts.config.lines import find_lines
from rollouts.config.schema import RunConfig, Section
from rollouts.config.spelling import nearest
from rollouts.errors import ConfigError, RunDirError

NONE = "none"  # TOML has no null: the word switches off a nullable setting that is not text
NUL = "\0"
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095  # what Linux and macOS take at most
SHOWN = 60  # characters of a path that is too long
STAGE_DATA = ("sft.data", "rl.data", "preference.data", "reward_model.data", "eval.data")
PATHS = (*(f"{data}.path" for data in STAGE_DATA), "model.chat_template")
DATASETS = tuple(f"{data}.dataset" for data in STAGE_DATA)  # a name on the hub or of reasoning-gym, or a path
FUNCTIONS = (
    *(f"{data}.function" for data in STAGE_DATA),
    *(f"rl.rollout.{name}" for name in ("generate", "reward", "group_reward", "reward_combine", "filters")),
    *("rl.curriculum", "rl.advantage", "rl.changes.advantage", "eval.reward"),
)
# On resume: what a run writes and how long it goes on, not what it computes.
MAY_CHANGE = (
    *(
        "name",
        "output",
        "distributed",
        "sft.steps",
        "sft.eval_every",
        "rl.steps",
        "rl.eval_every",
        "rl.rollout.reward_timeout_s",
    ),
    *("preference.steps", "preference.eval_every", "reward_model.steps", "reward_model.eval_every"),
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
    """`load_config`, and every setting's value with where it comes from: FILE:LINE, the flag, or "default".
    Raises ConfigError alike.
    """
    file = Path(path)
    text = _read_text(file)
    settings = _parse_toml(text, path)
    problems = _Problems(str(path), find_lines(text))
    for flag, text in _split_overrides(overrides, problems):
        _apply_override(settings, flag, text, problems)
    _replace_none(settings)
    _check_text(settings, problems)
    _make_paths_absolute(settings, file.absolute().parent, problems)
    config = _validate(settings, problems)
    if config is None:
        raise ConfigError(problems.text())
    values = _flatten(_plain(config))
    return config, {
        key: SetValue(format_value(value), problems.origin_of(key)) for key, value in values.items()
    }


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


def config_digest(config: RunConfig) -> str:
    """SHA-256, in hex, of every setting. Equal configs have equal digests, in whatever order a file names its
    keys.
    """
    text = json.dumps(_plain(config), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def training_digest(config: RunConfig) -> str:
    """SHA-256, in hex, of every setting that decides what is trained: two configs that check_same_run takes
    for one run have the same.

    Of a path only its last part counts, so that a run may be copied to another place. A setting that has its
    default is left out, so that a version with one setting more takes the checkpoints of the version before;
    what changed a default is not seen here, but by check_same_run.
    """
    free = _free_on_resume(config)
    decisive = {
        key: _last_part(value) for key, value in _set_apart(config).items() if not _is_within(key, free)
    }
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _set_apart(config: Section, defaults: Section | None = None, prefix: str = "") -> dict[str, Any]:
    """Dotted keys, as _flatten(_plain(config)) has them, of what has not its default. A table that is there
    though none need be is a key too.
    """
    apart: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        default = getattr(defaults, name) if defaults else info.get_default(call_default_factory=True)
        value, key = getattr(config, name), f"{prefix}{name}"
        tables = value if isinstance(value, list) and value and isinstance(value[0], Section) else [value]
        for index, table in enumerate(tables):
            numbered = f"{key}.{index}" if len(tables) > 1 else key
            if isinstance(table, Section):
                usual = default if isinstance(default, Section) else None
                apart |= {} if usual else {numbered: {}}
                apart |= _set_apart(table, usual, f"{numbered}.")
            elif value != default:
                apart |= _flatten({key: NONE if value is None else value})
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
    before, after = _flatten(_plain(saved)), _flatten(_plain(now))
    differing = [
        f"  {key}: {format_value(before[key]) if key in before else 'unset'} then,"
        f" {format_value(after[key]) if key in after else 'unset'} now"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not _is_within(key, free)
    ]
    if differing:
        lines = "\n".join(differing)
        raise RunDirError(
            "the run directory was made with other settings; go on with those, or name another"
            f" --output.dir:\n{lines}"
        )


def check_same_config(config: RunConfig, dumped: str, *, whose: str) -> None:
    """Raises ConfigError, naming the first setting, where `config` differs from the one that dump_config
    wrote as `dumped`.
    """
    own, other = _flatten(tomllib.loads(dump_config(config))), _flatten(tomllib.loads(dumped))
    for key in dict.fromkeys([*other, *own]):
        if own.get(key) != other.get(key):
            here, there = (format_value(values[key]) if key in values else "unset" for values in (own, other))
            raise ConfigError(
                f"{key} is {here} here and {there} on {whose}; start all ranks with the same config file and"
                " flags"
            )


# --- problems -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Problems:
    """What is wrong so far, and which keys came from a flag."""

    file: str
    file_lines: Mapping[str, int] = field(default_factory=dict)  # dotted key → line of the file
    flags: dict[str, str] = field(default_factory=dict)  # dotted key → flag as typed
    lines: list[str] = field(default_factory=list)

    def add(self, source: str, message: str) -> None:
        self.lines.append(f"{source}: {message}")

    def source_of(self, key: str) -> str:
        """The flag that set `key` or a table around it; otherwise the file, with the line of the key or of
        the table around it.
        """
        flag = next((self.flags[name] for name in _and_around(key) if name in self.flags), None)
        line = next((self.file_lines[name] for name in _and_around(key) if name in self.file_lines), None)
        return flag or (f"{self.file}:{line}" if line else self.file)

    def origin_of(self, key: str) -> str:
        """Where the value of `key` was set: the flag, FILE:LINE, or "default"."""
        flag = next((self.flags[name] for name in _and_around(key) if name in self.flags), None)
        line = self.file_lines.get(key)
        return flag or (f"{self.file}:{line}" if line else "default")

    def text(self) -> str:
        lines = list(dict.fromkeys(self.lines))
        return (
            lines[0]
            if len(lines) == 1
            else f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)
        )


def _and_around(key: str) -> Iterable[str]:
    """The key and the tables around it, the innermost first."""
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


# --- the file -----------------------------------------------------------------------------------------------


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; name a TOML file with --config FILE") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}; a TOML file is UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL character
        raise ConfigError(f"{str(file)!r} cannot be the name of a file: {error}") from error


def _parse_toml(text: str, path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


# --- flags --------------------------------------------------------------------------------------------------


def _split_overrides(overrides: Sequence[str], problems: _Problems) -> Iterable[tuple[str, str]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.add(word, "a stray word; settings are given as --section.key value")
            continue
        flag, equals, text = word.partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                problems.add(flag, f"has no value; write {flag} VALUE")
                continue
            text = words.pop(0)
        yield flag, text


def _apply_override(settings: dict[str, Any], flag: str, text: str, problems: _Problems) -> None:
    dotted = flag.removeprefix("--")
    if not all(dotted.split(".")):
        problems.add(flag, "names no setting; settings are given as --section.key value")
        return
    key = _setting_at(dotted)
    if key is None:
        problems.add(flag, describe_unknown_key(dotted))
        return
    if key.is_table or (key.takes_any_key and key.key == dotted):
        problems.add(flag, f"{dotted} is a table; set one of its keys, for example {_example_of(key)}")
        return
    section = dotted.partition(".")[0]
    if section not in settings and config_keys()[section].default == "unset":
        required = [
            other.key
            for other in config_keys().values()
            if other.table == section and other.default == "required"
        ]
        problems.add(
            flag,
            f"the file has no [{section}] table to change; add one with {', '.join(required)}, or leave the"
            " flag out",
        )
        return
    beyond = _find_beyond(settings, dotted)
    if beyond:
        problems.add(flag, beyond)
        return
    tables = _walk_to(settings, dotted.split(".")[:-1])
    if len(tables) > 1:
        problems.add(
            flag,
            f"there are {len(tables)} of {key.table}; say which: --{key.table}.0.{key.name},"
            f" --{key.table}.1.{key.name}, …",
        )
    for table in tables[:1]:  # none: the file has a value where a table belongs, and validation says so
        table[dotted.rpartition(".")[2]] = _parse_override(text, key)
        problems.flags[dotted] = flag


def _find_beyond(settings: dict[str, Any], dotted: str) -> str:
    """What is wrong with a number in the name of a flag: there is no such table, or nothing to number; empty
    if nothing is.
    """
    parts = dotted.split(".")
    for length in (index for index, part in enumerate(parts) if part.isdecimal()):
        holder = ".".join(part for part in parts[:length] if not part.isdecimal())
        held = config_keys().get(holder)
        count = len(_tables_at(settings, holder))
        if held is not None and held.is_list and int(parts[length]) >= count:
            rest = ".".join(parts[length + 1 :])
            tables = f"{count} table{'s' if count > 1 else ''}"
            return (
                f"{holder} has {tables} in the file, numbered from 0; write"
                f" --{holder}.{max(0, count - 1)}.{rest}"
            )
    return ""


def _walk_to(settings: dict[str, Any], parts: Sequence[str]) -> list[dict[str, Any]]:
    """The tables under that name, made where there is none; a number chooses one of a list of tables."""
    found: list[Any] = [settings]
    for part in parts:
        if part.isdecimal() and int(part) < len(found):
            found = [found[int(part)]]
            continue
        inner = [table.setdefault(part, {}) for table in found if isinstance(table, dict)]
        found = [item for value in inner for item in (value if isinstance(value, list) else [value])]
    return [table for table in found if isinstance(table, dict)]


def _setting_at(dotted: str) -> ConfigKey | None:
    """The setting of that name; for a key that the user may choose freely, the table that holds it."""
    known = config_keys()
    if dotted in known:
        return known[dotted]
    parts = [
        part for part in dotted.split(".") if not part.isdecimal()
    ]  # rl.data.0.size is rl.data.size of the first source
    if ".".join(parts) in known:
        return known[".".join(parts)]
    holders = (known.get(".".join(parts[:length])) for length in range(len(parts) - 1, 0, -1))
    return next(
        (holder for holder in holders if holder is not None and holder.takes_any_key and all(parts)), None
    )


def _example_of(key: ConfigKey) -> str:
    inside = [other.key for other in config_keys().values() if other.table == key.key and not other.is_table]
    return f"--{inside[0]} VALUE" if inside else f"--{key.key}.NAME VALUE"


def _parse_override(text: str, key: ConfigKey) -> object:
    members = members_of(key.annotation)
    if _is_text_only(members) and not text.startswith(('"', "'")):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _is_text_only(members: Sequence[Any]) -> bool:
    kinds = {type(value) for member in members if get_origin(member) is Literal for value in get_args(member)}
    kinds |= {member for member in members if get_origin(member) is not Literal}
    return kinds - {type(None)} == {str}


# --- before validation --------------------------------------------------------------------------------------


def _replace_none(settings: dict[str, Any]) -> None:
    for key in config_keys().values():
        for table in _tables_at(settings, key.table):
            if table.get(key.name) == NONE and is_nullable(key.annotation):
                table[key.name] = None


def _check_text(value: Any, problems: _Problems, key: str = "") -> None:
    """Notes every text that no file name, model or log can hold: with a NUL character, or bytes of a command
    line that are not UTF-8.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_text(inner, problems, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        numbered = any(isinstance(item, Mapping) for item in value)
        for index, item in enumerate(value):
            _check_text(item, problems, f"{key}.{index}" if numbered else key)
    elif isinstance(value, str) and not _is_plain(value):
        what = "a NUL character" if NUL in value else "bytes that are not UTF-8"
        problems.add(
            problems.source_of(key),
            f"{key} = {value!r}: the text has {what}; remove {'it' if NUL in value else 'them'}",
        )


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return NUL not in text


def _make_paths_absolute(settings: dict[str, Any], file_dir: Path, problems: _Problems) -> None:
    makers = (
        *((dotted, _absolute_path) for dotted in PATHS),
        *((dotted, _absolute_function) for dotted in FUNCTIONS),
        *((dotted, _absolute_if_there) for dotted in DATASETS),
        ("model.name", _absolute_model),
        ("output.dir", _unchanged_path),
    )
    for dotted, make_absolute in makers:
        table_name, _, name = dotted.rpartition(".")
        tables = _tables_at(settings, table_name)
        for index, table in enumerate(tables):
            numbered = f"{table_name}.{index}.{name}"
            base = Path.cwd() if dotted in problems.flags or numbered in problems.flags else file_dir
            value = table.get(name)
            if dotted in DATASETS and table.get("kind") != "hf":
                continue
            values = value if isinstance(value, list) else [value]
            made = [
                _try_path(item, base, make_absolute, numbered if len(tables) > 1 else dotted, problems)
                for item in values
            ]
            if name in table:
                table[name] = made if isinstance(value, list) else made[0]


def _try_path(
    value: Any, base: Path, make_absolute: Callable[[str, Path], str], key: str, problems: _Problems
) -> Any:
    """The value as a path, or as it is when it is no text; what cannot be a path is noted."""
    if not isinstance(value, str) or not value or not _is_plain(value):
        return value
    try:
        return make_absolute(value, base)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        reason = getattr(error, "strerror", None) or str(error)
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}… ({len(value)} characters)"
        problems.add(
            problems.source_of(key),
            f"{key} = {format_value(shown)} cannot be a path: {reason}; name a file or directory that can be",
        )
        return value


def _tables_at(settings: dict[str, Any], dotted: str) -> list[dict[str, Any]]:
    """The tables of that name: none, one, or those of a list."""
    tables: list[Any] = [settings]
    for part in dotted.split(".") if dotted else ():
        inner = [table.get(part) for table in tables]
        tables = [
            item
            for found in inner
            for item in (found if isinstance(found, list) else [found])
            if isinstance(item, dict)
        ]
    return tables


def _absolute_path(path: str, base: Path) -> str:
    _unchanged_path(path, base)
    return str((base / Path(path).expanduser()).resolve())


def _unchanged_path(path: str, base: Path) -> str:
    """The path itself. Raises OSError if it is, or one of its parts, longer than any file system takes."""
    lengths = [len(os.fsencode(part)) for part in Path(path).parts]
    if max(lengths, default=0) > MAX_NAME_BYTES or len(os.fsencode(base / path)) > MAX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return path


def _absolute_function(name: str, base: Path) -> str:
    file, colon, function = name.rpartition(":")
    return f"{_absolute_path(file, base)}:{function}" if colon and file.endswith(".py") else name


def _absolute_if_there(name: str, base: Path) -> str:
    # "org/name" on the hub looks like a relative path: it is one only if such a thing is there, or if it says
    # so
    is_path = name.startswith((".", "~", "/")) or (
        ":" not in name and _is_there(_unchanged_path(name, base), base)
    )
    return _absolute_path(name, base) if is_path else name


def _absolute_model(name: str, base: Path) -> str:
    is_gguf_file = name.endswith(".gguf") and (":" not in name or _is_there(name, base, Path.is_file))
    is_path = (
        is_gguf_file
        or name.startswith((".", "~", "/"))
        or (":" not in name and _is_there(_unchanged_path(name, base), base, Path.is_dir))
    )
    return _absolute_path(name, base) if is_path else name


def _is_there(name: str, base: Path, test: Callable[[Path], bool] = Path.exists) -> bool:
    try:
        return test(base / name)
    except OSError:  # a directory on the way that may not be read, a name that is too long
        return False


# --- validation ---------------------------------------------------------------------------------------------


def _validate(settings: dict[str, Any], problems: _Problems) -> RunConfig | None:
    config = None
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            dotted, message = _explain_problem(detail, settings)
            problems.add(problems.source_of(dotted), message)
    return None if problems.lines else config


def _explain_problem(detail: ErrorDetails, settings: Mapping[str, Any]) -> tuple[str, str]:
    """(dotted key, message) of one pydantic error; of one source among several, the key has its number:
    rl.data.1.path.
    """
    dotted, key = _locate(detail["loc"], settings)
    value = format_value(detail["input"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return dotted, describe_unknown_key(dotted) + _names_inside(dotted, detail["input"])
    if kind == "missing":
        hint = f": {key.meaning}" if key and key.meaning else ""
        return dotted, f"{dotted} is missing{hint}"
    if kind == "value_error":
        rule = str(detail.get("ctx", {}).get("error", detail["msg"]))
        return dotted, f"{dotted}: {rule}" if dotted else rule
    if key and kind == "literal_error" and isinstance(detail["input"], str):
        close = nearest(
            detail["input"], [choice for member in members_of(key.annotation) for choice in get_args(member)]
        )
        return dotted, f"{dotted} = {value}; it must be {key.type_text}" + (
            f"; did you mean {format_value(close)}?" if close else ""
        )
    assert key is not None, dotted  # only an unknown key has no setting
    if kind == "finite_number":
        return dotted, f"{dotted} = {value}; it must be {key.type_text}, and finite"
    rule = "a number, true or false, or text" if key.takes_any_key and dotted != key.key else key.type_text
    return dotted, f"{dotted} = {value}; it must be {rule}" + _hint_about_quotes(detail["input"], key)


def _locate(loc: Sequence[int | str], settings: Mapping[str, Any]) -> tuple[str, ConfigKey | None]:
    """The dotted key that a pydantic location means, and its setting; union members that pydantic appends are
    left off.
    """
    parts: list[str] = []
    for part in loc:
        held = _setting_at(".".join(parts))
        if held is not None and held.is_list and isinstance(part, int):
            parts += [str(part)] if len(_tables_at(dict(settings), held.key)) > 1 else []
            continue
        if held is None or held.is_table or held.takes_any_key or isinstance(part, int):
            parts.append(str(part))
        if held is not None and not held.is_table:
            break
    dotted = ".".join(parts)
    return dotted, _setting_at(dotted) or _setting_at(dotted.rpartition(".")[0])


def _names_inside(table: str, value: object) -> str:
    """What the settings of another framework in an unknown table are called here."""
    names = [f"{table}.{name}" for name in _flatten(value)] if isinstance(value, Mapping) else []
    found = [(name, alias) for name in names if (alias := find_alias(name)) is not None]
    said = [
        f"{name} is {' or '.join(alias.keys)} here{f' ({alias.note})' if alias.note else ''}"
        for name, alias in found
    ]
    return "".join(f"; {words}" for words in said)


def _hint_about_quotes(value: object, key: ConfigKey) -> str:
    if not isinstance(value, str) or str in members_of(key.annotation):
        return ""
    if any(get_origin(member) is list for member in members_of(key.annotation)):
        return f"; write {format_value([value])}"
    inner = _parse_override(value, key)
    return (
        f"; write it without quotes: {format_value(inner)}" if isinstance(inner, bool | int | float) else ""
    )


# --- plain values -------------------------------------------------------------------------------------------


def _plain(config: Section) -> dict[str, Any]:
    """Values that TOML knows: unset settings are left out, a nullable one that is off but not by default is
    the word "none".
    """
    plain: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            plain[name] = _plain(value)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            tables = [_plain(item) for item in value]
            plain[name] = tables if len(tables) > 1 else tables[0]
        elif value is not None:
            plain[name] = value
        elif info.default is not None:
            plain[name] = NONE
    return plain


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                flat |= _flatten(item, f"{prefix}{name}.{index}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat

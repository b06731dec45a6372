"""A TOML file and the flags of a command line become one RunConfig, and back.

A path or file.py:function is taken relative to the file that names it; one given by a flag, relative to the
working directory. Both are made absolute, so that the resolved config means the same wherever it is read.

`--mode`: stages of a run, joined by `+`, in the order in which they run.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from rollouts.config.explain import (
    OPEN_TABLE,
    SetValue,
    config_keys,
    describe_unknown_key,
    find_key,
    format_value,
    list_around,
    without_numbers,
)
from rollouts.config.schema import RunConfig, SFTTrainingConfig, StageConfig
from rollouts.config.secrets import flatten
from rollouts.config.spelling import ALIASES, REMOVED, did_you_mean, find_name
from rollouts.errors import ConfigError, RunDirError
from rollouts.types import Fields, Texts

# On resume: what a run writes and how long it goes on, not what it computes. (Of devices, a run that promised
# equal bits has only one.)
MAY_CHANGE = """
name output alerts distributed eval.policy_metrics eval.against model.device
rl.rollout.reward_timeout_s rl.rollout.generate_timeout_s
rl.steps rl.epochs rl.eval_every sft.steps sft.epochs sft.eval_every preference.steps preference.epochs
preference.eval_every reward_model.steps reward_model.epochs reward_model.eval_every
"""
# How fast it computes may change too, unless the run promised equal bits: these change the order of sums.
CHANGES_BITS = """
model.threads model.compile engine.max_rows sft.micro_batch_tokens rl.micro_batch_tokens
preference.micro_batch_tokens reward_model.micro_batch_tokens
"""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings in `path` after `overrides` (`--section.key value` or `--section.key=value`), checked,
    with absolute paths.

    An override is read as its setting's type asks: text stays text, everything else is a TOML value (true,
    0.5, ["a", "b"]). Raises ConfigError naming the file or flag, the key, the value and the rule; all
    problems of the file and flags, one a line.
    """
    return load_with_origins(path, overrides)[0]


def load_with_origins(path: Path | str, overrides: Sequence[str]) -> tuple[RunConfig, dict[str, SetValue]]:
    """`load_config`, and every setting's value with where it comes from. Raises ConfigError alike."""
    settings, words, problems = read_toml(Path(path)), list(overrides), list[str]()
    origins = dict.fromkeys(flatten(settings), str(path))
    while words:
        flag, equals, text = words.pop(0).partition("=")
        try:
            if not flag.startswith("--"):
                raise ConfigError("a stray word; settings are given as --section.key value")
            if not equals and (not words or words[0].startswith("--")):
                raise ConfigError(f"has no value; write {flag} VALUE")
            _apply_override(settings, flag[2:], text if equals else words.pop(0))
            origins[flag[2:]] = flag
        except ConfigError as error:
            problems.append(f"{flag}: {error}")
    for key, value in flatten(settings).items():
        if re.search(r"://[^/\s'\"]*@", str(value)):
            problems.append(f"{key} has an address with a user or a password, which the record would show")
    config, found = _validate(settings, Path(path))
    for key, message in found.items():
        origin = next((origins[name] for name in list_around(key) if name in origins), path)
        problems.append(f"{origin}: {message}")
    if problems or not config:
        if len(problems) > 1:
            problems.insert(0, f"{len(problems)} problems:")
        raise ConfigError("\n  ".join(problems))
    values = flatten(config.model_dump()).items()
    return config, {key: (format_value(value), origins.get(key, "default")) for key, value in values}


def load_recorded(path: Path) -> RunConfig:
    """The config that a run of this or an earlier version has written: what replaces a removed setting has
    its value, and where nothing does the setting is left out.

    Raises ConfigError.
    """
    settings = read_toml(path)
    _replace_removed([settings], "")
    config, problems = _validate(settings, path)
    if not config:
        raise ConfigError(f"{path}: {'; '.join(problems.values())}")
    return config


def _validate(settings: Fields, path: Path) -> tuple[RunConfig | None, Texts]:
    """The config, or None and what is wrong by dotted key."""
    try:
        return RunConfig.model_validate(settings, context=path.absolute().parent), {}
    except ValidationError as error:  # of a union the first problem counts: it has one for each member
        problems = {}
        for detail in error.errors():
            value, kind, parts = detail["input"], detail["type"], []
            inside: Any = settings
            for part in detail["loc"]:  # without the members of unions that pydantic appends
                if isinstance(inside, list) if isinstance(part, int) else isinstance(inside, Mapping):
                    parts.append(str(part))
                    inside = inside[part] if isinstance(part, int) else inside.get(part)
            dotted = ".".join(parts)
            if kind == "extra_forbidden":  # of an unknown table also each key that is another framework's
                foreign = (key for key in flatten(value, dotted) if find_name(ALIASES, key))
                for key in (dotted, *foreign):
                    problems.setdefault(key, describe_unknown_key(key))
                continue
            if kind in ("missing", "value_error"):
                said = detail.get("ctx", {}).get("error")
                text = f"{dotted}: {said}".removeprefix(": ") if said else f"{dotted} is missing"
            else:
                known = re.findall("'(.*?)'", detail["msg"]) if kind == "literal_error" else ()
                text = f"{dotted} = {format_value(value)}: {detail['msg']}{did_you_mean(str(value), known)}"
            problems.setdefault(dotted, text)
        return None, problems


def _replace_removed(tables: Sequence[Fields], prefix: str) -> None:
    for table in tables:
        cap, params = table.get("importance_cap"), table.get("loss_params", {})
        if cap is not None and table.get("recompute_old") and "correction" not in params:
            table["loss_params"] = {"importance_cap": cap, **params}
        if table.get("subset"):
            table["dataset"] += f":{table['subset']}"
        if table.get("where") == "process":
            table["where"] = "trainer"
        moves = {name: table[name] for name in ("every", "policy_weight") if name in table}
        for name, numbers in (("kl_control", table.get("kl_control_params")), ("update", moves)):
            if numbers and table.get(name, "none") != "none":
                table[name] += f"({', '.join(f'{key}={value}' for key, value in numbers.items())})"
        for name, value in list(table.items()):
            key = config_keys().get(f"{prefix}{name}")
            if key and key.section:
                _replace_removed(value if isinstance(value, list) else [value], f"{prefix}{name}.")
            elif not key and find_name(REMOVED, f"{prefix}{name}"):
                del table[name]


def read_toml(file: Path) -> Fields:
    """The tables of a file. Raises ConfigError for one that cannot be read or is not TOML."""
    try:
        settings = tomllib.loads(file.read_bytes().decode())
        flatten(settings)  # raises RecursionError where tables are nested too deep for everything else
        return settings
    except (OSError, ValueError, RecursionError) as error:  # a NUL in the name, not UTF-8, not TOML
        raise ConfigError(
            f"{str(file)!r} cannot be read as TOML ({error}); name a TOML file with --config FILE"
        ) from error


def dump_config(config: RunConfig) -> str:
    """TOML that `load_config` reads back equal: every setting written out, unset ones left out."""
    return tomli_w.dumps(config.model_dump())


def training_digest(config: RunConfig) -> str:
    """SHA-256, in hex, of every setting that decides what is trained: two configs that check_same_run takes
    for one run have the same.

    Of a path only its last part counts, so that a run may be copied to another place. A setting that has its
    default is left out, so that a version with one setting more or less takes the checkpoints of the version
    before; what changed a default is not seen here, but by check_same_run. A table that may be left out is a
    key too.
    """
    decisive = {}
    for dotted, value in flatten(config.model_dump()).items():
        for name in () if _may_change(dotted, config) else list_around(dotted):
            key, inside = config_keys().get(without_numbers(name)), dotted[len(name) :]
            if key and key.section:
                if inside and key.default and not re.match(r"\.\d", inside):
                    decisive[name] = {}
            elif not inside and (
                not key or key.default != format_value(value) or dotted.startswith("rl.changes.")
            ):
                decisive[name] = _last_part(value)
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _may_change(key: str, saved: RunConfig) -> bool:
    free = MAY_CHANGE + ("" if saved.deterministic else CHANGES_BITS)
    return not set(free.split()).isdisjoint(list_around(key))


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
    found = _find_differences(saved, now, "then", "now")
    if lines := [f"\n  {line}" for key, line in found.items() if not _may_change(key, saved)]:
        raise RunDirError(
            "the run directory was made with other settings; go on with those, or name another"
            f" --output.dir:{''.join(lines)}"
        )


def check_same_config(config: RunConfig, dumped: str) -> None:
    """Raises ConfigError, naming the first setting, where `config` differs from the one that dump_config
    wrote as `dumped`.
    """
    other = RunConfig.model_validate(tomllib.loads(dumped))
    for line in _find_differences(config, other, "here", "on rank 0").values():
        raise ConfigError(f"{line}; start all ranks with the same config file and flags")


def _find_differences(one: RunConfig, two: RunConfig, here: str, there: str) -> Texts:
    """By setting, both values where they differ; `here` and `there` say which is whose."""
    before, after = flatten(one.model_dump()), flatten(two.model_dump())
    return {
        key: f"{key}: {_format(before, key)} {here}, {_format(after, key)} {there}"
        for key in before | after
        if before.get(key) != after.get(key)
    }


def _format(values: Fields, key: str) -> str:
    return format_value(values[key]) if key in values else "unset"


# --- flags --------------------------------------------------------------------------------------------------


def _apply_override(settings: Fields, dotted: str, text: str) -> None:
    """Puts the value into the tables of the file: the text as TOML, or else as it is. A path or function in
    it is relative to the working directory. What the setting does not take stays as it is, and is reported
    with everything else. Raises ConfigError.
    """
    key = find_key(dotted)
    if not key:
        raise ConfigError(describe_unknown_key(dotted))
    if key.section or (key.kind == OPEN_TABLE and key.key == dotted):
        raise ConfigError(f"{dotted} is a table; set one of its keys, as --{dotted}.NAME VALUE")
    first, *_ = parts = dotted.split(".")
    if first not in settings and key.table and config_keys()[first].default == "unset":
        raise ConfigError(f"the file has no [{first}] table; add one, or leave the flag out")
    holder: Any = settings
    table: Any = settings
    for part in parts:
        numbered = part.isdecimal()
        if isinstance(table, list) or numbered:
            items = table if isinstance(table, list) else [table]
            number = int(part) if numbered else 0
            if number >= len(items) or (len(items) > 1 and not numbered):
                raise ConfigError(
                    f"{key.table} has {len(items)} tables in the file, numbered from 0: --{key.table}.0.…"
                )
            table = items[number]
        if not isinstance(table, dict):
            return  # the file has a value where a table belongs, and pydantic says so
        if not numbered:
            holder, table = table, table.setdefault(part, {})
    try:
        [value] = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):  # no TOML, or a second line
        value = text
    for meant in () if key.kind == OPEN_TABLE else (value, text):
        with suppress(ValidationError):
            value = TypeAdapter(key.field.rebuild_annotation()).validate_python(
                meant, strict=meant is not text, context=Path.cwd()
            )
            break
    holder[parts[-1]] = value


# --- stages and modes ---------------------------------------------------------------------------------------


STAGES = ("sft", "preference", "reward_model", "rl")
STAGE_ALIASES = {"dpo": "preference", "ppo": "rl", "online": "rl"}  # RL that must have a critic, or [online]
EVALUATE = "evaluate"  # the mode that trains nothing


def parse_mode(mode: str) -> tuple[str, ...]:
    """The stages of a mode that trains, under the names of their tables: "sft+reward_model+ppo" → ("sft",
    "reward_model", "rl").

    Each at most once; sft comes first and rl last, where they are. Raises ConfigError naming what is wrong.
    """
    stages = tuple(STAGE_ALIASES.get(stage, stage) for stage in mode.split("+"))
    for stage in stages:
        if stage not in STAGES:
            raise ConfigError(
                f"--mode {mode}: there is no stage {stage!r}"
                f"{did_you_mean(stage, [*STAGES, *STAGE_ALIASES])}; a"
                f" stage is {' or '.join(STAGES)}, joined by +"
            )
    if len(set(stages)) < len(stages) or "sft" in stages[1:] or "rl" in stages[:-1]:
        raise ConfigError(
            f"--mode {mode}: a run has each stage once, sft as the first and rl (or ppo) as the last one; put"
            " them in this order"
        )
    return stages


def choose_stages(config: RunConfig, mode: str | None) -> tuple[str, ...]:
    """The stages of a mode; without one, all that the config has tables for. Raises ConfigError as parse_mode
    does, for a config without stages, if the mode says ppo and [rl] has no critic, or evaluate and there is
    no [eval].
    """
    if mode == EVALUATE:
        if config.eval:
            return ()
        raise ConfigError(
            "there is no [eval] table, which says what is asked and how it is scored; add one, with data and"
            " reward, or name a file that has one with --config FILE"
        )
    stages = list_stages(config) if mode is None else parse_mode(mode)
    if not stages:
        raise ConfigError(
            f"the config has none of the tables {', '.join(STAGES)}: there is nothing to train; add one of"
            " them"
        )
    if mode and "ppo" in mode.split("+") and config.rl and not config.rl.critic:
        raise ConfigError(
            f"--mode {mode} has the stage ppo, which trains a critic, but there is no [rl.critic] table; add"
            " it, or use the stage rl"
        )
    asked, is_online = (mode or "online").split("+"), config.online is not None
    if config.rl and "rl" in stages and is_online != ("online" in asked) and mode:
        raise ConfigError(
            f"--mode {mode}, and the config has {'an' if is_online else 'no'} [online] table, with which RL"
            " learns without end, in --mode online; add it or leave it out, or change the mode"
        )
    return stages


def stage_config(config: RunConfig, stage: str) -> StageConfig:
    """The table of a stage; for "evaluate", of which nothing trains, one with defaults. Raises ConfigError if
    the config has none.
    """
    if stage == EVALUATE and config.eval:
        return SFTTrainingConfig(data=config.eval.data, steps=1)
    if stage not in list_stages(config):
        raise ConfigError(
            f"--mode has the stage {stage!r} but the config has no [{stage}] table; add it or choose another"
            " mode"
        )
    return getattr(config, stage)


def list_stages(config: RunConfig) -> tuple[str, ...]:
    """The stages that a config has tables for, in the order in which they run."""
    return tuple(stage for stage in STAGES if getattr(config, stage))

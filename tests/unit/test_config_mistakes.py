"""A corpus of mistakes in configs, made from the schema: each is refused before a model loads, and spelling
mistakes name the right key.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli_w

from rollouts.config.keys import ConfigKey, config_keys, members_of
from rollouts.config.load import FUNCTIONS, PATHS, load_config
from rollouts.errors import ConfigError, PlugInError

SHARE = 0.9  # of the spelling mistakes of a kind whose message names the right key
POSITIONS = 2  # places in a name that each kind of edit is tried at
LETTERS = "abcdefghijklmnopqrstuvwxyz_"
KEYS = list(config_keys().values())
SETTINGS = [key for key in KEYS if not key.is_table]

GOOD: dict[str, Any] = {
    "name": "x",
    "model": {"name": "tiny:byte"},
    "output": {},
    "engine": {},
    "sft": {"data": {"kind": "jsonl", "path": "sft.jsonl"}, "steps": 1, "optim": {}},
    "rl": {
        "data": {"kind": "jsonl", "path": "rl.jsonl"}, "steps": 1, "rollout": {"reward": "r.py:f"}, "optim": {},
        "changes": {"from_step": 2, "loss": "gspo"},
    },
    "preference": {"data": {"kind": "jsonl", "path": "pairs.jsonl"}, "steps": 1, "optim": {}},
    "reward_model": {"data": {"kind": "jsonl", "path": "pairs.jsonl"}, "steps": 1, "optim": {}},
    "eval": {"data": {"kind": "jsonl", "path": "eval.jsonl"}},
}  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A config with one thing wrong."""

    kind: str
    key: str  # what was meant
    settings: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    wrong: str = ""  # what was written


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes") / "run.toml"


def message_of(mistake: Mistake, file: Path) -> str:
    if mistake.settings is GOOD:
        file = file.with_name("good.toml")  # one file for all flags
    if mistake.settings is not GOOD or not file.exists():
        file.write_text(tomli_w.dumps(mistake.settings), encoding="utf-8")
    try:
        load_config(file, mistake.flags)
    except ConfigError as error:
        return str(error)
    raise AssertionError(
        f"{mistake.kind}: {mistake.wrong} for {mistake.key} was let through with"
        f" {mistake.flags or mistake.settings}"
    )


# --- making mistakes ----------------------------------------------------------------------------------------


def edits(name: str) -> Iterator[tuple[str, str]]:
    """(kind, name with one edit), the same ones every time, spread over the name."""
    seed = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    first, step = seed % len(name), max(1, len(name) // POSITIONS)
    places = sorted({(first + number * step) % len(name) for number in range(POSITIONS)})
    for at in places:
        letter = LETTERS[(seed >> at) % len(LETTERS)]
        yield "delete", name[:at] + name[at + 1 :]
        yield "insert", name[:at] + letter + name[at:]
        yield "substitute", name[:at] + letter + name[at + 1 :]
        if at + 1 < len(name):
            yield "transpose", name[:at] + name[at + 1] + name[at] + name[at + 2 :]


def table_of(settings: dict[str, Any], dotted: str) -> dict[str, Any]:
    table = settings
    for part in dotted.split(".") if dotted else ():
        table = table.setdefault(part, {})
    return table


def good_value(key: ConfigKey) -> Any:
    """A value that the setting takes."""
    if key.is_table:
        return copy.deepcopy(table_of(copy.deepcopy(GOOD), key.key))
    kind = next(member for member in members_of(key.annotation) if member is not type(None))
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    number = max(
        (bound + (words == "above") for words, bound in bounds_of(key) if words != "at most"), default=1.0
    )
    return {int: int(number), float: float(number), bool: True, str: "text", list: [], dict: {}}[
        get_origin(kind) or kind
    ]


def bounds_of(key: ConfigKey) -> list[tuple[str, float]]:
    """The bounds that the words of the type promise: read back from them, so that words and rules cannot
    part.
    """
    return [
        (words, float(number))
        for words, number in re.findall(r"(at least|above|at most) (-?\d+(?:\.\d+)?)", key.type_text)
    ]


def renamed(key: ConfigKey, wrong: str) -> dict[str, Any]:
    settings = copy.deepcopy(GOOD)
    value = good_value(key)
    table = table_of(settings, key.table)
    table.pop(key.name, None)
    table[wrong] = value
    return settings


def misspelt() -> Iterator[Mistake]:
    """Every key with every kind of edit, in the file and as a flag."""
    for key in KEYS:
        siblings = {other.name for other in KEYS if other.table == key.table}
        for number, (kind, wrong) in enumerate(edits(key.name)):
            if not wrong or wrong == key.name or wrong in siblings:
                continue
            yield Mistake(kind, key.key, renamed(key, wrong), wrong=wrong)
            if not key.is_table and number < 4:
                flag = f"--{key.table}.{wrong}".replace("--.", "--")
                yield Mistake(f"{kind} (flag)", key.key, GOOD, (flag, str(good_value(key))), wrong)
        if key.is_table:  # the flag of a setting inside, with the table's name misspelt
            inside = next(other for other in SETTINGS if other.table == key.key)
            for kind, wrong in edits(key.name):
                if wrong and wrong != key.name and wrong not in siblings:
                    flag = f"--{key.table}.{wrong}.{inside.name}".replace("--.", "--")
                    yield Mistake(f"{kind} (flag)", inside.key, GOOD, (flag, str(good_value(inside))), wrong)


WRONG_VALUES: tuple[Any, ...] = (
    "text",
    "3",
    3,
    1.5,
    True,
    [],
    [3],
    {},
    {"a": [3]},
    math.nan,
    math.inf,
    -1,
    0,
    -0.5,
    "none ",
    10**30,
    1e300,
)


def is_allowed(value: Any, key: ConfigKey) -> bool:
    """The slow obvious rule of what a setting takes."""
    kinds = [get_origin(member) or member for member in members_of(key.annotation)]
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float):
        fits = float in kinds or (int in kinds and isinstance(value, int))
        return fits and math.isfinite(value) and all(holds(bound, value) for bound in bounds_of(key))
    if isinstance(value, str):
        return str in kinds or any(value in get_args(member) for member in members_of(key.annotation))
    if isinstance(value, dict):
        return dict in kinds and (not value or "any" in repr(key.annotation).lower())
    return list in kinds and all(isinstance(item, str) for item in value)


def holds(bound: tuple[str, float], value: float) -> bool:
    words, number = bound
    return value >= number if words == "at least" else value > number if words == "above" else value <= number


def wrong_values() -> Iterator[Mistake]:
    for key in SETTINGS:
        for value in WRONG_VALUES:
            if not is_allowed(value, key):
                settings = copy.deepcopy(GOOD)
                table_of(settings, key.table)[key.name] = value
                yield Mistake(
                    f"{type(value).__name__} for {key.type_text}", key.key, settings, wrong=repr(value)
                )
    for key in KEYS:
        for value in (3, "text", True, [3], ["text"]) if key.is_table else ():
            settings = copy.deepcopy(GOOD)
            table_of(settings, key.table)[key.name] = value
            yield Mistake("value for a table", key.key, settings, wrong=repr(value))


def wrong_choices() -> Iterator[Mistake]:
    """One edit in a value of a setting that has a few."""
    for key in SETTINGS:
        choices = [
            value
            for member in members_of(key.annotation)
            if get_origin(member) is Literal
            for value in get_args(member)
        ]
        for choice in choices:
            for kind, wrong in edits(choice):
                if wrong not in choices:
                    settings = copy.deepcopy(GOOD)
                    table_of(settings, key.table)[key.name] = wrong
                    yield Mistake(f"{kind} in a value", choice, settings, wrong=wrong)


def misplaced() -> Iterator[Mistake]:
    """Every setting in the table around its own, in the tables inside its own and in those beside it, where
    no such key is.
    """
    tables = ["", *(key.key for key in KEYS if key.is_table)]
    for key in SETTINGS:
        around = key.table.rpartition(".")[0]
        for table in tables:
            above, inside = (
                table == around and table != key.table,
                table.rpartition(".")[0] == key.table and table != key.table,
            )
            beside = table.rpartition(".")[0] == around and table not in ("", key.table) and key.table
            place = "parent" if above else "child" if inside else "sibling" if beside else ""
            if place and f"{table}.{key.name}".removeprefix(".") not in config_keys():
                settings = copy.deepcopy(GOOD)
                table_of(settings, key.table).pop(key.name, None)
                table_of(settings, table)[key.name] = good_value(key)
                yield Mistake(place, key.key, settings, wrong=f"{table}.{key.name}".removeprefix("."))


# --- what is said about them --------------------------------------------------------------------------------


def shares(
    mistakes: Iterator[Mistake], file: Path, is_named: Any
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """(kind → how many messages name what was meant, of how many; the ones that do not)."""
    counts: dict[str, tuple[int, int]] = {}
    misses: list[str] = []
    for mistake in mistakes:
        message = message_of(mistake, file)
        good = bool(is_named(mistake, message))
        right, total = counts.get(mistake.kind, (0, 0))
        counts[mistake.kind] = (right + good, total + 1)
        if not good:
            misses.append(
                f"{mistake.kind}: {mistake.wrong} for {mistake.key}: {message.partition('Valid')[0]}"
            )
    return counts, misses


def check_shares(counts: Mapping[str, tuple[int, int]], misses: list[str]) -> None:
    listing = "\n".join(
        [*(f"{kind:<24} {right} of {total}" for kind, (right, total) in counts.items()), *misses]
    )
    print(listing)
    assert all(right >= SHARE * total for right, total in counts.values()), listing


def names_key(mistake: Mistake, message: str) -> bool:
    """The question of the line about the wrong key holds the key that was meant, by its name or in full."""
    for line in message.splitlines():
        asked = re.search(r"unknown key (\S+?); did you mean ([^?]*)\?", line)
        if asked and mistake.wrong in asked[1]:
            suggested = re.split(r", | or ", asked[2].partition(" (")[0])
            if mistake.key in suggested or mistake.key.rpartition(".")[2] in suggested:
                return True
    return False


def names_key_or_namesake(mistake: Mistake, message: str) -> bool:
    """In the wrong table beside its own a key may as well mean that table's."""
    return re.search(rf"did you mean [^?]*\b{mistake.key.rpartition('.')[2]}\b[^?]*\?", message) is not None


def test_nine_of_ten_misspelt_keys_are_answered_with_the_right_one(config_file):
    counts, misses = shares(misspelt(), config_file, names_key)
    assert sum(total for _, total in counts.values()) > 900
    check_shares(counts, misses)


def test_nine_of_ten_misspelt_values_are_answered_with_the_right_one(config_file):
    counts, misses = shares(
        wrong_choices(), config_file, lambda mistake, message: f'did you mean "{mistake.key}"?' in message
    )
    check_shares(counts, misses)


def test_nine_of_ten_misplaced_keys_are_answered_with_the_right_place(config_file):
    check = lambda mistake, message: (names_key_or_namesake if mistake.kind == "sibling" else names_key)(  # noqa: E731
        mistake, message
    )
    counts, misses = shares(misplaced(), config_file, check)
    assert set(counts) == {"parent", "child", "sibling"}
    check_shares(counts, misses)


def test_every_wrong_value_is_refused_by_key_and_rule(config_file):
    number = 0
    for mistake in wrong_values():
        message = message_of(mistake, config_file)
        assert mistake.key in message, (mistake, message)
        assert "it must be" in message or "is missing" in message or "at least 1" in message, (
            mistake,
            message,
        )
        number += 1
    assert number > 600


def test_every_wrong_value_is_refused_as_a_flag(config_file):
    for key in SETTINGS:
        for text in ("text", "nan", "-1", "[3]", "{ a = [3] }"):
            parsed: Any = {"nan": math.nan, "-1": -1, "[3]": [3], "{ a = [3] }": {"a": [3]}}.get(text, text)
            takes_text = str in members_of(key.annotation)
            if takes_text or key.takes_any_key or is_allowed(parsed, key):
                continue
            message = message_of(Mistake("flag", key.key, GOOD, (f"--{key.key}", text), text), config_file)
            assert f"--{key.key}: {key.key}" in message, message


def test_a_table_as_a_flag_is_refused(config_file):
    for key in KEYS:
        if key.is_table or key.takes_any_key:
            assert "is a table; set one of its keys" in message_of(
                Mistake("flag", key.key, GOOD, (f"--{key.key}", "{}")), config_file
            )


def test_every_required_key_left_out_is_named(config_file):
    required = [key for key in KEYS if key.default == "required"]
    assert {"sft.steps", "rl.rollout", "rl.data.kind"} <= {key.key for key in required}
    for key in required:
        settings = copy.deepcopy(GOOD)
        del table_of(settings, key.table)[key.name]
        assert f"{key.key} is missing" in message_of(Mistake("missing", key.key, settings), config_file)


def test_paths_and_functions_are_settings_of_the_schema():
    assert set(PATHS) | set(FUNCTIONS) <= set(config_keys())
    functions = [key.key for key in SETTINGS if "file.py:function" in key.meaning]
    assert set(functions) <= set(FUNCTIONS)


def test_a_loss_parameter_that_is_like_none_is_answered_with_all_there_are():
    from rollouts.losses import check_loss_params

    with pytest.raises(ConfigError) as caught:
        check_loss_params("ppo_clip", {"foo": 1})
    assert "has no parameter 'foo'; it takes " in str(caught.value)
    assert "clip_high" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"did you mean 'clip_high'\? It takes .*clip_low"):
        check_loss_params("ppo_clip", {"clip_hi": 1})


@pytest.mark.parametrize("name", ["my_loss.py:f", "/some/where/my_loss.py:f", "./my_loss:f"])
def test_a_loss_in_a_file_is_answered_with_the_module_it_must_be(name):
    from rollouts.losses import resolve_loss

    with pytest.raises(
        PlugInError,
        match=r"names a file; a loss is named as module:function.*write my_loss:f and put .* on PYTHONPATH",
    ):
        resolve_loss(name)

"""What every setting is: its type, its default and its meaning, read from the schema. Names the right key for a wrong one."""

from __future__ import annotations

import ast
import difflib
import inspect
import io
import json
import tokenize
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le

from rollouts.config import schema
from rollouts.config.schema import RunConfig, Section

# What other frameworks call our settings. Suggested, never accepted.
ALIASES: Mapping[str, str] = {
    "group_size": "samples_per_prompt",
    "num_generations": "samples_per_prompt",
    "n_samples_per_prompt": "samples_per_prompt",
    "num_samples": "samples_per_prompt",
    "rollout_n": "samples_per_prompt",
    "rollout_batch_size": "num_prompts",
    "prompts_per_step": "num_prompts",
    "train_batch_size": "batch_size",
    "global_batch_size": "batch_size",
    "batch_size": "num_prompts",
    "per_device_train_batch_size": "batch_size",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_response_len": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "num_warmup_steps": "warmup_steps",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clip": "max_grad_norm",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_rollout": "steps",
    "beta": "kl_coef",
    "kl_loss_coef": "kl_coef",
    "init_kl_coef": "kl_coef",
    "epsilon": "clip_low",
    "eps_clip": "clip_low",
    "clip_range": "clip_low",
    "epsilon_high": "clip_high",
    "eps_clip_high": "clip_high",
    "advantage_estimator": "advantage",
    "loss_type": "loss",
    "num_iterations": "updates_per_batch",
    "ppo_epochs": "updates_per_batch",
    "reward_fn": "reward",
    "reward_func": "reward",
    "reward_funcs": "reward",
    "custom_rm_path": "reward",
    "output_dir": "dir",
    "save_steps": "checkpoint_every",
    "save_interval": "checkpoint_every",
    "eval_steps": "eval_every",
    "eval_interval": "eval_every",
    "model_name": "name",
    "model_name_or_path": "name",
    "model_path": "name",
    "hf_checkpoint": "name",
}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting, or one table of settings."""

    key: str  # dotted: rl.rollout.num_prompts
    annotation: Any  # of the field
    type_text: str  # "a whole number, at least 1"
    default: str  # as TOML, "required", or "unset"
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


def explain_config(prefix: str = "") -> str:
    """A table of text: one line per setting with its default, meaning and type; only those under `prefix` when it is given.

    Raises KeyError, with the nearest key in its text, if nothing lies under `prefix`.
    """
    chosen = [key for key in config_keys().values() if not prefix or key.key == prefix or key.key.startswith(f"{prefix}.")]
    if not chosen:
        raise KeyError(describe_unknown_key(prefix))
    key_width = max(len(key.key) for key in chosen)
    default_width = max(len(key.default) for key in chosen)
    lines = []
    for key in chosen:
        if key.is_table:
            lines += ["", f"[{key.key}]  {key.meaning}" + ("  (unset)" if key.default == "unset" else "")]
        else:
            lines.append(f"{key.key:<{key_width}}  {key.default:<{default_width}}  {key.meaning}  ({key.type_text})")
    return "\n".join(lines).strip() + "\n"


def describe_unknown_key(dotted: str) -> str:
    """`unknown key rl.rollout.temperture; did you mean temperature? Valid here: …`"""
    table, _, name = dotted.rpartition(".")
    known = config_keys()
    while table and table not in known:  # the first part that is wrong is the one to talk about
        dotted = table
        table, _, name = table.rpartition(".")
    siblings = [key.name for key in known.values() if key.table == table]
    suggestion = _nearest_key(table, name, siblings)
    question = f"; did you mean {suggestion}?" if suggestion else "."
    where = "here" if table else "at the top"
    return f"unknown key {dotted}{question} Valid {where}: {', '.join(siblings)}"


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that looks most like `name`, None if none does."""
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return found[0] if found else None


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, unwrapped from Annotated; otherwise the annotation itself."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    return (annotation,)


def is_nullable(annotation: Any) -> bool:
    """Whether the setting may be switched off by the word "none"; text settings cannot, for the word would be their value."""
    members = members_of(annotation)
    return type(None) in members and str not in members and not any(_is_section(member) for member in members)


def format_value(value: object) -> str:
    """A value as TOML writes it, cut to one short line."""
    text = {True: "true", False: "false", None: '"none"'}[value] if value is None or isinstance(value, bool) else _plain_text(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_text(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(inner) for inner in value) + "]"
    return repr(value) if isinstance(value, int | float) else str(value)


def _nearest_key(table: str, name: str, siblings: Sequence[str]) -> str | None:
    name = name.replace("-", "_")
    if name in siblings:
        return name
    alias = ALIASES.get(name, "")
    if alias in siblings:
        return alias
    close = nearest(name, siblings)
    if close:
        return close
    elsewhere = [key for key in config_keys().values() if not key.is_table]
    wanted = (name, alias, nearest(name, [key.name for key in elsewhere]))
    found = [key.key for other in wanted for key in elsewhere if key.name == other]
    # the one nearest in the tree: below this table first, then the one that shares most of its path
    return max(found, key=lambda key: (key.startswith(f"{table}."), _shared_parts(key, table)), default=None)


def _shared_parts(first: str, second: str) -> int:
    parts = zip(first.split("."), second.split("."), strict=False)
    return sum(1 for a, b in parts if a == b)


# --- reading the schema ------------------------------------------------------------------------------------------------------


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """(the section that a field holds, whether it holds a list of them)."""
    for member in members_of(annotation):
        inner = members_of(get_args(member)[0])[0] if get_origin(member) is list else member
        if _is_section(inner):
            return inner, inner is not member
    return None, False


def _add_keys(keys: dict[str, ConfigKey], section: type[Section], prefix: str, defaults: Section | None = None) -> None:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        inner, is_list = _section_of(field.annotation)
        value = getattr(defaults, name) if defaults else field.default
        if inner is None:
            meaning = _comments().get((section.__name__, name), "").replace("None:", '"none":' if is_nullable(field.annotation) else "unset:")
            default = "required" if field.is_required() else "unset" if value is None and field.default is None else format_value(value)
            keys[dotted] = ConfigKey(dotted, field.annotation, describe_type(field.annotation, field.metadata), default, meaning, False)
            continue
        meaning = (inspect.getdoc(inner) or "").partition("\n")[0]
        default = "unset" if field.default is None else "required" if field.is_required() else "set"
        keys[dotted] = ConfigKey(dotted, field.annotation, "a table", default, meaning, True, is_list)
        _add_keys(keys, inner, f"{dotted}.", value if isinstance(value, Section) else None)


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type with its bounds in words: "a whole number, at least 1"."""
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return describe_type(base, [constraint for item in inner for constraint in getattr(item, "metadata", [item])] + list(metadata))
    if get_origin(annotation) in (Union, types.UnionType):
        return _describe_union(get_args(annotation), metadata, nullable=is_nullable(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(format_value(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"a list of {describe_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a table"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(annotation, "any value")
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
        case _:
            return ""


@cache
def _comments() -> Mapping[tuple[str, str], str]:
    """The trailing comment of every field by (class, field). The schema says what a setting means there and nowhere else."""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment_of_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)] if isinstance(node, ast.ClassDef) else []
        for item in fields:
            if isinstance(node, ast.ClassDef) and isinstance(item.target, ast.Name):
                found[node.name, item.target.id] = comment_of_line.get(item.end_lineno or item.lineno, "")
    return found

"""Rows of data: read from a JSONL file or made by reasoning-gym, checked where they enter, and kept apart from held-out prompts.

A row is a JSON object with `prompt` (text or chat messages), or `messages` (a conversation with its answers), and whatever else a reward
function reads, such as `answer`.
"""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rollouts.config.explain import nearest
from rollouts.config.schema import DataSourceConfig
from rollouts.errors import DataError
from rollouts.types import ChatMessage, JSONValue, check_json

Row = dict[str, Any]


def load_rows(source: DataSourceConfig, *, name: str) -> list[Row]:
    """The rows of a source in its own order, `source.size` of them when given, each with its system prompt in place.

    `name` is the setting that the source comes from ("rl.data"); errors begin with it.
    Raises DataError naming file, line and field, or the reasoning-gym dataset and parameter; and when `size` exceeds what there is.
    """
    rows = _read_jsonl(source, name) if source.kind == "jsonl" else _make_reasoning_gym_rows(source, name)
    if source.system_prompt is None:
        return rows
    return [_with_system_prompt(row, source.system_prompt) for row in rows]


# --- files -------------------------------------------------------------------------------------------------------------------


def _read_jsonl(source: DataSourceConfig, name: str) -> list[Row]:
    path = Path(source.path)
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):  # bytes: only "\n" ends a line of JSONL, text files know many more
                if len(rows) == source.size:
                    break
                if line.strip():
                    rows.append(_parse_row(line.rstrip(b"\r\n"), f"{name}: {path}:{number}"))
    except FileNotFoundError as error:
        raise DataError(f"{name}.path={source.path!r}: there is no such file (looked for {path.absolute()})") from error
    except OSError as error:
        raise DataError(f"{name}.path={source.path!r} cannot be read: {error.strerror}") from error
    if not rows:
        raise DataError(f"{name}.path={source.path!r} has no rows; a JSONL file has one JSON object per line")
    if source.size is not None and len(rows) < source.size:
        raise DataError(f"{name}.size={source.size} but {path} has {len(rows)} rows; set size = {len(rows)} or leave it out")
    return rows


def _parse_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}; every line must be a JSON object with `prompt` or `messages`")
    check_row(row, where=where)
    return row


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def check_row(row: Mapping[str, Any], *, where: str) -> None:
    """Raises DataError, beginning with `where`, if the row has neither prompt nor messages, or one that is empty or of another type."""
    if "prompt" not in row and "messages" not in row:
        close = next((found for key in row if (found := nearest(key, ["prompt", "messages"]))), None)
        hint = f"; did you mean {close}?" if close else ""
        raise DataError(f"{where}: neither `prompt` nor `messages`; the row has {', '.join(row) or 'no fields'}{hint}")
    if "prompt" in row:
        if isinstance(row["prompt"], str):
            if not row["prompt"].strip():
                raise DataError(f"{where}: prompt is empty; it must be text or chat messages")
        else:
            check_messages(row["prompt"], where=f"{where}: prompt")
    if "messages" in row:
        check_messages(row["messages"], where=f"{where}: messages")
    try:
        check_json("row", row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def check_messages(messages: object, *, where: str) -> None:
    """Raises DataError, beginning with `where`, unless `messages` is a list, not empty, of objects with a text role and a text content."""
    if not isinstance(messages, list | tuple):
        raise DataError(f"{where} is of type {type(messages).__name__}; it must be a list of chat messages")
    if not messages:
        raise DataError(f"{where} is an empty list; it must hold at least one chat message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}[{index}] is of type {type(message).__name__}; a chat message is an object with a role and a content")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f"{where}[{index}] has no {key}; a chat message is an object with a role and a content")
            if not isinstance(message[key], str):
                raise DataError(f"{where}[{index}].{key} is of type {type(message[key]).__name__}; it must be text")
        if not message["role"]:
            raise DataError(f"{where}[{index}].role is empty; it must be system, user, assistant or tool")


# --- reasoning-gym -----------------------------------------------------------------------------------------------------------


def _make_reasoning_gym_rows(source: DataSourceConfig, name: str) -> list[Row]:
    assert source.size is not None, "the schema asks for it"
    try:
        from reasoning_gym import factory  # takes seconds and is an optional dependency, so not at the top
    except ImportError as error:
        raise DataError(f"{name}.kind='reasoning_gym' needs the package reasoning-gym; pip install 'rollouts-rl[reasoning-gym]'") from error
    if source.dataset not in factory.DATASETS:
        close = nearest(source.dataset, list(factory.DATASETS))
        hint = f"; did you mean {close}?" if close else ""
        raise DataError(f"{name}.dataset={source.dataset!r} is not one of reasoning-gym's {len(factory.DATASETS)} datasets{hint}")
    _check_reasoning_gym_params(source, factory.DATASETS[source.dataset][1], name)
    try:
        dataset = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **source.params)
        return [_reasoning_gym_row(source.dataset, dataset[index]) for index in range(source.size)]
    except Exception as error:  # each of its datasets checks in its own way, mostly by assert
        message = f"{name}: reasoning-gym refused {source.dataset} with {name}.params={source.params}: {type(error).__name__}: {error}"
        raise DataError(message) from error


def _check_reasoning_gym_params(source: DataSourceConfig, config_class: type, name: str) -> None:
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    for key in source.params:
        if key in ("seed", "size"):
            raise DataError(f"{name}.params.{key}: set {name}.{key} instead")
        if key not in known:
            close = nearest(key, known)
            hint = f"; did you mean {close}?" if close else "."
            raise DataError(f"{name}.params.{key} is no parameter of {source.dataset}{hint} It takes: {', '.join(known)}")


def _reasoning_gym_row(dataset: str, entry: Mapping[str, Any]) -> Row:
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "source_dataset": dataset,
        "metadata": _json_subset(entry.get("metadata", {})),
    }


_LEFT_OUT = object()


def _json_subset(value: Any) -> JSONValue:
    """`value` without what JSON cannot say; tuples become lists, keys become text."""
    if isinstance(value, Mapping):
        inner = {str(key): _json_subset(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [kept for item in value if (kept := _json_subset(item)) is not _LEFT_OUT]
    try:
        check_json("metadata", value)
    except ValueError:
        return _LEFT_OUT
    return value


# --- prompts and conversations -----------------------------------------------------------------------------------------------


def _with_system_prompt(row: Row, system_prompt: str) -> Row:
    changed = dict(row)
    for key in ("prompt", "messages"):
        if key in row:
            messages = _as_messages(row[key])
            has_one = any(message["role"] == "system" for message in messages)
            changed[key] = messages if has_one else [ChatMessage(role="system", content=system_prompt), *messages]
    return changed


def _as_messages(prompt: str | Sequence[ChatMessage]) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


def require_prompts(rows: Iterable[Mapping[str, Any]], *, name: str) -> None:
    """Raises DataError naming the first row that has no `prompt`: RL and evaluation generate from one."""
    for index, row in enumerate(rows):
        if "prompt" not in row:
            raise DataError(f"{name}: row {index} has no prompt; RL and evaluation rows need one (`messages` alone is for SFT)")


def row_to_conversation(row: Mapping[str, Any], *, where: str = "row") -> list[ChatMessage]:
    """The messages that SFT trains on: row["messages"], or the prompt followed by row["answer"] as the assistant's turn.

    Raises DataError, beginning with `where`, if there is no assistant turn to train on.
    """
    if "messages" in row:
        messages = _as_messages(row["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: messages has no assistant turn; SFT trains on assistant turns")
        return messages
    if "answer" not in row:
        raise DataError(f"{where}: no `messages` and no `answer`; an SFT row has messages with an assistant turn, or a prompt and an answer")
    if not isinstance(row["answer"], str) or not row["answer"]:
        raise DataError(f"{where}: answer is {row['answer']!r}; SFT trains on it, so it must be text that is not empty")
    return [*_as_messages(row["prompt"]), ChatMessage(role="assistant", content=row["answer"])]


def prompt_key(row: Mapping[str, Any]) -> str:
    """What two rows share when they ask the same: the text of the prompt without system messages, case and runs of white space.

    The prompt of a row with `messages` alone is what comes before its first assistant turn.
    """
    return next(_asked_prompts(row))


def _asked_prompts(row: Mapping[str, Any]) -> Iterator[str]:
    """The key of every prompt that training on the row teaches to answer; the row's own prompt first."""
    if "prompt" in row:
        yield _key_of(_as_messages(row["prompt"]))
    messages = _as_messages(row.get("messages", ()))
    if not messages:
        return
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for end in answers or [len(messages)]:
        yield _key_of(messages[:end])


def _key_of(messages: Sequence[ChatMessage]) -> str:
    parts = [message["content"] for message in messages if message["role"] != "system"] or [message["content"] for message in messages]
    return "\x1e".join(" ".join(unicodedata.normalize("NFKC", part).casefold().split()) for part in parts)


class KeptRows(NamedTuple):
    """Rows that stayed, and how many did not."""

    rows: list[Row]
    removed_count: int


def exclude_prompts(rows: Sequence[Row], held_out_rows: Iterable[Mapping[str, Any]]) -> KeptRows:
    """`rows` in their order without those that train on a held-out prompt, also as an earlier turn of a conversation."""
    held_out = {prompt_key(row) for row in held_out_rows}
    kept = [row for row in rows if held_out.isdisjoint(_asked_prompts(row))]
    return KeptRows(kept, len(rows) - len(kept))


def unique_prompts(rows: Iterable[Row]) -> list[Row]:
    """`rows` in their order without those whose prompt occurred before."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(prompt_key(row), row)
    return list(first.values())

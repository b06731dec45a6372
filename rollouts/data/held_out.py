"""Which rows ask the same, so that no training row teaches the answer to a held-out prompt."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from rollouts.data.mixture import Mixture
from rollouts.data.rows import Row, as_messages
from rollouts.errors import DataError
from rollouts.types import ChatMessage

R = TypeVar("R", Row, Row | None)


class KeptRows(NamedTuple, Generic[R]):
    """Rows that stayed, and how many did not."""

    rows: list[R]
    removed_count: int


class KeptMixture(NamedTuple):
    """Sources without the rows that went, and how many did."""

    mixture: Mixture
    removed_count: int


def prompt_key(row: Mapping[str, Any]) -> str:
    """What two rows share when they ask the same: the text of the prompt without system messages, case and
    runs of white space.

    The prompt of a row with `messages` alone is what comes before its first assistant turn.
    """
    return next(_asked_prompts(row))


def _asked_prompts(row: Mapping[str, Any]) -> Iterator[str]:
    """The key of every prompt that training on the row teaches to answer; the row's own prompt first."""
    if "prompt" in row:
        yield _key_of(as_messages(row["prompt"]))
    if "messages" not in row:
        return
    messages = as_messages(row["messages"])
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for end in answers or [len(messages)]:
        yield _key_of(messages[:end])


def _key_of(messages: Sequence[ChatMessage]) -> str:
    parts = [message["content"] for message in messages if message["role"] != "system"] or [
        message["content"] for message in messages
    ]
    return "\x1e".join(" ".join(unicodedata.normalize("NFKC", part).casefold().split()) for part in parts)


def exclude_prompts(rows: Sequence[R], held_out_rows: Iterable[Mapping[str, Any]]) -> KeptRows[R]:
    """`rows` in their order without those that train on a held-out prompt, also as an earlier turn of a
    conversation. Holes stay.
    """
    held_out = {prompt_key(row) for row in held_out_rows}
    kept = [row for row in rows if row is None or held_out.isdisjoint(_asked_prompts(row))]
    return KeptRows(kept, len(rows) - len(kept))


def exclude_from_mixture(
    mixture: Mixture, held_out_rows: Iterable[Mapping[str, Any]], *, name: str
) -> KeptMixture:
    """Every source without its rows that train on a held-out prompt. Raises DataError naming a source that
    has none left.
    """
    held_out = list(held_out_rows)
    sources, removed_count = [], 0
    for source in mixture.sources:
        rows, removed = exclude_prompts(source.rows, held_out)
        if not any(row is not None for row in rows):
            which = f" from {source.name}" if len(mixture.sources) > 1 else ""
            raise DataError(
                f"{name} has no row left{which}: all of its prompts are held out by eval.data; use another"
                " seed or file"
            )
        sources.append(replace(source, rows=tuple(rows)))
        removed_count += removed
    return KeptMixture(Mixture(tuple(sources)), removed_count)


def unique_prompts(rows: Iterable[Row | None]) -> list[Row]:
    """`rows` in their order without holes and without those whose prompt occurred before."""
    first: dict[str, Row] = {}
    for row in rows:
        if row is not None:
            first.setdefault(prompt_key(row), row)
    return list(first.values())

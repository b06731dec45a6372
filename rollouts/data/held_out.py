"""Which rows ask the same, so that no training row teaches the answer to a held-out prompt."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollouts.data.mixture import Mixture
from rollouts.data.rows import Row, parse_messages, read_prompt
from rollouts.types import ChatMessage


def find_asked_prompts(row: Mapping[str, Any]) -> Iterator[str]:
    """The key of every prompt that training on the row teaches to answer; the row's own prompt first. Rows
    that ask the same share it: the prompt's text without system messages, case and runs of white space.

    The prompts of a row with `messages` are what comes before each assistant turn.
    """
    if "prompt" in row:
        yield _key_of(read_prompt(row["prompt"]))
    if "messages" in row:
        messages = parse_messages(row["messages"], where="messages")
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        yield from (_key_of(messages[:end]) for end in answers or [len(messages)])


def _key_of(messages: Sequence[ChatMessage]) -> str:
    asked = [message for message in messages if message["role"] != "system"] or messages
    texts = (unicodedata.normalize("NFKC", message["content"]).casefold() for message in asked)
    return "\x1e".join(" ".join(text.split()) for text in texts)


def exclude_prompts(
    mixture: Mixture[Row], held_out_rows: Iterable[Row], *, name: str
) -> tuple[Mixture[Row], int]:
    """(every source without its rows that train on a held-out prompt, also as an earlier turn of a
    conversation; how many these are). Holes stay. Raises DataError naming a source that has none left.
    """
    held_out = {next(find_asked_prompts(row)) for row in held_out_rows}
    found = mixture.keep(
        lambda row: held_out.isdisjoint(find_asked_prompts(row)),
        f"{name} has no row left{{}}: all of its prompts are held out by eval.data; use another seed or file",
    )
    return found, len(mixture.samples) - len(found.samples)


def unique_prompts(rows: Iterable[Row]) -> list[Row]:
    """`rows` in their order without those whose prompt occurred before."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(next(find_asked_prompts(row)), row)
    return list(first.values())

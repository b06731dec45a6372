"""Rows of preference data in one shape, whichever of the usual ones a dataset has. Column names are those of
TRL's datasets.

    pair      prompt + chosen + rejected; or chosen and rejected alone, two whole conversations that begin
              alike
    labelled  prompt + completion + label; or completion and label alone, a whole conversation

A response is text, or chat messages of which the last is the assistant's. Afterwards `prompt` holds every
message before the response, as chat messages, and each response column a list of one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.config.spelling import nearest
from rollouts.data.messages import parse_messages
from rollouts.data.rows import Row, RowProblem, as_messages, check_chat, check_prompt
from rollouts.types import ChatMessage


def split_pair(row: Row) -> Row:
    """The row with prompt, chosen and rejected apart; a margin that is null is left out.

    Raises RowProblem if one is missing, empty or of another type, or the two responses answer different
    prompts.
    """
    _require(row, ("chosen", "rejected"), "a pair has a prompt, a chosen and a rejected response")
    heads: dict[str, list[ChatMessage]] = {}
    ends: dict[str, list[ChatMessage]] = {}
    for field in ("chosen", "rejected"):
        *heads[field], end = _join(row, field)
        ends[field] = [end]
    if heads["chosen"] != heads["rejected"]:
        longest = max(len(head) for head in heads.values())
        same = next(
            index
            for index in range(longest)
            if heads["chosen"][index : index + 1] != heads["rejected"][index : index + 1]
        )
        raise RowProblem(
            "rejected",
            f"chosen and rejected differ in message {same} already; both must answer the same prompt with"
            " their last turn",
        )
    margin = row.get("margin")
    if margin is not None and (
        isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin)
    ):
        raise RowProblem(
            "margin",
            f"margin is {repr(margin)[:80]}; it must be a number: how much better the chosen response is",
        )
    kept = {key: value for key, value in row.items() if key != "margin" or value is not None}
    return {**kept, "prompt": heads["chosen"], **ends}


def split_labelled(row: Row) -> Row:
    """The row with prompt and completion apart. Raises RowProblem if one is missing, empty or of another
    type, or the label is not true or false.
    """
    _require(row, ("completion", "label"), "a KTO row has a prompt, a completion and a label")
    *head, end = _join(row, "completion")
    if not isinstance(row["label"], bool):
        raise RowProblem(
            "label",
            f"label is {repr(row['label'])[:80]}; it must be true for a good completion and false for a"
            " bad one",
        )
    return {**row, "prompt": head, "completion": [end]}


def _require(row: Mapping[str, Any], fields: Sequence[str], rule: str) -> None:
    for field in fields:
        if field not in row:
            close = nearest(field, [key for key in row if key not in fields])
            hint = f'; is it {close}? Then set columns.{field} = "{close}"' if close else ""
            raise RowProblem(
                field, f"no `{field}`; {rule}. The row has {', '.join(row) or 'no fields'}{hint}"
            )


def _join(row: Mapping[str, Any], field: str) -> list[ChatMessage]:
    """The whole conversation of which the last message is the response in `field`."""
    turns = _parse_response(row[field], field)
    is_whole = turns[0]["role"] != "assistant"
    if row.get("prompt") is None:
        if not is_whole:
            rule = (
                f"then {field} must be a whole conversation as chat messages, which begins with a user's turn"
            )
            raise RowProblem("prompt", f"no `prompt`; {rule}")
        return turns
    check_prompt(row["prompt"])
    prompt = as_messages(row["prompt"])
    if not is_whole:
        return [*prompt, *turns]
    asked = {message["content"].strip() for message in turns[:-1]}
    begins_alike = turns[: len(prompt)] == prompt or (
        isinstance(row["prompt"], str) and row["prompt"].strip() in asked
    )
    if not begins_alike:
        rule = "give the response alone, or a whole conversation that begins with the prompt"
        raise RowProblem(
            field, f"{field} begins with a {turns[0]['role']}'s turn, but not with the row's prompt; {rule}"
        )
    return turns


def _parse_response(value: object, field: str) -> list[ChatMessage]:
    if isinstance(value, str):
        if not value.strip():
            raise RowProblem(field, f"{field} is empty; it must be text or chat messages")
        return [ChatMessage(role="assistant", content=value)]
    check_chat([value] if isinstance(value, Mapping) else value, field)
    turns = parse_messages([value] if isinstance(value, Mapping) else value, where=field)
    last = turns[-1]
    if last["role"] != "assistant":
        raise RowProblem(
            field,
            f"{field} ends with a turn of the role {last['role']}; its last turn is the assistant's response",
        )
    if (
        not last["content"].strip()
        and not last.get("tool_calls")
        and not last.get("reasoning_content", "").strip()
    ):
        raise RowProblem(
            f"{field}[{len(turns) - 1}].content", f"the last turn of {field} says nothing; leave the row out"
        )
    return turns

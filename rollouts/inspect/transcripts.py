"""Samples as a person reads them; on request each token marked by its advantage, the difference of its
log-probs, or whether it trains.

A mark is a colour where the terminal has 256 of them or more, and brackets elsewhere: {++ text} is far above
0, {- text} a little below. The scale is symmetric about 0, reaches to the value of the sample that is
furthest from it, and has three steps to either side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from rollouts.errors import RecordError
from rollouts.inspect.columns import Columns, open_columns
from rollouts.inspect.samples import FoundSamples
from rollouts.inspect.terminal import make_safe, write_lines
from rollouts.inspect.token_texts import Decode, load_decoder, split_text
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.run_dir import RunDir

LEVELS = 3  # to either side of 0
# of a level: blue below 0, orange above, told apart by colour-blind people; the stronger, the darker the
# ground
STYLES = {
    -3: "white on #1f4e8c",
    -2: "black on #6fa8dc",
    -1: "black on #cfe2f3",
    1: "black on #fce5cd",
    2: "black on #f6b26b",
    3: "white on #a0520f",
}
RICH_COLOURS = ("256", "truecolor")  # of 16 colours the lightest blue and the lightest orange are one
ROUNDING = 0.001  # nats; engine and trainer differ by less where they compute the same in another order
TRAINED = "black on #cfe2f3"
MEANINGS = {
    "advantage": "advantage of the token",
    "logprob_diff": f"log-prob of the trainer minus log-prob of the engine, nats, from {ROUNDING}",
    "mask": "tokens that train",
}


class Marks(NamedTuple):
    """A value for each token of a sample."""

    tokens: np.ndarray  # [T]
    values: np.ndarray  # [T] float; of a mask 1 and 0
    trains: np.ndarray  # [T] bool; other tokens have no mark


def print_json(found: FoundSamples) -> None:
    """The rows as JSON lines on stdout."""
    for row in found.rows:
        write_lines(encode_json(row) + "\n")


def encode_json(value: Any) -> str:
    """The value as JSON on one line."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a character, which only an escape can say
        return json.dumps(value, separators=(",", ":"))


def print_samples(console: Console, found: FoundSamples, *, color: str | None = None) -> None:
    """Each sample with a headline, and how many match. `color`: a name of MEANINGS; where tokens cannot be
    marked the reason is said once.
    """
    run_dir = RunDir(found.root)
    decode: Decode | None = None
    reasons: dict[str, int] = {}
    contributions: Columns | None = None
    if color is not None:
        try:
            decode, contributions = load_decoder(run_dir), open_columns(run_dir, "contributions")
        except RecordError as error:
            reasons[str(error)] = len(found.rows)
    for row in found.rows:
        marked: Text | None = None
        if color is not None and decode is not None and contributions is not None:
            try:
                marked = mark_tokens(
                    load_marks(run_dir, contributions, row, color),
                    decode,
                    color,
                    plain=console.color_system not in RICH_COLOURS,
                )
            except RecordError as error:
                reasons[str(error)] = reasons.get(str(error), 0) + 1
        print_sample(console, row, marked)
    for reason, count in reasons.items():
        console.print(f"not marked, {count} sample{'' if count == 1 else 's'}: {reason}", soft_wrap=True)
    for note in found.notes:
        console.print(note, soft_wrap=True)
    console.print(describe_found(found), soft_wrap=True)


def describe_found(found: FoundSamples) -> str:
    """How many are shown, match and were logged."""
    if not found.total:
        return f"{found.root} has logged no samples"
    if not found.rows:
        return f"none of {found.total} logged samples matches"
    if found.matching is None:
        return f"{len(found.rows)} shown, more match, of {found.total} logged samples; --limit shows more"
    if found.matching > len(found.rows):
        return (
            f"{len(found.rows)} of {found.matching} that match, of {found.total} logged samples; --limit"
            " shows more"
        )
    return f"{len(found.rows)} of {found.total} logged samples"


def print_sample(console: Console, row: Row, marked: Text | None = None) -> None:
    """One sample: a headline, prompt and response, or the marked tokens of both, and what failed."""
    console.print(Text(make_safe(describe_sample(row), one_line=True), style="bold"), soft_wrap=True)
    if marked is not None:
        console.print(marked, soft_wrap=True)
    else:
        for label, text in list_turns(row):
            console.print(
                Text.assemble((f"{make_safe(label, one_line=True)} ", "bold cyan"), make_safe(text)),
                soft_wrap=True,
            )
    for line in list_facts(row):
        console.print(Text(make_safe(line), style="dim"), soft_wrap=True)
    console.print()


def describe_sample(row: Row) -> str:
    """`── rl step 4 · p1-0 · group 3 · completed · reward 1.000 · 2 tokens · 1 version behind`."""
    reward = row.get("reward")
    facts = [f"{row['stage']} step {row['step']}", str(row.get("id", ""))]
    facts += [f"group {row['group_index']}"] if "group_index" in row else []
    facts += [
        str(row.get("status", "")),
        f"reward {reward:.3f}" if isinstance(reward, int | float) else "no reward",
    ]
    facts += [f"{row.get('response_length', 0)} tokens"]
    oldest, version = row.get("weight_version_min"), row.get("policy_version")
    if isinstance(oldest, int) and isinstance(version, int) and version > oldest:
        facts.append(f"{version - oldest} version{'' if version - oldest == 1 else 's'} behind")
    return "── " + " · ".join(fact for fact in facts if fact)


def list_turns(row: Row) -> list[tuple[str, str]]:
    """Label and text of each turn of the prompt that says anything, and of the response."""
    prompt = row.get("prompt") or ""
    turns = (
        [describe_turn(turn) for turn in prompt] if isinstance(prompt, list) else [("prompt", str(prompt))]
    )
    return [*((f"[{label}]", text) for label, text in turns if text), ("→", str(row.get("response") or ""))]


def describe_turn(turn: Any) -> tuple[str, str]:
    """Role and content of a chat message; content that is no text as JSON."""
    if not isinstance(turn, dict):
        return "prompt", str(turn)
    content = turn.get("content", "")
    return str(turn.get("role", "")), content if isinstance(content, str) else encode_json(content)


def list_facts(row: Row) -> list[str]:
    """Lines below the text: parts of the reward, what failed."""
    lines: list[str] = []
    parts = row.get("rewards")
    known = (
        {name: value for name, value in parts.items() if isinstance(value, int | float)}
        if isinstance(parts, dict)
        else {}
    )
    if len(known) > 1:
        lines.append("rewards: " + ", ".join(f"{name} {value:.3g}" for name, value in known.items()))
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    if isinstance(failure, dict):
        where = f" in {failure['function']}" if failure.get("function") else ""
        lines.append(f"failed: {failure.get('class', 'unknown')}{where}: {failure.get('message', '')}")
    return lines


# --- tokens -------------------------------------------------------------------------------------------------


def load_marks(run_dir: RunDir, contributions: Columns, row: Row, color: str) -> Marks:
    """The values of a sample's tokens in the first update that it was part of.

    Raises RecordError for a sample that no update had, or whose arrays are not kept, or lack what was asked
    for.
    """
    arrays = read_token_arrays(run_dir, find_contribution(contributions, row))
    trains = np.asarray(arrays["mask"], dtype=bool)
    return Marks(
        np.asarray(arrays["tokens"]),
        compute_values(arrays, color),
        trains if color != "mask" else np.ones_like(trains),
    )


def find_contribution(contributions: Columns, row: Row) -> Row:
    """The row of contributions.jsonl of a logged sample, of its first update. Raises RecordError if there is
    none.
    """
    if contributions.rows:
        same = (
            contributions.newest()
            & contributions.match_text("stage", row["stage"])
            & (contributions.column("step") == row["step"])
        )
        for found in contributions.iterate_rows(np.flatnonzero(same)):
            if found.get("id") == row.get("id") and found.get("attempt") == row.get("attempt"):
                return found
    raise RecordError(
        "no update of the weights had this sample (one of an evaluation, one that failed), or the run kept no"
        " contributions"
    )


def compute_values(arrays: Mapping[str, np.ndarray], color: str) -> np.ndarray:
    """[T] float64 of what is asked for. Raises RecordError naming an array that the run did not keep."""
    if color == "mask":
        return np.asarray(arrays["mask"], dtype=np.float64)
    needed = ("advantage",) if color == "advantage" else ("log_prob", "mu")
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise RecordError(f"the run kept no {' and '.join(missing)} per token")
    values = [np.asarray(arrays[name], dtype=np.float64) for name in needed]
    if color == "advantage":
        return values[0]
    difference = values[0] - values[1]
    return np.where(np.abs(difference) < ROUNDING, 0.0, difference)


def mark_tokens(marks: Marks, decode: Decode, color: str, *, plain: bool) -> Text:
    """The text of the tokens, marked by level, and below it a legend. `plain`: by brackets."""
    levels = compute_levels(marks)
    text = Text()
    pieces = [(int(levels[begin]), words) for begin, _, words in split_text(marks.tokens.tolist(), decode)]
    for level, run in groupby(pieces, key=lambda piece: piece[0]):
        words = make_safe("".join(word for _, word in run))
        if plain and level:
            words = f"{{{'+' * level or '-' * -level} {words}}}"
        text.append(
            words, style=None if plain or not level else TRAINED if color == "mask" else STYLES[level]
        )
    return text.append("\n").append_text(make_legend(marks, color, plain=plain))


def compute_levels(marks: Marks) -> np.ndarray:
    """[T] whole numbers from -LEVELS to LEVELS: 0 for a value of 0 and for tokens that do not train, the end
    of the scale for the largest.
    """
    values = np.where(marks.trains, marks.values, 0.0)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest:
        return np.zeros(len(values), dtype=np.int64)
    return (np.sign(values) * np.ceil(np.abs(values) / largest * LEVELS)).astype(np.int64)


def make_legend(marks: Marks, color: str, *, plain: bool) -> Text:
    """What the marks mean, with the values at their bounds."""
    text = Text.assemble((f"{MEANINGS[color]}: ", "dim"))
    if color == "mask":
        return text.append("{+++ so}" if plain else "so", style=None if plain else TRAINED)
    largest = float(np.abs(np.where(marks.trains, marks.values, 0.0)).max(initial=0.0))
    if not largest:
        return text.append("none has any", style="dim")
    for level in [level for level in range(-LEVELS, LEVELS + 1) if level]:
        bound = f"{'to ' if level < 0 else 'to +'}{level / LEVELS * largest:.2g}"
        text.append(
            f" {'+' * level or '-' * -level} {bound} " if plain else f" {bound} ",
            style=None if plain else STYLES[level],
        )
    return text

"""The command `samples`: which logged samples a person asks for, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from rollouts.errors import ConfigError, RecordError, RunDirError
from rollouts.inspect.overview import describe_failure
from rollouts.inspect.record import Record
from rollouts.inspect.terminal import make_safe
from rollouts.inspect.token_texts import load_decoder, split_text
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays

SORT_KEYS = {
    "step": "step",
    "reward": "reward",
    "length": "response_length",
    "tokens": "tokens",
    "lag": "policy_version - weight_version_min",
    "group": "group_index",
}
STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
COLOURS = {  # what tokens are coloured by: the arrays it takes, what it means
    "advantage": (("advantage",), "advantage of the token"),
    "logprob_diff": (("log_prob", "mu"), "log-prob of the trainer minus the engine's, nats, from 0.001"),
    "mask": ((), "tokens that train"),
}
# prompt (of a chat what each message says), response and failure message as one text
SEARCHED = """concat_ws(chr(0), response, metadata->>'$.failure.message',
    CASE json_type(prompt) WHEN 'ARRAY' THEN array_to_string(prompt->>'$[*].content', chr(0))
    ELSE prompt->>'$' END)"""
LEVELS = 3  # to either side of 0
STYLES = {  # of a level: blue below 0, orange above, told apart by colour-blind people
    -3: "white on #1f4e8c",
    -2: "black on #6fa8dc",
    -1: "black on #cfe2f3",
    1: "black on #fce5cd",
    2: "black on #f6b26b",
    3: "white on #a0520f",
}
ROUNDING = 0.001  # nats; engine and trainer differ by less where they compute the same in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples, and how many of them in which order."""

    step: int | None = None
    last_step: bool = False  # only the last step that has samples which match otherwise
    stage: str | None = None
    status: str | None = None
    group: int | None = None
    grep: str = ""
    sort: str | None = None  # a name of SORT_KEYS; None: the last ones in the order of the file
    reverse: bool = False
    limit: int = 10


@dataclass(frozen=True, slots=True)
class FoundSamples:
    """What a query found."""

    rows: Sequence[Row]  # in the order asked for, at most `limit`
    matching: int
    total: int  # logged samples, of the newest attempt at each step


def find_samples(record: Record, query: SampleQuery) -> FoundSamples:
    """The samples that the query asks for.

    Raises ConfigError for a limit below 1, RunDirError for a step or stage without samples.
    """
    if query.limit < 1:
        raise ConfigError(f"--limit {query.limit}: at least 1")
    key = SORT_KEYS[query.sort] if query.sort else "NULL"
    hit = f"contains(lower({SEARCHED}), lower(?))" if query.grep else "true"
    record.load(
        "samples",
        f"stage, step, attempt, status, group_index, {key} AS key, {hit} AS hit",
        [query.grep] if query.grep else [],
    )
    conditions, values = ["hit"], []
    for column, value in (("stage", query.stage), ("step", query.step)):
        if value is None:
            continue
        known = record.connection.execute(f"SELECT DISTINCT {column} FROM samples_held ORDER BY 1").fetchall()
        if known and (value,) not in known:
            there = ", ".join(str(one) for (one,) in known)
            there = there if column == "stage" else f"steps {known[0][0]} to {known[-1][0]}"
            raise RunDirError(
                f"--{column} {value}: no samples of it were logged; there are samples of {there}"
            )
    for column, value in (
        ("stage", query.stage),
        ("step", query.step),
        ("status", query.status),
        ("group_index", query.group),
    ):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    matching = f"FROM samples_held WHERE {' AND '.join(conditions)}"
    if query.last_step:
        newest = "first_value((stage, step)) OVER (ORDER BY place DESC)"
        matching = f"FROM (SELECT * {matching} QUALIFY (stage, step) = {newest})"
    order = f"key {'DESC' if query.reverse else 'ASC'} NULLS LAST, place" if query.sort else "place DESC"
    counts = f"SELECT (SELECT count(*) FROM samples_held), count(*) {matching}"
    total, count = record.connection.execute(counts, values).fetchall()[0]
    chosen = record.connection.execute(
        f"SELECT place {matching} ORDER BY {order} LIMIT {query.limit}", values
    )
    places = [place for (place,) in chosen.fetchall()]
    if not query.sort and not query.reverse:
        places.reverse()  # the newest next to the prompt of the terminal
    return FoundSamples(record.read_places("samples", places), count, total)


def print_samples(console: Console, record: Record, found: FoundSamples, *, color: str | None = None) -> None:
    """Each sample with a headline, and how many match. `color`: one of COLOURS; why tokens have none is said
    once.
    """
    reasons: dict[str, int] = {}
    for row in found.rows:
        marked: Text | None = None
        if color is not None:
            try:
                marked = mark_tokens(
                    record, row, color, plain=console.color_system not in ("256", "truecolor")
                )
            except RecordError as error:
                reasons[str(error)] = reasons.get(str(error), 0) + 1
        print_sample(console, row, marked)
    for reason, count in reasons.items():
        console.print(f"not marked, {count} sample{'' if count == 1 else 's'}: {reason}", soft_wrap=True)
    for note in record.notes:
        console.print(note, soft_wrap=True)
    if not found.total:
        text = f"{record.root} has logged no samples"
    elif not found.rows:
        text = f"none of {found.total} logged samples matches"
    elif found.matching > len(found.rows):
        text = f"{len(found.rows)} of {found.matching} that match, of {found.total} logged samples;"
        text += " --limit shows more"
    else:
        text = f"{len(found.rows)} of {found.total} logged samples"
    console.print(text, soft_wrap=True)


def print_sample(console: Console, row: Row, marked: Text | None = None) -> None:
    """One sample: a headline, prompt and response or the marked tokens of both, parts of the reward, what
    failed.
    """
    console.print(Text(make_safe(describe_sample(row), one_line=True), style="bold"), soft_wrap=True)
    if marked is not None:
        console.print(marked, soft_wrap=True)
    else:
        prompt = row.get("prompt") or ""
        turns = prompt if isinstance(prompt, list) else [{"role": "prompt", "content": prompt}]
        for turn in [*turns, {"role": "→", "content": row.get("response", "")}]:
            known = turn if isinstance(turn, dict) else {"role": "prompt", "content": turn}
            content = known.get("content") or ""
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            role = make_safe(str(known.get("role", "")), one_line=True)
            if text or role == "→":
                label = role if role == "→" else f"[{role}]"
                console.print(Text.assemble((f"{label} ", "bold cyan"), text), soft_wrap=True)
    rewards = row.get("rewards")
    if isinstance(rewards, dict) and len(rewards) > 1:
        parts = [f"{name} {value:.3g}" for name, value in rewards.items() if isinstance(value, int | float)]
        console.print(Text(f"rewards: {', '.join(parts)}", style="dim"), soft_wrap=True)
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    if isinstance(failure, dict):
        text = f"failed: {failure.get('class', 'unknown')} in {describe_failure(failure)}"
        console.print(Text(text, style="dim"), soft_wrap=True)
    console.print()


def describe_sample(row: Row) -> str:
    """`── rl step 4 · p1-0 · group 3 · completed · reward 1.000 · 2 tokens · 1 version behind`."""
    facts = [f"{row['stage']} step {row['step']}", row.get("id", "")]
    facts += [f"group {row['group_index']}"] if "group_index" in row else []
    facts += [row.get("status", ""), f"reward {row['reward']:.3f}" if "reward" in row else "no reward"]
    facts += [f"{row.get('response_length', 0)} tokens"]
    if "weight_version_min" in row and "policy_version" in row:
        lag = row["policy_version"] - row["weight_version_min"]
        facts += [f"{lag} version{'' if lag == 1 else 's'} behind"] if lag > 0 else []
    return "── " + " · ".join(fact for fact in facts if fact)


# --- tokens -------------------------------------------------------------------------------------------------


def mark_tokens(record: Record, row: Row, color: str, *, plain: bool) -> Text:
    """The text of a sample's tokens, marked by their values in its first update, and a legend. `plain`: by
    brackets.

    Raises RecordError for a sample that no update had, or whose arrays are not kept, or lack what was asked
    for.
    """
    decode = load_decoder(record.run_dir)
    record.add_views("contributions")
    found = record.rows(
        "SELECT * FROM contributions WHERE stage = ? AND step = ? AND attempt = ? AND id = ?"
        " ORDER BY update LIMIT 1",
        [row["stage"], row["step"], row["attempt"], row.get("id")],
    )
    if not found:
        raise RecordError(
            "no update of the weights had this sample (one of an evaluation, one that failed), or the run"
            " kept no contributions"
        )
    arrays = read_token_arrays(record.run_dir, found[0])
    values = compute_values(arrays, color)
    largest = float(np.abs(values).max(initial=0.0))
    levels = np.sign(values) * np.ceil(np.abs(values) / (largest or 1.0) * LEVELS)
    styles = dict.fromkeys(STYLES, STYLES[-1]) if color == "mask" else STYLES
    pieces = [(int(levels[begin]), text) for begin, _, text in split_text(arrays["tokens"].tolist(), decode)]
    text = Text()
    for level, run in groupby(pieces, key=lambda piece: piece[0]):
        words = "".join(word for _, word in run)
        if plain and level:
            words = f"{{{'+' * level or '-' * -level} {words}}}"
        text.append(words, None if plain or not level else styles[level])
    text.append(f"\n{COLOURS[color][1]}: ", "dim")
    if color == "mask":
        return text.append("{+++ so}" if plain else "so", None if plain else styles[1])
    for level in STYLES if largest else ():
        bound = f"{'to ' if level < 0 else 'to +'}{level / LEVELS * largest:.2g}"
        bound = f" {'+' * level or '-' * -level} {bound} " if plain else f" {bound} "
        text.append(bound, None if plain else styles[level])
    return text if largest else text.append("none has any", "dim")


def compute_values(arrays: Mapping[str, Any], color: str) -> np.ndarray:
    """[T] float64 of what is asked for, 0 for tokens that do not train. Raises RecordError naming a missing
    array.
    """
    needed = COLOURS[color][0]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise RecordError(f"the run kept no {' and '.join(missing)} per token")
    mask = np.asarray(arrays["mask"], dtype=np.float64)
    if not needed:
        return mask
    values = np.asarray(arrays[needed[0]], dtype=np.float64)
    if color == "logprob_diff":
        values = values - np.asarray(arrays["mu"], dtype=np.float64)
        values[np.abs(values) < ROUNDING] = 0.0
    return np.where(mask > 0, values, 0.0)

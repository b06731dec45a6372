"""The command `samples`: which logged samples a person asks for, and how they are printed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from rollouts.errors import ConfigError, RecordError, RunDirError
from rollouts.inspect.facts import count_of
from rollouts.inspect.record import Record
from rollouts.inspect.terminal import make_safe
from rollouts.inspect.token_texts import load_tokenizer, split_text
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays

SORT_KEYS = {
    "length": "response_length",
    "lag": "policy_version - weight_version_min",
    "group": "group_index",
}
# of what tokens are coloured by: the meaning, and the arrays; of two the difference
COLORS = {
    "advantage": ("advantage of the token", ["advantage"]),
    "logprob_diff": ("log-prob of the trainer minus the engine's, nats, from 0.001", ["log_prob", "mu"]),
    "mask": ("tokens that train", ["mask"]),
}
# prompt (of a chat what each message says), response and failure message as one text
SEARCHED = """concat_ws(chr(0), response, metadata->>'$.failure.message',
    CASE json_type(prompt) WHEN 'ARRAY' THEN array_to_string(prompt->>'$[*].content', chr(0))
    ELSE prompt->>'$' END)"""
STYLES = {  # of a level: blue below 0, orange above, told apart by colour-blind people
    -3: "white on #1f4e8c",
    -2: "black on #6fa8dc",
    -1: "black on #cfe2f3",
    1: "black on #fce5cd",
    2: "black on #f6b26b",
    3: "white on #a0520f",
}
ROUNDING = 0.001  # nats; engine and trainer differ by less where they compute the same in another order


class FoundSamples(NamedTuple):
    """What was found."""

    rows: list[Row]  # in the order asked for, at most `limit`
    matching: int
    total: int  # logged samples, of the newest attempt at each step


def find_samples(
    record: Record,
    *,
    step: int | None = None,
    last: bool = False,
    stage: str | None = None,
    status: str | None = None,
    group: int | None = None,
    grep: str = "",
    sort: str | None = None,
    reverse: bool = False,
    limit: int = 10,
) -> FoundSamples:
    """The samples that are asked for. `last`: only of the last step that has samples which match otherwise;
    `sort`: of --sort, None for the last ones in the order of the file.

    Raises ConfigError for a limit below 1, RunDirError for a step or stage without samples.
    """
    if limit < 1:
        raise ConfigError(f"--limit {limit}: at least 1")
    key = SORT_KEYS.get(sort, sort) if sort else "NULL"
    hit = f"contains(lower({SEARCHED}), lower(?))" if grep else "? = ''"
    record.load("samples", f"stage, step, attempt, status, group_index, {key} AS key, {hit} AS hit", [grep])
    wanted = {"stage": stage, "step": step, "status": status, "group_index": group}
    wanted = {column: value for column, value in wanted.items() if value is not None}
    for column in wanted.keys() & {"stage", "step"}:
        known = [row[column] for row in record.rows(f"SELECT DISTINCT {column} FROM samples_held ORDER BY 1")]
        if known and wanted[column] not in known:
            there = ", ".join(known) if column == "stage" else f"steps {known[0]} to {known[-1]}"
            raise RunDirError(
                f"--{column} {wanted[column]}: no samples of it were logged; there are samples of {there}"
            )
    conditions = " AND ".join(["hit", *(f"{column} = ?" for column in wanted)])
    # the newest ones next to the prompt of the terminal
    order = f"key {'DESC' if reverse else 'ASC'} NULLS LAST, place" if sort else "place DESC"
    newest = "QUALIFY (stage, step) = first_value((stage, step)) OVER (ORDER BY place DESC)" if last else ""
    (found,) = record.rows(
        f"""WITH matching AS (SELECT *, rowid AS place FROM samples_held WHERE {conditions} {newest})
        SELECT (SELECT count(*) FROM samples_held) AS total, count(*) AS matching,
            coalesce(list(place ORDER BY {order})[:{limit}], []) AS places FROM matching""",
        list(wanted.values()),
    )
    places = found["places"] if sort or reverse else found["places"][::-1]
    return FoundSamples(record.read_places("samples", places), found["matching"], found["total"])


def print_samples(console: Console, record: Record, found: FoundSamples, *, color: str | None = None) -> None:
    """Each sample with a headline, and how many match. `color`: a name of COLORS; why tokens have none is
    said once.
    """
    reasons: Counter[str] = Counter()
    plain = console.color_system not in ("256", "truecolor")
    for row in found.rows:
        marked: Text | None = None
        try:
            marked = mark_tokens(record, row, color, plain=plain) if color else None
        except RecordError as error:
            reasons[str(error)] += 1
        print_sample(console, row, marked)
    shown = f"{len(found.rows)} of {found.total} logged samples"
    if found.matching > len(found.rows):
        shown = f"{len(found.rows)} of {found.matching} that match, of {found.total} logged samples;"
        shown += " --limit shows more"
    why = [f"not marked, {count_of(count, 'sample')}: {reason}" for reason, count in reasons.items()]
    for line in [*why, *record.notes, shown]:
        console.print(line, soft_wrap=True)


def print_sample(console: Console, row: Row, marked: Text | None = None) -> None:
    """One sample: a headline, prompt and response or the marked tokens of both, parts of the reward, what
    failed.
    """
    lines = [Text(make_safe(describe_sample(row), one_line=True), style="bold")]
    prompt = row.get("prompt") or ""
    turns = prompt if isinstance(prompt, list) else [{"role": "prompt", "content": prompt}]
    for turn in turns if marked is None else ():
        content = turn.get("content") if isinstance(turn, dict) else turn
        role = turn.get("role", "") if isinstance(turn, dict) else ""
        if content:
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            lines.append(Text.assemble((f"[{make_safe(str(role), one_line=True)}] ", "bold cyan"), text))
    lines.append(marked or Text.assemble(("→ ", "bold cyan"), row.get("response", "")))
    if len(rewards := row.get("rewards") or {}) > 1:
        parts = ", ".join(f"{name} {value}" for name, value in rewards.items())
        lines.append(Text(f"rewards: {parts}", style="dim"))
    if isinstance(failure := (row.get("metadata") or {}).get("failure"), dict):
        text = f"failed: {failure.get('class')} in {failure.get('function')}: {failure.get('message')}"
        lines.append(Text(" ".join(text.split()), style="dim"))
    for line in [*lines, ""]:
        console.print(line, soft_wrap=True)


def describe_sample(row: Row) -> str:
    """`── rl step 4 · p1-0 · group 3 · completed · reward 1.000 · 2 tokens · 1 version behind`."""
    lag = row.get("policy_version", 0) - row.get("weight_version_min", row.get("policy_version", 0))
    facts = [
        f"{row['stage']} step {row['step']}",
        row.get("id", ""),
        f"group {row['group_index']}" if "group_index" in row else "",
        row.get("status", ""),
        f"reward {row['reward']:.3f}" if "reward" in row else "no reward",
        count_of(row.get("response_length", 0), "token"),
        f"{count_of(lag, 'version')} behind" if lag > 0 else "",
    ]
    return "── " + " · ".join(filter(None, facts))


def mark_tokens(record: Record, row: Row, color: str, *, plain: bool) -> Text:
    """The text of a sample's tokens, marked by their values in its first update, and a legend. `plain`: by
    brackets.

    Raises RecordError for a sample that no update had, or whose arrays are not kept, or lack what was asked
    for.
    """
    tokenizer = load_tokenizer(record.run_dir)
    record.add_views("contributions")
    found = record.rows(
        "FROM contributions WHERE stage = ? AND step = ? AND attempt = ? AND id = ? ORDER BY update LIMIT 1",
        [row["stage"], row["step"], row["attempt"], row.get("id")],
    )
    if not found:
        raise RecordError(
            "no update of the weights had this sample (one of an evaluation, one that failed), or the run"
            " kept no contributions"
        )
    arrays = read_token_arrays(record.run_dir, found[0])
    meaning, needed = COLORS[color]
    if missing := [name for name in needed if name not in arrays]:
        raise RecordError(f"the run kept no {' and '.join(missing)} per token")
    first, *others = (np.asarray(arrays[name], dtype=np.float64) for name in needed)
    values = first - sum(others)
    trains = (arrays["mask"] > 0) & (np.abs(values) >= (ROUNDING if others else 0))
    values = np.where(trains, values, 0.0)
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    levels = np.sign(values) * np.ceil(np.abs(values) / largest * 3)
    text = Text()

    def add(level: int, words: str) -> None:
        bracketed = f"{{{'+' * level}{'-' * -level} {words}}}" if plain and level else words
        text.append(bracketed, None if plain else STYLES.get(level))

    pieces = zip(levels.tolist(), split_text(arrays["tokens"].tolist(), tokenizer), strict=True)
    for level, run in groupby((piece for piece in pieces if piece[1]), key=lambda piece: piece[0]):
        add(int(level), "".join(word for _, word in run))
    text.append(f"\n{meaning}:", "dim")
    for level in STYLES if values.any() and color != "mask" else ():
        text.append(" ")
        add(level, f"to {level / 3 * largest:+.2g}")
    return text

"""The command `samples`: which logged samples a person asks for, and how they are printed."""

from collections import Counter
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from rollouts.errors import ConfigError, RecordError, RunDirError
from rollouts.inspect.record import Record, count_of
from rollouts.inspect.terminal import make_safe
from rollouts.inspect.tokens import SampleTokens, find_tokenizer, find_updates, read_tokens
from rollouts.inspect.turns import list_turns

SORT_KEYS = {"length": "response_length", "group": "group_index"}  # columns of samples_held
COLORS = {
    "advantage": "advantage of the token",
    "logprob_diff": "log-prob of the trainer minus the engine's, nats, from 0.001",
    "mask": "tokens that train",
}
# prompt (of a chat what each message says), response, failure message, and of a trajectory what each message
# says, thinks and calls, as one text
SEARCHED = """concat_ws(chr(0), response, metadata->>'$.failure.message',
    array_to_string(messages->>'$[*].content', chr(0)),
    array_to_string(messages->>'$[*].reasoning_content', chr(0)),
    array_to_string(messages->>'$[*].tool_calls[*].function.*', chr(0)),
    CASE json_type(prompt) WHEN 'ARRAY' THEN array_to_string(prompt->>'$[*].content', chr(0))
    ELSE prompt->>'$' END)"""
# what is printed of a sample: `── rl step 4 · p1-0 · group 3 · completed · reward 1.000 · 2 tokens · 1
# version behind`, who said what, and remarks
TRANSCRIPT = r"""stage, step, id, messages, trajectory,
    '── ' || concat_ws(' · ', format('{} step {}', stage, step), nullif(id, ''),
        format('group {}', group_index), nullif(status, ''),
        coalesce(printf('reward %.3f', reward), 'no reward'),
        format('{} token{}', coalesce(response_length, 0), if(response_length = 1, '', 's')),
        if(policy_version > weight_version_min, format('{} version{} behind',
            policy_version - weight_version_min, if(policy_version - weight_version_min = 1, '', 's')), NULL)
    ) AS head,
    list_append(CASE WHEN json_type(prompt) = 'ARRAY' THEN
        [{said: format('[{}] ', coalesce(turn->>'role', '')), text: coalesce(turn->>'content', turn->>'$')}
            FOR turn IN prompt::JSON[] IF coalesce(turn->>'content', turn->>'$') != '']
        ELSE [{said: '[prompt] ', text: text} FOR text IN [prompt->>'$'] IF text != ''] END,
        {said: '→ ', text: coalesce(response, '')}) AS turns,
    [line FOR line IN [
        'ended: ' || (trajectory->>'$.end') || concat_ws(' · ', '',
            'turns ' || json_array_length(trajectory, '$.turns'),
            'tool calls ' || (trajectory->>'$.tool_calls'),
            printf('%.1f of %.1f s waiting', (trajectory->'$."time/tools"')::DOUBLE,
                (trajectory->'$."time/all"')::DOUBLE),
            'restarts ' || nullif(trajectory->>'$.restarts', '0'),
            'resumed ' || nullif(trajectory->>'$.resumed', '0'),
            if(trajectory->>'$.trains' = 'false', 'does not train', NULL)),
        'rewards: ' || (SELECT string_agg(key || ' ' || value, ', ' ORDER BY id) FROM json_each(rewards)
            HAVING count(*) > 1),
        'failed: ' || regexp_replace(format('{} in {}', metadata->>'$.failure.class', concat_ws(': ',
            metadata->>'$.failure.function', metadata->>'$.failure.message')), '\s+', ' ', 'g')
    ] IF line IS NOT NULL] AS remarks"""
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

    places: list[int]  # in the order asked for, at most `limit`
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
    hit = f"contains(lower({SEARCHED}), lower(?))" if grep else "? = ''"
    record.load_samples(f", {hit} AS hit", [grep])
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
    key = SORT_KEYS.get(sort, sort) if sort else ""
    order = f"{key} {'DESC' if reverse else 'ASC'} NULLS LAST, place" if sort else "place DESC"
    newest = "QUALIFY (stage, step) = first_value((stage, step)) OVER (ORDER BY place DESC)" if last else ""
    (found,) = record.rows(
        f"""WITH matching AS (SELECT *, rowid AS place FROM samples_held WHERE {conditions} {newest})
        SELECT coalesce(list(place ORDER BY {order})[:{limit}], []) AS places, count(*) AS matching,
            (SELECT count(*) FROM samples_held) AS total FROM matching""",
        list(wanted.values()),
    )
    if not (sort or reverse):
        found["places"].reverse()
    return FoundSamples(**found)


def print_samples(console: Console, record: Record, found: FoundSamples, *, color: str | None = None) -> None:
    """Each sample with a headline, and how many match. `color`: a name of COLORS; why tokens have none is
    said once.
    """
    rows, reasons = record.read_samples(found.places, TRANSCRIPT), Counter[str]()
    plain = console.color_system not in ("256", "truecolor")
    updates = find_updates(record, rows) if color else [()] * len(rows)
    tokenizer = find_tokenizer(record) if any(updates) else None
    for row, update in zip(rows, updates, strict=True):
        marked: Text | None = None
        if color:
            try:
                marked = mark_tokens(read_tokens(record, update, tokenizer), color, plain=plain)
            except RecordError as error:
                reasons[str(error)] += 1
        lines = [Text(make_safe(row["head"], one_line=True), style="bold")]
        said = [
            Text.assemble((make_safe(turn["said"], one_line=True), "bold cyan"), turn["text"])
            for turn in (list_turns(row) if "messages" in row else row["turns"])
        ]
        lines += [marked] if marked else said
        console.print(*lines, *(Text(remark, style="dim") for remark in row["remarks"]), "", sep="\n")
    shown = f"{len(rows)} of {found.total} logged samples"
    if found.matching > len(rows):
        shown = f"{len(rows)} of {found.matching} that match, of {found.total} logged samples;"
        shown += " --limit shows more"
    why = [f"not marked, {count_of(count, 'sample')}: {reason}" for reason, count in reasons.items()]
    console.print(*why, *record.notes, shown, sep="\n")


def mark_tokens(tokens: SampleTokens, color: str, *, plain: bool) -> Text:
    """The text of a sample's tokens, marked by their values, and a legend. `plain`: by brackets. Raises
    RecordError where the run kept no such values.
    """
    if color not in tokens.values:
        raise RecordError(f"the run kept no {color} per token")
    values = tokens.values[color]
    values = np.where(np.abs(values) >= (ROUNDING if color == "logprob_diff" else 0), values, 0.0)
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    levels = (np.sign(values) * np.ceil(np.abs(values) / largest * 3)).astype(int).tolist()
    text = Text()

    def add(level: int, words: str) -> None:
        bracketed = f"{{{'+' * level}{'-' * -level} {words}}}" if plain and level else words
        text.append(bracketed, None if plain else STYLES.get(level))

    pieces = ((level, piece) for level, piece in zip(levels, tokens.pieces, strict=True) if piece)
    for level, run in groupby(pieces, key=itemgetter(0)):
        add(level, "".join(piece for _, piece in run))
    text.append(f"\n{COLORS[color]}:", "dim")
    for level in STYLES if values.any() and color != "mask" else ():
        text.append(" ")
        add(level, f"to {level / 3 * largest:+.2g}")
    return text

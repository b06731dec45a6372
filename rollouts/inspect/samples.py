"""Logged samples: which of them a person asks for, their tokens as pieces of text with the values that the
run keeps of them, trajectories of many turns, and how the command `samples` prints all that. Tokens become
text by the run's own tokenizer, without transformers.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollouts.errors import ConfigError, RecordError, RunDirError
from rollouts.inspect.record import Record, count_of, find_checkpoints, read_settings
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.types import Fields, Texts, encode_json

COLUMNS = {"length": "response_length", "group": "group_index"}  # of samples_held, by what options say
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


class SampleTokens(NamedTuple):
    """The tokens of a sample in an update."""

    pieces: list[str]  # [T] their texts
    values: dict[str, np.ndarray]  # [T] by name of --color, 0 where the mask is; only those that the run kept


def find_samples(record: Record, asked: Fields) -> Row:
    """The samples that the options of the command ask for: their `places` in the order asked for, at most
    `limit`; how many are `matching`, and how many were logged in `total`, of the newest attempt at each step.
    `last`: only of the last step that has samples
    which match otherwise; without `sort` the last ones in the order of the file.

    Raises ConfigError for a limit below 1, RunDirError for a step or stage without samples.
    """
    sort, reverse, limit = asked["sort"], asked["reverse"], asked["limit"]
    if limit < 1:
        raise ConfigError(f"--limit {limit}: at least 1")
    hit = f"contains(lower({SEARCHED}), lower(?))" if asked["grep"] else "? = ''"
    record.load_samples(f", {hit} AS hit", [asked["grep"]])
    wanted = {
        COLUMNS.get(name, name): asked[name]
        for name in ("stage", "step", "status", "group")
        if asked[name] is not None
    }
    for column in wanted.keys() & {"stage", "step"}:
        known = [row[column] for row in record.rows(f"SELECT DISTINCT {column} FROM samples_held ORDER BY 1")]
        if known and wanted[column] not in known:
            raise RunDirError(
                f"--{column} {wanted[column]}: no samples of it were logged; there are samples of"
                f" {', '.join(known) if column == 'stage' else f'steps {known[0]} to {known[-1]}'}"
            )
    # the newest ones next to the prompt of the terminal
    by = f"{COLUMNS.get(sort, sort)} {'DESC' if reverse else 'ASC'} NULLS LAST, place"
    newest = "QUALIFY (stage, step) = first_value((stage, step)) OVER (ORDER BY place DESC)"
    (found,) = record.rows(
        f"""WITH matching AS (SELECT *, rowid AS place FROM samples_held
            WHERE hit{"".join(f" AND {column} = ?" for column in wanted)}
            {newest if asked["last"] else ""})
        SELECT coalesce(list(place ORDER BY {by if sort else "place DESC"})[:{limit}], []) AS places,
            count(*) AS matching, (SELECT count(*) FROM samples_held) AS total FROM matching""",
        list(wanted.values()),
    )
    if not (sort or reverse):
        found["places"].reverse()
    return found


def print_samples(console: Console, record: Record, found: Row, *, color: str | None) -> None:
    """Each sample with a headline, and how many match. `color`: a name of COLORS; why tokens have none is
    said once.
    """
    rows, reasons = record.read_samples(found["places"], TRANSCRIPT), Counter[str]()
    plain = console.color_system not in ("256", "truecolor")
    updates = find_updates(record, rows) if color else [()] * len(rows)
    for row, update in zip(rows, updates, strict=True):
        said = [
            Text.assemble((make_safe(turn["said"], one_line=True), "bold cyan"), turn["text"])
            for turn in (list_turns(row) if "messages" in row else row["turns"])
        ]
        if color:
            try:
                said = [mark_tokens(read_tokens(record, update), color, plain=plain)]
            except RecordError as error:
                reasons[str(error)] += 1
        head = Text(make_safe(row["head"], one_line=True), style="bold")
        console.print(head, *said, *(Text(remark, style="dim") for remark in row["remarks"]), "", sep="\n")
    shown = f"{len(rows)} of {found['total']} logged samples"
    if found["matching"] > len(rows):
        shown = (
            f"{len(rows)} of {found['matching']} that match, of {found['total']} logged samples; --limit"
            " shows more"
        )
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


# --- tokens -------------------------------------------------------------------------------------------------


# the first update that each of these samples was part of, or each segment of a trajectory, whose last one is
# `ending`; `share` is then that of all
UPDATES = """
    SELECT * REPLACE (sum(share) OVER (PARTITION BY stage, step, ending) AS share) FROM (
        SELECT contributions.*, coalesce(segments.ending, contributions.id) AS ending
        FROM contributions LEFT JOIN segments USING (stage, step, id)
        WHERE coalesce(segments.ending, contributions.id) IN (SELECT unnest(?::VARCHAR[]))
        QUALIFY row_number() OVER (PARTITION BY stage, step, contributions.id ORDER BY update) = 1)
    ORDER BY len(id), id"""
SPLIT = "— segment {} begins: what came before was written anew —"


def find_updates(record: Record, rows: Sequence[Row]) -> list[list[Row]]:
    """The first update that each of these samples was part of, of a trajectory that of each segment, in their
    order; none of a sample that did not train.
    """
    found = {}
    for row in record.rows(UPDATES, [[row.get("id", "") for row in rows]]):
        found.setdefault((row["stage"], row["step"], row["ending"]), []).append(row)
    return [found.get((row["stage"], row["step"], row.get("id")), []) for row in rows]


@lru_cache(1)
def find_tokenizer(record: Record) -> Tokenizer | None:
    """The tokenizer.json of the newest checkpoint, else of model.name. Where there is none that can be read,
    None and a note.
    """
    run_dir = record.run_dir
    places = [run_dir.checkpoint(stage, step) for stage, step in reversed(find_checkpoints(run_dir))]
    with suppress(OSError, KeyError, RunDirError):  # no readable config: the others may do
        places.append(Path(read_settings(run_dir)["model.name"]).expanduser())
    reason = "there is no tokenizer.json yet: the first checkpoint brings it"
    for path in filter(Path.is_file, (place / "tokenizer.json" for place in places)):
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more exact
            reason = f"{path} cannot be read ({error})"
    record.notes.append(f"tokens are shown by number: {reason}")
    return None


def read_tokens(record: Record, updates: Sequence[Row]) -> SampleTokens:
    """The tokens of a sample as they were in this update, or of the segments of a trajectory with a line
    between them.

    Raises RecordError for a sample that no update had, or whose arrays were removed or are damaged.
    """
    if not updates:
        raise RecordError(
            "no update of the weights had this sample (one of an evaluation, one that failed), or the run"
            " kept no contributions"
        )
    found = [read_token_arrays(record.run_dir, update) for update in updates]
    pieces = []
    for segment, arrays in enumerate(found, 1):
        own = split_text(arrays["tokens"].tolist(), find_tokenizer(record))
        if segment > 1:
            own[0] = f"\n{SPLIT.format(segment)}\n{own[0]}"  # of a prompt, so it has no value
        pieces += own
    arrays = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    mask = arrays["mask"].astype(bool)
    values = {"mask": mask, "advantage": arrays.get("advantage")}
    if "log_prob" in arrays and "mu" in arrays:
        values["logprob_diff"] = arrays["log_prob"].astype(np.float64) - arrays["mu"]
    return SampleTokens(
        pieces, {name: np.where(mask, array, 0.0) for name, array in values.items() if array is not None}
    )


def split_text(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token, special ones included; of a character made of several the last has the text.
    Without a tokenizer their numbers.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]


# --- trajectories -------------------------------------------------------------------------------------------


def list_turns(row: Row) -> list[Texts]:
    """Each message of a trajectory's row of samples.jsonl as `said`, in brackets who says it with what the
    record knows of it, and `text`: thinking, content and tool calls. What has no `said` is a line where a
    segment begins.

    The turns of the record are the last messages of the assistant: a prompt may hold others before them.
    """
    messages, turns = row["messages"], row["trajectory"]["turns"]
    number = len(turns) - sum(message["role"] == "assistant" for message in messages)
    shown = []
    segment, calls = 0, []
    for message in messages:
        said = [message["role"], message.get("name", "")]
        is_answer = message["role"] == "assistant"
        number += is_answer
        if is_answer and number > 0:
            turn = turns[number - 1]
            if turn.get("segment", 0) > segment:
                segment = turn["segment"]
                shown.append({"said": "", "text": SPLIT.format(segment + 1)})
            said += [f"turn {number}", count_of(turn["tokens"], "token")]
            rewards = {"reward": turn.get("reward"), **turn.get("rewards", {})}
            said += [f"{name} {value:.3g}" for name, value in rewards.items() if value]
            calls = [*turn.get("calls", ())]
        elif calls:
            call = calls.pop(0)
            said[1:] = [call["name"], call["outcome"].removeprefix("ok")]
        thinking = message.get("reasoning_content")
        texts = [f"(thinks) {thinking}" if thinking else "", message["content"]]
        called = [call["function"] for call in message.get("tool_calls", ())]
        texts += [f"calls {one['name']} {encode_json(one['arguments'])}" for one in called]
        shown.append({"said": f"[{' · '.join(filter(None, said))}] ", "text": "\n".join(filter(None, texts))})
    return shown

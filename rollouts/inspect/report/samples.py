"""The logged samples that a report shows, within a number of bytes, and the values of their tokens."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollouts.errors import RecordError
from rollouts.inspect.record import Record
from rollouts.inspect.tokens import find_tokenizer, find_updates, read_tokens

TEXT_CHARS = 20_000  # of a prompt's message, a response or another text; a longer one is cut
# The places of samples that together have no more than so many bytes, the most wanted first. A sample's place
# in each order is the bytes before it over the order's share of the room; the least of these counts. Examples
# of failures, which messages name, come first; whole steps in the order of a hash are even over the run.
CHOSEN = """
    WITH ordered AS (
        SELECT place, bytes, least(
            CASE WHEN place IN (SELECT unnest(?::BIGINT[])) THEN 0 END,
            sum(bytes) OVER (ORDER BY age, place) / 0.3,
            CASE WHEN status = 'failed' THEN sum(bytes) OVER (
                PARTITION BY status ORDER BY place DESC) / 0.15 END,
            CASE WHEN reward IS NOT NULL THEN least(
                sum(bytes) OVER (PARTITION BY reward IS NULL ORDER BY reward DESC, place DESC),
                sum(bytes) OVER (PARTITION BY reward IS NULL ORDER BY reward, place DESC)) / 0.1 END,
            sum(bytes) OVER (ORDER BY hash(stage, step), place) / 0.3) AS rank
        FROM (SELECT *, rowid AS place, dense_rank() OVER (PARTITION BY stage ORDER BY step DESC) AS age
            FROM samples_held))
    SELECT place FROM ordered
    QUALIFY sum(bytes) OVER (ORDER BY rank, place) <= ? ORDER BY rank, place"""
LEFT_OUT = frozenset({"schema", "attempt", "time_unix"})  # of a row, in the page
TOKEN_BYTES = 28  # of a token with its values, in JSON
SHARE = 0.3  # of the room that tokens may take
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut


def gather_samples(record: Record, limit_bytes: int, examples: Sequence[int]) -> list[str]:
    """JSON of the samples for the page in the order of the file, by the table samples_held. `examples`:
    places that are wanted first.

    A sample that was trained has advantage, weight and share of its first update, and `arrays` with values of
    its tokens, the most wanted samples first, until those take their SHARE.
    """
    record.add_views("contributions")
    for_tokens = SHARE * limit_bytes * bool(record.rows("FROM contributions LIMIT 1"))
    chosen = [row["place"] for row in record.rows(CHOSEN, [list(examples), int(limit_bytes - for_tokens)])]
    rows = record.read_places("samples", chosen)
    updates = find_updates(record, rows)
    tokenizer = find_tokenizer(record) if updates else None
    texts: dict[int, str] = {}
    missing = 0
    for place, row in zip(chosen, rows, strict=True):
        update = updates.get((row["stage"], row["step"], row.get("id")), {})
        sample = {name: value for name, value in row.items() if name not in LEFT_OUT}
        sample |= {name: update[name] for name in ("advantage", "weight", "share") if name in update}
        if for_tokens > 0 and "shard" in update:
            try:
                pieces, values = read_tokens(record, update, tokenizer)
            except RecordError:
                missing += 1
            else:
                cut = slice(SAMPLE_TOKENS)
                sample["arrays"] = {name: round_numbers(array[cut]) for name, array in values.items()}
                sample["arrays"] |= {"pieces": pieces[cut], "cut": len(pieces[SAMPLE_TOKENS:])}
                for_tokens -= TOKEN_BYTES * len(pieces[cut])
        text = encode_json(shorten(sample))
        limit_bytes -= len(text.encode(errors="replace")) + 1
        if limit_bytes < 0:
            break
        texts[place] = text
    if missing:
        record.notes.append(
            f"per-token arrays of {missing} shown samples were removed to make room, or are damaged"
        )
    return [texts[place] for place in sorted(texts)]


def shorten(value: Any) -> Any:
    """The value with long texts cut, and None for numbers that are not finite."""
    if isinstance(value, str) and len(value) > TEXT_CHARS:
        return f"{value[:TEXT_CHARS]}… ({len(value):,} characters in all)"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: shorten(inner) for name, inner in value.items()}
    return [shorten(inner) for inner in value] if isinstance(value, list) else value


def encode_json(value: Any) -> str:
    """JSON that may stand inside a script element: without `<` and JavaScript's other line ends."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def round_numbers(values: np.ndarray) -> list[float]:
    """Plain numbers of three digits, whole ones without a point."""
    short = (float(f"{value:.3g}") for value in values.tolist())
    return [int(number) if number.is_integer() else number for number in short]

"""The logged samples that a report shows, within a number of bytes, and the values of their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from rollouts.errors import RecordError
from rollouts.inspect.record import Record
from rollouts.inspect.token_texts import load_tokenizer, split_text
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays

TEXT_CHARS = 20_000  # of a prompt's message, a response or another text; a longer one is cut
HOW = "newest steps, failed, best rewards, worst rewards, and steps evenly"
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
ARRAY_BYTES = 3_400_000  # of all samples of a run together: some 120,000 tokens
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut


class ShownSamples(NamedTuple):
    """What the page shows of a run's samples."""

    texts: list[str]  # JSON of each, in the order of the file
    total: int  # logged samples
    how: str  # in words how they were chosen, "" if all are there
    remarks: list[str]  # on their tokens, for a person


def gather_samples(record: Record, limit_bytes: int, examples: Sequence[int]) -> ShownSamples:
    """The samples for the page, by the table samples_held. `examples`: places that are wanted first.

    A sample that was trained has advantage, weight and share of its first update, and `arrays` with values of
    its tokens, the most wanted samples first, until those take ARRAY_BYTES or a third of all.
    """
    (counts,) = record.rows("SELECT count(*) AS total FROM samples_held")
    record.add_views("contributions")
    has_arrays = bool(record.rows("FROM contributions LIMIT 1"))
    for_tokens = min(ARRAY_BYTES, limit_bytes // 3) if has_arrays else 0
    room = limit_bytes - for_tokens
    chosen = [row["place"] for row in record.rows(CHOSEN, [list(examples), room])]
    rows = record.read_places("samples", chosen)
    found = record.rows(
        "FROM contributions WHERE update = 0 AND id IN (SELECT unnest(?::VARCHAR[]))",
        [[row.get("id", "") for row in rows]],
    )
    trained = {(row["stage"], row["step"], row["id"]): row for row in found}
    remarks: list[str] = []
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = load_tokenizer(record.run_dir) if trained else None
    except RecordError as error:
        remarks.append(f"Tokens are shown by number: {error}.")
    texts: dict[int, str] = {}
    missing = 0
    for place, row in zip(chosen, rows, strict=True):
        update = trained.get((row["stage"], row["step"], row.get("id")), {})
        sample = {name: shorten(value) for name, value in row.items() if name not in LEFT_OUT}
        sample |= {name: update[name] for name in ("advantage", "weight", "share") if name in update}
        text = encode_json(sample)
        room -= len(text.encode(errors="replace")) + 1
        if room < 0:
            break
        try:
            arrays = encode_arrays(record, update, tokenizer) if for_tokens > 0 and "shard" in update else ""
        except RecordError:
            arrays, missing = "", missing + 1
        for_tokens -= len(arrays.encode())
        texts[place] = text[:-1] + f',"arrays":{arrays}}}' if arrays and for_tokens >= 0 else text
    if missing:
        remarks.append(
            f"Per-token arrays of {missing} shown samples were removed to make room, or are damaged."
        )
    how = HOW if len(texts) < counts["total"] else ""
    return ShownSamples([texts[place] for place in sorted(texts)], counts["total"], how, remarks)


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


def round_numbers(values: np.ndarray, digits: int) -> list[float | None]:
    """Plain numbers of a few digits, None for what is not finite."""
    short = (float(f"{value:.{digits}g}") for value in np.asarray(values, np.float64).tolist())
    return [None if not math.isfinite(one) else int(one) if one.is_integer() else one for one in short]


def encode_arrays(record: Record, update: Row, tokenizer: Tokenizer | None) -> str:
    """JSON of what the page shows of a sample's tokens; `difference`: trainer − engine, where they train.

    Raises RecordError for arrays that were removed or are damaged.
    """
    arrays: dict[str, Any] = dict(read_token_arrays(record.run_dir, update))
    ids = arrays["tokens"][:SAMPLE_TOKENS].tolist()
    mask = np.asarray(arrays["mask"][: len(ids)]).astype(bool)
    pieces = split_text(ids, tokenizer) if tokenizer else [f"{token} " for token in ids]
    if "log_prob" in arrays and "mu" in arrays:
        arrays["difference"] = np.asarray(arrays["log_prob"], np.float64) - arrays["mu"]
    values = {
        name: round_numbers(np.where(mask, arrays[name][: len(ids)], np.nan), 3)
        for name in ("advantage", "difference")
        if name in arrays
    }
    cut = len(arrays["tokens"]) - len(ids)
    return encode_json({"pieces": pieces, "mask": mask.astype(int).tolist(), "cut": cut} | values)

"""The logged samples that a report shows, within a number of bytes, and the values of their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollouts.errors import RecordError
from rollouts.inspect.record import Record
from rollouts.inspect.token_texts import Decode, load_decoder, split_text
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
    remark: str  # on their tokens, for a person


def gather_samples(record: Record, limit_bytes: int, examples: Sequence[int]) -> ShownSamples:
    """The samples for the page, by the table samples_held. `examples`: places that are wanted first."""
    (counts,) = record.rows("SELECT count(*) AS total FROM samples_held")
    record.add_views("contributions")
    has_arrays = bool(record.rows("FROM contributions LIMIT 1"))
    for_tokens = min(ARRAY_BYTES, limit_bytes // 3) if has_arrays else 0
    room = limit_bytes - for_tokens
    chosen = [row["place"] for row in record.rows(CHOSEN, [list(examples), room])]
    shown: dict[int, Row] = {}
    for place, row in zip(chosen, record.read_places("samples", chosen), strict=True):
        short = {name: shorten(value) for name, value in row.items() if name not in LEFT_OUT}
        room -= count_bytes(short)
        if room < 0:
            break
        shown[place] = short
    rows = [shown[place] for place in sorted(shown)]
    remark = add_token_values(record, rows, limit_bytes=for_tokens)
    how = HOW if len(rows) < counts["total"] else ""
    return ShownSamples(list(map(encode_json, rows)), counts["total"], how, remark)


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


def count_bytes(value: Any) -> int:
    """Of a value's JSON in the page."""
    return len(encode_json(value).encode(errors="replace")) + 1


def round_numbers(values: Any, digits: int = 5) -> list[float | None]:
    """Plain numbers of a few digits, None for what is not finite."""
    short = (float(f"{value:.{digits}g}") for value in np.asarray(values, np.float64).tolist())
    return [None if not math.isfinite(one) else int(one) if one.is_integer() else one for one in short]


def add_token_values(record: Record, samples: Sequence[Row], *, limit_bytes: int) -> str:
    """Adds advantage, weight and share to samples that were trained, and `arrays` with values of their
    tokens, the newest first, as long as they take no more than `limit_bytes`. All are of a sample's first
    update.

    Returns a remark for a person, "" if there is none.
    """
    first = "FROM contributions WHERE update = 0 AND id IN (SELECT unnest(?::VARCHAR[]))"
    found = record.rows(first, [[row.get("id", "") for row in samples]])
    trained = {(row["stage"], row["step"], row["id"]): row for row in found}
    decode: Decode | None = None
    remarks: list[str] = []
    if any("shard" in row for row in found):
        try:
            decode = load_decoder(record.run_dir)
        except RecordError as error:
            remarks.append(f"Tokens are shown by number: {error}.")
    missing = 0
    for sample in sorted(samples, key=lambda row: -row["step"]):
        row = trained.get((sample["stage"], sample["step"], sample.get("id")), {})
        sample |= {name: row[name] for name in ("advantage", "weight", "share") if name in row}
        if limit_bytes <= 0 or "shard" not in row:
            continue
        try:
            values = make_token_values(read_token_arrays(record.run_dir, row), decode)
        except RecordError:
            missing += 1
            continue
        limit_bytes -= count_bytes(values)
        if limit_bytes >= 0:
            sample["arrays"] = values
    if missing:
        remarks.append(
            f"Per-token arrays of {missing} shown samples were removed to make room, or are damaged."
        )
    return " ".join(remarks)


def make_token_values(arrays: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """What the page shows of a sample's tokens. `difference` is trainer − engine, of tokens that train."""
    ids = arrays["tokens"][:SAMPLE_TOKENS].tolist()
    mask = np.asarray(arrays["mask"][: len(ids)]).astype(bool)
    pieces = [f"{token} " for token in ids]
    if decode is not None:
        pieces = [""] * len(ids)  # of a character made of several tokens, the last has the text
        for _, end, text in split_text(ids, decode):
            pieces[end - 1] = text
    values: dict[str, Any] = {"pieces": pieces, "mask": mask.astype(int).tolist()}
    columns = dict(arrays)
    if "log_prob" in columns and "mu" in columns:
        columns["difference"] = np.asarray(columns["log_prob"], np.float64) - columns["mu"]
    for name in columns.keys() & {"advantage", "difference"}:
        values[name] = round_numbers(np.where(mask, columns[name][: len(ids)], np.nan), 3)
    return values | {"cut": len(arrays["tokens"]) - len(ids)}

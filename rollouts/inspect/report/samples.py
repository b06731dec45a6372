"""The logged samples that a report shows, within a number of bytes, and the values of their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollouts.errors import RecordError
from rollouts.inspect.record import Record
from rollouts.inspect.token_texts import Decode, load_decoder, split_text
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays

TEXT_CHARS = 20_000  # of a prompt's message, a response or another text; a longer one is cut
# of the bytes; messages of failures are linked to their samples, steps evenly over the run take the rest
SHARES = {
    "examples of failures": 0.25,
    "newest steps": 0.25,
    "failed": 0.15,
    "best rewards": 0.1,
    "worst rewards": 0.1,
}
LEFT_OUT = frozenset({"schema", "attempt", "time_unix"})  # of a row, in the page
ARRAY_BYTES = 3_400_000  # of all samples of a run together: some 120,000 tokens
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut


class ShownSamples(NamedTuple):
    """What the page shows of a run's samples."""

    texts: list[str]  # JSON of each, by stage, step and place in the file
    how: str  # in words how they were chosen, "" if all are there
    remark: str  # on their tokens, for a person


def gather_samples(record: Record, limit_bytes: int, examples: Sequence[int]) -> ShownSamples:
    """The samples for the page, by the table samples_held. `examples`: places that are wanted first."""
    facts = record.columns(
        "SELECT place, stage, step, status, reward, bytes FROM samples_held ORDER BY place"
    )
    if not len(facts["place"]):
        return ShownSamples([], "", "")
    for_tokens = min(ARRAY_BYTES, limit_bytes // 3) if record.files("contributions") else 0
    room = limit_bytes - for_tokens
    how = ""
    chosen = facts["place"]
    if facts["bytes"].sum() > room:
        chosen, how = choose_places(facts, room, examples), f"{', '.join(list(SHARES)[1:])}, and steps evenly"
    rows: list[tuple[int, Row]] = []
    for place, row in zip(chosen.tolist(), record.read_places("samples", chosen.tolist()), strict=True):
        short = {name: shorten(value) for name, value in row.items() if name not in LEFT_OUT}
        size = count_bytes(short)
        if size <= room:
            rows.append((place, short))
            room -= size
    order = {stage: place for place, stage in enumerate(dict.fromkeys(facts["stage"].tolist()))}
    rows.sort(key=lambda found: (order[found[1]["stage"]], found[1]["step"], found[0]))
    shown = [row for _, row in rows]
    remark = add_token_values(record, shown, limit_bytes=for_tokens)
    if len(shown) < len(facts["place"]):
        how = how or "as many as fit"
    return ShownSamples([encode_json(row) for row in shown], how, remark)


def choose_places(facts: Mapping[str, np.ndarray], limit: float, examples: Sequence[int]) -> np.ndarray:
    """Places of samples that together cost no more than `limit` bytes, the preferred ones first."""
    places, steps, rewards, costs = (facts[name] for name in ("place", "step", "reward", "bytes"))
    rewarded = np.flatnonzero(np.isfinite(rewards))[::-1]
    age = np.zeros(len(places))
    for stage in dict.fromkeys(facts["stage"].tolist()):
        own = facts["stage"] == stage
        age[own] = np.unique(-steps[own], return_inverse=True)[1]
    keys = np.unique(np.stack([age, steps]), axis=1, return_inverse=True)[1].ravel()
    count = max(1, min(keys.max() + 1, int(limit / 2 / np.bincount(keys, weights=costs).mean())))
    even = np.isin(keys, np.linspace(0, keys.max(), count).astype(int))
    orders = {
        "examples of failures": np.searchsorted(places, np.array(examples, dtype=np.int64)),
        "newest steps": np.argsort(age, kind="stable"),
        "failed": np.flatnonzero(facts["status"] == "failed")[::-1],
        "best rewards": rewarded[np.argsort(-rewards[rewarded], kind="stable")],
        "worst rewards": rewarded[np.argsort(rewards[rewarded], kind="stable")],
        "steps evenly": np.flatnonzero(even),
    }
    taken = np.zeros(len(places), dtype=bool)
    chosen: list[int] = []
    left = limit
    for name, order in orders.items():
        room = min(left, SHARES.get(name, 1.0) * limit)
        left -= room
        for place in order.tolist():
            if room < 200:  # bytes; no sample takes less
                break
            if not taken[place] and costs[place] <= room:
                taken[place] = True
                chosen.append(place)
                room -= costs[place]
        left += room
    return places[chosen]


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
    record.add_views("contributions")
    ids = list({row["id"] for row in samples if "id" in row})
    first = "SELECT * FROM contributions WHERE update = 0 AND id IN (SELECT unnest(?::VARCHAR[]))"
    trained = {(row["stage"], row["step"], row["id"]): row for row in record.rows(first, [ids])}
    decode: Decode | None = None
    remarks: list[str] = []
    if any("shard" in row for row in trained.values()):
        try:
            decode = load_decoder(record.run_dir)
        except RecordError as error:
            remarks.append(f"Tokens are shown by number: {error}.")
    missing, left = 0, limit_bytes
    for sample in sorted(samples, key=lambda row: -row["step"]):
        row = trained.get((sample["stage"], sample["step"], sample.get("id")), {})
        sample.update({name: row[name] for name in ("advantage", "weight", "share") if name in row})
        if left <= 0 or "shard" not in row:
            continue
        try:
            values = make_token_values(read_token_arrays(record.run_dir, row), decode)
        except RecordError:
            missing += 1
            continue
        left -= count_bytes(values)
        if left >= 0:
            sample["arrays"] = values
    if missing:
        remarks.append(
            f"Per-token arrays of {missing} shown samples were removed to make room, or are damaged."
        )
    return " ".join(remarks)


def make_token_values(arrays: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """What the page shows of a sample's tokens. `difference` is trainer − engine, of tokens that train."""
    ids = arrays["tokens"][:SAMPLE_TOKENS].tolist()
    mask = np.asarray(arrays["mask"][:SAMPLE_TOKENS]).astype(bool)
    pieces = [f"{token} " for token in ids]
    if decode is not None:
        pieces = [""] * len(ids)  # of a character made of several tokens, the last has the text
        for _, end, text in split_text(ids, decode):
            pieces[end - 1] = text
    columns = {name: np.asarray(values[: len(ids)], np.float64) for name, values in arrays.items()}
    if "log_prob" in columns and "mu" in columns:
        columns["difference"] = columns["log_prob"] - columns["mu"]

    def iterate_values() -> Iterator[tuple[str, list[float | None]]]:
        for name in ("advantage", "difference"):
            if name in columns:
                yield name, round_numbers(np.where(mask, columns[name], np.nan), 3)

    cut = len(arrays["tokens"]) - len(ids)
    return {"pieces": pieces, "mask": mask.astype(int).tolist(), "cut": cut, **dict(iterate_values())}

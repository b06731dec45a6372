"""Per-token values of the samples that a report shows: text of each token, advantage, log-prob difference, and whether it trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.errors import RecordError
from rollouts.inspect.columns import Columns, open_columns
from rollouts.inspect.report.curves import shorten
from rollouts.inspect.token_texts import Decode, load_decoder, split_text
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import RunDir

ROWS_READ = 60_000  # of contributions.jsonl
TOKENS_MAX = 120_000  # of all samples together
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut
TOKEN_BYTES = 28  # that a token takes in the page, about
DIGITS = 3
SHARED = ("advantage", "weight", "share")  # of a contribution's row, shown with the sample


def add_token_values(run_dir: RunDir, samples: Sequence[Row]) -> str:
    """Adds advantage, weight and share to samples that were trained, and `arrays` to those whose per-token arrays are there, the newest first.

    Returns a remark for a person, empty if there is none.
    """
    columns = open_columns(run_dir, "contributions")
    if not columns.rows:
        return ""
    trained = read_contributions(columns, samples)
    decode, remark = load_decode(run_dir) if any("shard" in row for row in trained.values()) else (None, "")
    left, missing = TOKENS_MAX, 0
    for sample in sorted(samples, key=lambda row: -row["step"]):
        row = trained.get((sample["stage"], sample["step"], sample.get("id")))
        if row is None:
            continue
        sample.update({name: row[name] for name in SHARED if name in row})
        if left <= 0 or "shard" not in row:
            continue
        try:
            arrays = read_arrays(run_dir, row)
        except RecordError:
            missing += 1
            continue
        sample["arrays"] = make_token_values(arrays, decode)
        left -= len(sample["arrays"]["pieces"])
    removed = f"Per-token arrays of {missing} shown samples were removed to make room, or are damaged." if missing else ""
    return " ".join(text for text in (remark, removed) if text)


def load_decode(run_dir: RunDir) -> tuple[Decode | None, str]:
    """What turns ids into text, or None and why there is nothing."""
    try:
        return load_decoder(run_dir), ""
    except (RecordError, ImportError) as error:
        return None, f"Tokens are shown by number: {error}."


def read_contributions(columns: Columns, samples: Sequence[Row]) -> dict[tuple[str, int, Any], Row]:
    """The rows of the samples' last updates, by stage, step and id; of more than ROWS_READ candidates the newest."""
    wanted = np.zeros(columns.rows, dtype=bool)
    steps = columns.column("step")
    for stage in {row["stage"] for row in samples}:
        own = np.array(sorted({row["step"] for row in samples if row["stage"] == stage}))
        wanted |= columns.match_text("stage", stage) & np.isin(steps, own)
    found = np.flatnonzero(wanted & columns.newest())[-ROWS_READ:]
    return {(row["stage"], row["step"], row.get("id")): row for row in columns.read_rows(found)}


def read_arrays(run_dir: RunDir, row: Row) -> Mapping[str, Any]:
    from rollouts.metrics.token_shards import read_token_arrays

    return read_token_arrays(run_dir, row)


def make_token_values(arrays: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """What the page shows of a sample's tokens. `difference` is trainer − engine, where both log-probs are there."""
    ids = [int(token) for token in arrays["tokens"][:SAMPLE_TOKENS]]
    mask = np.asarray(arrays["mask"][:SAMPLE_TOKENS]).astype(bool)
    pieces = [f"{token} " for token in ids]
    if decode is not None:
        pieces = [""] * len(ids)  # of a character made of several tokens, the last has the text
        for _, end, text in split_text(ids, decode):
            pieces[end - 1] = text
    values: dict[str, Any] = {"pieces": pieces, "mask": mask.astype(int).tolist(), "cut": len(arrays["tokens"]) - len(ids)}
    if "advantage" in arrays:
        values["advantage"] = shorten_masked(arrays["advantage"], mask)
    if "log_prob" in arrays and "mu" in arrays:
        values["difference"] = shorten_masked(np.asarray(arrays["log_prob"], np.float64) - np.asarray(arrays["mu"], np.float64), mask)
    return values


def shorten_masked(values: Any, mask: np.ndarray[Any, Any]) -> list[float | None]:
    """The values of trained tokens, None for the others."""
    return shorten(np.where(mask, np.asarray(values[: len(mask)], np.float64), np.nan), DIGITS)

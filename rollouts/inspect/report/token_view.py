"""Per-token values of the samples that a report shows: text of each token, advantage, log-prob difference,
and whether it trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.errors import RecordError
from rollouts.inspect.columns import Columns, open_columns
from rollouts.inspect.report.choose import encode_page_json
from rollouts.inspect.report.curves import shorten
from rollouts.inspect.token_texts import Decode, load_decoder, split_text
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import RunDir

ROWS_READ = 60_000  # of contributions.jsonl
ARRAY_BYTES = 3_400_000  # of all samples of a run together: some 120,000 tokens
SAMPLE_TOKENS = 4_000  # of one sample; the rest is cut
DIGITS = 3
SHARED = ("advantage", "weight", "share")  # of a contribution's row, shown with the sample


def add_token_values(run_dir: RunDir, samples: Sequence[Row], *, limit_bytes: int) -> str:
    """Adds advantage, weight and share to samples that were trained, and `arrays` to those whose per-token
    arrays are there, the newest first, as long as they take no more than `limit_bytes` in the page. All are
    those of a sample's first update.

    Returns a remark for a person, empty if there is none.
    """
    columns = open_columns(run_dir, "contributions")
    if not columns.rows:
        return ""
    trained = read_contributions(columns, samples)
    decode, remark = load_decode(run_dir) if any("shard" in row for row in trained.values()) else (None, "")
    left, missing = limit_bytes, 0
    for sample in sorted(samples, key=lambda row: -row["step"]):
        row = trained.get((sample["stage"], sample["step"], sample.get("id")))
        if row is None:
            continue
        sample.update({name: row[name] for name in SHARED if name in row})
        if not left or "shard" not in row:
            continue
        try:
            arrays = read_arrays(run_dir, row)
        except RecordError:
            missing += 1
            continue
        values = make_token_values(arrays, decode)
        size = len(encode_page_json(values).encode(errors="replace"))
        if size <= left:
            sample["arrays"] = values
        left = left - size if size <= left else 0
    removed = (
        f"Per-token arrays of {missing} shown samples were removed to make room, or are damaged."
        if missing
        else ""
    )
    return " ".join(text for text in (remark, removed) if text)


def load_decode(run_dir: RunDir) -> tuple[Decode | None, str]:
    """What turns ids into text, or None and why there is nothing."""
    try:
        return load_decoder(run_dir), ""
    except (RecordError, ImportError) as error:
        return None, f"Tokens are shown by number: {error}."


def read_contributions(columns: Columns, samples: Sequence[Row]) -> dict[tuple[str, int, Any], Row]:
    """The row of each sample's first update, in which the trainer is as far from the engine as the samples
    are off policy, by stage, step and id.

    Of more than ROWS_READ candidates the newest are read, whole steps of them.
    """
    wanted = np.zeros(columns.rows, dtype=bool)
    steps = columns.column("step")
    for stage in {row["stage"] for row in samples}:
        own = np.array(sorted({row["step"] for row in samples if row["stage"] == stage}))
        wanted |= columns.match_text("stage", stage) & np.isin(steps, own)
    every = np.flatnonzero(wanted & columns.newest())
    found = every[-ROWS_READ:]
    if len(found) < len(every):  # a step of which some rows are not read may lack the first update
        cut = every[-ROWS_READ - 1]
        stages = columns.column("stage")
        found = found[(steps[found] != steps[cut]) | (stages[found] != stages[cut])]
    first: dict[tuple[str, int, Any], Row] = {}
    for row in columns.iterate_rows(found):
        first.setdefault((row["stage"], row["step"], row.get("id")), row)
    return first


def read_arrays(run_dir: RunDir, row: Row) -> Mapping[str, Any]:
    from rollouts.metrics.token_shards import read_token_arrays

    return read_token_arrays(run_dir, row)


def make_token_values(arrays: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """What the page shows of a sample's tokens. `difference` is trainer − engine, where both log-probs are
    there.
    """
    ids = [int(token) for token in arrays["tokens"][:SAMPLE_TOKENS]]
    mask = np.asarray(arrays["mask"][:SAMPLE_TOKENS]).astype(bool)
    pieces = [f"{token} " for token in ids]
    if decode is not None:
        pieces = [""] * len(ids)  # of a character made of several tokens, the last has the text
        for _, end, text in split_text(ids, decode):
            pieces[end - 1] = text
    values: dict[str, Any] = {
        "pieces": pieces,
        "mask": mask.astype(int).tolist(),
        "cut": len(arrays["tokens"]) - len(ids),
    }
    if "advantage" in arrays:
        values["advantage"] = shorten_masked(arrays["advantage"], mask)
    if "log_prob" in arrays and "mu" in arrays:
        values["difference"] = shorten_masked(
            np.asarray(arrays["log_prob"], np.float64) - np.asarray(arrays["mu"], np.float64), mask
        )
    return values


def shorten_masked(values: Any, mask: np.ndarray[Any, Any]) -> list[float | None]:
    """The values of trained tokens, None for the others."""
    return shorten(np.where(mask, np.asarray(values[: len(mask)], np.float64), np.nan), DIGITS)

"""Tokens of samples as pieces of text, by the run's own tokenizer without transformers, with the values that
the run keeps of them.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollouts.errors import RecordError, RunDirError
from rollouts.inspect.record import Record, find_checkpoints, read_settings
from rollouts.metrics.jsonl import Row
from rollouts.metrics.token_shards import read_token_arrays

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


class SampleTokens(NamedTuple):
    """The tokens of a sample in an update."""

    pieces: list[str]  # [T] their texts
    values: dict[str, np.ndarray]  # [T] by name of --color, 0 where the mask is; only those that the run kept


def find_updates(record: Record, rows: Sequence[Row]) -> list[list[Row]]:
    """The first update that each of these samples was part of, of a trajectory that of each segment, in their
    order; none of a sample that did not train.
    """
    record.add_views("contributions")
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in record.rows(UPDATES, [[row.get("id", "") for row in rows]]):
        found.setdefault((row["stage"], row["step"], row["ending"]), []).append(row)
    return [found.get((row["stage"], row["step"], row.get("id")), []) for row in rows]


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


def read_tokens(record: Record, updates: Sequence[Row], tokenizer: Tokenizer | None) -> SampleTokens:
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
    pieces: list[str] = []
    for segment, arrays in enumerate(found, 1):
        own = split_text(arrays["tokens"].tolist(), tokenizer)
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

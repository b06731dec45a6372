"""Rows of data from anywhere: files, a hub, reasoning-gym, a function. Checked where they enter; what is
malformed leaves a hole.

[[rl.data]] ──► read_source ──► SourceRows: rows with holes, and what is wrong with each ──► require_good_rows
                                         └── one for each table ──► Mixture
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path

from rollouts.config.tables import DataSourceConfig, SourceKind
from rollouts.data.files import FoundRow, read_hf, read_jsonl, read_parquet
from rollouts.data.held_out import exclude_from_mixture, exclude_prompts, prompt_key, unique_prompts
from rollouts.data.made_rows import make_python_rows, make_reasoning_gym_rows
from rollouts.data.messages import check_messages
from rollouts.data.mixture import Mixture
from rollouts.data.preference_rows import split_labelled, split_pair
from rollouts.data.rows import (
    BadRow,
    Row,
    RowProblem,
    RowUse,
    SourceRows,
    check_row,
    check_use,
    parse_row,
    require_good_rows,
    require_prompts,
    row_to_conversation,
)
from rollouts.errors import DataError

__all__ = [
    "BadRow",
    "Mixture",
    "Row",
    "SourceRows",
    "check_messages",
    "check_row",
    "exclude_from_mixture",
    "exclude_prompts",
    "load_rows",
    "load_sources",
    "prompt_key",
    "read_source",
    "require_good_rows",
    "require_prompts",
    "row_to_conversation",
    "unique_prompts",
]

Reader = Callable[[DataSourceConfig, str], Iterator[FoundRow]]
READERS: Mapping[SourceKind, Reader] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hf": read_hf,
    "reasoning_gym": make_reasoning_gym_rows,
    "python": make_python_rows,
}
RESHAPES: Mapping[RowUse, Callable[[Row], Row]] = {"pair": split_pair, "labelled": split_labelled}


def read_source(source: DataSourceConfig, *, name: str, use: RowUse = "any") -> SourceRows:
    """The rows of a source in its own order, the first `source.size` of them when given, with holes and what
    is wrong where they are malformed.

    `name` is the setting that the source comes from ("rl.data"); errors begin with it. A row that is no good
    for its `use` is malformed too. How much may be malformed is not judged here. Raises DataError for a
    source that cannot be read, has no rows, or has fewer than `size`, malformed ones counted.
    """
    rows: list[Row | None] = []
    bad: list[BadRow] = []
    found_rows = READERS[source.kind](source, name)
    for position, found in enumerate(islice(found_rows, source.size)):
        try:
            if found.problem is not None:
                raise found.problem
            row = parse_row(found.value, source.columns, source.system_prompt, RESHAPES.get(use))
            check_use(row, use)
            rows.append(row)
        except RowProblem as problem:
            rows.append(None)
            bad.append(BadRow(position, found.file, found.number, found.by_line, problem.field, str(problem)))
    where = next(key for key in ("path", "function", "dataset") if getattr(source, key))
    if not rows:
        hint = "; a JSONL file has one JSON object per line" if source.kind == "jsonl" else ""
        raise DataError(f"{name}.{where}={getattr(source, where)!r} has no rows{hint}")
    if source.size is not None and len(rows) < source.size:
        advice = f"set size = {len(rows)}" + (
            " or leave it out" if source.kind in ("jsonl", "parquet", "hf") else ""
        )
        raise DataError(
            f"{name}.size={source.size} but {getattr(source, where)} has {len(rows)} rows; {advice}"
        )
    return SourceRows(name_sources([source])[0], source.weight, tuple(rows), tuple(bad))


def name_sources(sources: Sequence[DataSourceConfig]) -> list[str]:
    """What each source is called in metrics, samples and curricula: after its file, dataset or function, in
    small letters; the second of a name has the suffix _2.
    """
    names: list[str] = []
    for source in sources:
        called = Path(source.path).name.partition(".")[0] or source.dataset.rpartition("/")[2]
        base = re.sub(r"[^a-z0-9]+", "_", (called or source.function.rpartition(":")[2]).lower()).strip("_")
        base = base or "source"
        numbered = (f"{base}_{number}" for number in count(2))
        names.append(next(name for name in chain([base], numbered) if name not in names))
    return names


def load_sources(sources: Sequence[DataSourceConfig], *, name: str, use: RowUse = "any") -> Mixture:
    """The rows of every source. Malformed rows are holes; their share is at most each source's
    max_bad_fraction.

    Raises DataError beginning with `name`, or
    `name`.INDEX when there are several.
    """
    loaded: list[SourceRows] = []
    for index, (source, called) in enumerate(zip(sources, name_sources(sources), strict=True)):
        key = f"{name}.{index}" if len(sources) > 1 else name
        found = read_source(source, name=key, use=use)
        require_good_rows(found, max_bad_fraction=source.max_bad_fraction, name=key)
        loaded.append(replace(found, name=called))
    mixture = Mixture(tuple(loaded))
    mixture.check_fields(name=name)
    return mixture


def load_rows(source: DataSourceConfig, *, name: str) -> list[Row]:
    """The good rows of one source in its own order. Raises what `load_sources` raises."""
    return [row for row in load_sources([source], name=name).sources[0].rows if row is not None]

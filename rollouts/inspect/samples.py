"""Which of a run's logged samples a person asks for: filters on the columns, a search of the text, an order."""

from __future__ import annotations

import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.column_rows import ABSENT
from rollouts.inspect.columns import Columns, open_columns
from rollouts.inspect.read import open_run_dir
from rollouts.metrics.jsonl import Row, parse_row

SORT_COLUMNS = {
    "step": "step",
    "reward": "reward",
    "length": "response_length",
    "tokens": "tokens",
    "group": "group_index",
}
PLAIN_RUN = re.compile(
    r"[A-Za-z0-9 !#$%&'()*+,.:;<=>?@\[\]^_`{|}~-]+"
)  # characters that stand in JSON as they are
KEY_END = re.compile(
    rb'[^"\\]{0,64}":'
)  # what follows bytes of the name of a field, as every row has it; a text ends by '",' or '"}'
SCAN_BYTES = 16 << 20  # of a file that are lowered and searched at a time
# the files are scanned if at least one in so many rows is asked about; else these rows are read one by one
SCAN_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples, and how many of them in which order."""

    step: int | None = None
    last_step: bool = False  # only the last step that has samples which match otherwise
    stage: str | None = None
    status: str | None = None
    group: int | None = None
    grep: str = ""
    sort: str | None = None  # a name of SORT_COLUMNS, or lag; None: the last ones in the order of the file
    reverse: bool = False
    limit: int = 10


@dataclass(frozen=True, slots=True)
class FoundSamples:
    """What a query found."""

    root: Path
    rows: tuple[Row, ...]  # in the order asked for, at most `limit`
    matching: int | None  # all that match; None: not counted, for the search ended when it had enough
    total: int  # logged samples, of the newest attempt at each step
    notes: tuple[str, ...]  # of the file: a torn line


def find_samples(root: Path, query: SampleQuery) -> FoundSamples:
    """The samples of the run at `root` that the query asks for.

    Raises RunDirError where `root` is no run directory or its file is damaged, ConfigError for a query that
    asks for nothing there can be.
    """
    check_query(query)
    columns = open_columns(open_run_dir(root), "samples")
    total = int(columns.newest().sum())
    chosen = filter_rows(columns, query)
    if query.grep:
        return search_rows(root, columns, query, chosen, total)
    rows = columns.read_rows(order_rows(columns, chosen, query)[: query.limit])
    return FoundSamples(root, arrange(rows, query), len(chosen), total, columns.notes)


def check_query(query: SampleQuery) -> None:
    """Raises ConfigError."""
    if query.limit < 1:
        raise ConfigError(f"--limit {query.limit}: at least 1")
    if query.sort is not None and query.sort not in (*SORT_COLUMNS, "lag"):
        raise ConfigError(f"--sort {query.sort}: give one of {', '.join((*SORT_COLUMNS, 'lag'))}")


def filter_rows(columns: Columns, query: SampleQuery) -> np.ndarray:
    """Numbers of the rows that match all but the text, in the order of the file. Raises RunDirError for a
    step or stage that has no samples.
    """
    held = columns.newest()
    if query.stage is not None:
        held = held & columns.match_text("stage", query.stage)
        check_some(held, columns, f"--stage {query.stage}", "stage")
    if query.step is not None:
        held = held & (columns.column("step") == query.step)
        check_some(held, columns, f"--step {query.step}", "step")
    if query.group is not None:
        held = held & (columns.column("group_index") == query.group)
    if query.status is not None:
        held = held & columns.match_text("status", query.status)
    chosen = np.flatnonzero(held)
    if query.last_step and len(chosen):
        last = chosen[-1]
        same = (columns.column("step") == columns.column("step")[last]) & (
            columns.column("stage") == columns.column("stage")[last]
        )
        chosen = chosen[same[chosen]]
    return chosen


def check_some(held: np.ndarray, columns: Columns, asked: str, name: str) -> None:
    """Raises RunDirError saying what there is if no row is left."""
    if held.any() or not columns.rows:
        return
    there = columns.column(name)[columns.newest()]
    if name == "stage":
        stages = ", ".join(columns.texts("stage")[code] for code in np.unique(there))
        raise RunDirError(f"{asked}: no samples of it were logged; there are samples of {stages}")
    raise RunDirError(
        f"{asked}: no samples of it were logged; there are samples of steps {there.min()} to {there.max()}"
    )


def order_rows(columns: Columns, rows: np.ndarray, query: SampleQuery) -> np.ndarray:
    """The rows in the order asked for, those without the value last; without an order the last of the file
    first.
    """
    if query.sort is None:
        return rows[::-1]
    values = sort_values(columns, query.sort)[rows]
    absent = np.isnan(values)
    order = np.lexsort((-values if query.reverse else values, absent))
    return rows[order]


def sort_values(columns: Columns, sort: str) -> np.ndarray:
    """What the rows are ordered by; NaN for none."""
    if sort == "lag":
        oldest = columns.column("weight_version_min")
        return np.where(oldest == ABSENT, np.nan, columns.column("policy_version") - oldest)
    values = columns.column(SORT_COLUMNS[sort])
    return values if values.dtype.kind == "f" else np.where(values == ABSENT, np.nan, values)


def arrange(rows: Sequence[Row], query: SampleQuery) -> tuple[Row, ...]:
    """The rows as they are shown: without an order the last of the file comes last, for it is next to the
    prompt of the terminal.
    """
    return tuple(rows) if query.sort or query.reverse else tuple(reversed(rows))


# --- text ---------------------------------------------------------------------------------------------------


class _Text(msgspec.Struct):
    """What of a row is searched."""

    prompt: Any = ""
    response: str = ""
    metadata: Any = None


_text_decoder = msgspec.json.Decoder(_Text)


def search_rows(
    root: Path, columns: Columns, query: SampleQuery, chosen: np.ndarray, total: int
) -> FoundSamples:
    """Those of the chosen rows that hold the text, the first `limit` in the order asked for."""
    plain = longest_plain_run(query.grep)
    if plain and len(chosen) * SCAN_SHARE > columns.rows:
        held = np.zeros(columns.rows, dtype=bool)
        held[scan_files(columns, plain)] = True
        chosen = chosen[held[chosen]]
    ordered = order_rows(columns, chosen, query)
    needle = query.grep.lower()
    matching = (
        line
        for line in columns.read_lines(ordered)
        if any(needle in text.lower() for text in searched_texts(line))
    )
    rows = [parse_row(line) or {} for line in islice(matching, query.limit + 1)]
    count = len(rows) if len(rows) <= query.limit else None
    return FoundSamples(root, arrange(rows[: query.limit], query), count, total, columns.notes)


def longest_plain_run(text: str) -> str:
    """The longest part of the text that a JSON file holds as it is, whatever wrote it, in lower case; "" if
    there is none.
    """
    return max(PLAIN_RUN.findall(text), key=len, default="").lower()


def scan_files(columns: Columns, plain: str) -> np.ndarray:
    """Numbers of the rows whose line holds `plain` (lower case, ASCII) in upper or lower case, in the order
    of the file.
    """
    needle = plain.encode("ascii")
    part_of, offsets = columns.column("part"), columns.column("offset")
    found: list[np.ndarray] = []
    for part, path in enumerate(columns.paths):
        first, last = np.searchsorted(part_of, [part, part + 1])
        if first < last:
            begins = offsets[first:last]
            hits = np.fromiter(scan_file(path, needle, begins), dtype=np.int64)
            found.append(first + hits)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def scan_file(path: Path, needle: bytes, begins: np.ndarray) -> Iterator[int]:
    """Places in `begins` (first byte of each line, ascending) of the lines that hold the needle. Lines are
    searched many at a time.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = 0
        while place < len(begins):
            after = max(place + 1, int(np.searchsorted(begins, begins[place] + SCAN_BYTES)))
            end = int(begins[after]) if after < len(begins) else len(data)
            chunk = data[int(begins[place]) : end].lower()
            starts = (begins[place:after] - begins[place]).tolist()
            hit = chunk.find(needle)
            line = 0
            while hit >= 0:
                if KEY_END.match(chunk, hit + len(needle)):
                    hit = chunk.find(needle, hit + len(needle))
                    continue
                line = bisect_right(starts, hit, line) - 1
                yield place + line
                if line + 1 == len(starts):
                    break
                hit = chunk.find(needle, starts[line + 1])
            place = after


def searched_texts(line: bytes) -> list[str]:
    """Prompt (of a chat each message), response and failure message of a sample row."""
    try:
        row = _text_decoder.decode(line)
        prompt, response, metadata = row.prompt, row.response, row.metadata
    except (msgspec.MsgspecError, UnicodeDecodeError):
        known = parse_row(line) or {}
        prompt, response, metadata = known.get("prompt"), known.get("response"), known.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    message = failure.get("message") if isinstance(failure, dict) else None
    return [*list_texts(prompt), *list_texts(response), *list_texts(message)]


def list_texts(value: object) -> Iterator[str]:
    """The text, or of chat messages what they say, without their roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from list_texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name != "role":
                yield from list_texts(part)

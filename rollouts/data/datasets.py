"""Rows of data from anywhere: files, a hub, reasoning-gym, a function. Checked where they enter; what is
malformed leaves a hole.

[[rl.data]] ──► read_source ──► Source: rows with holes, and what is wrong with each ──► load_sources
                                         └── one for each table, few of them malformed ──► Mixture
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from rollouts.config.tables import NEEDS, DataSourceConfig
from rollouts.data.mixture import SOURCE_FIELD, Mixture, Source
from rollouts.data.readers import READERS, FoundRows
from rollouts.data.rows import Row, RowUse, parse_messages, parse_row, read_prompt
from rollouts.errors import DataError, RolloutsError
from rollouts.types import ChatMessage

SHOWN = 5  # malformed rows that an error lists
EXTRAS = {"parquet": "data", "hf": "data", "reasoning_gym": "reasoning-gym"}  # of rollouts-rl, by kind


def read_source(source: DataSourceConfig, *, name: str, use: RowUse = "any") -> Source[Row]:
    """The rows of a source in its own order, the first `source.size` of them when given, with holes and what
    is wrong where they are malformed.

    `name` is the setting that the source comes from ("rl.data"); errors begin with it. A row that is no good
    for its `use` is malformed too. How much may be malformed is not judged here. Raises DataError for a
    source that cannot be read, has no rows, or has fewer than `size`, malformed ones counted.
    """
    rows: list[Row | None] = []
    bad: list[str] = []
    for place, value in islice(_find_rows(source, name), source.size):
        row = None
        try:
            if isinstance(value, DataError):
                raise value
            row = parse_row(value, use, columns=source.columns, system_prompt=source.system_prompt)
        except DataError as problem:
            bad.append(f"{place}: {problem}")
        rows.append(row)
    if not rows:
        hint = "; a JSONL file has one JSON object per line" if source.kind == "jsonl" else ""
        raise DataError(f"{_describe(source, name)} has no rows{hint}")
    if source.size is not None and len(rows) < source.size:
        raise DataError(
            f"{name}.size={source.size} but {_describe(source, name)} has {len(rows)} rows; set size ="
            f" {len(rows)} or leave it out"
        )
    return Source(name_sources([source])[0], source.weight, tuple(rows), tuple(bad))


def _describe(source: DataSourceConfig, name: str) -> str:
    setting, *_ = NEEDS[source.kind].split()
    params = f" with {name}.params={source.params}" if source.params else ""
    return f"{name}.{setting}={getattr(source, setting)!r}{params}"


def _find_rows(source: DataSourceConfig, name: str) -> FoundRows:
    """What the source gives. Raises DataError, with the cause, for whatever its reader or function raises."""
    taken = 0
    try:
        for found in READERS[source.kind](source):
            yield found
            taken += 1
    except RolloutsError:
        raise
    except (Exception, SystemExit) as error:  # of a file system, a network, a reader, or a user's function
        what, kind = _describe(source, name), type(error).__name__
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, ImportError) and source.kind in EXTRAS:
            problem = f" needs the package {error.name}; pip install 'rollouts-rl[{EXTRAS[source.kind]}]'"
        elif source.kind == "python":
            problem = f" raised {kind} after {taken} rows: {reason}"
        elif isinstance(error, FileNotFoundError) and source.path:
            problem = f": there is no such file (looked for {Path(source.path).absolute()})"
        else:
            hub = "; see that the hub can be reached, or name a local directory"
            away = source.kind == "hf" and not Path(source.dataset).exists()
            problem = f" cannot be read: {reason} ({kind}){hub if away else ''}"
        raise DataError(what + problem) from error


def name_sources(sources: Sequence[DataSourceConfig]) -> list[str]:
    """What each source is called in metrics, samples and curricula: after its file, dataset or function, in
    small letters; the second of a name has the suffix _2.
    """
    names: list[str] = []
    for source in sources:
        called = Path(source.path).name.partition(".")[0] or source.dataset.rpartition("/")[2]
        called = called or source.function.rpartition(":")[2]
        base = "_".join(re.findall("[a-z0-9]+", called.lower())) or "source"
        numbered = (f"{base}_{number}" for number in count(2))
        names.append(next(name for name in chain([base], numbered) if name not in names))
    return names


def load_sources(sources: Sequence[DataSourceConfig], *, name: str, use: RowUse = "any") -> Mixture[Row]:
    """The rows of every source. Malformed rows are holes; their share is at most each source's
    max_bad_fraction.

    Raises DataError beginning with `name`, or `name`.INDEX when there are several.
    """
    loaded: list[Source[Row]] = []
    for index, (source, called) in enumerate(zip(sources, name_sources(sources), strict=True)):
        key = f"{name}.{index}" if len(sources) > 1 else name
        found = read_source(source, name=key, use=use)
        count, bad = len(found.rows), found.bad
        if not found.good or len(bad) > source.max_bad_fraction * count:
            more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
            rule = (
                f"more than max_bad_fraction={source.max_bad_fraction:g} allows; mend them, or set"
                f" {key}.max_bad_fraction"
            )
            raise DataError(
                f"{key}: {len(bad)} of {count} rows {'is' if len(bad) == 1 else 'are'} malformed,"
                f" {rule if found.good else 'so nothing is left; mend them'}:"
                + "".join(f"\n  {line}" for line in [*bad[:SHOWN], *more])
            )
        if len(sources) > 1 and any(SOURCE_FIELD in row for row in found.good):
            raise DataError(
                f"{key} ({called}): its rows have a field {SOURCE_FIELD}, which says in a mixture what source"
                f' a sample is of; give it another name with columns.NAME = "{SOURCE_FIELD}", or leave it out'
                f' with columns.{SOURCE_FIELD} = ""'
            )
        loaded.append(replace(found, name=called))
    return Mixture(tuple(loaded))


# --- held-out prompts: no training row teaches the answer to one --------------------------------------------


def find_asked_prompts(row: Mapping[str, Any]) -> Iterator[str]:
    """The key of every prompt that training on the row teaches to answer; the row's own prompt first. Rows
    that ask the same share it: the prompt's text without system messages, case and runs of white space.

    The prompts of a row with `messages` are what comes before each assistant turn.
    """
    if "prompt" in row:
        yield _key_of(read_prompt(row["prompt"]))
    if "messages" in row:
        messages = parse_messages(row["messages"], where="messages")
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        yield from (_key_of(messages[:end]) for end in answers or [len(messages)])


def _key_of(messages: Sequence[ChatMessage]) -> str:
    asked = [message for message in messages if message["role"] != "system"] or messages
    texts = (unicodedata.normalize("NFKC", message["content"]).casefold() for message in asked)
    return "\x1e".join(" ".join(text.split()) for text in texts)


def exclude_prompts(
    mixture: Mixture[Row], held_out_rows: Iterable[Row], *, name: str
) -> tuple[Mixture[Row], int]:
    """(every source without its rows that train on a held-out prompt, also as an earlier turn of a
    conversation; how many these are). Holes stay. Raises DataError naming a source that has none left.
    """
    held_out = {next(find_asked_prompts(row)) for row in held_out_rows}
    found = mixture.keep(
        lambda row: held_out.isdisjoint(find_asked_prompts(row)),
        f"{name} has no row left{{}}: all of its prompts are held out by eval.data; use another seed or file",
    )
    return found, len(mixture.samples) - len(found.samples)


def unique_prompts(rows: Iterable[Row]) -> list[Row]:
    """`rows` in their order without those whose prompt occurred before."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(next(find_asked_prompts(row)), row)
    return list(first.values())

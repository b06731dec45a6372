"""Rows of data from anywhere: JSON lines, Parquet, whatever the package `datasets` reads, local or from its
hub, reasoning-gym, or a Python function that the config names. Checked where they enter; what is malformed
leaves a hole.

[[rl.data]] ──► read_source ──► Source: rows with holes, and what is wrong with each ──► load_sources
                                         └── one for each table, few of them malformed ──► Mixture
"""

import glob
import gzip
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from rollouts.config.plugins import load_function
from rollouts.config.spelling import did_you_mean
from rollouts.config.tables import NEEDS, DataSourceConfig
from rollouts.data.mixture import SOURCE_FIELD, Mixture, Source
from rollouts.data.rows import MAX_ROW_BYTES, Messages, Row, RowUse, parse_messages, parse_row, read_prompt
from rollouts.errors import DataError, RolloutsError
from rollouts.messages import parse_json

SHOWN = 5  # malformed rows that an error lists
EXTRAS = {"parquet": "data", "hf": "data", "reasoning_gym": "reasoning-gym"}  # of rollouts-rl, by kind
FoundRows = Iterator[tuple[str, Any]]
"""What a source gave, with its place ("FILE:LINE" or "NAME row NUMBER"); a DataError where it cannot be
read.
"""

PARQUET_BATCH = 256  # rows decoded at once
# The other formats that `datasets` finds by the names of files may unpickle what they read.
PLAIN_FORMATS = ("arrow", "csv", "json", "parquet", "text")
FORMAT_OF_SUFFIX = {f".{name}": name for name in PLAIN_FORMATS[:4]} | {".jsonl": "json", ".txt": "text"}


def find_source_files(source: DataSourceConfig) -> list[Path]:
    """The files that a path or a pattern means, in the order of their names; the path itself if it is there,
    whatever it looks like, or if there are none.
    """
    path = Path(source.path)
    found = [] if path.exists() else map(Path, glob.glob(source.path, recursive=True))  # noqa: PTH207
    return sorted(filter(Path.is_file, found)) or [path]


# --- JSON lines ---------------------------------------------------------------------------------------------


def read_jsonl(source: DataSourceConfig) -> FoundRows:
    """Every line that is not blank, of every file."""
    for path in find_source_files(source):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_ROW_BYTES + 2):  # only "\n" ends a line, text files know more
                number += 1
                text = line.rstrip(b"\r\n")
                if len(text) > MAX_ROW_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_ROW_BYTES)
                    value = DataError(
                        f"the line has more than {MAX_ROW_BYTES} bytes; shorten it or leave it out"
                    )
                elif text.strip():
                    value = _parse_line(line)
                else:
                    continue
                yield f"{path}:{number}", value


def _parse_line(line: bytes) -> Any:
    cut = "" if line.endswith(b"\n") else "; the file ends in the middle of this line"
    try:
        return parse_json(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 at byte {error.start} of the line{cut}")
    except json.JSONDecodeError as error:
        return DataError(f"not JSON: {error.msg} at column {error.colno}{cut}")
    except (ValueError, RecursionError) as error:
        return DataError(f"not JSON: {error}")


# --- Parquet ------------------------------------------------------------------------------------------------


def read_parquet(source: DataSourceConfig) -> FoundRows:
    """Every row of every file; columns that are left out are not read."""
    from pyarrow import parquet  # optional, and a tenth of a second

    for path in find_source_files(source):
        with path.open("rb") as opened, parquet.ParquetFile(opened) as file:
            columns = choose_columns(source, file.schema_arrow.names)
            batches = file.iter_batches(PARQUET_BATCH, columns=columns)
            for number, row in enumerate(chain.from_iterable(map(_decode_batch, batches))):
                yield f"{path} row {number}", row


def _decode_batch(batch: Any) -> list[Any]:
    """Every row of an arrow batch as an object, or what is wrong with it: a value that Python cannot hold
    spoils its own row alone.
    """
    try:
        return batch.to_pylist()
    except Exception:  # of many libraries: text that is not UTF-8, dates after 9999, unknown time zones
        return [_decode_row(batch, index) for index in range(batch.num_rows)]


def _decode_row(batch: Any, index: int) -> Any:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return DataError(
                f"{name} is of type {column.type} and cannot be read ({reason}); leave the field out with"
                f' columns.{name} = "", or convert it'
            )
    return row


def choose_columns(source: DataSourceConfig, names: list[str]) -> list[str]:
    """The columns to read: all but those that the source leaves out with "". Raises ValueError if two have
    one name.
    """
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns are called {name}; which one is meant? Rename one of them")
    columns = source.columns
    return [name for name in names if columns.get(name) != "" or name in columns.values()]


# --- the package `datasets` ---------------------------------------------------------------------------------


def read_hf(source: DataSourceConfig) -> FoundRows:
    """Every row of a split, in order; of the hub streamed where `source.size` says how
    many. Code that comes with a dataset is never run.
    """
    found = _open_hf(source)
    names = found.column_names
    kept = names if names is None else choose_columns(source, names)
    for number, row in enumerate(found if kept == names else found.select_columns(kept)):
        yield f"{source.dataset} {source.split} row {number}", row


def _open_hf(source: DataSourceConfig) -> Any:
    """A Dataset or, streaming, an IterableDataset. Raises DataError for a format that is not read, and for a
    split that is not there.
    """
    import datasets  # optional, and takes seconds
    from datasets.config import HF_HUB_OFFLINE

    datasets.disable_progress_bars()  # they would write over ours, and keep a thread
    path = Path(source.dataset)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved: Any = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {str(saved.split or source.split): saved}
        if source.split not in splits:
            raise ValueError(
                f"it has no split {source.split}; it has {', '.join(splits)}"
                f"{did_you_mean(source.split, splits)}"
            )
        return splits[source.split]
    if path.is_file():
        files = {source.split.partition("[")[0]: [str(path)]}
        if path.suffix not in FORMAT_OF_SUFFIX:
            raise ValueError(
                f"it is a file of an unknown kind; it can be one of {', '.join(FORMAT_OF_SUFFIX)}, or a"
                " directory"
            )
        builder = datasets.load_dataset_builder(FORMAT_OF_SUFFIX[path.suffix], data_files=files)
    else:
        dataset, _, subset = source.dataset.partition(":")
        builder = datasets.load_dataset_builder(dataset, subset or None)
    modules = [cls.__module__ for cls in type(builder).__mro__]
    if {f"datasets.packaged_modules.{name}.{name}" for name in PLAIN_FORMATS}.isdisjoint(modules):
        raise ValueError(
            f"it is in a format that is not read ({modules[0].rpartition('.')[2]}), because reading it"
            f" may run code or give no text; save it as one of {', '.join(PLAIN_FORMATS)}"
        )
    if source.size is not None and not path.exists() and not HF_HUB_OFFLINE:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


# --- rows that are made -------------------------------------------------------------------------------------


def make_reasoning_gym_rows(source: DataSourceConfig) -> FoundRows:
    """`source.size` rows. Metadata that is not JSON becomes null. Raises what reasoning-gym raises for
    a dataset that it does not have, and for parameters.
    """
    from reasoning_gym import factory  # takes seconds and is an optional dependency, so not at the top
    from reasoning_gym.composite import DatasetSpec

    params = dict(source.params)
    if source.dataset == "composite":
        specs = params.get("datasets", ())
        params["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **spec}) for spec in specs]
    elif source.dataset not in factory.DATASETS:
        raise ValueError(f"no such dataset{did_you_mean(source.dataset, factory.DATASETS)}")
    dataset = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **params)
    for number, entry in enumerate(dataset):
        text = json.dumps(entry.get("metadata", {}), default=lambda _: None, skipkeys=True)
        metadata = json.loads(text, parse_constant=lambda _: None)
        yield (
            f"reasoning_gym {source.dataset} row {number}",
            {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "metadata": metadata,
                "source_dataset": metadata.get("source_dataset", source.dataset),
            },
        )


def make_python_rows(source: DataSourceConfig) -> FoundRows:
    """What function(size=, seed=, **params) gives. Raises PlugInError if there is no such function."""
    function = load_function(source.function, role="rows")
    for number, row in enumerate(function(size=source.size, seed=source.seed, **source.params)):
        yield f"{source.function} row {number}", row


READERS = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hf": read_hf,
    "reasoning_gym": make_reasoning_gym_rows,
    "python": make_python_rows,
}


# --- one source, and several --------------------------------------------------------------------------------


def read_source(source: DataSourceConfig, *, name: str, use: RowUse = "any") -> Source[Row]:
    """The rows of a source in its own order, the first `source.size` of them when given, with holes and what
    is wrong where they are malformed.

    `name` is the setting that the source comes from ("rl.data"); errors begin with it. A row that is no good
    for its `use` is malformed too. How much may be malformed is not judged here. Raises DataError for a
    source that cannot be read, has no rows, or has fewer than `size`, malformed ones counted.
    """
    rows = []
    bad = []
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
    return Source(name, source.weight, tuple(rows), tuple(bad))


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
    names = []
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
    loaded = []
    for index, (source, called) in enumerate(zip(sources, name_sources(sources), strict=True)):
        key = f"{name}.{index}" if len(sources) > 1 else name
        if source.kind == "stream":  # is read while the run goes on
            loaded.append(Source(called, source.weight, ()))
            continue
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


def find_asked_prompts(row: Row) -> Iterator[str]:
    """The key of every prompt that training on the row teaches to answer; the row's own prompt first. Rows
    that ask the same share it: the prompt's text without system messages, case and runs of white space.

    The prompts of a row with `messages` are what comes before each assistant turn.
    """
    if "prompt" in row:
        yield _key_of(read_prompt(row["prompt"]))
    if "messages" in row:
        messages = parse_messages(row["messages"])
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        yield from (_key_of(messages[:end]) for end in answers or [len(messages)])


def _key_of(messages: Messages) -> str:
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
    first = {}
    for row in rows:
        first.setdefault(next(find_asked_prompts(row)), row)
    return list(first.values())

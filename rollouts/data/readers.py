"""Rows where they come from: JSON lines, Parquet, whatever the package `datasets` reads, local or from its
hub, reasoning-gym, or a Python function that the config names.
"""

import glob
import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rollouts.config.plugins import load_function
from rollouts.config.spelling import did_you_mean
from rollouts.config.tables import DataSourceConfig
from rollouts.data.rows import MAX_ROW_BYTES
from rollouts.errors import DataError
from rollouts.messages import parse_json

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
    row: dict[str, Any] = {}
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
    import datasets  # optional, and takes seconds

    datasets.disable_progress_bars()  # they would write over ours, and keep a thread
    found = _open_hf(source)
    names = found.column_names
    kept = names if names is None else choose_columns(source, names)
    for number, row in enumerate(found if kept == names else found.select_columns(kept)):
        yield f"{source.dataset} {source.split} row {number}", row


def _open_hf(source: DataSourceConfig) -> Any:
    """A Dataset or, streaming, an IterableDataset. Raises DataError for a format that is not read, and for a
    split that is not there.
    """
    import datasets
    from datasets.config import HF_HUB_OFFLINE

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
    dataset: Any = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **params)
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

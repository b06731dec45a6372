"""Rows out of files: JSON lines, Parquet, and whatever the package `datasets` reads, local or from its
hub.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from rollouts.config.spelling import nearest
from rollouts.config.tables import DataSourceConfig
from rollouts.data.rows import MAX_ROW_BYTES, RowProblem, describe_missing
from rollouts.errors import DataError

PARQUET_BATCH = 256  # rows decoded at once
# The other formats that `datasets` finds by the names of files may unpickle what they read.
PLAIN_FORMATS = ("arrow", "csv", "json", "parquet", "text")
FORMAT_OF_SUFFIX = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
INSTALL = "pip install 'rollouts-rl[data]'"


class FoundRow(NamedTuple):
    """What a source gave at one place: a value, or the reason why there is none."""

    file: str
    number: int  # the line from 1 where `by_line`, otherwise the row of the file from 0
    by_line: bool
    value: Any
    problem: RowProblem | None = None


def find_source_files(source: DataSourceConfig, name: str) -> list[Path]:
    """The file, or the files that the pattern means in the order of their names. Raises DataError if there is
    none.
    """
    path = Path(source.path)
    if path.exists() or not glob.has_magic(source.path):
        return [path]
    matches = map(Path, glob.glob(source.path, recursive=True))  # noqa: PTH207
    found = sorted(file for file in matches if file.is_file())
    if not found:
        raise DataError(
            f"{name}.path={source.path!r}: no file has such a name (looked for {path.absolute()})"
        )
    return found


def _cannot_read(source: DataSourceConfig, path: Path, error: Exception, name: str) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{name}.path={source.path!r}: there is no such file (looked for {path.absolute()})")
    which = "" if str(path) == source.path else f": {path}"
    return DataError(
        f"{name}.path={source.path!r}{which} cannot be read: {getattr(error, 'strerror', None) or error}"
    )


# --- JSON lines ---------------------------------------------------------------------------------------------


def read_jsonl(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """One found row for every line that is not blank, of every file. Raises DataError for a file that cannot
    be read.
    """
    for path in find_source_files(source, name):
        try:
            with path.open("rb") as file:
                yield from _read_lines(
                    gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, str(path)
                )
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # a compressed file that is cut off is refused: nobody knows how much is lost
            raise _cannot_read(source, path, error, name) from error


def _read_lines(file: IO[bytes] | gzip.GzipFile, path: str) -> Iterator[FoundRow]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 2):  # only "\n" ends a line of JSONL, text files know more
        number += 1
        ended, value, problem = line.endswith(b"\n"), None, None
        if len(line.rstrip(b"\r\n")) > MAX_ROW_BYTES:
            rule = f"the line has more than {MAX_ROW_BYTES} bytes; shorten it or leave it out"
            problem = RowProblem("", rule)
            while not ended and (part := file.readline(MAX_ROW_BYTES)):
                ended = part.endswith(b"\n")
        elif line.strip():
            value, problem = _parse_line(
                line.rstrip(b"\r\n"), "" if ended else "; the file ends in the middle of this line"
            )
        else:
            continue
        yield FoundRow(path, number, True, value, problem)


def _parse_line(line: bytes, cut: str) -> tuple[Any, RowProblem | None]:
    try:
        text = line.decode("utf-8-sig")
        parse = {"parse_constant": _refuse_constant, "object_pairs_hook": _refuse_double_keys}
        return json.loads(text, **parse), None
    except RowProblem as problem:
        return None, problem
    except UnicodeDecodeError as error:
        return None, RowProblem("", f"not UTF-8 at byte {error.start} of the line{cut}")
    except json.JSONDecodeError as error:
        return None, RowProblem("", f"not JSON: {error.msg} at column {error.colno}{cut}")
    except (ValueError, RecursionError) as error:
        return None, RowProblem("", f"not JSON: {error}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _refuse_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowProblem(twice, f"the key {twice!r} stands twice in one object; which one is meant?")
    return value


# --- Parquet ------------------------------------------------------------------------------------------------


def read_parquet(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """One found row for every row of every file. Raises DataError for a file that cannot be read or has not
    the columns asked for.
    """
    try:
        from pyarrow import ArrowException, parquet  # optional, and a tenth of a second
    except ImportError as error:
        raise DataError(f"{name}.kind='parquet' needs the package pyarrow; {INSTALL}") from error
    for path in find_source_files(source, name):
        try:
            with path.open("rb") as opened, parquet.ParquetFile(opened) as file:
                columns = choose_columns(source.columns, file.schema_arrow.names, f"{name}: {path}", name)
                batches = file.iter_batches(PARQUET_BATCH, columns=columns)
                rows = (row for batch in batches for row in _decode_batch(batch))
                for number, (row, problem) in enumerate(rows):
                    yield FoundRow(str(path), number, False, row, problem)
        except (OSError, ArrowException, ValueError) as error:
            raise _cannot_read(source, path, error, name) from error


def _decode_batch(batch: Any) -> list[tuple[Any, RowProblem | None]]:
    """Every row of an arrow batch as an object, or what is wrong with it: a value that Python cannot hold
    spoils its own row alone.
    """
    try:
        return [(row, None) for row in batch.to_pylist()]
    except (
        Exception
    ):  # of many libraries: text that is not UTF-8, dates after 9999, time zones that nobody knows
        return [_decode_row(batch, index) for index in range(batch.num_rows)]


def _decode_row(batch: Any, index: int) -> tuple[Any, RowProblem | None]:
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            way_out = f'leave the field out with columns.{name} = "", or convert it'
            return None, RowProblem(
                name,
                f"{name} is of type {column.type} and cannot be read ({type(error).__name__}: {reason});"
                f" {way_out}",
            )
    return row, None


def choose_columns(columns: Mapping[str, str], names: Sequence[str], where: str, name: str) -> list[str]:
    """The columns to read: all but those that `columns` leaves out with "". Raises DataError naming one that
    is asked for and is not there.
    """
    doubled = next((column for column in names if names.count(column) > 1), None)
    if doubled is not None:
        raise DataError(f"{where}: two columns are called {doubled}; which one is meant? Rename one of them")
    for ours, theirs in columns.items():
        first = theirs.partition(".")[0]
        if theirs and theirs not in names and first not in names:
            missing = describe_missing(theirs, first, "", dict.fromkeys(names))
            raise DataError(
                f"{where}: {name}.columns.{ours}={theirs!r}:"
                f" {missing.replace('the row has', 'the columns are')}"
            )
    return [column for column in names if columns.get(column) != "" or column in columns.values()]


# --- the package `datasets` ---------------------------------------------------------------------------------


def read_hf(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """One found row for every row of a split, in order; of the hub streamed where `source.size` says how
    many.

    Code that comes with a dataset is never run. Raises DataError if the package is missing, the hub does not
    answer, or the dataset, its subset, its split or a column is not there.
    """
    try:
        import datasets  # optional, and takes seconds
    except ImportError as error:
        raise DataError(f"{name}.kind='hf' needs the package datasets; {INSTALL}") from error
    datasets.disable_progress_bars()  # they would write over ours, and keep a thread
    where = f"{name}.dataset={source.dataset!r}"
    try:
        found = _open_hf(source, where)
        names = found.column_names
        if names is not None:
            kept = choose_columns(source.columns, names, where, name)
            found = found.select_columns(kept) if len(kept) < len(names) else found
        for number, row in enumerate(islice(found, source.size)):
            yield FoundRow(f"{source.dataset} {source.split}", number, False, row)
    except DataError:
        raise
    except Exception as error:  # what lies behind it is a file system, a network, or one of many readers
        raise DataError(f"{where} cannot be read: {_explain_hf(error)}") from error


def _explain_hf(error: Exception) -> str:
    text = " ".join(str(error).split())
    offline = ("OfflineModeIsEnabled", "ConnectError", "LocalEntryNotFoundError")
    if isinstance(error, ConnectionError) or type(error).__name__ in offline:
        return (
            f"the hub does not answer ({type(error).__name__}: {text}); name a local directory, or read it"
            " once while the hub can be reached"
        )
    return f"{type(error).__name__}: {text}"


def _open_hf(source: DataSourceConfig, where: str) -> Any:
    """A Dataset or, streaming, an IterableDataset."""
    import datasets
    from datasets.config import HF_HUB_OFFLINE

    path = Path(source.dataset)
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _choose_saved(datasets.load_from_disk(str(path)), source, where)
    if path.is_file():
        format_ = FORMAT_OF_SUFFIX.get(path.suffix)
        if format_ is None:
            raise DataError(
                f"{where} is a file of an unknown kind; it can be one of {', '.join(FORMAT_OF_SUFFIX)}, or a"
                " directory"
            )
        builder = datasets.load_dataset_builder(
            format_, data_files={source.split.partition("[")[0]: [str(path)]}
        )
    else:
        dataset, _, subset = source.dataset.partition(":")
        builder = datasets.load_dataset_builder(dataset, subset or None)
    _check_format(builder, where)
    if source.size is not None and not path.exists() and not HF_HUB_OFFLINE:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


def _choose_saved(saved: Any, source: DataSourceConfig, where: str) -> Any:
    """The split of what save_to_disk wrote: a split, or several by name."""
    if isinstance(saved, dict):
        if source.split not in saved:
            close = nearest(source.split, list(saved))
            raise DataError(
                f"{where}: it has no split {source.split}; it has {', '.join(saved)}"
                + (f"; did you mean {close}?" if close else "")
            )
        return saved[source.split]
    if saved.split is not None and str(saved.split) != source.split:
        raise DataError(
            f"{where} is the split {saved.split}, but split={source.split!r}; set split ="
            f" {str(saved.split)!r}"
        )
    return saved


def _check_format(builder: Any, where: str) -> None:
    modules = [cls.__module__ for cls in type(builder).__mro__]
    if not {f"datasets.packaged_modules.{name}.{name}" for name in PLAIN_FORMATS} & {*modules}:
        raise DataError(
            f"{where} is in a format that is not read ({modules[0].rpartition('.')[2]}), because reading it"
            f" may run code or give no text; save it as one of {', '.join(PLAIN_FORMATS)}"
        )

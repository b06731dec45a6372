"""Columns on disk: what viewers have computed from a record's files, so that the next one reads only what is
new.

    index/metrics.json         which columns, how many rows, up to where the files were read; replaced by rename, so it is the commit
    index/metrics-1f8a…/0.bin  one column, little-endian numbers one after another; bytes beyond the committed rows mean nothing
    index/lock                 locked by the one viewer that may write; the others compute in memory

All of it may be deleted at any time. What does not fit the files of the run, or its own checksums, is not
used and is built anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollouts.inspect.column_rows import ABSENT, REAL, TEXT, WHOLE, Block

SCHEMA = 1  # of the index; another one is built anew
ITEM_BYTES = {TEXT: 4, WHOLE: 8, REAL: 8}


class ColumnDamage(Exception):
    """A column is not what was committed; the index is to be built anew."""


class Position(msgspec.Struct, frozen=True):
    """Up to where the files of a record were read, at the beginning of a row."""

    part: int  # which of the files, from 0
    offset: int  # bytes
    line: int  # rows before it in that file


class Column(msgspec.Struct, frozen=True):
    """One column of a store."""

    name: str
    dtype: str  # TEXT, WHOLE or REAL
    crc: int  # of the committed bytes


class Store(msgspec.Struct, frozen=True):
    """What is committed: index/NAME.json."""

    schema: int
    directory: str  # beside the file
    rows: int
    position: Position
    marks: tuple[
        tuple[int, int, int, int], ...
    ]  # (part, begin, end, crc32) of bytes that the run's files must have
    columns: tuple[Column, ...]
    texts: dict[str, tuple[str, ...]]  # of TEXT columns: the text of code n at n − 1

    def find(self, name: str) -> int | None:
        """Where the column is."""
        return next((place for place, column in enumerate(self.columns) if column.name == name), None)


def make_store(name: str, columns: Mapping[str, str]) -> Store:
    """An empty store with a new directory, which is not made yet."""
    made = tuple(Column(column, dtype, 0) for column, dtype in columns.items())
    texts: dict[str, tuple[str, ...]] = {column: () for column, dtype in columns.items() if dtype == TEXT}
    return Store(SCHEMA, f"{name}-{secrets.token_hex(8)}", 0, Position(0, 0, 0), (), made, texts)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the store of one kind of file lies."""

    root: Path  # RUN/index
    name: str  # metrics, samples, …
    columns: Mapping[str, str]  # those that it must have

    @property
    def commit(self) -> Path:
        return self.root / f"{self.name}.json"

    def column(self, store: Store, place: int) -> Path:
        return self.root / store.directory / f"{place}.bin"


def load_store(place: StorePlace) -> Store | None:
    """The committed store, None if there is none that can be used: missing, of another schema, damaged, or
    with columns cut short.
    """
    try:
        store = msgspec.json.decode(place.commit.read_bytes(), type=Store)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    known = {column.name: column.dtype for column in store.columns}
    whole = (
        store.schema == SCHEMA
        and store.rows >= 0
        and store.directory.startswith(f"{place.name}-")
        and store.directory.removeprefix(f"{place.name}-").isalnum()
        and all(known.get(name) == dtype for name, dtype in place.columns.items())
        and all(column.dtype in ITEM_BYTES for column in store.columns)
        and all(column.name in store.texts for column in store.columns if column.dtype == TEXT)
    )
    try:
        held = whole and all(
            place.column(store, index).stat().st_size >= store.rows * ITEM_BYTES[column.dtype]
            for index, column in enumerate(store.columns)
        )
    except OSError:
        return None
    return store if held else None


def load_column(place: StorePlace, store: Store, index: int) -> np.ndarray:
    """The committed rows of a column. Raises ColumnDamage if they are not what was committed."""
    column = store.columns[index]
    try:
        values = np.fromfile(place.column(store, index), dtype=column.dtype, count=store.rows)
    except OSError as error:
        raise ColumnDamage(f"{place.column(store, index)}: {error}") from error
    if len(values) != store.rows or zlib.crc32(values.view(np.uint8).data) != column.crc:
        raise ColumnDamage(f"{place.column(store, index)} is not what was written")
    return values


@contextmanager
def lock_index(root: Path) -> Iterator[bool]:
    """Whether this viewer may write into the index, which is made if it is missing; nobody else may until the
    block ends.

    Raises OSError where the directory cannot be written or locked.
    """
    root.mkdir(exist_ok=True)
    file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)


def append_block(place: StorePlace, store: Store, block: Block) -> Store:
    """The store with the block's rows behind its own; not committed. Raises OSError."""
    (place.root / store.directory).mkdir(exist_ok=True)
    store = add_columns(place, store, [name for name in block.numbers if store.find(name) is None])
    texts = dict(store.texts)
    columns: list[Column] = []
    for index, column in enumerate(store.columns):
        if column.dtype == TEXT:
            values, texts[column.name] = encode_texts(
                block.texts.get(column.name, [None] * block.rows), texts[column.name]
            )
        else:
            values = get_numbers(block, column.name, column.dtype)
        columns.append(_append_values(place.column(store, index), column, store.rows, values))
    return msgspec.structs.replace(store, rows=store.rows + block.rows, columns=tuple(columns), texts=texts)


def add_columns(place: StorePlace, store: Store, names: Sequence[str]) -> Store:
    """The store with REAL columns that are NaN so far."""
    absent = np.full(store.rows, np.nan, dtype=REAL)
    added: list[Column] = []
    for index, name in enumerate(names, len(store.columns)):
        added.append(_append_values(place.column(store, index), Column(name, REAL, 0), 0, absent))
    return msgspec.structs.replace(store, columns=(*store.columns, *added))


def get_numbers(block: Block, name: str, dtype: str) -> np.ndarray:
    """The block's column, absent throughout where it has none."""
    held = block.numbers.get(name)
    if held is None:
        return np.full(block.rows, np.nan if dtype == REAL else ABSENT, dtype=dtype)
    return held.astype(dtype, copy=False)


def encode_texts(words: Sequence[str | None], known: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Codes of the words, 0 for None, and the known texts with new ones behind them."""
    codes = {None: 0, **{text: code for code, text in enumerate(known, 1)}}
    for word in dict.fromkeys(words):
        codes.setdefault(word, len(codes))
    return np.array([codes[word] for word in words], dtype=TEXT), tuple(
        text for text in codes if text is not None
    )


def _append_values(path: Path, column: Column, rows: int, values: np.ndarray) -> Column:
    """Writes behind the committed rows, over what a writer that was killed has left there."""
    begin, data = rows * ITEM_BYTES[column.dtype], np.ascontiguousarray(values).view(np.uint8).data
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(file, "wb") as out:
        out.truncate(begin)
        out.seek(begin)
        out.write(data)
    return msgspec.structs.replace(column, crc=zlib.crc32(data, column.crc))


def commit_store(place: StorePlace, store: Store) -> None:
    """Makes the store the one that viewers find; older directories of the kind are removed. Raises OSError."""
    beside = place.root / f".{place.name}.json-{secrets.token_hex(4)}"
    try:
        beside.write_bytes(json.dumps(msgspec.to_builtins(store), separators=(",", ":")).encode())
        beside.replace(place.commit)
    finally:
        beside.unlink(missing_ok=True)
    for other in place.root.glob(f"{place.name}-*"):
        if other.name != store.directory and other.is_dir() and not other.is_symlink():
            shutil.rmtree(other, ignore_errors=True)

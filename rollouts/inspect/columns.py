"""A record's .jsonl files as columns of numbers, so that a viewer answers at once however long the run is.

    metrics.jsonl ─► decode new lines ─► columns in index/ ─► Columns ─► the tables, curves and filters of viewers

`open_columns` reads what the index has not seen yet. Up to KEEP_BYTES of it stay in memory, for they are read
again as fast as they are written; more are added to the index. Where that is not possible (a directory that
is not writable, another viewer that is writing) everything is computed in memory, and `notes` say so.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollouts.errors import RunDirError
from rollouts.inspect.column_rows import (
    LAYOUTS,
    PLACE,
    REAL,
    TEXT,
    WHOLE,
    Block,
    Layout,
    decode_lines,
    join_blocks,
)
from rollouts.inspect.column_store import (
    ColumnDamage,
    Position,
    Store,
    StorePlace,
    append_block,
    commit_store,
    encode_texts,
    get_numbers,
    load_column,
    load_store,
    lock_index,
    make_store,
)
from rollouts.metrics.jsonl import Row, parse_row
from rollouts.run_dir import RunDir

KEEP_BYTES = 4 << 20  # of lines that are not in the index: decoded in 0.1 s
BLOCK_BYTES = 16 << 20  # of lines that are decoded at a time
COMMIT_BLOCKS = (
    16  # after so many blocks an index that is being built is committed: what is interrupted goes on there
)
MARK_BYTES = 4096  # at the beginning and at the end of what was read: by them an index knows its files


@dataclass(frozen=True, slots=True)
class Part:
    """One of the files of a record, as it was when it was looked at."""

    path: Path
    size: int  # bytes


class Columns:
    """The rows of one kind of file, of all attempts, in the order of the files; a column is read when it is
    asked for. Made by open_columns.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[Part],
        place: StorePlace,
        store: Store,
        tail: Block,
        notes: Sequence[str],
    ) -> None:
        self._layout = layout
        self._parts = parts
        self._place = place
        self._store = store
        self._tail = tail  # the rows behind the store's
        self._held: dict[str, np.ndarray] = {}
        self._texts: dict[str, tuple[str, ...]] = {}
        self._newest: np.ndarray | None = None
        self.rows = store.rows + tail.rows
        self.notes = tuple(notes)  # for a person: a torn line, why nothing was kept

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the columns that not every row has the place for: of metrics.jsonl the metrics, in order
        of appearance.
        """
        fixed = {*self._layout.columns, *PLACE}
        stored = [column.name for column in self._store.columns]
        return tuple(name for name in dict.fromkeys([*stored, *self._tail.numbers]) if name not in fixed)

    def column(self, name: str) -> np.ndarray:
        """A value for each row: float64 with NaN for none, or int64 with -1 for none, or codes of
        `texts(name)`. Not to be written to.

        Raises KeyError for a column that no row has.
        """
        if name not in self._held:
            self._held[name] = self._read_column(name)
            self._held[name].flags.writeable = False
        return self._held[name]

    def texts(self, name: str) -> tuple[str, ...]:
        """What the codes of a column of texts mean: code 0 is an absent text, ''."""
        self.column(name)
        return self._texts[name]

    def match_text(self, name: str, text: str) -> np.ndarray:
        """For each row whether its text is this one."""
        texts = self.texts(name)
        return self.column(name) == texts.index(text) if text in texts else np.zeros(self.rows, dtype=bool)

    def newest(self) -> np.ndarray:
        """For each row whether it is of the highest attempt that wrote a row of its (stage, step)."""
        if self._newest is None:
            self._newest = find_newest(self.column("stage"), self.column("step"), self.column("attempt"))
        return self._newest

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> list[Row]:
        """The rows themselves, read from the files. Raises RunDirError where they have changed since."""
        return list(self.iterate_rows(indices))

    def iterate_rows(self, indices: Sequence[int] | np.ndarray) -> Iterator[Row]:
        """The rows, one after another. Raises RunDirError like read_rows."""
        for index, line in zip(indices, self.read_lines(indices), strict=True):
            row = parse_row(line)
            if row is None:
                path, offset = self.paths[int(self.column("part")[index])], int(self.column("offset")[index])
                raise RunDirError(
                    f"{path}: no row begins at byte {offset} any more; the file was changed: look again"
                )
            yield row

    def read_lines(self, indices: Sequence[int] | np.ndarray) -> Iterator[bytes]:
        """The lines on which the rows stand, without the newline, one after another."""
        places = [
            self.column(name)[np.asarray(indices, dtype=np.int64)].tolist()
            for name in ("part", "offset", "length")
        ]
        with ExitStack() as stack:
            files = {
                part: stack.enter_context(self._parts[part].path.open("rb")).fileno()
                for part in set(places[0])
            }
            for part, offset, length in zip(*places, strict=True):
                yield os.pread(files[part], length, offset).rstrip(b"\n")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, by their number in column `part`."""
        return tuple(part.path for part in self._parts)

    def _read_column(self, name: str) -> np.ndarray:
        index = self._store.find(name)
        if index is None and name not in self._tail.numbers and name not in self._tail.texts:
            raise KeyError(name)
        try:
            return self._join(name, index)
        except ColumnDamage:
            self._forget_store()
            return self._join(name, None)

    def _join(self, name: str, index: int | None) -> np.ndarray:
        """The stored rows and the tail's."""
        dtype = self._store.columns[index].dtype if index is not None else self._dtype(name)
        stored = (
            load_column(self._place, self._store, index)
            if index is not None
            else np.full(self._store.rows, np.nan, dtype=REAL)
        )
        if dtype != TEXT:
            tail = get_numbers(self._tail, name, dtype)
            return np.concatenate([stored, tail]) if self._store.rows else tail.copy()
        codes, texts = encode_texts(
            self._tail.texts.get(name, [None] * self._tail.rows), self._store.texts.get(name, ())
        )
        self._texts[name] = ("", *texts)
        return np.concatenate([stored, codes]) if self._store.rows else codes

    def _dtype(self, name: str) -> str:
        return {**self._layout.columns, **PLACE}.get(name, REAL)

    def _forget_store(self) -> None:
        """Goes on without the index, which is damaged: the same rows from the files, and the next viewer
        builds it anew.
        """
        current = load_store(self._place)
        if current is None or current.directory == self._store.directory:
            discard(self._place)
        self._store = make_store(self._layout.name, {**self._layout.columns, **PLACE})
        self._tail = join_blocks(
            [
                empty_block(self._layout),
                *(block for block, _ in read_blocks(self._layout, self._parts, Position(0, 0, 0))),
            ]
        )
        if (last := decode_torn(self._layout, self._parts)) is not None:
            self._tail = join_blocks([self._tail, last])
        assert self._tail.rows == self.rows, (self._tail.rows, self.rows)


def open_columns(run_dir: RunDir, name: str, *, keep_bytes: int = KEEP_BYTES) -> Columns:
    """The columns of `metrics`, `samples`, `contributions` or `spans`; none for a file that is missing.

    Whole lines that the index lacks are decoded, and added to it if they are more than `keep_bytes`. A torn
    last line is left out, and noted. Raises RunDirError naming a row that is damaged or that rollouts did not
    write.
    """
    layout = LAYOUTS[name]
    parts = [Part(path, path.stat().st_size) for path in run_dir.parts(run_dir.root / f"{name}.jsonl")]
    place = StorePlace(run_dir.index, name, {**layout.columns, **PLACE})
    notes: list[str] = []
    store = load_fitting(place, parts)
    if sum(part.size for part in parts[store.position.part :]) - store.position.offset > keep_bytes:
        store = extend_store(layout, place, parts, store, notes)
    blocks = [block for block, _ in read_blocks(layout, parts, store.position)]
    last = decode_torn(layout, parts)
    if last is not None:
        blocks.append(last)
    elif torn := read_torn(parts):
        notes.append(
            f"{parts[-1].path}: the last line is torn ({len(torn)} bytes) and left out; its writer was"
            " killed, or is writing it"
        )
    return Columns(layout, parts, place, store, join_blocks([empty_block(layout), *blocks]), notes)


def load_fitting(place: StorePlace, parts: Sequence[Part]) -> Store:
    """The committed store if it was read from these files, else an empty one."""
    store = load_store(place)
    if store is not None and fits_files(store, parts):
        return store
    return make_store(place.name, place.columns)


def fits_files(store: Store, parts: Sequence[Part]) -> bool:
    """Whether the files reach as far as the store has read, and have the bytes that it remembers."""
    position = store.position
    if position.part >= max(1, len(parts)) or (parts and position.offset > parts[position.part].size):
        return False
    if not parts or any(
        not (0 <= part <= position.part and 0 <= begin <= end) for part, begin, end, _ in store.marks
    ):
        return store.rows == 0
    return all(crc_of(parts[part].path, begin, end) == crc for part, begin, end, crc in store.marks)


def make_marks(parts: Sequence[Part], position: Position) -> tuple[tuple[int, int, int, int], ...]:
    """The bytes by which the files are known again: the first ones, and the last that were read."""
    first_end = min(MARK_BYTES, position.offset if position.part == 0 else parts[0].size)
    places = [(0, 0, first_end), (position.part, max(0, position.offset - MARK_BYTES), position.offset)]
    return tuple((part, begin, end, crc_of(parts[part].path, begin, end)) for part, begin, end in places)


def crc_of(path: Path, begin: int, end: int) -> int:
    """CRC-32 of bytes of a file."""
    with path.open("rb") as file:
        file.seek(begin)
        return zlib.crc32(file.read(end - begin))


def extend_store(
    layout: Layout, place: StorePlace, parts: Sequence[Part], store: Store, notes: list[str]
) -> Store:
    """The store with all whole lines of the files in it, committed; the one that there is, and a note, where
    it cannot be written.
    """
    committed = store
    try:
        with lock_index(place.root) as mine:
            if not mine:
                notes.append(f"another viewer is writing {place.root}: computed in memory")
                return committed
            store = committed = load_fitting(place, parts)
            for count, (block, position) in enumerate(read_blocks(layout, parts, store.position), 1):
                store = msgspec.structs.replace(append_block(place, store, block), position=position)
                if count % COMMIT_BLOCKS == 0:
                    committed = commit_marked(place, store, parts)
            return commit_marked(place, store, parts)
    except OSError as error:
        notes.append(f"{place.root} cannot be written ({error.strerror or error}): computed in memory")
        return committed


def commit_marked(place: StorePlace, store: Store, parts: Sequence[Part]) -> Store:
    """The store, committed with the marks of its files."""
    marked = msgspec.structs.replace(store, marks=make_marks(parts, store.position))
    commit_store(place, marked)
    return marked


def discard(place: StorePlace) -> None:
    """Takes the commit away, so that the next viewer builds the index anew; where that is not allowed it
    stays.
    """
    try:
        place.commit.unlink(missing_ok=True)
    except OSError:
        return


# --- lines --------------------------------------------------------------------------------------------------


def read_blocks(
    layout: Layout, parts: Sequence[Part], position: Position
) -> Iterator[tuple[Block, Position]]:
    """The whole lines from `position` on as blocks with the places of their rows, each with the position
    behind it.

    Raises RunDirError for a damaged row, and for a torn line in a file that is not the last.
    """
    for number in range(position.part, len(parts)):
        begin, line = (position.offset, position.line) if number == position.part else (0, 0)
        for lines in read_lines(parts[number], begin):
            block = decode_lines(layout, lines, path=parts[number].path, first_row=line + 1)
            yield (
                place_block(block, lines, number, begin),
                Position(number, begin + len(lines), line + block.rows),
            )
            begin, line = begin + len(lines), line + block.rows
        if begin < parts[number].size and number + 1 < len(parts):
            block = decode_torn(layout, parts[: number + 1])
            if block is None:
                raise RunDirError(
                    f"{parts[number].path}:{line + 1} is torn, though {parts[number + 1].path.name} follows;"
                    " delete that line"
                )
            yield block, Position(number, parts[number].size, line + 1)


def read_lines(part: Part, begin: int) -> Iterator[bytes]:
    """The whole lines of a file from byte `begin` to its size when it was looked at, many at a time."""
    with part.path.open("rb") as file:
        file.seek(begin)
        left, rest = part.size - begin, b""
        while left > 0 and (data := file.read(min(BLOCK_BYTES, left))):
            left -= len(data)
            data = rest + data
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                yield data[:end]


def place_block(block: Block, lines: bytes, part: int, begin: int) -> Block:
    """The block with the place of each of its rows; `begin`: of the first."""
    ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")) + 1
    lengths = np.diff(ends, prepend=0)
    offsets = begin + ends - lengths
    place = {
        "part": np.full(block.rows, part, dtype=WHOLE),
        "offset": offsets.astype(WHOLE),
        "length": lengths.astype(WHOLE),
    }
    return Block(block.rows, {**block.numbers, **place}, block.texts)


def read_torn(parts: Sequence[Part]) -> bytes:
    """What follows the last newline of the last file."""
    if not parts:
        return b""
    with parts[-1].path.open("rb") as file:
        torn, begin = b"", parts[-1].size
        while begin > 0 and b"\n" not in torn:
            step = min(begin, 1 << 16)
            begin -= step
            file.seek(begin)
            torn = file.read(step) + torn
    return torn[torn.rfind(b"\n") + 1 :]


def decode_torn(layout: Layout, parts: Sequence[Part]) -> Block | None:
    """The row of a last line that lacks only its newline, None for another."""
    torn = read_torn(parts)
    if parse_row(torn) is None:
        return None
    block = decode_lines(layout, torn + b"\n", path=parts[-1].path, first_row=1)
    return place_block(block, torn + b"\n", len(parts) - 1, parts[-1].size - len(torn))


def empty_block(layout: Layout) -> Block:
    """No rows, with all columns of the kind."""
    types = {**layout.columns, **PLACE}
    numbers = {name: np.empty(0, dtype=dtype) for name, dtype in types.items() if dtype != TEXT}
    return Block(0, numbers, {name: [] for name, dtype in types.items() if dtype == TEXT})


# --- attempts -----------------------------------------------------------------------------------------------


def find_newest(stage: np.ndarray, step: np.ndarray, attempt: np.ndarray) -> np.ndarray:
    """For each row whether no other of its stage and step has a higher attempt."""
    if not len(step) or attempt.min() == attempt.max():
        return np.ones(len(step), dtype=bool)
    newest = np.zeros(len(step), dtype=bool)
    for code in np.unique(stage):
        rows = np.flatnonzero(stage == code)
        _, key = np.unique(step[rows], return_inverse=True)
        highest = np.zeros(key.max() + 1, dtype=attempt.dtype)
        np.maximum.at(highest, key, attempt[rows])
        newest[rows] = attempt[rows] == highest[key]
    return newest

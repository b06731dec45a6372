"""Per-token arrays of trained samples: binary files in tokens/, addressed by (file, offset) from the rows of
contributions.jsonl.

    tokens/STAGE-ATTEMPT-NNNNNN.bin  =  block, block, …
    block  =  b"tok1" | header bytes u32 | payload bytes u32 | crc32 u32 | header | payload            all
           little-endian

The header is JSON: id, length T and the columns with their types; the payload is the columns one after the
other, T values each; the CRC is of both. A column that has one value where the mask is 1 and one where it is
0 says the two in the header, and has no payload. A shard is only appended to, by one attempt; the oldest
shards are removed when all together are larger than the limit.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.errors import RecordError, StorageError
from rollouts.metrics.contributions import Place, UpdateRecord
from rollouts.metrics.record_files import FLAGS, write_whole
from rollouts.run_dir import RunDir

Array = NDArray[Any]
SHARD_BYTES = 64 << 20
SHARDS_AT_LEAST = 8  # that the limit holds, so that the removal of the oldest takes a small part
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*-([1-9][0-9]*)-([0-9]{6,})\.bin")  # attempt, number
MAGIC = b"tok1"
PREFIX = Struct("<4sIII")
BLOCK_BYTES_MAX = 1 << 30  # more is damage: a row of a hundred million tokens
TYPES = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}  # of columns; the others are <f4
LEVELLED = (
    "version",
    "slope",
    "weight",
    "advantage",
)  # columns that mostly have one value where the mask is 1 and one where it is 0
CHUNK_TOKENS = 1 << 16  # that numpy is given at once
KNOWN_TYPES = ("<i4", "|u1", "<f4")


# --- blocks -------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The arrays of one row, encoded."""

    data: bytes
    length: int  # T


def encode_blocks(update: UpdateRecord) -> list[Block]:
    """The block of each row of the update's batch."""
    columns, samples = collect_columns(update), update.batch.samples
    ids = [sample.id for sample in samples] if samples else [""] * len(update.batch)
    blocks: list[Block] = []
    for rows in chunk_rows(update.batch.tokens):
        blocks += _encode_rows(ids[rows], {name: values[rows] for name, values in columns.items()})
    return blocks


def chunk_rows(rows: Sequence[Array]) -> Iterator[slice]:
    """Neighbouring rows of some CHUNK_TOKENS values together: enough for one call of numpy, and no more
    memory than that.
    """
    begin, total = 0, 0
    for end, row in enumerate(rows, 1):
        total += len(row)
        if total >= CHUNK_TOKENS or end == len(rows):
            yield slice(begin, end)
            begin, total = end, 0


def _encode_rows(ids: Sequence[str], columns: Mapping[str, Sequence[Array]]) -> Iterator[Block]:
    """A block for each of some neighbouring rows."""
    lengths = [len(row) for row in columns["tokens"]]
    flat = {
        name: np.concatenate(values, dtype=TYPES.get(name, "<f4"), casting="unsafe")
        for name, values in columns.items()
    }
    levels = _find_levels(
        {name: flat[name] for name in LEVELLED if name in flat}, flat["mask"].astype(bool), lengths
    )
    raw = {name: f'["{name}","{values.dtype.str}"]' for name, values in flat.items()}
    begin = 0
    for row, (id_, length) in enumerate(zip(ids, lengths, strict=True)):
        end = begin + length
        described, payload = [], []
        for name, values in flat.items():
            found = levels[name][row] if name in levels else None
            described.append(raw[name] if found is None else f"{raw[name][:-1]},{found[0]!r},{found[1]!r}]")
            if found is None:
                payload.append(values[begin:end].data)
        header = f'{{"id":{json.dumps(id_)},"length":{length},"columns":[{",".join(described)}]}}'.encode()
        body = b"".join((header, *payload))
        yield Block(PREFIX.pack(MAGIC, len(header), len(body) - len(header), zlib.crc32(body)) + body, length)
        begin = end


def _find_levels(
    columns: Mapping[str, Array], mask: Array, lengths: Sequence[int]
) -> dict[str, list[tuple[float, float] | None]]:
    """Of each column, for each row: (value where the mask is 1, value where it is 0), or None where there are
    others. Equal are equal bits.
    """
    levels: dict[str, list[tuple[float, float] | None]] = {name: [None] * len(lengths) for name in columns}
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return levels
    sizes = np.asarray(lengths)[filled]
    starts = np.cumsum(sizes) - sizes
    inside, outside = (_find_first(side, starts, starts + sizes - 1) for side in (mask, ~mask))
    for name, values in columns.items():
        bits = values.view("<i4")
        same = np.where(mask, np.repeat(bits[inside], sizes), np.repeat(bits[outside], sizes)) == bits
        one = (
            np.logical_and.reduceat(same, starts) & np.isfinite(values[inside]) & np.isfinite(values[outside])
        )  # JSON has no word for the others
        pairs = list(zip(values[inside].tolist(), values[outside].tolist(), strict=True))
        for row in np.flatnonzero(one).tolist():
            levels[name][filled[row]] = pairs[row]
    return levels


def _find_first(side: Array, starts: Array, ends: Array) -> Array:
    """[B] places of the first token of each row that is on this side, or of some token of the row where none
    is.
    """
    places = np.append(np.flatnonzero(side), len(side))
    return np.minimum(places[np.searchsorted(places, starts)], ends)


def collect_columns(update: UpdateRecord) -> dict[str, Sequence[Array]]:
    """[T_i] per row of each column that the update has."""
    batch, traced = update.batch, update.forward.per_token
    versions = batch.weight_versions or [np.full(len(row), -1) for row in batch.tokens]
    columns: dict[str, Sequence[Array] | None] = {
        "tokens": batch.tokens,
        "mask": batch.loss_masks,
        "version": versions,
        "mu": batch.rollout_log_probs,
        "log_prob": None if traced is None else traced.log_probs,
        "slope": None if traced is None else traced.slopes,
        "weight": None if traced is None else traced.weights,
        "advantage": batch.advantages,
        "old": batch.old_log_probs,
        "ref": batch.ref_log_probs,
        "value": batch.old_values,
        "return": batch.returns,
    }
    return {name: values for name, values in columns.items() if values is not None}


def decode_block(data: bytes, *, where: str) -> tuple[str, dict[str, Array]]:
    """The sample's id and its columns [T]. Raises RecordError, beginning with `where`, for bytes that are not
    a whole block as it was written.
    """
    damaged = f"{where} is damaged"
    if len(data) < PREFIX.size:
        raise RecordError(f"{damaged}: it ends after {len(data)} bytes of a block")
    magic, header_bytes, payload_bytes, crc = PREFIX.unpack_from(data)
    end = PREFIX.size + header_bytes + payload_bytes
    if magic != MAGIC or len(data) < end:
        raise RecordError(f"{damaged}: no block begins there, or it is cut")
    body = memoryview(data)[PREFIX.size : end]
    if zlib.crc32(body) != crc:
        raise RecordError(f"{damaged}: its checksum is not the one that was written")
    header, at = json.loads(bytes(body[:header_bytes])), header_bytes
    columns: dict[str, Array] = {}
    for name, kind, *levels in header["columns"]:
        if kind not in KNOWN_TYPES:
            raise RecordError(f"{where}: a later version has written column {name!r} of type {kind!r}")
        if levels:
            columns[name] = np.where(columns["mask"], *levels).astype(kind)
        else:
            columns[name] = np.frombuffer(body, kind, header["length"], at).copy()
            at += columns[name].nbytes
    return header["id"], columns


# --- reading ------------------------------------------------------------------------------------------------


def read_token_arrays(run_dir: RunDir, row: Mapping[str, Any]) -> Mapping[str, Array]:
    """The per-token arrays [T] of a row of contributions.jsonl, by column: docs/run_directory.md lists them.

    Raises RecordError where none were kept, where the shard was removed to make room, and where it is
    damaged.
    """
    shard, offset = row.get("shard"), row.get("offset")
    what = f"step {row.get('step')}, update {row.get('update')}, row {row.get('row')}"
    if not isinstance(shard, str) or not isinstance(offset, int):
        raise RecordError(f"{what} has no per-token arrays: the disk refused them")
    if SHARD_NAME.fullmatch(shard) is None:
        raise RecordError(f"{what} names the shard {shard!r}, which is no name of one; the row is damaged")
    path = run_dir.tokens / shard
    try:
        with path.open("rb") as file:
            file.seek(offset)
            prefix = file.read(PREFIX.size)
            sizes = PREFIX.unpack(prefix)[1:3] if len(prefix) == PREFIX.size else (0, 0)
            data = prefix + file.read(min(sum(sizes), BLOCK_BYTES_MAX))
    except FileNotFoundError as error:
        raise RecordError(
            f"{path} of {what} was removed: arrays of the newest steps are kept; ask for a later step"
        ) from error
    except OSError as error:
        raise RecordError(f"{path} of {what} cannot be read ({error})") from error
    where = f"{path} at {offset}"
    sample_id, columns = decode_block(data, where=where)
    if sample_id != row.get("id", ""):
        raise RecordError(
            f"{where} is of the sample {sample_id!r}, not {row.get('id')!r}: the shard or the row is damaged"
        )
    return columns


# --- writing ------------------------------------------------------------------------------------------------


class TokenShards:
    """The shards that one attempt writes. Its methods block: call them from one thread at a time, off the
    event loop.
    """

    def __init__(self, run_dir: RunDir, *, attempt: int, limit_bytes: int) -> None:
        """limit_bytes: of all shards together, those of earlier attempts included; an update's own may go
        beyond until it is written.
        """
        self._folder = run_dir.tokens
        self._attempt = attempt
        self._limit = limit_bytes
        self._shard_bytes = max(1, min(SHARD_BYTES, limit_bytes // SHARDS_AT_LEAST))
        self._open: dict[str, tuple[int, Path]] = {}  # by stage: the shard that grows
        self._next = 0

    def write(self, stage: str, blocks: Sequence[Block]) -> list[Place]:
        """Appends the blocks and says where each lies; then removes the oldest shards beyond the limit.

        Raises StorageError where the disk refuses; what had been appended of the blocks is cut off again.
        """
        places: list[Place] = []
        try:
            file, path = self._choose_shard(stage)
            begin = end = os.lseek(file, 0, os.SEEK_END)
            for block in blocks:
                places.append(Place(path.name, end, block.length))
                end += len(block.data)
            try:
                write_whole(file, b"".join(block.data for block in blocks))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, begin)
                os.close(self._open.pop(stage)[0])  # nothing is appended to what may be left
                raise
            self._make_room()
        except OSError as error:
            raise StorageError(
                f"per-token arrays are refused by {self._folder} ({error}); free space"
            ) from error
        return places

    def close(self) -> None:
        """Flushes the shards to the device; one that refuses shows its damage to who reads it."""
        for file, _ in self._open.values():
            with suppress(OSError):
                os.fsync(file)
            os.close(file)
        self._open.clear()

    def _choose_shard(self, stage: str) -> tuple[int, Path]:
        """The stage's shard, or the next where it is full, or somebody has removed it."""
        if held := self._open.get(stage):
            state = os.fstat(held[0])
            if state.st_nlink > 0 and state.st_size < self._shard_bytes:
                return held
            os.close(self._open.pop(stage)[0])
        self._folder.mkdir(exist_ok=True)
        while (path := self._folder / f"{stage}-{self._attempt}-{self._next:06d}.bin").exists():
            self._next += 1
        self._open[stage] = os.open(path, FLAGS | os.O_EXCL | os.O_NOFOLLOW, 0o644), path
        return self._open[stage]

    def _make_room(self) -> None:
        growing = [path for _, path in self._open.values()]
        sizes = {path: path.stat().st_size for path in list_shards(self._folder)}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total > self._limit and path not in growing:
                path.unlink()
                total -= size


def list_shards(folder: Path) -> list[Path]:
    """The shards in a directory, oldest first: by attempt, then by number, which goes on over the stages of
    an attempt.
    """
    found = {path: match for path in folder.iterdir() if (match := SHARD_NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][1]), int(found[path][2]), path.name))

"""Per-token arrays of trained samples: binary files in tokens/, addressed by (file, offset) from the rows of
contributions.jsonl.

    tokens/STAGE-ATTEMPT-NNNNNN.bin  =  block, block, …
    block  =  bytes u64 | crc32 u32 | that many bytes of safetensors           little-endian

The safetensors hold one tensor [T] a column; the CRC is of the sample's id, then of them. A shard is only
appended to, by one attempt; the oldest shards are removed when all together are larger than the limit.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollouts.errors import RecordError, StorageError
from rollouts.metrics.contributions import Place, UpdateRecord
from rollouts.metrics.record_files import FLAGS, write_whole
from rollouts.run_dir import RunDir
from rollouts.types import LOSS_FIELDS

Array = NDArray[Any]
SHARD_BYTES = 64 << 20
SHARDS_AT_LEAST = 8  # that the limit holds, so that the removal of the oldest takes a small part
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*-([1-9][0-9]*)-([0-9]{6,})\.bin")  # attempt, number
PREFIX = struct.Struct("<QI")
BLOCK_BYTES_MAX = 1 << 30  # more is damage: a row of thirty million tokens
TYPES = {"tokens": "<i4", "mask": "|u1", "version": "<i4"}  # of columns; the others are <f4


# --- blocks -------------------------------------------------------------------------------------------------


def encode_blocks(update: UpdateRecord) -> Iterator[bytes]:
    """The block of each row of the update's batch."""
    columns = collect_columns(update)
    ids = [sample.id for sample in update.batch.samples] or [""] * len(update.batch.tokens)
    for id_, *row in zip(ids, *columns.values(), strict=True):
        arrays = dict(zip(columns, row, strict=True))
        body = safetensors.numpy.save(
            {name: np.asarray(values, TYPES.get(name, "<f4")) for name, values in arrays.items()}
        )
        yield PREFIX.pack(len(body), zlib.crc32(body, zlib.crc32(id_.encode()))) + body


def collect_columns(update: UpdateRecord) -> dict[str, Sequence[Array]]:
    """[T_i] per row of each column that the update has."""
    batch, traced = update.batch, update.forward.per_token
    columns: dict[str, Sequence[Array] | None] = {
        "tokens": batch.tokens,
        "mask": batch.loss_masks,
        "version": batch.weight_versions or [np.full(len(row), -1) for row in batch.tokens],
        "log_prob": traced and traced.log_probs,
        "slope": traced and traced.slopes,
        "weight": traced and traced.weights,
        "turn_reward": batch.turn_rewards,
        **{name: getattr(batch, field) for name, field in LOSS_FIELDS.items()},
    }
    return {name: values for name, values in columns.items() if values is not None}


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
            size, crc = PREFIX.unpack(file.read(PREFIX.size))
            body = file.read(min(size, BLOCK_BYTES_MAX))
        sample_id = row.get("id", "")
        if len(body) != size or zlib.crc32(body, zlib.crc32(sample_id.encode())) != crc:
            raise ValueError(f"no block of the sample {sample_id!r} with the checksum that was written")
        return safetensors.numpy.load(body)
    except FileNotFoundError as error:
        raise RecordError(
            f"{path} of {what} was removed: arrays of the newest steps are kept; ask for a later step"
        ) from error
    except (OSError, ValueError, struct.error, SafetensorError) as error:
        raise RecordError(f"{path} at {offset} is damaged, or cannot be read ({error})") from error


# --- writing ------------------------------------------------------------------------------------------------


class TokenShards:
    """The shards that one attempt writes. Its methods block: call them from one thread at a time, off the
    event loop.
    """

    def __init__(self, run_dir: RunDir, *, attempt: int, limit_bytes: int) -> None:
        """limit_bytes: of all shards together, those of earlier attempts included; an update's own may go
        beyond until it is written.
        """
        self._folder, self._attempt, self._limit = run_dir.tokens, attempt, limit_bytes
        self._file, self._path, self._next = -1, run_dir.tokens, 0  # the shard that grows

    def write(self, stage: str, update: UpdateRecord) -> list[Place]:
        """Appends the arrays of an update and says where those of each row lie; then removes the oldest
        shards beyond the limit.

        Raises StorageError where the disk refuses; what had been appended of the blocks is cut off again.
        """
        blocks = list(encode_blocks(update))
        try:
            begin = self._open_shard(stage)
            try:
                write_whole(self._file, b"".join(blocks))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, begin)
                self.close()  # nothing is appended to what may be left
                raise
            sizes = {path: path.stat().st_size for path in list_shards(self._folder)}
            for path in list(sizes):
                if sum(sizes.values()) > self._limit and path != self._path:
                    path.unlink()
                    del sizes[path]
        except OSError as error:
            raise StorageError(
                f"per-token arrays are refused by {self._folder} ({error}); free space"
            ) from error
        offsets, lengths = accumulate(map(len, blocks), initial=begin), map(len, update.batch.tokens)
        return [Place(self._path.name, *place) for place in zip(offsets, lengths)]  # noqa: B905

    def close(self) -> None:
        """Flushes the shard to the device; one that refuses shows its damage to who reads it."""
        if self._file >= 0:
            with suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
        self._file = -1

    def _open_shard(self, stage: str) -> int:
        """Where the stage's shard ends: the one that is open, or the next where it is full or of another
        stage, or somebody has removed it.
        """
        name = f"{stage}-{self._attempt}-"
        if self._file >= 0 and self._path.name.startswith(name):
            state = os.fstat(self._file)
            if state.st_nlink > 0 and state.st_size < min(SHARD_BYTES, self._limit // SHARDS_AT_LEAST):
                return state.st_size
        self.close()
        self._folder.mkdir(exist_ok=True)
        while (path := self._folder / f"{name}{self._next:06d}.bin").exists():
            self._next += 1
        self._file, self._path = os.open(path, FLAGS | os.O_EXCL | os.O_NOFOLLOW, 0o644), path
        return 0


def list_shards(folder: Path) -> list[Path]:
    """The shards in a directory, oldest first: by attempt, then by number, which goes on over the stages of
    an attempt.
    """
    found = {path: match for path in folder.iterdir() if (match := SHARD_NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][1]), int(found[path][2]), path.name))

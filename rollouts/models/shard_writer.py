"""Safetensors files written tensor by tensor as they come, so that no more than one tensor is held.

    bucket ─► names of the files ─► CPU, dtype ─► appended to the open shard of its dtype
        ─► shard full: header written, file complete

The header stands before the tensors and is written last: room for it is kept, and what is left of the room is
spaces, as the format allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.models.safetensors_file import CHUNK_BYTES, DTYPES, read_bytes

Bucket = Sequence[tuple[str, Tensor]]
SHARD_BYTES = 2 * 2**30
HEADER_BYTES = 1024, 64 * 1024  # least and most room; the most is enough for about 400 tensors
LENGTH_BYTES = 8


class Names(Protocol):
    """From tensors under the names that they have in memory to those of a model's files:
    rollouts.models.export.FileNames is one.
    """

    def translate(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The bucket as files have it; what must wait for more comes later."""
        ...

    def rest(self) -> list[tuple[str, Tensor]]:
        """What waited, when everything has come."""
        ...


def name_shard(prefix: str, number: int) -> str:
    """What a writer calls its files, counted from 1, before it is known how many there are."""
    return f"{prefix}-{number:05d}.safetensors"


class GrowingFile:
    """A safetensors file that tensors of one dtype are appended to. Open only while something is written: one
    that is given up leaks nothing.
    """

    def __init__(self, path: Path, shard_bytes: int) -> None:
        self.path = path
        self.size = 0  # bytes of tensors
        self._shard_bytes = shard_bytes
        self._header_bytes = min(max(HEADER_BYTES[0], shard_bytes // 128 * 8), HEADER_BYTES[1])
        self.names: list[str] = []
        self._entries = '{"__metadata__":{"format":"pt"}'

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor still belongs here, where others are already."""
        longer = len((self._entries + self._describe(name, tensor) + "}").encode())
        whole = LENGTH_BYTES + self._header_bytes + self.size + tensor.nbytes
        return whole <= self._shard_bytes and longer <= self._header_bytes

    def append(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor. Raises OSError."""
        self._entries += self._describe(name, tensor)
        content = read_bytes(tensor)
        with self.path.open("ab" if self.names else "wb") as file:
            if not self.names:
                file.write(bytes(LENGTH_BYTES + self._header_bytes))
            for start in range(0, len(content), CHUNK_BYTES):
                file.write(content[start : start + CHUNK_BYTES])
        self.size += tensor.nbytes
        self.names.append(name)

    def finish(self) -> None:
        """Writes the header: the file is complete. Raises OSError."""
        text = (self._entries + "}").encode().ljust(self._header_bytes)
        assert len(text) == self._header_bytes, f"{self.names[0]!r} is a name of {len(self.names[0])} letters"
        with self.path.open("r+b") as file:
            file.write(self._header_bytes.to_bytes(LENGTH_BYTES, "little") + text)

    def _describe(self, name: str, tensor: Tensor) -> str:
        entry: dict[str, Any] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, self.size + tensor.nbytes],
        }
        return f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"


class ShardWriter:
    """A WeightSink that writes safetensors files of at most `shard_bytes` (a larger tensor alone). Runs on
    the device thread.

    `on_shard` is called with each file that is complete. What fails is kept in `failure` and later buckets
    are let through unread: an error in a sink would fail the backend and every step after, and with several
    ranks it would leave the others inside a collective. `prefix`: of the names of files, which are
    {prefix}-00001.safetensors and so on.
    """

    def __init__(
        self,
        folder: Path,
        names: Names,
        *,
        dtype: torch.dtype | None,
        shard_bytes: int,
        on_shard: Callable[[Path], object],
        prefix: str = "model",
    ) -> None:
        self._folder = folder
        self._prefix = prefix
        self._names = names
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._on_shard = on_shard
        self._open: dict[
            torch.dtype, GrowingFile
        ] = {}  # one of each dtype, so that every tensor is aligned to its elements
        self._begun = 0  # files
        self._stopped = False
        self.failure: Exception | None = None
        self.shards: list[tuple[str, list[str]]] = []  # complete: file name, names of its tensors

    def take(self, bucket: Bucket) -> None:
        """Writes the bucket to the shards."""
        self._guard(lambda: self._add_all(self._names.translate(bucket)))

    def close(self) -> None:
        """Completes what is left."""
        self._guard(
            lambda: (self._add_all(self._names.rest()), [self._finish(dtype) for dtype in list(self._open)])
        )

    def stop(self) -> None:
        """Whatever comes later is let through: nobody waits for it any more."""
        self._stopped = True

    def _guard(self, work: Callable[[], object]) -> None:
        if self._stopped or self.failure is not None:
            return
        try:
            work()
        except Exception as error:  # raised again where the files are awaited
            self.failure = error

    def _add_all(self, tensors: Bucket) -> None:
        for name, tensor in tensors:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            if dtype not in DTYPES:
                raise ModelError(
                    f"{name} has dtype {dtype}, which model files do not hold here; convert it first"
                )
            own = tensor.detach().to(device="cpu", dtype=dtype)
            if dtype in self._open and not self._open[dtype].has_room(name, own):
                self._finish(dtype)
            if dtype not in self._open:
                self._begun += 1
                self._open[dtype] = GrowingFile(
                    self._folder / name_shard(self._prefix, self._begun), self._shard_bytes
                )
            self._open[dtype].append(name, own)

    def _finish(self, dtype: torch.dtype) -> None:
        shard = self._open.pop(dtype)
        shard.finish()
        self.shards.append((shard.path.name, shard.names))
        self._on_shard(shard.path)

"""Writing a weight snapshot: bucket by bucket from the trainer, shard by shard to disk, under the names that
model files have.

    backend's device thread:  bucket ─► names of the files ─► CPU, dtype ─► safetensors file ─► shard full?
    trio:                                                                                       └──► hash it and sync it in two threads, meanwhile

No more than one tensor is held beside the model (of one whose files join several of its tensors into one:
those of one such join). Where training goes on meanwhile, the device thread only copies (hold_weights), and
the same is done in another thread from the copy.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trio
from torch import Tensor

from rollouts.checkpoints.manifest import FileRecord
from rollouts.errors import SnapshotError, WeightSyncError
from rollouts.models.directories import fsync_path
from rollouts.models.export import FileNames, name_shards, write_config
from rollouts.models.host_memory import read_free_memory
from rollouts.models.shard_writer import SHARD_BYTES, ShardWriter
from rollouts.protocols import TrainingBackend, WeightSink
from rollouts.weight_sync.snapshots import (
    SnapshotManifest,
    Snapshots,
    check_snapshot,
    hash_file,
    make_temporary,
    parse_snapshot_name,
    publish_files,
    remove_snapshot,
)
from rollouts.weight_sync.sync import Snapshot, WeightSource
from rollouts.weight_sync.update import log_warning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COPIED_FILES = (  # what a server may want of a model directory beside weights
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json",
)  # fmt: skip
ROOM = 1.5  # free memory for each byte of a copy, at least
SHARDS, LEAST_SHARD_BYTES = (
    8,
    64 * 2**20,
)  # so many shards of that size or more: while one is hashed and synced the next is written


class HeldWeights:
    """A WeightSource: a trainer's weights of one version, in host memory."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        self.model = model  # tells how weights are called in files; its own have moved on
        self._buckets: list[list[tuple[str, Tensor]]] = []

    def take(self, bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
        """Copies one bucket. On the device thread."""
        self._buckets.append(
            [
                (name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True))
                for name, tensor in bucket
            ]
        )

    def stream_weights(self, sink: WeightSink) -> _Streamed:
        """Hands the buckets to `sink`, in a thread of their own."""

        def work() -> None:
            for bucket in self._buckets:
                sink(bucket)

        return _Streamed(
            partial(trio.to_thread.run_sync, work, abandon_on_cancel=True)
        )  # the sink lets the rest through then


class _Streamed:
    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work

    async def result(self) -> None:
        await self._work()


async def hold_weights(backend: TrainingBackend, *, dtype: torch.dtype | None = None) -> HeldWeights | None:
    """A copy of the trainer's weights as a snapshot stores them; None where this machine's memory has no room
    for it to spare.
    """
    model: Any = getattr(backend, "model", None)
    free = read_free_memory()
    if free is not None and free < ROOM * count_bytes(model, dtype):
        return None
    held = HeldWeights(model)
    failures: list[Exception] = []

    def sink(bucket: Sequence[tuple[str, Tensor]]) -> None:
        if not failures:
            try:
                held.take(bucket, dtype)
            except (
                Exception
            ) as error:  # raised below: an error in a sink would fail the backend and every step after
                failures.append(error)

    await backend.stream_weights(sink).result()
    if failures:
        raise SnapshotError(
            f"the weights could not be copied ({type(failures[0]).__name__}: {failures[0]})"
        ) from failures[0]
    return held


def count_bytes(model: PreTrainedModel | None, dtype: torch.dtype | None) -> int:
    """Of the parameters as a snapshot stores them; 0 without a model."""
    parameters = [] if model is None else list(model.parameters())
    return sum(
        one.numel() * (dtype if dtype and one.is_floating_point() else one.dtype).itemsize
        for one in parameters
    )


async def export_snapshot(
    backend: WeightSource,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    model_dir: Path | None = None,
) -> SnapshotManifest:
    """The manifest of the snapshot `path` (a name like v12), which holds the trainer's weights as a Hugging
    Face model directory.

    One that is there already is verified and kept as it is. `dtype`: what floating-point weights are stored
    as; None: as the trainer has them. `shard_bytes`: the most that one file holds; it holds less where few
    files would make the whole. `model_dir`: where files that a server wants beside the weights come from
    (tokenizer, chat template). Raises SnapshotError when the disk refuses, or when what is there is damaged;
    what the backend raises. Cancelling leaves a .tmp- directory, for the device thread may be writing still.
    """
    parsed = parse_snapshot_name(path.name)
    if parsed is None:
        raise SnapshotError(f"snapshot {path} must have a name like v12, its version")
    if path.exists():
        return await trio.to_thread.run_sync(check_snapshot, path)
    try:
        temporary = await trio.to_thread.run_sync(make_temporary, path)
    except OSError as error:
        raise SnapshotError(
            f"snapshot {path} cannot be written ({error}); free space there or choose another output.dir"
        ) from error
    model = getattr(backend, "model", None)
    try:
        shard_bytes = min(shard_bytes, max(LEAST_SHARD_BYTES, count_bytes(model, dtype) // SHARDS))
        shards = await _stream_shards(
            backend, temporary, FileNames(model), dtype=dtype, shard_bytes=shard_bytes
        )
        return await trio.to_thread.run_sync(
            lambda: _finish(temporary, path, shards, model=model, dtype=dtype, model_dir=model_dir)
        )
    except OSError as error:
        await trio.to_thread.run_sync(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise SnapshotError(
            f"snapshot {path} cannot be written ({error}); free space there or choose another output.dir"
        ) from error
    except Exception:
        await trio.to_thread.run_sync(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


async def _stream_shards(
    backend: WeightSource, folder: Path, names: FileNames, *, dtype: torch.dtype | None, shard_bytes: int
) -> list[tuple[FileRecord, list[str]]]:
    """Each shard's record and the names of its tensors; all of them are hashed and on disk."""
    to_hash, hashing = trio.open_memory_channel[Path](math.inf)  # no more than there are shards
    to_sync, syncing = trio.open_memory_channel[Path](math.inf)
    token = trio.lowlevel.current_trio_token()
    records: dict[str, FileRecord] = {}
    failures: list[Exception] = []

    def announce(path: Path) -> None:
        with suppress(
            trio.ClosedResourceError
        ):  # after a cancellation the device thread may still complete a shard
            to_hash.send_nowait(path)
            to_sync.send_nowait(path)

    async def follow(
        shards: trio.MemoryReceiveChannel[Path], work: Callable[[Path], FileRecord | None]
    ) -> None:
        async for path in shards:
            try:
                record = await trio.to_thread.run_sync(work, path)
            except OSError as error:
                failures.append(error)
            else:
                records.update({} if record is None else {path.name: record})

    writer = ShardWriter(
        folder,
        names,
        dtype=dtype,
        shard_bytes=shard_bytes,
        on_shard=lambda path: token.run_sync_soon(announce, path),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow, hashing, hash_file)
        nursery.start_soon(follow, syncing, fsync_path)
        try:
            await backend.stream_weights(writer.take).result()
            await trio.to_thread.run_sync(writer.close)
        except Exception as error:
            failures.append(error)
        finally:
            writer.stop()
            to_hash.close()
            to_sync.close()
    if writer.failure is not None or failures:
        raise writer.failure or failures[0]
    return [(records[name], tensors) for name, tensors in writer.shards]


def _finish(
    temporary: Path,
    path: Path,
    shards: list[tuple[FileRecord, list[str]]],
    *,
    model: PreTrainedModel | None,
    dtype: torch.dtype | None,
    model_dir: Path | None,
) -> SnapshotManifest:
    """Names the shards, adds the index and what a server wants beside them, and gives the snapshot its name."""
    if not shards:
        raise SnapshotError(f"snapshot {path} would hold no weights: the backend streamed none")
    renamed = name_shards(temporary, [(record.path, names) for record, names in shards], always_index=True)
    final = {
        name: FileRecord(name, record.size, record.sha256)
        for record, _ in shards
        for name in [renamed[record.path]]
    }
    for name in COPIED_FILES if model_dir is not None else ():
        if model_dir is not None and (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, temporary / name)
    if model is not None:
        write_config(model, temporary, dtype)
    version, _ = parse_snapshot_name(path.name) or (0, 0)
    return publish_files(temporary, path, version=version, shards=final)


class DiskSnapshots:
    """A SnapshotKeeper in one folder, `weights/`."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str | None = None,
        model_dir: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        warn: Callable[[str], None] = log_warning,
    ) -> None:
        self._warn = warn
        self._snapshots = Snapshots(folder)
        self._dtype = None if dtype is None else parse_dtype(dtype)
        self._model_dir = model_dir
        self._shard_bytes = shard_bytes
        self._made: dict[int, Path] = {}  # by this process, whose weights of a version are one thing
        self._cleared = False

    async def hold(self, backend: TrainingBackend) -> HeldWeights | None:
        """What export() takes in the trainer's place once that has moved on; None where there is no room for
        a copy.
        """
        return await hold_weights(backend, dtype=self._dtype)

    async def export(self, backend: WeightSource, version: int) -> Snapshot:
        """The trainer's weights as `version`; what this process made before is verified and given again.

        What an earlier process left of this version may be of other weights, which training would not make
        again bit for bit: it is never served, and the new one has another name beside it.
        """
        if not self._cleared:
            try:
                await trio.to_thread.run_sync(self._snapshots.clear_after_restart, version)
            except OSError as error:
                raise SnapshotError(
                    f"what an earlier run left in {self._snapshots.folder} cannot be removed ({error});"
                    " remove it by hand"
                ) from error
            self._cleared = True
        path = self._made.get(version) or self._snapshots.find_name(version)
        manifest = await export_snapshot(
            backend, path, dtype=self._dtype, shard_bytes=self._shard_bytes, model_dir=self._model_dir
        )
        self._made[version] = path
        return Snapshot(path, manifest.digest, manifest.weight_bytes)

    def open_reader(self, path: Path) -> AbstractContextManager[Path]:
        return self._snapshots.open_reader(path)

    async def prune(self, keep: Path) -> None:
        """Removes every snapshot but `keep` that nobody reads. One that the disk does not let go is a
        warning, and tried again next time.
        """
        for path in self._snapshots.removable(keep):
            try:
                await trio.to_thread.run_sync(remove_snapshot, path)
            except OSError as error:
                self._warn(f"the snapshot {path} could not be removed and takes up space: {error}")
        self._made = {version: path for version, path in self._made.items() if path.exists()}


def parse_dtype(name: str) -> torch.dtype:
    """The floating-point dtype of that name. Raises WeightSyncError for any other name."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise WeightSyncError(
            f"snapshot_dtype={name!r} is not a dtype that engines serve; use 'bfloat16', 'float16' or"
            " 'float32'"
        )
    return dtype

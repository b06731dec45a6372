"""Weight snapshots on disk: `weights/vN/`, Hugging Face model directories that never change.

    backend's device thread:  bucket ─► names of the files ─► CPU, dtype ─► shard full?
    trio, in threads:                                                       └──► hash and sync it, meanwhile
    .tmp-vN-xxxxxxxx/  shards, index, config ─► manifest.json (sizes, hashes) last ─► synced ─► renamed to vN/

A crash at any point leaves vN complete or a .tmp- directory that no reader looks at. No more than one tensor
is held beside the model (or those that a model's files join into one). Where training goes on meanwhile, the
device thread only copies (DiskSnapshots.hold), and the snapshot is written from the copy.
"""

import hashlib
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
import trio
from trio.to_thread import run_sync as run_in_thread

from rollouts.checkpoints.load import FileRecord, record_file
from rollouts.checkpoints.retention import remove_incomplete
from rollouts.checkpoints.save import TEMPORARY_PREFIX, move_aside
from rollouts.errors import SnapshotError
from rollouts.models.directories import write_json
from rollouts.models.export import (
    SHARD_BYTES,
    Bucket,
    FileNames,
    ShardWriter,
    copy_bucket,
    name_shards,
    write_description,
    write_safetensors,
)
from rollouts.models.host_memory import read_free_memory
from rollouts.models.load import load_hf_model
from rollouts.models.lora import WEIGHTS_FILE, Adapter, Trained, list_trained
from rollouts.protocols import Say, TrainingBackend, WeightSink
from rollouts.run_dir import fsync_path
from rollouts.types import live
from rollouts.weight_sync.update import log_warning

MANIFEST_NAME = "manifest.json"
SNAPSHOT_NAME = re.compile(r"v(0|[1-9][0-9]{0,17})(?:-(?:[2-9]|[1-9][0-9]{1,8}))?")  # version, edition
COPIED_FILES = (  # what a server may want of a model directory beside weights
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "tokenizer.model", "preprocessor_config.json",
)  # fmt: skip
ROOM = 1.5  # free memory for each byte of a copy, at least
SHARDS = 8  # as many of LEAST_SHARD_BYTES or more: while one is hashed and synced the next is written
LEAST_SHARD_BYTES = 64 * 2**20


class Snapshot(NamedTuple):
    """Weights on disk."""

    path: Path
    digest: str  # equal for equal weights
    weight_bytes: int
    files: tuple[FileRecord, ...] = ()  # all but the manifest


@live
class DiskSnapshots:
    """Writes snapshots into one folder, `weights/`, and removes them."""

    folder: Path
    _: KW_ONLY
    dtype: torch.dtype | None = None  # of floating-point weights as stored; None: as the trainer has them
    # where files come from that a server wants beside weights (tokenizer, chat template)
    model_dir: Path | None = None
    merge: bool = False  # an adapter is written as its whole model with the adapter added
    warn: Say = log_warning
    _newest: Snapshot | None = None
    _cleared: bool = False

    async def hold(self, backend: TrainingBackend) -> "HeldWeights | None":
        """A copy of the weights, in the dtype of a snapshot, for export(); None where memory has no room to
        spare.
        """
        held, free = HeldWeights(find_trained(backend), []), read_free_memory()
        if free is not None and free < ROOM * count_bytes(held.trained, self.dtype):
            return None

        def copy(bucket: Bucket) -> None:
            held.buckets.append(
                [
                    (name, one.detach().to("cpu", self.dtype if one.is_floating_point() else None, copy=True))
                    for name, one in bucket
                ]
            )

        await stream_guarded(backend, copy)
        return held

    async def export(self, source: "WeightSource", version: int) -> Snapshot:
        """The weights as `version`. The newest that it made is verified and returned again if it is of that
        version.

        What an earlier process left of this version may have other weights: it is never served, and the new
        snapshot is called v{version}-2 and so on. Raises SnapshotError.
        """
        newest = self._newest
        if newest and parse_snapshot_name(newest.path.name) == version:
            await run_in_thread(check_snapshot, newest)
            return newest
        if not self._cleared:
            try:
                await run_in_thread(clear_after_restart, self.folder, version)
            except OSError as error:
                raise SnapshotError(
                    f"what an earlier run left in {self.folder} cannot be removed ({error}); remove it"
                ) from error
            self._cleared = True
        path, edition = self.folder / f"v{version}", 1
        while path.exists():
            edition += 1
            path = self.folder / f"v{version}-{edition}"
        self._newest = await export_snapshot(
            source, path, dtype=self.dtype, model_dir=self.model_dir, merge=self.merge
        )
        return self._newest

    async def prune(self, keep: Path) -> None:
        """Removes every snapshot but `keep`. One that cannot be removed is a warning and tried again next
        time.
        """
        for _, path in list_snapshots(self.folder):
            if path == keep:
                continue
            try:
                await run_in_thread(remove_snapshot, path)
            except OSError as error:
                self.warn(f"the snapshot {path} could not be removed and takes up space: {error}")


# --- a copy in memory ---------------------------------------------------------------------------------------


class HeldWeights(NamedTuple):
    """A WeightSource: a trainer's weights of one version, in host memory."""

    # for the names of weights in files; its own weights have changed
    trained: Trained | None
    buckets: list[Bucket]

    async def stream_weights(self, sink: WeightSink) -> None:
        """Hands the buckets to `sink`, in a thread."""

        def stream() -> None:
            for bucket in self.buckets:
                sink(bucket)

        await run_in_thread(stream, abandon_on_cancel=True)  # sinks ignore what comes later


class WeightSource(Protocol):
    """A trainer, a copy of its weights, or a reference that moves."""

    def stream_weights(self, sink: WeightSink) -> Awaitable[None]: ...


async def stream_guarded(source: WeightSource, take: Callable[[Bucket], object]) -> None:
    """Hands all buckets to `take`. Raises what it raises, once the stream has ended: an error in a sink would
    fail the backend. After a cancellation buckets are let through unread.
    """
    failures = []
    awaited = True

    def sink(bucket: Bucket) -> None:
        if awaited and not failures:
            try:
                take(bucket)
            except Exception as error:
                failures.append(error)

    try:
        await source.stream_weights(sink)
    finally:
        awaited = False
    if failures:
        raise failures[0]


def find_trained(source: object) -> Trained | None:
    """What a WeightSource streams; None if it does not say."""
    return getattr(source, "trained", None)


def count_bytes(trained: Trained | None, dtype: torch.dtype | None) -> int:
    """Of the parameters as a snapshot stores them; 0 without any."""
    return sum(
        one.numel() * (dtype if dtype and one.is_floating_point() else one.dtype).itemsize
        for one in (list_trained(trained).values() if trained else ())
    )


async def hold_merged(source: WeightSource, adapter: Adapter, folder: Path) -> HeldWeights:
    """The adapter's model with the adapter as `source` streams it added to its weights; by way of `folder`.
    While it is held it takes the memory of the model. Raises ModelError, OSError.
    """
    weights = {}
    await stream_guarded(source, lambda bucket: weights.update(copy_bucket(bucket)))

    def merge() -> HeldWeights:
        write_description(adapter, folder)
        write_safetensors(folder / WEIGHTS_FILE, weights)
        model = load_hf_model(folder)
        shutil.rmtree(folder)
        return HeldWeights(model, [list(model.named_parameters())])

    return await run_in_thread(merge)


# --- writing ------------------------------------------------------------------------------------------------


async def export_snapshot(
    source: WeightSource,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    model_dir: Path | None = None,
    merge: bool = False,
) -> Snapshot:
    """The snapshot `path` (a new name like v12), complete on disk.

    `shard_bytes`: the most that one file holds; it holds less where few files would make the whole. Raises
    SnapshotError when the disk refuses; what the source raises. Cancelling leaves a .tmp- directory, because
    the device thread may still be writing.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    trained = find_trained(source)
    shard_bytes = min(shard_bytes, max(LEAST_SHARD_BYTES, count_bytes(trained, dtype) // SHARDS))
    try:
        await run_in_thread(lambda: temporary.mkdir(parents=True))
        if merge and isinstance(trained, Adapter):
            source = await hold_merged(source, trained, temporary / "adapter")
            trained = source.trained
        names = await run_in_thread(FileNames, trained)
        shards = await _stream_shards(source, temporary, names, dtype, shard_bytes)
        if not shards:
            raise SnapshotError(f"snapshot {path} would hold no weights: the backend streamed none")
        return await run_in_thread(_finish, temporary, path, shards, trained, dtype, model_dir)
    except Exception as error:
        await run_in_thread(lambda: shutil.rmtree(temporary, ignore_errors=True))
        if isinstance(error, OSError):
            raise SnapshotError(
                f"snapshot {path} cannot be written ({error}); free space there or choose another output.dir"
            ) from error
        raise


async def _stream_shards(
    source: WeightSource, folder: Path, names: FileNames, dtype: torch.dtype | None, shard_bytes: int
) -> list[tuple[FileRecord, list[str]]]:
    """Each shard's record and the names of its tensors; all of them are hashed and on disk."""
    token = trio.lowlevel.current_trio_token()
    records = {}
    failures = []

    async def follow(work: Callable[[Path], object], shard: Path) -> None:
        try:
            await run_in_thread(work, shard)
        except OSError as error:
            failures.append(error)

    def hash_shard(shard: Path) -> None:
        records[shard.name] = record_file(folder, shard)

    def announce(shard: Path) -> None:
        if not left:  # the device thread may complete a shard after a cancellation
            nursery.start_soon(follow, hash_shard, shard)
            nursery.start_soon(follow, fsync_path, shard)

    writer = ShardWriter(
        folder,
        names,
        dtype=dtype,
        shard_bytes=shard_bytes,
        on_shard=lambda shard: token.run_sync_soon(announce, shard),
    )
    left = False
    async with trio.open_nursery() as nursery:
        try:
            await stream_guarded(source, writer.take)
            await run_in_thread(writer.close)
        except Exception as error:
            failures.append(error)
        finally:
            left = True
    if failures:
        raise failures[0]
    return [(records[name], tensors) for name, tensors in writer.shards]


def _finish(
    temporary: Path,
    path: Path,
    shards: list[tuple[FileRecord, list[str]]],
    trained: Trained | None,
    dtype: torch.dtype | None,
    model_dir: Path | None,
) -> Snapshot:
    """Names the shards, adds the index and what a server wants beside them, the manifest, and renames it."""
    if trained:
        write_description(trained, temporary, dtype=dtype)
    renamed = name_shards(temporary, [(record.path, names) for record, names in shards], always_index=True)
    weights = [FileRecord(renamed[record.path], record.size, record.sha256) for record, _ in shards]
    if model_dir and not isinstance(trained, Adapter):
        for name in COPIED_FILES:
            if not (temporary / name).exists() and (model_dir / name).is_file():
                shutil.copyfile(model_dir / name, temporary / name)
    files = list(weights)
    for file in set(temporary.iterdir()) - {temporary / record.path for record in weights}:
        fsync_path(file)
        files.append(record_file(temporary, file))
    files.sort(key=lambda record: record.path)
    version = parse_snapshot_name(path.name)
    content = {"schema": 1, "version": version, "files": msgspec.to_builtins(files)}
    write_json(temporary / MANIFEST_NAME, content)
    fsync_path(temporary / MANIFEST_NAME)
    fsync_path(temporary)
    temporary.rename(path)
    fsync_path(path.parent)
    hashes = "\n".join(f"{record.path} {record.sha256}" for record in weights)
    size = sum(record.size for record in weights)
    return Snapshot(path, hashlib.sha256(hashes.encode()).hexdigest(), size, tuple(files))


# --- the folder ---------------------------------------------------------------------------------------------


def parse_snapshot_name(name: str) -> int | None:
    """The version of `vN`, or of another edition of it, `vN-E`; None for any other name."""
    match = SNAPSHOT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(version, path) of every complete snapshot in `folder`."""
    return [
        (version, path)
        for path in folder.glob("v*")
        if (version := parse_snapshot_name(path.name)) is not None
    ]


def check_snapshot(snapshot: Snapshot) -> None:
    """Raises SnapshotError naming the file that is missing or not as it was written. Blocks."""
    for record in snapshot.files:
        path = snapshot.path / record.path
        try:
            intact = path.is_file() and record_file(snapshot.path, path) == record
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read ({error}); remove {snapshot.path}") from error
        if not intact:
            raise SnapshotError(f"{path} is not as it was written: it is damaged, remove {snapshot.path}")


def clear_after_restart(folder: Path, version: int) -> None:
    """Removes what a killed run left: half-written snapshots, and versions above `version`, which training
    will make again. Blocks. Raises OSError.
    """
    remove_incomplete(folder)
    for newer, path in list_snapshots(folder):
        if newer > version:
            remove_snapshot(path)


def remove_snapshot(path: Path) -> None:
    """Removes a snapshot, its name first, so that no reader sees half of it. One that is gone is fine.
    Blocks. Raises OSError.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(move_aside(path), ignore_errors=True)  # what stays is cleared at the next start

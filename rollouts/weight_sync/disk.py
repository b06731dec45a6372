"""Writing a weight snapshot: bucket by bucket from the trainer, shard by shard to disk, under the names that model files have.

    backend's device thread:  bucket ─► names of the files ─► CPU, dtype ─► shard full? ─► safetensors file
    trio:                                                                                       └──► hash and sync in a thread, meanwhile

No more than one shard is held beside the model (a model whose files join several of its tensors into one: the whole of it).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trio
from safetensors.torch import save_file
from torch import Tensor

from rollouts.checkpoints.manifest import FileRecord
from rollouts.errors import SnapshotError, WeightSyncError
from rollouts.models.directories import WEIGHT_INDEX
from rollouts.models.quiet import quiet_transformers
from rollouts.protocols import TrainingBackend
from rollouts.weight_sync.snapshots import (
    SnapshotManifest,
    Snapshots,
    check_snapshot,
    make_temporary,
    parse_snapshot_name,
    publish_files,
    record_file,
    remove_snapshot,
)
from rollouts.weight_sync.sync import Snapshot
from rollouts.weight_sync.update import log_warning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bucket = Sequence[tuple[str, Tensor]]
SHARD_BYTES = 2 * 2**30
COPIED_FILES = (  # what a server may want of a model directory beside weights
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json",
)  # fmt: skip


async def export_snapshot(
    backend: TrainingBackend,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    model_dir: Path | None = None,
) -> SnapshotManifest:
    """The manifest of the snapshot `path` (a name like v12), which holds the trainer's weights as a Hugging Face model directory.

    One that is there already is verified and kept as it is. `dtype`: what floating-point weights are stored as; None: as the trainer has
    them. `model_dir`: where files that a server wants beside the weights come from (tokenizer, chat template). Raises SnapshotError when the
    disk refuses, or when what is there is damaged; what the backend raises. Cancelling leaves a .tmp- directory, for the device thread may
    be writing still.
    """
    parsed = parse_snapshot_name(path.name)
    if parsed is None:
        raise SnapshotError(f"snapshot {path} must have a name like v12, its version")
    if path.exists():
        return await trio.to_thread.run_sync(check_snapshot, path)
    temporary = await trio.to_thread.run_sync(make_temporary, path)
    model = getattr(backend, "model", None)
    try:
        shards = await _stream_shards(backend, temporary, FileNames(model), dtype=dtype, shard_bytes=shard_bytes)
        return await trio.to_thread.run_sync(lambda: _finish(temporary, path, shards, model=model, dtype=dtype, model_dir=model_dir))
    except OSError as error:
        await trio.to_thread.run_sync(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise SnapshotError(f"snapshot {path} cannot be written ({error}); free space there or choose another output.dir") from error
    except Exception:
        await trio.to_thread.run_sync(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


async def _stream_shards(
    backend: TrainingBackend, folder: Path, names: FileNames, *, dtype: torch.dtype | None, shard_bytes: int
) -> list[tuple[FileRecord, list[str]]]:
    """Each shard's record and the names of its tensors; all of them are hashed and on disk."""
    send, receive = trio.open_memory_channel[Path](math.inf)  # of paths
    token = trio.lowlevel.current_trio_token()
    writer = ShardWriter(folder, names, dtype=dtype, shard_bytes=shard_bytes, on_shard=lambda path: token.run_sync_soon(send.send_nowait, path))
    records: dict[str, FileRecord] = {}
    failures: list[Exception] = []

    async def hash_shards() -> None:
        async for path in receive:
            try:
                records[path.name] = await trio.to_thread.run_sync(record_file, path)
            except OSError as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hash_shards)
        try:
            await backend.stream_weights(writer.take).result()
            await trio.to_thread.run_sync(writer.close)
        except Exception as error:
            failures.append(error)
        finally:
            writer.stop()
            send.close()
    if writer.failure is not None or failures:
        raise writer.failure or failures[0]
    return [(records[name], tensors) for name, tensors in writer.shards]


class ShardWriter:
    """A WeightSink that writes safetensors files of at most `shard_bytes` (a larger tensor alone). Runs on the device thread.

    What fails is kept in `failure` and later buckets are let through unread: an error in a sink would fail the backend and every step after.
    """

    def __init__(self, folder: Path, names: FileNames, *, dtype: torch.dtype | None, shard_bytes: int, on_shard: Callable[[Path], object]) -> None:
        self._folder = folder
        self._names = names
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._on_shard = on_shard
        self._tensors: dict[str, Tensor] = {}  # of the shard that is being filled
        self._size = 0
        self._stopped = False
        self.failure: Exception | None = None
        self.shards: list[tuple[str, list[str]]] = []  # file name, names of its tensors

    def take(self, bucket: Bucket) -> None:
        """Copies the bucket, and writes a shard whenever one is full."""
        self._guard(lambda: self._add_all(self._names.translate(bucket)))

    def close(self) -> None:
        """Writes what is left."""
        self._guard(lambda: (self._add_all(self._names.rest()), self._write()))

    def stop(self) -> None:
        """Whatever comes later is let through: nobody waits for it any more."""
        self._stopped = True

    def _guard(self, work: Callable[[], object]) -> None:
        if self._stopped or self.failure is not None:
            return
        try:
            work()
        except Exception as error:  # raised again where the snapshot is awaited
            self.failure = error

    def _add_all(self, tensors: Bucket) -> None:
        for name, tensor in tensors:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            own = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            if self._tensors and self._size + own.nbytes > self._shard_bytes:
                self._write()
            self._tensors[name] = own
            self._size += own.nbytes

    def _write(self) -> None:
        if not self._tensors:
            return
        path = self._folder / f"model-{len(self.shards) + 1:05d}.safetensors"
        save_file(self._tensors, path, metadata={"format": "pt"})
        self.shards.append((path.name, list(self._tensors)))
        self._tensors, self._size = {}, 0
        self._on_shard(path)


class FileNames:
    """From the names that tensors have in memory to those that they have in a model's files.

    Transformers holds the experts of a mixture in one tensor where files have one each, and renames more besides; a tied weight has one
    name in files; buffers that belong to the weights are in files and not among the parameters. Without a model names stay as they are.
    """

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._model = model
        self._renamed: dict[str, str] = {}  # parameters that have another of their tied names in files
        self._joins = False  # whether a tensor of the files is made of several
        self._held: dict[str, Tensor] = {}
        self._looked = False

    def translate(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The bucket as files have it; nothing where tensors are to be joined, until rest()."""
        if self._model is None:
            return [(name, torch.as_tensor(tensor)) for name, tensor in bucket]
        extra = self._look(self._model)
        tensors = {self._renamed.get(name, name): tensor for name, tensor in [*bucket, *extra]}
        if self._joins:
            self._held |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            return []
        return self._revert(self._model, tensors)

    def rest(self) -> list[tuple[str, Tensor]]:
        """What was held back, when everything has come."""
        held, self._held = self._held, {}
        return [] if self._model is None or not held else self._revert(self._model, held)

    def _look(self, model: PreTrainedModel) -> list[tuple[str, Tensor]]:
        """Once: which names differ. The buffers, which no stream brings."""
        if self._looked:
            return []
        self._looked = True
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        state = model.state_dict()
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        with quiet_transformers():
            kept = set(remove_tied_weights_from_state_dict({name: value for name, value in state.items() if name not in ignored}, model))
        names_of: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        for names in names_of.values():
            in_files = next((name for name in names if name in kept), names[0])
            self._renamed |= {name: in_files for name in names if name != in_files}
        self._joins = joins_tensors(model)
        parameters = {name for names in names_of.values() for name in names}
        return [(name, state[name]) for name in sorted(kept - parameters)]

    def _revert(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(model, tensors).items())


def joins_tensors(model: PreTrainedModel) -> bool:
    """Whether a tensor of the model's files is made of several that it has in memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [conversion.reverse_transform() for conversion in conversions or () if isinstance(conversion, WeightConverter)]
    return any(len(conversion.source_patterns) > 1 for conversion in reverse)


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
    final: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, (record, names) in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (temporary / record.path).rename(temporary / name)
        final[name] = FileRecord(name, record.size, record.sha256)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": sum(record.size for record in final.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (temporary / WEIGHT_INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    for name in COPIED_FILES if model_dir is not None else ():
        if model_dir is not None and (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, temporary / name)
    if model is not None:
        _write_config(model, temporary, dtype)
    version, _ = parse_snapshot_name(path.name) or (0, 0)
    return publish_files(temporary, path, version=version, shards=final)


def _write_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    with quiet_transformers():
        config.save_pretrained(str(folder))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))


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

    async def export(self, backend: TrainingBackend, version: int) -> Snapshot:
        """The trainer's weights as `version`; what this process made before is verified and given again.

        What an earlier process left of this version may be of other weights, which training would not make again bit for bit: it is never
        served, and the new one has another name beside it.
        """
        if not self._cleared:
            try:
                await trio.to_thread.run_sync(self._snapshots.clear_after_restart, version)
            except OSError as error:
                raise SnapshotError(f"what an earlier run left in {self._snapshots.folder} cannot be removed ({error}); remove it by hand") from error
            self._cleared = True
        path = self._made.get(version) or self._snapshots.find_name(version)
        manifest = await export_snapshot(backend, path, dtype=self._dtype, shard_bytes=self._shard_bytes, model_dir=self._model_dir)
        self._made[version] = path
        return Snapshot(path, manifest.digest, manifest.weight_bytes)

    def open_reader(self, path: Path) -> AbstractContextManager[Path]:
        return self._snapshots.open_reader(path)

    async def prune(self, keep: Path) -> None:
        """Removes every snapshot but `keep` that nobody reads. One that the disk does not let go is a warning, and tried again next time."""
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
        raise WeightSyncError(f"snapshot_dtype={name!r} is not a dtype that engines serve; use 'bfloat16', 'float16' or 'float32'")
    return dtype

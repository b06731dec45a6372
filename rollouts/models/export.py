"""From a torch module, or a stream of its weights, to a directory that others load; written by one process,
or by the ranks of a job together, each some of the tensors.

    bucket ─► names of the files ─► CPU, dtype ─► appended to the open shard of its dtype ─► full: complete
    every rank:  deal_weights ─► who writes which weights, the same on all ─► open_part
    rank 0:      write_description, and when all have written name_parts ─► final names, their index

Nothing here communicates.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import ModelError, StorageError
from rollouts.models.directories import WEIGHT_INDEX, WHOLE_FILE, is_adapter, quiet_transformers, write_json
from rollouts.models.lora import WEIGHTS_FILE, Adapter, Trained, list_trained, write_adapter_config
from rollouts.models.sharded import list_weights
from rollouts.protocols import Bucket
from rollouts.run_dir import fsync_path
from rollouts.types import Texts, live

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_BYTES = 2 * 2**30
HEADER_BYTES = 64 * 1024  # enough for about 200 tensors
NAME_BYTES = 512  # for each tensor of an adapter, of which a model has many
PART = "model-of-rank-"  # and the rank: what the names of its files begin with


def save_hf_model(
    model: "PreTrainedModel",
    path: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face model directory: config, generation config, safetensors, and the tokenizer with
    its chat template.

    One model.safetensors, or several with an index where there is more than `shard_bytes` (or more than one
    dtype), under the names that transformers expects; tied weights are written once. weights: what takes the
    place of the model's own parameters, in any order; held is no more than one of them (of a model whose
    files join several tensors into one: those of one such join). dtype: what floating-point weights are
    stored as; None: as they are, and then load_hf_model with that dtype reads them bit for bit.

    Not atomic, not synced: write into a directory that nobody reads yet, see rollouts.checkpoints.save. Any
    rank of a distributed job may call it (transformers' own saving writes nothing but on rank 0). Raises
    OSError of a disk, ModelError if a weight never came, came twice, or has a dtype that files do not hold.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_description(model, path, tokenizer, dtype)
    writer = ShardWriter(path, FileNames(model), dtype=dtype, shard_bytes=shard_bytes)
    for name, tensor in model.named_parameters() if weights is None else weights:
        writer.take([(name, tensor)])
    writer.close()
    name_shards(path, writer.shards)


def copy_bucket(bucket: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies on the CPU, by the same names."""
    return [(name, one.to("cpu", copy=True)) for name, one in bucket]


def name_shards(
    path: Path, shards: Sequence[tuple[str, Sequence[str]]], *, always_index: bool = False
) -> Texts:
    """Gives complete shards (file, names of its tensors) their final names and, if they are several, an
    index. New names by old ones.

    What an earlier model of another number of files had instead is removed: a reader would take it.
    """
    several, whole = len(shards) > 1, WEIGHTS_FILE if is_adapter(path) else WHOLE_FILE
    renamed = {}
    for number, (file, _) in enumerate(shards, start=1):
        renamed[file] = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else whole
        (path / file).rename(path / renamed[file])
    (path / WEIGHT_INDEX).unlink(missing_ok=True)
    if several:
        (path / WHOLE_FILE).unlink(missing_ok=True)
    if several or (always_index and whole == WHOLE_FILE):
        weight_map = dict(sorted((name, renamed[file]) for file, names in shards for name in names))
        total = sum((path / file).stat().st_size for file in renamed.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(path / WEIGHT_INDEX, index)
    return renamed


def write_description(
    trained: Trained,
    path: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dtype: torch.dtype | None = None,
) -> None:
    """All of a model directory but its weights: config.json, saying class and dtype as saved models do,
    generation_config.json of a model that generates, and the tokenizer; or of an adapter's.
    """
    with quiet_transformers():
        if tokenizer:
            tokenizer.save_pretrained(path)
        if isinstance(trained, Adapter):
            write_adapter_config(trained, path)
            return
        config = copy.deepcopy(trained.config)
        config.dtype = str(dtype or trained.dtype).removeprefix("torch.")
        config.architectures = [type(trained).__name__.removeprefix("FSDP")]
        config.save_pretrained(path)
        if trained.can_generate() and trained.generation_config:
            trained.generation_config.save_pretrained(path)


# --- shards -------------------------------------------------------------------------------------------------


@live
class ShardWriter:
    """Writes safetensors files of at most `shard_bytes` of tensors (a larger tensor alone), called
    {prefix}-00001.safetensors and so on. `on_shard` is called with each file that is complete.
    """

    folder: Path
    names: "FileNames"
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    on_shard: Callable[[Path], object] = lambda _: None
    prefix: str = "model"
    # complete: file name, names of its tensors
    shards: list[tuple[str, list[str]]] = field(default_factory=list)
    # one of each dtype, so that every tensor is aligned to its elements
    _open: "dict[torch.dtype, TensorFile]" = field(default_factory=dict)

    def take(self, bucket: Bucket) -> None:
        """Writes the bucket. Raises OSError, ModelError."""
        for name, tensor in self.names.translate(bucket):
            dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
            own, shard = tensor.detach().to(device="cpu", dtype=dtype), self._open.get(dtype)
            full = shard and (shard.nbytes + own.nbytes > self.shard_bytes or not shard.has_room(name))
            if full and not self.names.one_file:
                self._finish(dtype)
            if dtype not in self._open:
                path = self.folder / name_shard(self.prefix, len(self.shards) + len(self._open) + 1)
                self._open[dtype] = TensorFile(path, header_bytes=self.names.header_bytes)
            self._open[dtype].append(name, own)

    def close(self) -> None:
        """Completes what is left. Raises OSError; ModelError naming a weight that never came."""
        self.take([])
        self.names.check_complete()
        for dtype in list(self._open):
            self._finish(dtype)

    def _finish(self, dtype: torch.dtype) -> None:
        shard = self._open.pop(dtype)
        shard.finish()
        self.shards.append((shard.path.name, shard.names))
        self.on_shard(shard.path)


def name_shard(prefix: str, number: int) -> str:
    """What a writer calls its files, counted from 1, before it is known how many there are."""
    return f"{prefix}-{number:05d}.safetensors"


def split_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> list[Bucket]:
    """`tensors` in order, in buckets of one dtype and at most `bucket_bytes`; a larger tensor alone."""
    buckets = []
    size = 0
    for name, tensor in tensors:
        if not buckets or size + tensor.nbytes > bucket_bytes or buckets[-1][0][1].dtype != tensor.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


# --- parts of several ranks ---------------------------------------------------------------------------------


class Deal(NamedTuple):
    """Who writes which of a model's weights, and what one of the ranks needs for its part."""

    # of each rank, as the model holds them: sharded or whole
    parameters: Sequence[Bucket]
    names: "FileNames"  # of the one rank's part
    nbytes: int  # of the one rank's part, whole


def deal_weights(trained: Trained, rank: int, ranks: int) -> Deal:
    """The weights dealt to `ranks`, and the part of `rank`. The same deal on all ranks; no communication.

    The largest first, each to the rank that has least so far: none gets more than an equal share and one
    thing besides. Tensors that the files join go to one rank, an adapter, one file, to the first. Raises
    ModelError.
    """
    names, parameters = FileNames(trained), list_trained(trained)
    weights = parameters if isinstance(trained, Adapter) else list_weights(trained)[0]
    sizes = {unit: sum(weights[name].nbytes for name in unit) for unit in names.units.values()}
    mine = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(sizes, key=lambda unit: -sizes[unit]):
        taker = loads.index(min(loads))
        mine[taker] += unit
        loads[taker] += sizes[unit]
    names.to_come &= {*mine[rank]}
    held = [[(name, parameters[name]) for name in part if name in parameters] for part in mine]
    return Deal(held, names, loads[rank])


def open_part(path: Path, names: "FileNames", rank: int) -> ShardWriter:
    """A writer of one rank's part of the weights, which `names` expects.

    Its files are synced where rank 0 will not do it: another machine's memory may hold the bytes back.
    """
    return ShardWriter(path, names, prefix=f"{PART}{rank}", on_shard=fsync_path if rank else lambda _: None)


def name_parts(path: Path, counts: Sequence[int]) -> None:
    """Gives the files of all ranks, of which each has written so many, their final names, and writes the
    index. On rank 0, after all have written.

    Raises OSError, StorageError if what another rank has written is not to be read here.
    """
    shards = []
    for rank, count in enumerate(counts):
        for number in range(1, count + 1):
            file = name_shard(f"{PART}{rank}", number)
            try:
                with safe_open(path / file, framework="pt") as opened:
                    shards.append((file, list(opened.keys())))
            except SafetensorError as error:
                raise StorageError(
                    f"{path / file}, as its rank has written it, cannot be read on rank 0 ({error}); check"
                    " the filesystem of output.dir"
                ) from error
    name_shards(path, shards)


# --- names --------------------------------------------------------------------------------------------------


class FileNames:
    """From the names that tensors have in memory to those that they have in a model's files.

    Transformers holds the experts of a mixture in one tensor where files have one each, and renames more
    besides; a tied weight has one name in files; buffers that belong to the weights are in files and not
    among the parameters. Where a tensor of the files is made of several, those wait for each other; nothing
    else is held. Without a model names stay as they are.
    """

    def __init__(self, trained: Trained | None) -> None:
        self._model = model = None if isinstance(trained, Adapter) else trained
        self.header_bytes, self.one_file = HEADER_BYTES, isinstance(trained, Adapter)
        # by each name of the model, parameters and buffers: those that files join with it
        self.units: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, Tensor] = {}
        self._buffers: list[tuple[str, Tensor]] = []  # which no stream brings, until they have come
        if model:
            weights, _ = list_weights(model)
            parameters, ignored = dict(model.named_parameters()), model._keys_to_ignore_on_save or ()
            self._buffers = [(n, one) for n, one in weights.items() if n not in {*parameters, *ignored}]
            # the names that transformers leaves out of files, and those that it writes
            self._in_files = {name: model.all_tied_weights_keys.get(name, name) for name in parameters}
            self._in_files |= {name: name for name, _ in self._buffers}
            for unit in find_units(model, self._in_files):
                self.units |= dict.fromkeys(unit, unit)
        elif isinstance(trained, Adapter):
            self.units = dict.fromkeys(trained.weights, tuple(trained.weights))  # one file
            self.header_bytes += NAME_BYTES * len(self.units)
        self.to_come = set(self.units)  # weights and buffers; made fewer for a part, before the first bucket

    def translate(self, bucket: Bucket) -> Bucket:
        """The bucket as files have it, without the tensors that are to be joined with some that have not
        come, and with the model's buffers if it is the first. Raises ModelError.
        """
        if self._model is None:
            self.to_come -= {name for name, _ in bucket}
            return [(name, torch.as_tensor(tensor)) for name, tensor in bucket]
        ready = {}
        buffers = [(name, one) for name, one in self._buffers if name in self.to_come]
        self._buffers = []
        for name, tensor in [*bucket, *buffers]:
            if name not in self.to_come:
                raise ModelError(f"the weight {name!r} came twice, or is none of the model's")
            self.to_come.remove(name)
            unit = self.units[name]
            self._held[name] = tensor if len(unit) == 1 else tensor.detach().to("cpu", copy=True)
            if self._held.keys() >= set(unit):
                ready |= {self._in_files[one]: self._held.pop(one) for one in unit}
        if not ready:
            return []
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._model, ready).items())

    def check_complete(self) -> None:
        """Raises ModelError naming a weight that never came."""
        if self.to_come:
            raise ModelError(
                f"{len(self.to_come)} weights never came, {min(self.to_come)!r} for one; stream all of the"
                " model's parameters"
            )


def find_units(model: "PreTrainedModel", in_files: Texts) -> list[tuple[str, ...]]:
    """The model's names (keys of `in_files`: what files call them, but for conversions), those together that
    become one tensor of the model's files; nearly all are alone.

    A renaming that looks at several names at once makes one unit of all.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False) or []
    if any(isinstance(one, getattr(loading, "GroupWeightRename", ())) for one in conversions):
        return [tuple(in_files)]
    reverse: list[Any] = [
        one.reverse_transform() for one in reversed(conversions) if isinstance(one, loading.WeightConverter)
    ]
    units = {}
    for name, written in in_files.items():
        made, pattern = loading.rename_source_key(written, [], reverse)
        units.setdefault((name if pattern is None else made, pattern is None), []).append(name)
    return [tuple(unit) for unit in units.values()]


# --- safetensors --------------------------------------------------------------------------------------------

# Files are written in plain Python, tensor by tensor: other threads run meanwhile, errors are OSErrors, and
# no more than one tensor is held. The library holds the interpreter for as long as it writes, which would
# stop training, and says in words only why a disk refused. Format: 8 bytes with the header's length
# (little-endian), the header as JSON padded with spaces to 8 bytes, the tensors one after the other. The
# header is written last, into room that is kept for it.

CHUNK_BYTES = 16 * 2**20
LENGTH_BYTES = 8
ENTRY_BYTES = 256  # room in the header for what it says of one tensor beside its name
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """A safetensors file that tensors of one dtype, or of narrower and narrower ones, are appended to. Open
    only while something is written: one that is given up leaks nothing.
    """

    def __init__(self, path: Path, *, header_bytes: int, metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.names: list[str] = []
        self.nbytes = 0  # of the tensors
        self._room = -(-header_bytes // 8) * 8
        self._header = f'{{"__metadata__":{json.dumps(dict(metadata or {"format": "pt"}))}'
        path.write_bytes(bytes(LENGTH_BYTES + self._room))

    def has_room(self, name: str) -> bool:
        """Whether the header still holds another tensor."""
        return len(self._header.encode()) + len(name.encode()) + ENTRY_BYTES <= self._room

    def append(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, on whatever device it is. Raises OSError; ModelError for a dtype outside
        DTYPES.
        """
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"tensor {name!r} has dtype {tensor.dtype}, which files do not hold here; convert it first"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        with self.path.open("ab") as file:
            for start in range(0, len(content), CHUNK_BYTES):
                file.write(content[start : start + CHUNK_BYTES])
        offsets = [self.nbytes, self.nbytes + tensor.nbytes]
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._header += f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        self.nbytes += tensor.nbytes
        self.names.append(name)

    def finish(self) -> None:
        """Writes the header: the file is complete. Raises OSError."""
        text = (self._header + "}").encode().ljust(self._room)
        assert len(text) == self._room, "has_room was asked before each tensor"
        with self.path.open("r+b") as file:
            file.write(self._room.to_bytes(LENGTH_BYTES, "little") + text)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """The file `path` holds `tensors`, on whatever device they are. Not synced. Tensors that share memory are
    written once each. Raises OSError; ModelError for a dtype outside DTYPES.
    """
    room = len(json.dumps(metadata)) + sum(len(json.dumps(name)) + ENTRY_BYTES for name in tensors)
    file = TensorFile(path, header_bytes=room + ENTRY_BYTES, metadata=metadata)
    # widest first, which keeps every tensor aligned
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        file.append(name, tensors[name])
    file.finish()

"""From a torch module, or a stream of its weights, to a directory that others load; written by one process,
or by the ranks of a job together, each some of the tensors.

    bucket ─► names of the files ─► CPU, dtype ─► appended to the open shard of its dtype ─► full: complete
    every rank:  deal_weights ─► who writes which weights, the same on all ─► write_part
    rank 0:      write_description, and when all have written name_parts ─► final names, their index

Nothing here communicates.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import ModelError, StorageError
from rollouts.models.directories import WEIGHT_INDEX, WHOLE_FILE, fsync_path
from rollouts.models.quiet import quiet_transformers
from rollouts.models.safetensors_file import TensorFile
from rollouts.models.sharded import list_weights
from rollouts.protocols import WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Bucket = Sequence[tuple[str, Tensor]]
SHARD_BYTES = 2 * 2**30
HEADER_BYTES = 1024, 64 * 1024  # least and most room; the most is enough for about 200 tensors


def save_hf_model(
    model: PreTrainedModel, path: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Writes a Hugging Face model directory: config, safetensors in the weights' own dtype, and the tokenizer
    with its chat template.

    What `load_hf_model` then reads with that dtype is equal bit for bit; tied weights are written once. Not
    atomic: write into a directory that nobody reads yet. Any rank of a distributed job may call it
    (transformers' own saving writes nothing but on rank 0).
    """
    path.mkdir(parents=True, exist_ok=True)
    with write_hf_stream(model, path, tokenizer) as sink:
        sink([(name, parameter.detach()) for name, parameter in model.named_parameters()])


@contextmanager
def write_hf_stream(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[WeightSink]:
    """A sink for all of the model's weights, in buckets of any size and order; when the context is left the
    directory is complete.

    Written are config, generation config, tokenizer and safetensors under the names that transformers
    expects: one model.safetensors, or several with an index where there is more than `shard_bytes` (or more
    than one dtype). Held is no more than one tensor beside the bucket (of a model whose files join several of
    its tensors into one: those of one such join). `model` may be sharded: of it only names, shapes, config
    and buffers are read. `dtype`: what floating-point weights are stored as; None: as they come. The sink
    never raises; what failed is raised when the context is left: OSError of a disk, ModelError if a weight
    never came, came twice, or has a dtype that files do not hold. Not synced, not atomic: see
    rollouts.checkpoints.save.
    """
    write_description(model, path, tokenizer, dtype)
    with ShardWriter(path, FileNames(model), dtype=dtype, shard_bytes=shard_bytes).writing() as writer:
        yield writer.take
    name_shards(path, writer.shards)


def name_shards(
    path: Path, shards: Sequence[tuple[str, Sequence[str]]], *, always_index: bool = False
) -> dict[str, str]:
    """Gives complete shards (file, names of its tensors) their final names and, if they are several, an
    index. New names by old ones.

    What an earlier model of another number of files had instead is removed: a reader would take it. Raises
    ModelError if there are no shards, or if two tensors have one name.
    """
    if not shards:
        raise ModelError(f"{path} would hold no weights: none were streamed")
    counts = Counter(name for _, names in shards for name in names)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ModelError(
            f"{path} would hold {twice[0]!r} twice (and {len(twice) - 1} more): its parts were not written"
            " together"
        )
    renamed: dict[str, str] = {}
    for number, (file, _) in enumerate(shards, start=1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        renamed[file] = WHOLE_FILE if len(shards) == 1 else several
        (path / file).rename(path / renamed[file])
    if len(shards) > 1:
        (path / WHOLE_FILE).unlink(missing_ok=True)
    (path / WEIGHT_INDEX).unlink(missing_ok=True)
    if len(shards) > 1 or always_index:
        weight_map = {name: renamed[file] for file, names in shards for name in names}
        total = sum((path / file).stat().st_size for file in renamed.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (path / WEIGHT_INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return renamed


def write_description(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """All of a model directory but its weights: config.json, saying class and dtype as saved models do,
    generation_config.json of a model that generates, and the tokenizer.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    with quiet_transformers():
        config.save_pretrained(str(path))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(path))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(path))


# --- shards -------------------------------------------------------------------------------------------------


class ShardWriter:
    """A WeightSink that writes safetensors files of at most `shard_bytes` (a larger tensor alone). Runs on
    the device thread.

    `on_shard` is called with each file that is complete. What fails is kept in `failure` and later buckets
    are let through unread: an error in a sink would fail the backend and every step after, and with several
    ranks it would leave the others inside a collective. The files are called {prefix}-00001.safetensors and
    so on.
    """

    def __init__(
        self,
        folder: Path,
        names: FileNames,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        on_shard: Callable[[Path], object] = lambda _: None,
        prefix: str = "model",
    ) -> None:
        self._folder, self._prefix, self._names = folder, prefix, names
        self._dtype, self._shard_bytes, self._on_shard = dtype, shard_bytes, on_shard
        # one of each dtype, so that every tensor is aligned to its elements
        self._open: dict[torch.dtype, TensorFile] = {}
        self._stopped = False
        self.failure: Exception | None = None
        self.shards: list[tuple[str, list[str]]] = []  # complete: file name, names of its tensors

    @contextmanager
    def writing(self) -> Iterator[ShardWriter]:
        """Itself; when the block is left its shards are complete. Raises what failed."""
        try:
            yield self
            self.close()
        finally:
            self.stop()
        if self.failure is not None:
            raise self.failure

    def take(self, bucket: Bucket) -> None:
        """Writes the bucket to the shards."""
        self._guard(lambda: self._append(self._names.translate(bucket)))

    def close(self) -> None:
        """Completes what is left. A weight that never came is a failure."""

        def work() -> None:
            self._append(self._names.rest())
            for dtype in list(self._open):
                self._finish(dtype)

        self._guard(work)

    def _guard(self, work: Callable[[], object]) -> None:
        if self._stopped or self.failure is not None:
            return
        try:
            work()
        except Exception as error:  # raised again where the files are awaited
            self.failure = error

    def stop(self) -> None:
        """Whatever comes later is let through: nobody waits for it any more."""
        self._stopped = True

    def _append(self, tensors: Bucket) -> None:
        for name, tensor in tensors:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            own, shard = tensor.detach().to(device="cpu", dtype=dtype), self._open.get(dtype)
            if shard and (shard.size + own.nbytes > self._shard_bytes or not shard.has_room(name)):
                self._finish(dtype)
            if dtype not in self._open:
                number = len(self.shards) + len(self._open) + 1
                path = self._folder / name_shard(self._prefix, number)
                room = min(max(HEADER_BYTES[0], self._shard_bytes // 16), HEADER_BYTES[1])
                self._open[dtype] = TensorFile(path, header_bytes=room, metadata={"format": "pt"})
            self._open[dtype].append(name, own)

    def _finish(self, dtype: torch.dtype) -> None:
        shard = self._open.pop(dtype)
        shard.finish()
        self.shards.append((shard.path.name, shard.names))
        self._on_shard(shard.path)


def name_shard(prefix: str, number: int) -> str:
    """What a writer calls its files, counted from 1, before it is known how many there are."""
    return f"{prefix}-{number:05d}.safetensors"


# --- parts of several ranks ---------------------------------------------------------------------------------


class Deal(NamedTuple):
    """Who writes which of a model's weights, and what one of the ranks needs for its part."""

    # of each rank, as the model holds them: sharded or whole
    parameters: Sequence[Sequence[tuple[str, Tensor]]]
    names: FileNames  # of the one rank's part, looked at
    nbytes: int  # of the one rank's part, whole


def deal_weights(model: PreTrainedModel, rank: int, ranks: int) -> Deal:
    """The weights dealt to `ranks`, and the part of `rank`. The same deal on all ranks; no communication.

    The largest first, each to the rank that has least so far: none gets more than an equal share and one
    thing besides. Tensors that the files join go to one rank; buffers, and what files join with one, to rank
    0. Raises ModelError.
    """
    names, (weights, _) = FileNames(model), list_weights(model)
    parameters = dict(model.named_parameters())
    sizes = {unit: sum(weights[name].nbytes for name in unit) for unit in names.find_units()}
    mine: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(sizes, key=lambda unit: (parameters.keys() >= set(unit), -sizes[unit])):
        taker = loads.index(min(loads)) if parameters.keys() >= set(unit) else 0
        mine[taker] += unit
        loads[taker] += sizes[unit]
    names.expect_only(mine[rank])
    held = [[(name, parameters[name]) for name in part if name in parameters] for part in mine]
    return Deal(held, names, loads[rank])


def write_part(path: Path, names: FileNames, rank: int) -> AbstractContextManager[ShardWriter]:
    """A writer of one rank's part of the weights, which `names` expects; its files are complete when the
    context is left.

    They are synced where rank 0 will not do it: another machine's memory may hold the bytes back. Raises as
    write_hf_stream.
    """
    on_shard = fsync_path if rank else lambda _: None
    return ShardWriter(path, names, prefix=_name_part(rank), on_shard=on_shard).writing()


def name_parts(path: Path, counts: Sequence[int]) -> None:
    """Gives the files of all ranks, of which each has written so many, their final names, and writes the
    index. On rank 0, after all have written.

    Raises OSError, StorageError if what another rank has written is not to be read here, ModelError if two
    ranks have written one tensor.
    """
    shards: list[tuple[str, list[str]]] = []
    for rank, count in enumerate(counts):
        for file in (name_shard(_name_part(rank), number) for number in range(1, count + 1)):
            try:
                with safe_open(path / file, framework="pt") as opened:
                    shards.append((file, list(opened.keys())))
            except SafetensorError as error:
                raise StorageError(
                    f"{path / file}, as its rank has written it, cannot be read on rank 0 ({error}); check"
                    " the filesystem of output.dir"
                ) from error
    name_shards(path, shards)


def _name_part(rank: int) -> str:
    return f"model-of-rank-{rank}"


# --- names --------------------------------------------------------------------------------------------------


class FileNames:
    """From the names that tensors have in memory to those that they have in a model's files.

    Transformers holds the experts of a mixture in one tensor where files have one each, and renames more
    besides; a tied weight has one name in files; buffers that belong to the weights are in files and not
    among the parameters. Where a tensor of the files is made of several, those wait for each other; nothing
    else is held. Without a model names stay as they are.
    """

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._model = model
        self._units: dict[str, tuple[str, ...]] = {}  # by the model's names: those that files join with it
        self._in_files: dict[str, str] = {}  # of tied weights whose name in files is another one's
        self._held: dict[str, Tensor] = {}
        self._to_come: set[str] = set()
        self._buffers: list[tuple[str, Tensor]] = []  # which no stream brings, until they have come

    def translate(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The bucket as files have it, without the tensors that are to be joined with some that have not
        come. Raises ModelError.
        """
        if self._model is None:
            return [(name, torch.as_tensor(tensor)) for name, tensor in bucket]
        self.look()
        ready: dict[str, Tensor] = {}
        extra, self._buffers = self._buffers, []
        for name, tensor in [*bucket, *extra]:
            if name not in self._to_come:
                raise ModelError(f"the weight {name!r} came twice, or is none of the model's")
            self._to_come.remove(name)
            unit = self._units[name]
            self._held[name] = tensor if len(unit) == 1 else tensor.detach().to("cpu", copy=True)
            if self._held.keys() >= set(unit):
                ready |= {self._in_files.get(one, one): self._held.pop(one) for one in unit}
        if not ready:
            return []
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._model, ready).items())

    def rest(self) -> list[tuple[str, Tensor]]:
        """Buffers that no bucket took along. Raises ModelError naming a weight that never came."""
        found = self.translate([])
        if self._to_come:
            raise ModelError(
                f"{len(self._to_come)} weights never came, {min(self._to_come)!r} for one; stream all of the"
                " model's parameters"
            )
        return found

    def look(self) -> None:
        """Learns, once, which names differ, and the buffers. Else the first bucket does: call it where the
        model may run in another thread then.
        """
        model = self._model
        if model is None or self._units:
            return
        weights, aliases = list_weights(model)
        # the names that transformers leaves out of files
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        for main in set(aliases.values()):
            names = sorted([main, *(alias for alias, name in aliases.items() if name == main)])
            self._in_files[main] = next((name for name in names if name not in tied), names[-1])
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        parameters = {name for name, _ in model.named_parameters()}
        self._buffers = [(name, weights[name]) for name in sorted(weights.keys() - parameters - ignored)]
        names = [name for name in weights if name in parameters or name not in ignored]
        self._to_come = set(names)
        for unit in find_units(model, {name: self._in_files.get(name, name) for name in names}):
            self._units |= dict.fromkeys(unit, unit)

    def find_units(self) -> list[tuple[str, ...]]:
        """Names of the model's parameters, and of its buffers that files hold, in its order; in one tuple
        those that must come to one writer, because files join them.
        """
        self.look()
        return list(dict.fromkeys(self._units.values()))

    def expect_only(self, names: Collection[str]) -> None:
        """Of the weights only these units are to come, and of the buffers only these are added. Before the
        first bucket.
        """
        self.look()
        self._to_come &= set(names)
        self._buffers = [(name, buffer) for name, buffer in self._buffers if name in self._to_come]


def find_units(model: PreTrainedModel, names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The keys of `names`, those together that become one tensor of the model's files; nearly all are alone.
    `names`: the model's, to those in files.

    A renaming that looks at several names at once makes one unit of all.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    conversions = list(conversions or ())
    if any(isinstance(one, getattr(loading, "GroupWeightRename", ())) for one in conversions):
        return [tuple(names)]
    converters = [one for one in reversed(conversions) if isinstance(one, loading.WeightConverter)]
    reverse: list[Any] = [converter.reverse_transform() for converter in converters]
    units: dict[tuple[str, bool], list[str]] = {}
    for name, in_files in names.items():
        made, pattern = loading.rename_source_key(in_files, [], reverse)
        units.setdefault((name if pattern is None else made, pattern is None), []).append(name)
    return [tuple(unit) for unit in units.values()]

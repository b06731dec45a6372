"""From a torch module, or a stream of its weights, to a directory that others load."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.models.directories import WEIGHT_INDEX
from rollouts.models.quiet import quiet_transformers
from rollouts.models.shard_writer import SHARD_BYTES, Bucket, ShardWriter
from rollouts.models.weight_files import list_weights
from rollouts.protocols import WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    names: FileNames | None = None,
) -> Iterator[WeightSink]:
    """A sink for all of the model's weights, in buckets of any size and order; when the context is left the
    directory is complete.

    Written are config, generation config, tokenizer and safetensors under the names that transformers
    expects: one model.safetensors, or several with an index where there is more than `shard_bytes` (or more
    than one dtype). Held is no more than one tensor beside the bucket (of a model whose files join several of
    its tensors into one: those of one such join). `model` may be sharded: of it only names, shapes, config
    and buffers are read. `names`: of the model, looked at before, where the model runs meanwhile. `dtype`:
    what floating-point weights are stored as; None: as they come. The sink never raises; what failed is
    raised when the context is left: OSError of a disk, ModelError if a weight never came, came twice, or has
    a dtype that files do not hold. Not synced, not atomic: see rollouts.checkpoints.save.
    """
    write_description(model, path, tokenizer, dtype)
    with write_shards(path, names or FileNames(model), dtype=dtype, shard_bytes=shard_bytes) as writer:
        yield writer.take
    name_shards(path, writer.shards)


@contextmanager
def write_shards(
    path: Path,
    names: FileNames,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    prefix: str = "model",
    on_shard: Callable[[Path], object] = lambda _: None,
) -> Iterator[ShardWriter]:
    """A writer of all weights that `names` expects; when the context is left its `shards` are complete and
    want their names (name_shards).

    `prefix`: of their temporary names. `on_shard`: called with each complete file. Raises as write_hf_stream.
    """
    writer = ShardWriter(path, names, dtype=dtype, shard_bytes=shard_bytes, on_shard=on_shard, prefix=prefix)
    try:
        yield writer
        writer.close()
    finally:
        writer.stop()
    if writer.failure is not None:
        raise writer.failure
    names.check_complete()


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
    all_names = [name for _, names in shards for name in names]
    if twice := sorted(name for name, count in Counter(all_names).items() if count > 1):
        raise ModelError(
            f"{path} would hold {twice[0]!r} twice (and {len(twice) - 1} more): its parts were not written"
            " together"
        )
    renamed: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(shards, start=1):
        renamed[file] = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        (path / file).rename(path / renamed[file])
        weight_map |= dict.fromkeys(names, renamed[file])
    if len(shards) > 1:
        (path / "model.safetensors").unlink(missing_ok=True)
    if len(shards) == 1 and not always_index:
        (path / WEIGHT_INDEX).unlink(missing_ok=True)
    else:
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
    """All of a model directory but its weights: config, generation config and tokenizer."""
    with quiet_transformers():
        write_config(model, path, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(path))


def write_config(model: PreTrainedModel, path: Path, dtype: torch.dtype | None = None) -> None:
    """config.json, saying class and dtype as saved models do, and generation_config.json of a model that
    generates.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    with quiet_transformers():
        config.save_pretrained(str(path))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(path))


class FileNames:
    """From the names that tensors have in memory to those that they have in a model's files.

    Transformers holds the experts of a mixture in one tensor where files have one each, and renames more
    besides; a tied weight has one name in files; buffers that belong to the weights are in files and not
    among the parameters. Where a tensor of the files is made of several, those wait for each other; nothing
    else is held. Without a model names stay as they are.
    """

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._model = model
        self._names: list[str] = []  # of parameters and of buffers that files hold, as the model has them
        self._renamed: dict[str, str] = {}  # parameters that have another of their tied names in files
        self._joins: Mapping[
            str, frozenset[str]
        ] = {}  # name → the names that it waits for, itself among them
        self._held: dict[str, Tensor] = {}
        self._to_come: set[str] = set()
        self._buffers: list[tuple[str, Tensor]] | None = (
            None  # None before the model was looked at; they come with the first bucket
        )

    def translate(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The bucket as files have it, without the tensors that are to be joined with some that have not
        come. Raises ModelError.
        """
        if self._model is None:
            return [(name, torch.as_tensor(tensor)) for name, tensor in bucket]
        self.look()
        extra, self._buffers = self._buffers or [], []
        ready: dict[str, Tensor] = {}
        for name, tensor in [*bucket, *extra]:
            name = self._renamed.get(name, name)
            if name not in self._to_come:
                raise ModelError(f"the weight {name!r} came twice, or is none of the model's")
            self._to_come.remove(name)
            group = self._joins.get(name)
            if group is None:
                ready[name] = tensor
                continue
            self._held[name] = tensor.detach().to("cpu", copy=True)
            if group <= self._held.keys():
                ready |= {member: self._held.pop(member) for member in sorted(group)}
        return self._revert(self._model, ready) if ready else []

    def rest(self) -> list[tuple[str, Tensor]]:
        """Buffers that no bucket took along; else nothing, once everything has come. Raises ModelError naming
        weights that others waited for.
        """
        if self._buffers and self._to_come <= {name for name, _ in self._buffers}:
            return self.translate([])
        if self._held:
            self.check_complete()
        return []

    def check_complete(self) -> None:
        """Raises ModelError naming a weight that never came."""
        if self._to_come:
            raise ModelError(
                f"{len(self._to_come)} weights never came, {min(self._to_come)!r} for one; stream all of the"
                " model's parameters"
            )

    def look(self) -> None:
        """Learns, once, which names differ, and the buffers, which no stream brings. Else the first bucket
        does: call it where the model may run in another thread then.
        """
        model = self._model
        if model is None or self._buffers is not None:
            return
        weights, aliases = list_weights(model)
        tied = set(
            getattr(model, "all_tied_weights_keys", None) or ()
        )  # the names that transformers leaves out of files
        for main in set(aliases.values()):
            names = sorted([main, *(alias for alias, name in aliases.items() if name == main)])
            in_files = next((name for name in names if name not in tied), names[-1])
            self._renamed |= {name: in_files for name in names if name != in_files}
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        parameters = {name for name, _ in model.named_parameters()}
        self._buffers = [(name, weights[name]) for name in sorted(weights.keys() - parameters - ignored)]
        self._to_come = {self._renamed.get(name, name) for name in parameters} | {
            name for name, _ in self._buffers
        }
        self._joins = find_joins(model, sorted(self._to_come))
        self._names = [name for name in weights if self._renamed.get(name, name) in self._to_come]

    def find_units(self) -> list[tuple[str, ...]]:
        """Names of the model's parameters, and of its buffers that files hold, in its order; in one tuple
        those that must come to one writer, because files join them.
        """
        self.look()
        units: dict[frozenset[str], list[str]] = {}
        for name in self._names:
            in_files = self._renamed.get(name, name)
            units.setdefault(self._joins.get(in_files, frozenset((in_files,))), []).append(name)
        return [tuple(unit) for unit in units.values()]

    def expect_only(self, names: Collection[str]) -> None:
        """Of the weights only these units are to come, and of the buffers only these are added. Before the
        first bucket.
        """
        self.look()
        kept = {self._renamed.get(name, name) for name in names}
        self._to_come &= kept
        self._buffers = [(name, buffer) for name, buffer in self._buffers or [] if name in kept]

    def _revert(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(model, tensors).items())


def find_joins(model: PreTrainedModel, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Of the names, those that become one tensor of the model's files together with others, each with all of
    its group.

    A renaming that looks at several names at once makes one group of all. Empty for nearly every model.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    together = getattr(loading, "GroupWeightRename", ())
    if any(isinstance(conversion, together) for conversion in conversions or ()):
        return dict.fromkeys(names, frozenset(names))
    reverse = [
        conversion.reverse_transform()
        for conversion in reversed(conversions or ())
        if isinstance(conversion, loading.WeightConverter)
    ]
    groups: dict[str, set[str]] = {}
    for name in names:
        found = next(
            (
                made
                for made, pattern in (converter.rename_source_key(name) for converter in reverse)
                if pattern is not None
            ),
            None,
        )
        if found is not None:
            groups.setdefault(found, set()).add(name)
    return {name: frozenset(group) for group in groups.values() if len(group) > 1 for name in group}

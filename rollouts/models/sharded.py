"""A directory's weights in a torch module, whole or spread over ranks: made without memory, filled by
slices, so that no rank ever holds the whole.

    make_meta_model(path) ─► fully_shard (the caller, if at all)
        ─► load_sharded_weights(model, path): each rank reads its rows of every weight

    names and shapes in the files ─► transformers' renamings
        ─► a weight read by slices: one tensor of the files
        ─► weights made together from several tensors (a mixture's experts), on every rank, and cut there

Only headers are read to find that out, and every process that reads the same files comes to the same groups,
and to the same error.
"""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollouts.errors import ModelError
from rollouts.models.directories import (
    LOCAL,
    FileTensor,
    ModelHead,
    check_model_directory,
    find_class,
    has_own_scalar_head,
    list_tensors,
    naming_errors,
    quiet_transformers,
)
from rollouts.models.layers import HEAD_WEIGHT, get_scalar_weight, has_scalar_head
from rollouts.types import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIALIZED = "_is_hf_initialized"  # transformers leaves tensors and modules that have it alone
CONVERSIONS = "_rollouts_conversions"  # attribute of a model: how transformers gets its weights from files
NAMES_SHOWN = 5
OLD_NAMES = ("rotary_emb.inv_freq", "position_ids")  # ends of names in old files that no model reads


def make_meta_model(path: Path, *, dtype: torch.dtype, head: ModelHead) -> "PreTrainedModel":
    """The model of a directory without its weights: parameters on the meta device, buffers that no file holds
    as they must be.

    Evaluation mode; SDPA attention, or "eager" where the model has none (one with capped scores). Shard it,
    then load_sharded_weights. `Module.to_empty` would lose the buffers: load_sharded_weights gives the
    parameters their memory. head: "scalar" makes a model with one scalar head. Raises ModelError as
    load_hf_model does.
    """
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    check_model_directory(path)
    name, written = find_class(path, head)
    auto, labels = transformers.AutoModelForCausalLM, {}
    if head == "scalar":
        auto = transformers.AutoModelForSequenceClassification
        labels = {} if name in written["architectures"] else {"num_labels": 1}
    with naming_errors(f"the model in {path} cannot be made"), quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(str(path), **LOCAL, **labels)
        attention = "sdpa" if getattr(getattr(transformers, name), "_supports_sdpa", False) else "eager"
        with torch.device("meta"):
            model = auto.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
        if model.can_generate() and (path / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                str(path), local_files_only=True
            )
        _compute_buffers(model)
    if head == "scalar" and (not has_scalar_head(model) or get_scalar_weight(model).shape[0] != 1):
        raise ModelError(
            f"{name} of the model in {path} has no head {HEAD_WEIGHT} of shape [1, H]; use a Llama, Qwen or"
            " Gemma"
        )
    # before sharding gives the classes other names, by which it looks them up
    setattr(model, CONVERSIONS, get_model_conversion_mapping(model))
    return model.eval()


def _compute_buffers(model: "PreTrainedModel") -> None:
    """Gives the buffers that no file holds their values, on the CPU, by the model's own initialisation;
    weights keep to the meta device.
    """
    for weight in list_weights(model)[0].values():
        setattr(weight, INITIALIZED, True)
    for module in model.modules():
        module.__dict__.pop(INITIALIZED, None)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


# --- shards -------------------------------------------------------------------------------------------------


def reshard(model: torch.nn.Module) -> None:
    """Frees what a forward gathered and kept; afterwards every parameter of a sharded model is its DTensor.
    No communication.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compute_local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """What of a tensor this rank holds, one slice for each dimension; all of it where it is not sharded.
    Shards at the end may be empty.

    Raises ModelError for layouts that are not rows of a tensor (partial sums, interleaved shards).
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise ModelError(
                f"a weight of shape {tuple(tensor.shape)} is laid out as {placement}; shard along one"
                " dimension, or replicate"
            )
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def get_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def load_sharded_weights(
    model: "PreTrainedModel",
    path: Path,
    *,
    device: torch.device | str = "cpu",
    offload: bool = False,
    new_head: bool = False,
) -> None:
    """Fills a model, sharded or not, with the weights in a directory; this rank reads its own slices.

    A model on the meta device gets memory on `device`, but on the CPU for parameters that are offloaded;
    parameters that have memory stay the same objects. new_head: a scalar head becomes 0 where the directory
    is a causal model's. Raises ModelError, the same on every rank and before anything is changed, naming
    weights that are missing, unknown, misshapen or laid out in a way that is not known; a disk that fails
    later may raise on one rank only. Call it on every rank; it does not communicate.
    """
    reshard(model)
    new = (HEAD_WEIGHT,) if new_head and has_scalar_head(model) and not has_own_scalar_head(path) else ()
    groups, used_conversions = plan_weights(model, path, new=new)
    for weight in model.parameters():
        compute_local_slices(weight)

    def place(tensor: Tensor) -> Tensor:
        target = "cpu" if offload and isinstance(tensor, DTensor | torch.nn.Parameter) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    if any(weight.is_meta for weight in model.parameters()):
        model._apply(place)
        # where a model is not sharded, each name has a new parameter
        model.tie_weights(recompute_mapping=False)
    weights, aliases = list_weights(model)
    with torch.no_grad():
        for name in new:
            get_local(weights[name]).zero_()
        for group in groups:
            rows = None  # of a tensor that is a weight as it is, this rank's alone
            if group.converter is None:
                rows = compute_local_slices(weights[aliases.get(group.target, group.target)])
            for name, tensor in convert_group(model, group, read_tensors(group.sources, rows)).items():
                weight = weights[aliases.get(name, name)]
                get_local(weight).copy_(tensor if rows else tensor[compute_local_slices(weight)])
    # what transformers notes when it loads: saving undoes it
    cast(Any, model)._weight_conversions = used_conversions


def list_weights(model: "PreTrainedModel") -> tuple[dict[str, Tensor], Texts]:
    """(parameters and buffers that files hold, by name; other names of tied ones → the name among the
    first).
    """
    held: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(held.items())}
    aliases = {name: first for name, tensor in held.items() if (first := names[id(tensor)]) != name}
    return {name: tensor for name, tensor in held.items() if name not in aliases}, aliases


# --- files --------------------------------------------------------------------------------------------------


class WeightGroup(NamedTuple):
    """Weights of the model that are made from the same tensors of the files; one from one almost always."""

    target: str  # the model's name, of the first weight where several are made
    # transformers' WeightConverter with the sources by pattern; None: the one tensor is the weight as it is
    converter: Any
    sources: list[FileTensor]


def plan_weights(
    model: "PreTrainedModel", path: Path, *, new: Collection[str] = ()
) -> tuple[list[WeightGroup], list[Any]]:
    """Where each of the model's weights lies in the directory, complete and of the right shapes; and
    transformers' conversions that changed a name, which saving undoes. `new`: a head that its files do not
    have; what they have in its place is left.

    The model may be sharded or on the meta device. Rotary frequencies, and what transformers itself passes
    over for this model, may be in the files. Raises ModelError naming the weights that are missing, unknown
    or of another shape, and a tied weight that the files have twice with other values.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    check_model_directory(path)
    weights, aliases = list_weights(model)
    known = getattr(model, CONVERSIONS, None)
    # fresh copies, for transformers notes in them what they were used for
    conversions = copy.deepcopy(known) if known is not None else get_model_conversion_mapping(model)
    groups, unknown = _group(model, list_tensors(path), conversions, {*weights, *aliases})
    shapes = {}
    first_sources = {}
    for group in groups:
        empty = {source: torch.empty(source.shape, device="meta") for source in group.sources}
        for name, tensor in convert_group(model, group, empty).items():
            main, source = aliases.get(name, name), group.sources[0]
            shapes[main] = tuple(tensor.shape)
            first = first_sources.setdefault(main, source)
            if first is not source and not torch.equal(*read_tensors([first, source]).values()):
                raise ModelError(
                    f"the weights in {path} have {first.name} and {source.name}, which config.json ties, with"
                    " different values; set tie_word_embeddings to false in config.json"
                )
    prefix, optional = f"{model.base_model_prefix}.", model._keys_to_ignore_on_load_missing
    missing = [name for name in weights if name not in {*shapes, *new} and not _matches(optional, name)]
    foreign = [name for name in unknown if not new or name.startswith(prefix)]
    misshapen = [
        f"{name} {shapes[name]} for {tuple(weight.shape)}"
        for name, weight in weights.items()
        if shapes.get(name, weight.shape) != tuple(weight.shape)
    ]
    problems = {
        "are missing": missing,
        "are not the model's": foreign + sorted(shapes.keys() - weights),
        "have another shape": misshapen,
    }
    for what, found in problems.items():
        if found:
            raise ModelError(
                f"the weights in {path} do not fit: {len(found)} {what}: {', '.join(found[:NAMES_SHOWN])};"
                " copy the model directory again, or use the one that the config.json is of"
            )
    return groups, [one for one in conversions if one.was_used()]


def _group(
    model: "PreTrainedModel",
    tensors: Sequence[FileTensor],
    conversions: Sequence[Any],
    known: Collection[str],
) -> tuple[list[WeightGroup], list[str]]:
    """The tensors by what is made of them, as transformers does when it loads; and names that are
    nobody's.
    """
    from transformers import core_model_loading as loading

    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, meta = model.base_model_prefix, dict.fromkeys(known, True)
    groups = {}
    unknown = []
    for tensor in sorted(tensors, key=lambda tensor: loading.dot_natural_key(tensor.name)):
        name, pattern = loading.rename_source_key(tensor.name, renamings, converters, prefix, meta)
        if name not in known and tensor.name in known:
            name, pattern = tensor.name, None
        if name in known:
            if name not in groups:
                converter = None if pattern is None else copy.deepcopy(by_pattern[pattern])
                groups[name] = WeightGroup(name, converter, [])
            groups[name].sources.append(tensor)
            if pattern is not None:
                groups[name].converter.add_tensor(name, tensor.name, pattern, tensor)
        elif not name.endswith(OLD_NAMES) and not _matches(model._keys_to_ignore_on_load_unexpected, name):
            unknown.append(tensor.name)
    return list(groups.values()), unknown


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def convert_group(
    model: "PreTrainedModel", group: WeightGroup, tensors: Mapping[FileTensor, Tensor]
) -> dict[str, Tensor]:
    """The weights that transformers makes of a group's tensors. Raises ModelError."""
    if group.converter is None:
        return {group.target: tensors[group.sources[0]]}
    converter = copy.deepcopy(group.converter)
    for sources in converter.collected_tensors.values():
        sources[:] = [tensors[source] for source in sources]
    # transformers' operations raise whatever torch does with tensors that do not fit together
    with naming_errors(
        f"{group.sources[0].name} … {group.sources[-1].name} cannot be made into {group.target}"
    ):
        made = converter.convert(group.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def read_tensors(
    sources: Sequence[FileTensor], slices: tuple[slice, ...] | None = None
) -> dict[FileTensor, Tensor]:
    """The tensors, or the same slices of each. Raises ModelError.

    Each file is opened for this reading alone: what was read through a mapping counts as this process's
    memory until it is closed.
    """
    found = {}
    for path in {source.file for source in sources}:
        with naming_errors(f"{path} cannot be read"), safe_open(path, framework="pt") as file:
            for source in sources:
                if source.file == path:
                    found[source] = file.get_slice(source.name)[slices or ...]
    return found

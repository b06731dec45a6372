"""Models whose weights are spread over ranks: made without memory, filled by slices, so that no rank ever
holds the whole.

    make_meta_model(path) ─► fully_shard (the caller)
        ─► load_sharded_weights(model, path): each rank reads its rows of every weight

A weight that files have in pieces (a mixture's experts) is put together on every rank, one such weight at a
time, and cut there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollouts.errors import ModelError
from rollouts.models.directories import check_model_directory
from rollouts.models.load import (
    LOAD_ERRORS,
    LOCAL,
    ModelHead,
    choose_attention,
    describe_error,
    find_causal_class,
    find_scalar_class,
    has_own_scalar_head,
)
from rollouts.models.quiet import quiet_transformers
from rollouts.models.scalar_head import HEAD_WEIGHT, check_scalar_head, has_scalar_head
from rollouts.models.weight_files import (
    CONVERSIONS,
    convert_group,
    list_weights,
    plan_weights,
    read_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIALIZED = "_is_hf_initialized"  # transformers leaves tensors and modules that have it alone


def make_meta_model(
    path: Path, *, dtype: torch.dtype = torch.float32, head: ModelHead = "tokens"
) -> PreTrainedModel:
    """The causal language model of a directory without its weights: parameters on the meta device, buffers
    that no file holds as they must be.

    Evaluation mode, attention as load_hf_model chooses it. Shard it, then load_sharded_weights.
    `Module.to_empty` would lose the buffers: load_sharded_weights gives the parameters their memory. head:
    "scalar" makes a model as load_scalar_model does. Raises ModelError as those do.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
    )
    from transformers.conversion_mapping import get_model_conversion_mapping

    check_model_directory(path)
    scalar = head == "scalar"
    attention = choose_attention(find_scalar_class(path) if scalar else find_causal_class(path))
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    labels = {"num_labels": 1} if scalar and not has_own_scalar_head(path) else {}
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(path), **LOCAL, **labels)
            with torch.device("meta"):
                model = auto.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
                )
            if model.can_generate() and (path / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
            _compute_buffers(model)
    except LOAD_ERRORS as error:
        raise ModelError(f"the model in {path} cannot be made ({describe_error(error)})") from error
    if scalar:
        check_scalar_head(model, path)
    setattr(
        model, CONVERSIONS, get_model_conversion_mapping(model)
    )  # before sharding gives the classes other names, which it looks them up by
    return model.eval()


def _compute_buffers(model: PreTrainedModel) -> None:
    """Gives the buffers that no file holds their values, on the CPU, by the model's own initialisation;
    weights keep to the meta device.
    """
    weights, _ = list_weights(model)
    for weight in weights.values():
        setattr(weight, INITIALIZED, True)
    for module in model.modules():
        module.__dict__.pop(INITIALIZED, None)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.random.fork_rng(devices=[]):
        cast(Any, model).initialize_weights()


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

    torch cuts as torch.chunk does: every rank has ceil(n / ranks) rows but the last ones. Raises ModelError
    for layouts that are not rows of a tensor (partial sums, interleaved shards).
    """
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "this rank is not of the mesh that the tensor is spread over"
        for axis, placement in enumerate(tensor.placements):
            if type(placement) is Shard:
                start, stop = bounds[placement.dim]
                chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
                first = min(start + coordinates[axis] * chunk, stop)
                bounds[placement.dim] = (first, min(first + chunk, stop))
            elif not isinstance(placement, Replicate):
                raise ModelError(
                    f"a weight of shape {tuple(tensor.shape)} is laid out as {placement}; shard along one"
                    " dimension, or replicate"
                )
    return tuple(slice(start, stop) for start, stop in bounds)


def get_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def load_sharded_weights(
    model: PreTrainedModel,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    buffer_device: torch.device | str | None = None,
    new_head: bool = False,
) -> None:
    """Fills a model, sharded or not, with the weights in a directory; this rank reads its own slices.

    A model on the meta device gets memory on `device`, for buffers on `buffer_device` where that is another
    (parameters offloaded to the CPU); parameters that have memory stay the same objects. What the model then
    computes is bit for bit what one from load_hf_model does. new_head: a scalar head becomes 0 where the
    directory is a causal model's, as in load_scalar_model. Raises ModelError, the same on every rank and
    before anything is changed, naming weights that are missing, unknown, misshapen or laid out in a way that
    is not known; a disk that fails later may raise on one rank only. Call it on every rank; it does not
    communicate.
    """
    reshard(model)
    new = (HEAD_WEIGHT,) if new_head and has_scalar_head(model) and not has_own_scalar_head(path) else ()
    plan = plan_weights(model, path, new=new)
    weights, aliases = list_weights(model)
    for weight in weights.values():
        compute_local_slices(weight)
    if any(weight.is_meta for weight in weights.values()):
        _materialize(model, torch.device(device), torch.device(buffer_device or device))
        weights, aliases = list_weights(model)
    with torch.no_grad():
        for name in new:
            get_local(weights[name]).zero_()
        for group in plan.groups:
            sources = [source for _, source in group.sources]
            weight = weights[aliases.get(group.target, group.target)]
            if group.converter is None:
                get_local(weight).copy_(read_tensors(sources[:1], compute_local_slices(weight))[0])
                continue
            whole = [tensor.to(weight.dtype) for tensor in read_tensors(sources)]
            for name, tensor in convert_group(model, group, whole).items():
                weight = weights[aliases.get(name, name)]
                get_local(weight).copy_(tensor[compute_local_slices(weight)])
    # what transformers notes when it loads: saving undoes it
    cast(Any, model)._weight_conversions = list(plan.used_conversions)


def _materialize(model: PreTrainedModel, device: torch.device, buffer_device: torch.device) -> None:
    """Memory for what is on the meta device; everything else moves, with its values."""

    def place(tensor: Tensor) -> Tensor:
        target = device if isinstance(tensor, DTensor | torch.nn.Parameter) else buffer_device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    _, tied = list_weights(model)
    cast(Any, model)._apply(place)
    for alias, name in tied.items():  # where a model is not sharded, torch makes a new parameter of each name
        path, _, attribute = alias.rpartition(".")
        if model.get_parameter(alias) is not model.get_parameter(name):
            setattr(model.get_submodule(path), attribute, model.get_parameter(name))
    assert list_weights(model)[1] == tied, "tied weights came apart"

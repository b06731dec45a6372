"""Which tensors of a directory's safetensors files make which weights of a model. Reads headers only, so it
costs no memory.

    names and shapes in the files ─► transformers' renamings
        ─► a weight read by slices: one tensor of the files
                                            └─► weights made together from several tensors (a mixture's
                                                experts)

Every process that reads the same files comes to the same plan, and to the same error.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.models.directories import WEIGHT_INDEX, check_model_directory, read_shard_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONVERSIONS = "_rollouts_conversions"  # attribute of a model: how transformers gets its weights from files
WHOLE_FILE = "model.safetensors"
NAMES_SHOWN = 5
COMPARED_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a safetensors file."""

    name: str  # in the file
    file: Path
    shape: tuple[int, ...]


@dataclass(slots=True)
class WeightGroup:
    """Weights of the model that are made from the same tensors of the files; one from one almost always."""

    target: str  # the model's name, of the first weight where several are made
    converter: Any = (
        None  # transformers' WeightConverter for this group; None: the one tensor is the weight as it is
    )
    sources: list[tuple[str, FileTensor]] = field(
        default_factory=list
    )  # (pattern of the converter that its name matched, tensor), in order


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where every weight of the model comes from; complete, and of the right shapes."""

    groups: tuple[WeightGroup, ...]
    used_conversions: tuple[Any, ...]  # of transformers, those that changed a name: saving undoes these


def list_weights(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters and buffers that files hold, by name; other names of tied ones → the name among the
    first).
    """
    weights: dict[str, Tensor] = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in weights.items()}
    aliases = {
        name: names[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in weights
    }
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                weights[f"{path}.{name}" if path else name] = buffer
    return weights, aliases


def plan_weights(model: PreTrainedModel, path: Path, *, new: Collection[str] = ()) -> WeightPlan:
    """Where each of the model's weights lies in the directory. `new`: a head that its files do not have; what
    they have in its place is left.

    The model may be sharded or on the meta device. Rotary frequencies, and what transformers itself passes
    over for this model, may be in the files. Raises ModelError naming the weights that are missing, unknown
    or of another shape.
    """
    check_model_directory(path)
    weights, aliases = list_weights(model)
    conversions = _get_conversions(model)
    unknown: list[str] = []
    prefix = f"{model.base_model_prefix}."
    groups = _group(
        model,
        _read_headers(path),
        conversions,
        {**dict.fromkeys(weights, True), **dict.fromkeys(aliases, True)},
        unknown,
    )
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, list[WeightGroup]] = {}
    for group in groups:
        for name, shape in _compute_shapes(model, group).items():
            main = aliases.get(name, name)
            shapes[main] = shape
            tied.setdefault(main, []).append(group)
    unknown = [name for name in unknown if not new or name.startswith(prefix)] + sorted(
        set(shapes) - set(weights)
    )
    missing = [
        name
        for name in weights
        if name not in shapes
        and name not in new
        and not _matches(model._keys_to_ignore_on_load_missing, name)
    ]
    wrong = [
        f"{name} {shapes[name]} for {tuple(w.shape)}"
        for name, w in weights.items()
        if name in shapes and shapes[name] != tuple(w.shape)
    ]
    for what, found in (
        ("are missing", missing),
        ("are not the model's", unknown),
        ("have another shape", wrong),
    ):
        if found:
            more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
            raise ModelError(
                f"the weights in {path} do not fit: {len(found)} {what}:"
                f" {', '.join(found[:NAMES_SHOWN])}{more}; copy the model directory again, or use the one"
                " that the config.json is of"
            )
    for name, twice in tied.items():
        _check_equal(name, twice, path)
    return WeightPlan(tuple(groups), tuple(conversion for conversion in conversions if conversion.was_used()))


def _get_conversions(model: PreTrainedModel) -> list[Any]:
    """Fresh copies, for transformers notes in them what they were used for."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = getattr(model, CONVERSIONS, None)
    return copy.deepcopy(known) if known is not None else get_model_conversion_mapping(model)


def _read_headers(path: Path) -> list[FileTensor]:
    """Every tensor of the files that transformers would read."""
    if (path / WHOLE_FILE).is_file():
        names = [WHOLE_FILE]
    elif (path / WEIGHT_INDEX).is_file():
        names = read_shard_names(path)
    else:
        raise ModelError(f"model directory {path} has neither {WHOLE_FILE} nor {WEIGHT_INDEX}; copy it again")
    found: list[FileTensor] = []
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{path / WEIGHT_INDEX} names the file {name!r}; shards lie beside their index")
        try:
            with safe_open(path / name, framework="pt") as file:
                found += [
                    FileTensor(key, path / name, tuple(file.get_slice(key).get_shape()))
                    for key in file.keys()  # noqa: SIM118
                ]
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{path / name} cannot be read ({error}); copy the model directory again"
            ) from error
    return found


def _group(
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
    conversions: Sequence[Any],
    known: Mapping[str, Any],
    unknown: list[str],
) -> list[WeightGroup]:
    """The tensors by what is made of them, as transformers does when it loads; names that are nobody's are
    added to `unknown`.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, meta = model.base_model_prefix, dict(known)
    groups: dict[str, WeightGroup] = {}
    for tensor in sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, prefix, meta)
        if name not in known and tensor.name in known:
            name, pattern = rename_source_key(tensor.name, [], [], prefix, meta)
        if name not in known:
            if not is_ignored(model, name):
                unknown.append(tensor.name)
            continue
        converter = copy.deepcopy(by_pattern[pattern]) if pattern is not None else None
        group = groups.setdefault(name, WeightGroup(name, converter))
        group.sources.append((pattern or tensor.name, tensor))
    return list(groups.values())


def is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor of the files that is no weight of the model is passed over: rotary frequencies, which
    old files carry, and what transformers names for the model.
    """
    return name.endswith(("rotary_emb.inv_freq", "position_ids")) or _matches(
        model._keys_to_ignore_on_load_unexpected, name
    )


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def convert_group(model: PreTrainedModel, group: WeightGroup, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The weights that transformers makes of a group's tensors, which are in the order of its sources. Raises
    ModelError.
    """
    if group.converter is None:
        return {group.target: tensors[0]}
    converter = copy.deepcopy(group.converter)
    for (pattern, source), tensor in zip(group.sources, tensors, strict=True):
        converter.add_tensor(group.target, source.name, pattern, tensor)
    try:
        made = converter.convert(group.target, model=model, config=model.config)
    except (
        Exception
    ) as error:  # transformers' operations raise whatever torch does with tensors that do not fit together
        names = f"{group.sources[0][1].name} … {group.sources[-1][1].name}"
        raise ModelError(
            f"{names} cannot be made into {group.target} ({type(error).__name__}: {error}); copy the model"
            " directory again"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _compute_shapes(model: PreTrainedModel, group: WeightGroup) -> dict[str, tuple[int, ...]]:
    if group.converter is None:
        return {group.target: group.sources[0][1].shape}
    empty = [torch.empty(source.shape, device="meta") for _, source in group.sources]
    return {name: tuple(tensor.shape) for name, tensor in convert_group(model, group, empty).items()}


def _check_equal(name: str, groups: Sequence[WeightGroup], path: Path) -> None:
    """Raises ModelError if files hold a tied weight under two names with different values: the model would
    not be the one that was saved.
    """
    if len(groups) < 2:
        return
    sources = [group.sources[0][1] for group in groups]
    first, *others = sources
    rows = max(1, COMPARED_BYTES // max(1, 4 * math.prod(first.shape[1:])))
    with safe_open(first.file, framework="pt") as left:
        for other in others:
            with safe_open(other.file, framework="pt") as right:
                one, two = left.get_slice(first.name), right.get_slice(other.name)
                starts = range(0, next(iter(first.shape), 0), rows)
                same = all(
                    torch.equal(one[start : start + rows], two[start : start + rows]) for start in starts
                )
            if not same:
                raise ModelError(
                    f"the weights in {path} have {first.name} and {other.name}, which config.json ties, with"
                    " different values; set tie_word_embeddings to false in config.json"
                )

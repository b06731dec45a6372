"""Which tensors of a directory's safetensors files make which weights of a model. Reads headers only, so it
costs no memory.

    names and shapes in the files ─► transformers' renamings
        ─► a weight read by slices: one tensor of the files
        ─► weights made together from several tensors (a mixture's experts)

Every process that reads the same files comes to the same groups, and to the same error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.models.directories import check_model_directory, list_weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONVERSIONS = "_rollouts_conversions"  # attribute of a model: how transformers gets its weights from files
NAMES_SHOWN = 5


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
    converter: Any  # transformers' WeightConverter; None: the one tensor is the weight as it is
    # (pattern of the converter that its name matched, tensor), in order
    sources: list[tuple[str, FileTensor]] = field(default_factory=list)


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
    or of another shape, and a tied weight that the files have twice with other values.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    check_model_directory(path)
    weights, aliases = list_weights(model)
    known = getattr(model, CONVERSIONS, None)
    # fresh copies, for transformers notes in them what they were used for
    conversions = copy.deepcopy(known) if known is not None else get_model_conversion_mapping(model)
    groups, unknown = _group(model, _read_headers(path), conversions, {*weights, *aliases})
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, list[WeightGroup]] = {}
    for group in groups:
        empty = [torch.empty(source.shape, device="meta") for _, source in group.sources]
        for name, tensor in convert_group(model, group, empty).items():
            main = aliases.get(name, name)
            shapes[main] = tuple(tensor.shape)
            tied.setdefault(main, []).append(group)
    prefix = f"{model.base_model_prefix}."
    optional = model._keys_to_ignore_on_load_missing
    problems = {
        "are missing": [
            name for name in weights if name not in {*shapes, *new} and not _matches(optional, name)
        ],
        "are not the model's": [name for name in unknown if not new or name.startswith(prefix)]
        + sorted(set(shapes) - set(weights)),
        "have another shape": [
            f"{name} {shapes[name]} for {tuple(weight.shape)}"
            for name, weight in weights.items()
            if shapes.get(name, weight.shape) != tuple(weight.shape)
        ],
    }
    for what, found in problems.items():
        if found:
            more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
            raise ModelError(
                f"the weights in {path} do not fit: {len(found)} {what}:"
                f" {', '.join(found[:NAMES_SHOWN])}{more}; copy the model directory again, or use the one"
                " that the config.json is of"
            )
    for twice in tied.values():
        first, *others = (group.sources[0][1] for group in twice)
        for other in others:
            if not torch.equal(*read_tensors([first]), *read_tensors([other])):
                raise ModelError(
                    f"the weights in {path} have {first.name} and {other.name}, which config.json ties, with"
                    " different values; set tie_word_embeddings to false in config.json"
                )
    return WeightPlan(tuple(groups), tuple(one for one in conversions if one.was_used()))


def _read_headers(path: Path) -> list[FileTensor]:
    """Every tensor of the files that transformers would read."""
    found: list[FileTensor] = []
    for name in list_weight_files(path):
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


def read_tensors(sources: Sequence[FileTensor], slices: tuple[slice, ...] | None = None) -> list[Tensor]:
    """The tensors, or the same slices of each. Each file is opened for this alone: what was read through a
    mapping counts as this process's memory until it is closed. Raises ModelError.
    """
    found: dict[int, Tensor] = {}
    for path in {source.file for source in sources}:
        try:
            with safe_open(path, framework="pt") as file:
                for index, source in enumerate(sources):
                    if source.file == path:
                        name = source.name
                        found[index] = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}); copy the model directory again") from error
    return [found[index] for index in range(len(sources))]


def _group(
    model: PreTrainedModel,
    tensors: Sequence[FileTensor],
    conversions: Sequence[Any],
    known: Collection[str],
) -> tuple[list[WeightGroup], list[str]]:
    """The tensors by what is made of them, as transformers does when it loads; and names that are
    nobody's.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, meta = model.base_model_prefix, dict.fromkeys(known, True)
    groups: dict[str, WeightGroup] = {}
    unknown: list[str] = []
    for tensor in sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, prefix, cast(Any, meta))
        if name not in known and tensor.name in known:
            name, pattern = tensor.name, None
        if name in known:
            converter = copy.deepcopy(by_pattern[pattern]) if pattern is not None else None
            group = groups.setdefault(name, WeightGroup(name, converter))
            group.sources.append((pattern or tensor.name, tensor))
        # rotary frequencies are in old files; others transformers itself passes over
        elif not name.endswith(("rotary_emb.inv_freq", "position_ids")) and not _matches(
            model._keys_to_ignore_on_load_unexpected, name
        ):
            unknown.append(tensor.name)
    return list(groups.values()), unknown


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
    # transformers' operations raise whatever torch does with tensors that do not fit together
    except Exception as error:
        names = f"{group.sources[0][1].name} … {group.sources[-1][1].name}"
        raise ModelError(
            f"{names} cannot be made into {group.target} ({type(error).__name__}: {error}); copy the model"
            " directory again"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

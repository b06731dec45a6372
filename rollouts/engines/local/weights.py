"""An update of the engine's own model: it arrives in buckets, is held aside, and becomes visible at once or
not at all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from rollouts.errors import EngineError, ModelError
from rollouts.models.load import load_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedWeights:
    """New values for the weights of one model, by Hugging Face name. Tied weights have several names; any of
    them will do.

    On a CPU the memory that an update made is kept when the next one replaces it, and the one after that
    writes there: new memory costs five times the copy, as its pages are cleared first. `before`: the last
    update that was applied to the model.
    """

    def __init__(self, model: nn.Module, before: StagedWeights | None = None) -> None:
        self._targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._staged: dict[int, Tensor] = {}  # by identity of the target, which tied names share
        self._room = {} if before is None else before.free
        self._replaced = {} if before is None else before.made
        self.made: dict[int, Tensor] = {}  # once applied: the model's weights
        self.free: dict[
            int, Tensor
        ] = {}  # once applied: memory of weights before them, that an update had made

    def add(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copies the tensors. Raises EngineError on an unknown name or a wrong shape, before any of the
        bucket is copied.
        """
        for name, tensor in bucket:
            target = self._targets.get(name)
            if target is None:
                raise EngineError(
                    f"weight update has {name!r}, which the engine's model does not have; trainer and engine"
                    " must be one model"
                )
            if target.shape != tensor.shape:
                raise EngineError(
                    f"weight update has {name!r} of shape {list(tensor.shape)}; the engine's is"
                    f" {list(target.shape)}"
                )
        for name, tensor in bucket:
            target = self._targets[name]
            self._staged[id(target)] = self._copy(tensor.detach(), target)

    def _copy(self, tensor: Tensor, target: Tensor) -> Tensor:
        room = self._room.get(id(target))
        if room is None or room.dtype != target.dtype or room.device != target.device:
            return tensor.to(device=target.device, dtype=target.dtype, copy=True)
        return room.copy_(tensor)

    def apply(self) -> int:
        """Makes the staged values the model's own; the number of tensors. Raises EngineError, changing
        nothing, if one never arrived.
        """
        missing = [name for name, target in self._targets.items() if id(target) not in self._staged]
        if missing:
            raise EngineError(
                f"weight update lacks {len(missing)} of {len(self._targets)} tensors, among them"
                f" {missing[:3]}; nothing was changed"
            )
        for target in {id(target): target for target in self._targets.values()}.values():
            staged = self._staged.pop(id(target))
            if target.is_cuda:  # pragma: gpu
                target.data.copy_(staged)  # in place, for recorded steps read it where it is
            else:
                target.data = staged
                if not staged.is_inference():  # such a tensor could not be written to elsewhere
                    self.made[id(target)] = staged
        self.free = self._replaced
        return len(self._targets)


def read_checkpoint(path: Path, model: PreTrainedModel) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of a Hugging Face directory of safetensors by the names of `model`, one list per file.

    Where the files name them otherwise (experts are written one by one and held in one tensor), transformers
    translates: one list, and memory for a second model meanwhile. Raises EngineError naming what is missing
    or damaged.
    """
    files = _checkpoint_files(path)
    if (path / "config.json").is_file() and not _names(files) <= set(model.state_dict()):
        yield _read_translated(path, model)
        return
    for file in files:
        try:
            yield list(load_file(file).items())
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{file} cannot be read as safetensors: {error}; export the weights again"
            ) from error


def _names(files: Sequence[Path]) -> set[str]:
    found: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found.update(opened.keys())
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{file} cannot be read as safetensors: {error}; export the weights again"
            ) from error
    return found


def _read_translated(path: Path, model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    try:
        loaded = load_hf_model(path, dtype=model.dtype)
    except ModelError as error:
        raise EngineError(f"{path} cannot be loaded as weights of {type(model).__name__}: {error}") from error
    return list(loaded.state_dict().items())


def _checkpoint_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineError(f"{index} is not an index of safetensors files: {error!r}") from error
        return [path / name for name in sorted(names)]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{path} holds no *.safetensors file; give a Hugging Face model directory")
    return files


def copy_model(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The engine's own copy, for inference only."""
    own = copy.deepcopy(model)
    if dtype is not None:
        for weight in own.state_dict(
            keep_vars=True
        ).values():  # not rotary frequencies, which a loaded model has in float32
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
    return own.eval().requires_grad_(False)

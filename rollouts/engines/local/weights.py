"""An update of the engine's own model: it arrives in buckets, is held aside, and becomes visible at once or
not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from rollouts.errors import EngineError, ModelError
from rollouts.models.directories import WEIGHT_INDEX, read_shard_names
from rollouts.models.load import load_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedWeights:
    """New values for the weights of one model, by Hugging Face name. Tied weights have several names; any of
    them will do.

    On a CPU an update swaps its memory with the model's, and the next update writes there: new memory costs
    five times the copy, because its pages are cleared first. The model's first memory is never written to.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._staged: dict[int, Tensor] = {}  # by identity of the target, which tied names share
        self._spare: dict[int, Tensor] = {}
        self._owned: set[int] = set()  # targets whose memory an update made
        self.is_open = False

    def begin(self) -> None:
        """Expects a whole new set of values; what came before and was not applied is discarded."""
        self.discard()
        self.is_open = True

    def discard(self) -> None:
        self._spare |= self._staged
        self._staged = {}
        self.is_open = False

    def add(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copies the tensors. Raises EngineError outside an update, and on an unknown name or a wrong shape,
        before any of the bucket is copied.
        """
        if not self.is_open:
            raise EngineError("receive_bucket outside an update; await begin_update() first")
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
            room = self._spare.pop(id(target), None)
            if room is None or room.dtype != target.dtype or room.is_inference():
                room = torch.empty_like(target, requires_grad=False)
            self._staged[id(target)] = room.copy_(tensor.detach())

    def apply(self) -> None:
        """Makes the staged values the model's own. Raises EngineError, changing nothing, if one never
        arrived.
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
                self._spare[id(target)] = staged
                continue
            if id(target) in self._owned:
                self._spare[id(target)] = target.data
            self._owned.add(id(target))
            target.data = staged
        self.is_open = False


def read_checkpoint(path: Path, model: PreTrainedModel) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of a Hugging Face directory of safetensors by the names of `model`, one list per file.

    Where the files name them otherwise (experts are written one by one and held in one tensor), transformers
    translates: one list, and memory for a second model meanwhile. Raises EngineError naming what is missing
    or damaged.
    """
    file = path
    try:
        indexed = (path / WEIGHT_INDEX).is_file()
        files = (
            [path / name for name in read_shard_names(path)]
            if indexed
            else sorted(path.glob("*.safetensors"))
        )
        if not files:
            raise EngineError(f"{path} holds no *.safetensors file; give a Hugging Face model directory")
        names: set[str] = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        if (path / "config.json").is_file() and not names <= set(model.state_dict()):
            yield list(load_hf_model(path, dtype=model.dtype).state_dict().items())
            return
        for file in files:
            yield list(load_file(file).items())
    except ModelError as error:
        raise EngineError(f"{path} cannot be loaded as weights of {type(model).__name__}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"{file} cannot be read as safetensors: {error}; export the weights again"
        ) from error


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

"""An update of the engine's own model: it arrives in buckets, is held aside, and becomes visible at once or
not at all.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollouts.errors import EngineError, ModelError
from rollouts.models.directories import is_adapter
from rollouts.models.lora import Adapter, read_adapter_weights
from rollouts.models.sharded import convert_group, plan_weights, read_tensors
from rollouts.protocols import Bucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedWeights:
    """New values for the weights of one model, by Hugging Face name, or of an adapter. Tied weights have
    several names; any of them will do.

    On a CPU an update swaps its memory with the model's, and the next update writes there: new memory costs
    five times the copy, because its pages are cleared first.
    """

    def __init__(self, trained: nn.Module | Adapter) -> None:
        self._targets: Mapping[str, Tensor] = (
            trained.weights if isinstance(trained, Adapter) else trained.state_dict(keep_vars=True)
        )
        self._staged: dict[int, Tensor] = {}  # by identity of the target, which tied names share
        self._spare: dict[int, Tensor] = {}
        self.is_open = False

    def begin(self) -> None:
        """Expects a whole new set of values; what came before and was not applied is discarded."""
        self.discard()
        self.is_open = True

    def discard(self) -> None:
        self._spare |= self._staged
        self._staged = {}
        self.is_open = False

    def add(self, bucket: Bucket) -> None:
        """Copies the tensors. Raises EngineError outside an update, for an unknown name and a wrong shape."""
        if not self.is_open:
            raise EngineError("receive_bucket outside an update; await begin_update() first")
        for name, tensor in bucket:
            target = self._targets.get(name)
            if target is None or target.shape != tensor.shape:
                has = "does not have" if target is None else f"has of shape {list(target.shape)}"
                raise EngineError(
                    f"weight update has {name!r} of shape {list(tensor.shape)}, which the engine's model"
                    f" {has}; trainer and engine must be one model"
                )
            room = self._spare.pop(id(target), None)
            if room is None or room.is_inference():
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
        for key, target in {id(target): target for target in self._targets.values()}.items():
            staged = self._staged.pop(key)
            if target.is_cuda:  # pragma: gpu
                target.data.copy_(staged)  # in place, for recorded steps read it where it is
            else:
                staged, target.data = target.data, staged
            self._spare[key] = staged
        self.is_open = False


def read_checkpoint(path: Path, model: "PreTrainedModel") -> Iterator[Bucket]:
    """The weights of `model`, or an adapter of it, in a directory of safetensors, a few at a time. Where the
    files hold them otherwise (experts one by one), transformers converts them.

    Raises EngineError naming what is missing, damaged or of another model.
    """
    try:
        if is_adapter(path):
            yield list(read_adapter_weights(path).items())
            return
        groups, _ = plan_weights(model, path)
        for group in groups:
            yield list(convert_group(model, group, read_tensors(group.sources)).items())
    except ModelError as error:
        raise EngineError(f"{path} cannot be loaded as weights of {type(model).__name__}: {error}") from error

"""What a backend keeps in a checkpoint, as tensors and records that can be written anywhere and at any time
later.

device thread:  model, optimizer ──hold_state(copied=True)──► HeldState in host memory ──► training goes on
a thread:                                                        └── write(path): model directory and state/
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollouts.backends.state import collect_optimizer_tensors
from rollouts.backends.state_files import BACKEND_FILE, OPTIMIZER_FILE
from rollouts.models.export import write_hf_stream
from rollouts.models.safetensors_file import write_safetensors
from rollouts.run_dir import checkpoint_state_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class HeldState:
    """A training state between two steps."""

    # of which config, names and buffers are read when this is written, which training leaves alone
    model: PreTrainedModel
    weights: Mapping[str, Tensor]  # parameters under the model's names; a tied weight once
    optimizer: Mapping[str, Tensor]  # moments under parameter names, and torch's random states
    position: Mapping[str, float]  # counters of the backend
    tokenizer: PreTrainedTokenizerBase | None

    def write(self, path: Path) -> None:
        """Writes the model directory `path`, which exists, and its `state/`. Not synced, not atomic. Blocks;
        raises OSError.

        May run on any thread, and again after a failure: tensors are only read.
        """
        with write_hf_stream(self.model, path, self.tokenizer) as sink:
            sink(list(self.weights.items()))
        folder = checkpoint_state_dir(path)
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / OPTIMIZER_FILE, self.optimizer)
        (folder / BACKEND_FILE).write_text(
            json.dumps(dict(self.position), indent=1, allow_nan=False), encoding="utf-8"
        )


def hold_state(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    copied: bool,
) -> HeldState:
    """The state as it is now. On the device thread. copied: in host memory of its own, so that training may
    go on.

    Without a copy the tensors are the trainer's: write before anything trains. `tokenizer` must not be in use
    while it is written.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = collect_optimizer_tensors(model, optimizer)
    if copied:
        weights, moments = (
            {name: copy_to_host(tensor) for name, tensor in tensors.items()} for tensors in (weights, moments)
        )
    return HeldState(model, weights, moments, dict(position), tokenizer)


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory that shares nothing with `tensor`."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

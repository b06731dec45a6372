"""What a backend keeps in a checkpoint's `state/`: optimizer moments and random state as safetensors,
positions as JSON. Never pickle.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollouts.backends.random_states import copy_random_states
from rollouts.backends.sharded_state import load_sharded_state
from rollouts.errors import CheckpointError, ModelError
from rollouts.models.load import load_hf_model
from rollouts.models.scalar_head import has_scalar_head, load_scalar_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def collect_optimizer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors under parameter names, and torch's random states. Nothing is copied but
    those.
    """
    tensors = copy_random_states(model.device)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach()
    return tensors


def load_backend_state(
    checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, fields: Collection[str]
) -> dict[str, float]:
    """The position that was saved, by this process alone or by ranks; the optimizer and torch's random state
    are as they were.

    Raises CheckpointError naming file and field, before anything is changed.
    """
    return load_sharded_state(checkpoint, model, optimizer, fields, rank=0, ranks=1)


def read_model_weights(checkpoint: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """All weights of the checkpoint, under the names and in the shapes that `model` has them in.

    Some models hold tensors that their files have in pieces (the experts of a mixture); those are put
    together as loading a model does. Raises CheckpointError if a file cannot be read.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{checkpoint} has no *.safetensors file; it is not a complete checkpoint")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _read_tensors(file)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if set(weights) <= own or not any(name not in weights for name, _ in model.named_parameters()):
        return weights
    try:
        scalar = has_scalar_head(model)
        loaded = (
            load_scalar_model(checkpoint, dtype=model.dtype, new_head=False)
            if scalar
            else load_hf_model(checkpoint, dtype=model.dtype)
        )
        return dict(loaded.named_parameters())
    except ModelError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded ({error}); resume from another checkpoint"
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error

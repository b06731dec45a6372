"""What a backend keeps in a checkpoint's `state/`: optimizer moments and random state as safetensors, positions as JSON. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.errors import CheckpointError, ModelError
from rollouts.models.load import load_hf_model
from rollouts.run_dir import checkpoint_state_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER_FILE, BACKEND_FILE = "optimizer.safetensors", "backend.json"
CPU_RNG, CUDA_RNG = "rng/cpu", "rng/cuda"
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def save_backend_state(checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, position: Mapping[str, float]) -> None:
    """Writes `state/` of a checkpoint: the optimizer's tensors under parameter names, torch's random state, and `position`."""
    folder = checkpoint_state_dir(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {CPU_RNG: torch.get_rng_state()}
    if model.device.type == "cuda":
        tensors[CUDA_RNG] = torch.cuda.get_rng_state(model.device)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    save_file(tensors, folder / OPTIMIZER_FILE)
    (folder / BACKEND_FILE).write_text(json.dumps(dict(position), indent=1, allow_nan=False), encoding="utf-8")


def load_backend_state(checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, fields: Collection[str]) -> dict[str, float]:
    """The position that was saved; the optimizer and torch's random state are as they were.

    Raises CheckpointError naming file and field, before anything is changed.
    """
    folder = checkpoint_state_dir(checkpoint)
    tensors = _read_tensors(folder / OPTIMIZER_FILE)
    position = _read_position(folder / BACKEND_FILE, fields)
    parameters = dict(model.named_parameters())
    states: dict[Tensor, dict[str, Any]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "rng":
            continue
        if name not in parameters:
            raise CheckpointError(f"{folder / OPTIMIZER_FILE} has {key!r}, which is no parameter of this model; it is another model's checkpoint")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise CheckpointError(f"{folder / OPTIMIZER_FILE}: {key!r} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
        states.setdefault(parameter, {})[kind] = value.to(parameter.device)  # fused AdamW wants its step counter there too
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    for parameter, state in states.items():
        if set(state) != ADAMW_STATE:
            raise CheckpointError(f"{folder / OPTIMIZER_FILE} has {sorted(state)} of {names[parameter]}; AdamW needs {sorted(ADAMW_STATE)}")
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    if CPU_RNG in tensors:
        torch.set_rng_state(tensors[CPU_RNG])
    if CUDA_RNG in tensors and model.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[CUDA_RNG], model.device)
    return position


def read_model_weights(checkpoint: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """All weights of the checkpoint, under the names and in the shapes that `model` has them in.

    Some models hold tensors that their files have in pieces (the experts of a mixture); those are put together as loading a model does.
    Raises CheckpointError if a file cannot be read.
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
        return dict(load_hf_model(checkpoint, dtype=model.dtype).named_parameters())
    except ModelError as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded ({error}); resume from another checkpoint") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def _read_position(path: Path, fields: Collection[str]) -> dict[str, float]:
    try:
        position: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    for name in fields:
        value = position.get(name) if isinstance(position, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{path} has {name}={value!r}; it must be a number: resume from another checkpoint")
    return position

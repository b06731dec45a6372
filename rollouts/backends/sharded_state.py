"""What ranks keep of the training state in a checkpoint, each its own rows in its own file, and what other
ranks make of it later.

    W ranks:   hold_sharded_state ─► state/optimizer-R-of-W.safetensors each; rank 0: state/backend.json
    M ranks:   read_sharded_state ─► own rows, from whichever files have them; random states; checked whole ─► apply

Any M reads what any W wrote, one process among them (optimizer.safetensors). Random states: rank r goes on
with that of rank r; a rank that is new draws from a seed made of that of rank r mod W, and of r: copies would
make two ranks draw the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rollouts.backends.random_states import copy_random_states, set_random_states
from rollouts.backends.state_files import (
    BACKEND_FILE,
    CUDA_RNG,
    LAYOUT,
    STEP,
    WAY_OUT,
    Extent,
    Layout,
    check_optimizer_files,
    read_optimizer_files,
    read_part,
    read_position,
    read_random_states,
    shard_name,
)
from rollouts.errors import CheckpointError
from rollouts.models.devices import find_device
from rollouts.models.directories import fsync_path
from rollouts.models.safetensors_file import write_safetensors
from rollouts.models.sharded import compute_local_slices, get_local, reshard
from rollouts.run_dir import checkpoint_state_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# --- saving -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldShard:
    """One rank's part of the training state between two steps, which can be written anywhere and at any time
    later.
    """

    tensors: Mapping[str, Tensor]  # this rank's rows of the moments, and its random states
    layout: Layout
    position: Mapping[str, float]

    def write(self, checkpoint: Path) -> None:
        """Writes this rank's file in the checkpoint's `state/`; rank 0 the position as well. Blocks; raises
        OSError.

        Synced where rank 0 will not do it: another machine's memory may hold the bytes back.
        """
        folder = checkpoint_state_dir(checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {LAYOUT: msgspec.json.encode(self.layout).decode()}
        file = folder / shard_name(self.layout.rank, self.layout.ranks)
        write_safetensors(file, self.tensors, metadata=metadata)
        if self.layout.rank:
            fsync_path(file)
        else:
            (folder / BACKEND_FILE).write_text(
                json.dumps(dict(self.position), indent=1, allow_nan=False), encoding="utf-8"
            )


def hold_sharded_state(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, float],
    *,
    rank: int,
    ranks: int,
    copied: bool,
) -> HeldShard:
    """The state of this rank as it is now. On the device thread; no communication. copied: in host memory of
    its own.

    Without a copy the tensors are the trainer's: write before anything trains. Of ranks that hold the same
    rows the first one keeps them.
    """
    reshard(model)
    tensors = copy_random_states(find_device(model))
    extents: dict[str, Extent] = {}
    steps: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        offset = tuple(cut.start for cut in compute_local_slices(parameter))
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == STEP:
                steps[name] = float(get_local(value))
                continue
            local = get_local(value)
            if not local.numel() or not _is_first_copy(parameter, rank):
                continue
            tensors[f"{kind}/{name}"] = local.to("cpu", copy=True).contiguous() if copied else local
            extents[f"{kind}/{name}"] = Extent(tuple(parameter.shape), offset)
    return HeldShard(tensors, Layout(rank, ranks, steps, extents), dict(position))


def _is_first_copy(parameter: Tensor, rank: int) -> bool:
    """Whether no rank before this one holds the same rows."""
    if not isinstance(parameter, DTensor):
        return rank == 0
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(
        place == 0
        for place, placement in zip(coordinates, parameter.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def save_sharded_state(
    checkpoint: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, float],
    *,
    rank: int,
    ranks: int,
) -> None:
    """Writes this rank's part of `state/`. Every rank calls it, with a checkpoint directory that all of them
    see; it does not communicate.
    """
    hold_sharded_state(model, optimizer, position, rank=rank, ranks=ranks, copied=False).write(checkpoint)


# --- loading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedState:
    """One rank's training state as a checkpoint has it: read and checked, nothing changed yet."""

    position: dict[str, float]
    states: Mapping[Tensor, dict[str, Tensor]]  # of AdamW, by parameter
    random_states: Mapping[str, Tensor]  # of this rank; a kind that the checkpoint has not is left alone

    def apply(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """The optimizer and torch's random states are as they were."""
        optimizer.state.clear()
        for parameter, state in self.states.items():
            optimizer.state[parameter] = state
        set_random_states(self.random_states, device)


def read_sharded_state(
    checkpoint: Path, model: PreTrainedModel, fields: Collection[str], *, rank: int, ranks: int
) -> LoadedState:
    """This rank's part of what any number of ranks, or one process, saved. `fields`: what the position must
    have.

    Raises CheckpointError naming file and field, on every rank the same but where a disk fails. Does not
    communicate.
    """
    reshard(model)
    folder = checkpoint_state_dir(checkpoint)
    found = read_optimizer_files(folder)
    position = read_position(folder / BACKEND_FILE, fields)
    parameters = dict(model.named_parameters())
    check_optimizer_files(found, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    random_states = _find_random_states(found.files, rank, find_device(model))
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, step in found.steps.items():
        parameter = parameters[name]
        slices, device = compute_local_slices(parameter), get_local(parameter).device
        state: dict[str, Any] = {
            STEP: torch.tensor(step, dtype=torch.float32, device=device)
        }  # where fused AdamW wants it
        for kind in ("exp_avg", "exp_avg_sq"):
            local = read_part(found.pieces.get(name, {}).get(kind, ()), slices, parameter.dtype).to(device)
            state[kind] = _spread_like(parameter, local)
        states[parameter] = state
    return LoadedState(position, states, random_states)


def load_sharded_state(
    checkpoint: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    fields: Collection[str],
    *,
    rank: int,
    ranks: int,
) -> dict[str, float]:
    """The position that was saved; the optimizer's part on this rank and torch's random states are as they
    were. Raises as read_sharded_state, before anything is changed.
    """
    loaded = read_sharded_state(checkpoint, model, fields, rank=rank, ranks=ranks)
    loaded.apply(optimizer, find_device(model))
    return loaded.position


def _spread_like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _find_random_states(files: tuple[Path, ...], rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states that this rank's generators go on with. Raises CheckpointError if torch does not take one."""
    path = files[rank % len(files)]
    found: dict[str, Tensor] = {}
    for key, state in read_random_states(path).items():
        if key == CUDA_RNG and device.type != "cuda":
            continue
        generator = torch.Generator(device if key == CUDA_RNG else "cpu")
        try:
            generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: {key!r} is not a random state of this torch ({error}); {WAY_OUT}"
            ) from error
        if rank >= len(files):
            digest = hashlib.sha256(state.numpy().tobytes() + f"rank {rank}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found[key] = generator.get_state()
    return found

"""A backend's training state in a checkpoint's `state/`, written by any number of ranks, read by any.

    optimizer.safetensors         one rank: exp_avg/NAME, exp_avg_sq/NAME, step/NAME; rng/cpu, rng/cuda
    optimizer-R-of-W.safetensors  rank R of W: its rows of the moments, its random states; offsets, shapes of
                                  the whole and steps as JSON in the header's metadata under "layout"
    backend.json                  the backend's counters

Random states: rank r goes on with those of rank r; a rank that is new draws from a seed made of those of rank
r mod W and of r, for copies would make two ranks draw the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.errors import CheckpointError
from rollouts.models.devices import find_device
from rollouts.models.directories import fsync_path
from rollouts.models.safetensors_file import write_safetensors
from rollouts.models.sharded import compute_local_slices, get_local, reshard
from rollouts.ranks.group import Ranks
from rollouts.run_dir import checkpoint_state_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER_FILE, BACKEND_FILE = "optimizer.safetensors", "backend.json"
CPU_RNG, CUDA_RNG = "rng/cpu", "rng/cuda"
MOMENTS, STEP, LAYOUT = ("exp_avg", "exp_avg_sq"), "step", "layout"
SHARD_NAME = re.compile(r"optimizer-(\d+)-of-(\d+)\.safetensors")
WAY_OUT = "resume from another checkpoint"


def copy_random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators, on the CPU and on the device, under their names in files."""
    states = {CPU_RNG: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA_RNG] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """torch draws as it did when `states` were copied; a kind that is missing is left alone."""
    if CPU_RNG in states:
        torch.set_rng_state(states[CPU_RNG])
    if CUDA_RNG in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA_RNG], device)


# --- saving -------------------------------------------------------------------------------------------------


class Extent(msgspec.Struct, frozen=True):
    """Where a rank's part of a tensor lies in the whole."""

    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """What a rank's file says of itself."""

    rank: int
    ranks: int
    steps: dict[str, float]  # of AdamW, by parameter name; the same in every file
    tensors: dict[str, Extent]  # by key


@dataclass(frozen=True, slots=True)
class HeldState:
    """One rank's part of the training state between two steps."""

    tensors: Mapping[str, Tensor]  # this rank's rows of the moments, and its random states
    layout: Layout
    position: Mapping[str, float]

    def write(self, checkpoint: Path) -> None:
        """Writes this rank's file in the checkpoint's `state/`, and on rank 0 the position. Raises OSError.

        Synced where rank 0 will not do it: another machine's memory may hold the bytes back.
        """
        folder, layout = checkpoint_state_dir(checkpoint), self.layout
        folder.mkdir(parents=True, exist_ok=True)
        if layout.ranks == 1:
            steps = {f"{STEP}/{name}": torch.tensor(step) for name, step in layout.steps.items()}
            write_safetensors(folder / OPTIMIZER_FILE, {**self.tensors, **steps})
        else:
            file = folder / f"optimizer-{layout.rank}-of-{layout.ranks}.safetensors"
            write_safetensors(file, self.tensors, metadata={LAYOUT: msgspec.json.encode(layout).decode()})
            if layout.rank:
                fsync_path(file)
        if layout.rank == 0:
            text = json.dumps(dict(self.position), indent=1, allow_nan=False)
            (folder / BACKEND_FILE).write_text(text, encoding="utf-8")


def hold_state(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, float],
    ranks: Ranks,
    *,
    copied: bool,
) -> HeldState:
    """This rank's state as it is now. On the device thread; no communication. copied: in host memory of its
    own; else the tensors are the trainer's, to be written before anything trains.

    Only the ranks of the first replica keep moments.
    """
    reshard(model)
    tensors = copy_random_states(find_device(model))
    extents: dict[str, Extent] = {}
    steps: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        offset = tuple(cut.start for cut in compute_local_slices(parameter))
        for kind, value in optimizer.state.get(parameter, {}).items():
            local = get_local(value)
            if kind == STEP:
                steps[name] = float(local)
            elif local.numel() and ranks.first_replica:
                tensors[f"{kind}/{name}"] = local.to("cpu", copy=True).contiguous() if copied else local
                extents[f"{kind}/{name}"] = Extent(tuple(parameter.shape), offset)
    return HeldState(tensors, Layout(ranks.rank, ranks.world_size, steps, extents), dict(position))


# --- loading ------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a tensor as it lies in a file."""

    file: Path
    extent: Extent
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """One rank's training state as a checkpoint has it: read and checked, nothing changed yet."""

    position: dict[str, float]
    states: Mapping[Tensor, dict[str, Tensor]]  # of AdamW, by parameter
    random_states: Mapping[str, Tensor]

    def apply(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """The optimizer and torch's random states are as they were."""
        optimizer.state.clear()
        optimizer.state.update(self.states)
        set_random_states(self.random_states, device)


def read_state(
    checkpoint: Path, model: PreTrainedModel, fields: Collection[str], ranks: Ranks
) -> LoadedState:
    """This rank's part of what any number of ranks saved. `fields`: what the position must have. No
    communication.

    Raises CheckpointError naming file and field, on every rank the same but where a disk fails.
    """
    reshard(model)
    folder = checkpoint_state_dir(checkpoint)
    files = find_optimizer_files(folder)
    steps, pieces = read_headers(files)
    position = read_position(folder / BACKEND_FILE, fields)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    check_headers(files[0], steps, pieces, parameters)
    random_states = read_random_states(files, ranks.rank, find_device(model))
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, step in steps.items():
        parameter = parameters[name]
        local = get_local(parameter)
        # fused AdamW wants the step on the parameter's device
        state = {STEP: torch.tensor(step, dtype=torch.float32, device=local.device)}
        for kind in MOMENTS:
            key, slices = f"{kind}/{name}", compute_local_slices(parameter)
            part = read_part(pieces.get(key, ()), key, slices, parameter.dtype).to(local.device)
            if isinstance(parameter, DTensor):
                shape: Any = {"shape": parameter.shape, "stride": parameter.stride()}
                mesh, placements = parameter.device_mesh, parameter.placements
                part = DTensor.from_local(part, mesh, placements, run_check=False, **shape)
            state[kind] = part
        states[parameter] = state
    return LoadedState(position, states, random_states)


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {WAY_OUT}") from error


def find_optimizer_files(folder: Path) -> list[Path]:
    """The one file of a single process, or those of all ranks in order. Raises CheckpointError naming one
    that is missing or of another save.
    """
    found = sorted(path.name for path in folder.glob("optimizer*"))
    counts = {int(match[2]) for name in found if (match := SHARD_NAME.fullmatch(name))}
    if not counts:
        return [folder / OPTIMIZER_FILE]
    ranks = min(counts)
    wanted = [f"optimizer-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]
    for name in wanted:
        if name not in found:
            raise CheckpointError(f"{folder / name} is missing; {ranks} ranks saved the optimizer; {WAY_OUT}")
    for name in found:
        if name not in wanted:
            raise CheckpointError(f"{folder / name} and {folder / wanted[0]} are of two saves; {WAY_OUT}")
    return [folder / name for name in wanted]


def read_headers(files: Sequence[Path]) -> tuple[dict[str, float], dict[str, list[Piece]]]:
    """AdamW's steps by parameter name, and by key where the pieces of a moment lie. Raises CheckpointError
    naming the file.
    """
    steps: dict[str, float] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, path in enumerate(files):
        with _open_file(path) as file:
            sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if path.name == OPTIMIZER_FILE:
                scalars = [key for key, size in sizes.items() if key.startswith(f"{STEP}/") and not size]
                own = {key.partition("/")[2]: float(file.get_tensor(key)) for key in scalars}
                moments = [key for key in sizes if key.partition("/")[0] in MOMENTS]
                tensors = {key: Extent(sizes[key], (0,) * len(sizes[key])) for key in moments}
                layout = Layout(0, 1, own, tensors)
            else:
                try:
                    layout = msgspec.json.decode((file.metadata() or {}).get(LAYOUT, ""), type=Layout)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise CheckpointError(
                        f"{path}: its metadata has no readable {LAYOUT} ({error}); {WAY_OUT}"
                    ) from error
        if (layout.rank, layout.ranks) != (rank, len(files)):
            raise CheckpointError(f"{path}: {LAYOUT} says rank {layout.rank} of {layout.ranks}; {WAY_OUT}")
        if rank and layout.steps != steps:
            raise CheckpointError(f"{path} and {files[0]} are of two saves: other steps; {WAY_OUT}")
        steps = layout.steps
        for key, extent in layout.tensors.items():
            lying = pieces.setdefault(key, [])
            if key not in sizes or any(other.extent.shape != extent.shape for other in lying):
                raise CheckpointError(f"{path}: {key!r} is not what its {LAYOUT} says; {WAY_OUT}")
            lying.append(Piece(path, extent, sizes[key]))
    return steps, pieces


def check_headers(
    file: Path,
    steps: Mapping[str, float],
    pieces: Mapping[str, Sequence[Piece]],
    parameters: Mapping[str, Tensor],
) -> None:
    """Raises CheckpointError unless everything is of a parameter of the model, and what AdamW needs of it."""
    for key, lying in pieces.items():
        shape, parameter = lying[0].extent.shape, parameters.get(key.partition("/")[2])
        if parameter is None or tuple(parameter.shape) != shape:
            has = "does not exist" if parameter is None else tuple(parameter.shape)
            raise CheckpointError(
                f"{lying[0].file}: {key!r} has shape {shape}, the model's parameter {has}; it is another"
                " model's checkpoint"
            )
    kinds = {name: {STEP} for name in steps}
    for key in pieces:
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
    for name, has in sorted(kinds.items()):
        # of a parameter without elements the files hold no moments
        empty = name in parameters and parameters[name].numel() == 0
        if has != {STEP, *MOMENTS} and not (empty and has == {STEP}):
            raise CheckpointError(f"{file} has {sorted(has)} of {name}; AdamW needs {[*MOMENTS, STEP]}")


def read_part(pieces: Sequence[Piece], key: str, slices: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """A part of a moment, put together from the files that have something of it, in the precision in which
    they do. Reads no more. dtype: of a part without elements. Raises CheckpointError if elements are lacking.
    """
    size = [cut.stop - cut.start for cut in slices]
    part, filled = torch.empty(size, dtype=dtype), 0
    for file, extent, lengths in pieces:
        starts = [max(at, cut.start) for at, cut in zip(extent.offset, slices, strict=True)]
        ends = [min(at + n, cut.stop) for at, n, cut in zip(extent.offset, lengths, slices, strict=True)]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            continue

        def cut_from(origin: Sequence[int], starts: list[int] = starts, ends: list[int] = ends) -> Any:
            return tuple(slice(a - o, b - o) for a, b, o in zip(starts, ends, origin, strict=True))

        with _open_file(file) as opened:
            content = opened.get_slice(key)[cut_from(extent.offset)] if size else opened.get_tensor(key)
        part = part.to(content.dtype)
        part[cut_from([cut.start for cut in slices])] = content
        filled += content.numel()
    if filled != math.prod(size):
        folder = pieces[0].file.parent if pieces else "state/"
        raise CheckpointError(f"{folder}: the files lack elements of {key!r}; {WAY_OUT}")
    return part


def read_random_states(files: Sequence[Path], rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states that this rank's generators go on with. Raises CheckpointError if torch refuses one."""
    path = files[rank % len(files)]
    kinds = {CPU_RNG: torch.device("cpu")} | ({CUDA_RNG: device} if device.type == "cuda" else {})
    with _open_file(path) as file:
        saved = {key: file.get_tensor(key) for key in kinds if key in file.keys()}  # noqa: SIM118
    found: dict[str, Tensor] = {}
    for key, state in saved.items():
        generator = torch.Generator(kinds[key])
        try:
            generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: {key!r} is no random state of this torch ({error}); {WAY_OUT}"
            ) from error
        if rank >= len(files):
            digest = hashlib.sha256(state.numpy().tobytes() + f"rank {rank}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found[key] = generator.get_state()
    return found


def read_position(path: Path, fields: Collection[str]) -> dict[str, float]:
    """The counters of the backend. Raises CheckpointError naming one that is missing or no number."""
    try:
        position: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {WAY_OUT}") from error
    for name in fields:
        value = position.get(name) if isinstance(position, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{path} has {name}={value!r}; it must be a number: {WAY_OUT}")
    return position

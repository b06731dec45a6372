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


# --- random states ------------------------------------------------------------------------------------------


def copy_random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators, on the CPU and on the device, under their names in files."""
    states = {CPU_RNG: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA_RNG] = torch.cuda.get_rng_state(device)
    return states


class StepRandomStates:
    """torch's random states as of the last completed step, so that a step that is given up and repeated draws
    the same numbers. On the device thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[str, Tensor] | None = None  # None: no step began yet

    def begin(self) -> None:
        """Before a step draws; only the first one needs it."""
        if self._states is None:
            self.note()

    def note(self) -> None:
        """A step has drawn what it draws, or a checkpoint was loaded."""
        self._states = copy_random_states(self._device)

    def restore(self) -> None:
        """The step since then was given up."""
        if self._states is not None:
            set_random_states(self._states, self._device)


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
                key = f"{kind}/{name}"
                tensors[key] = local.to("cpu", copy=True).contiguous() if copied else local
                extents[key] = Extent(tuple(parameter.shape), offset)
    return HeldState(tensors, Layout(ranks.rank, ranks.world_size, steps, extents), dict(position))


# --- loading ------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a tensor as it lies in a file."""

    file: Path
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(slots=True)
class OptimizerFiles:
    """The optimizer of a checkpoint by the headers of its files."""

    files: list[Path]  # one for each rank that saved
    steps: dict[str, float]  # by parameter name
    shapes: dict[str, tuple[int, ...]]  # of whole tensors, by key
    pieces: dict[str, list[Piece]]  # by key


@dataclass(frozen=True, slots=True)
class LoadedState:
    """One rank's training state as a checkpoint has it: read and checked, nothing changed yet."""

    position: dict[str, float]
    states: Mapping[Tensor, dict[str, Tensor]]  # of AdamW, by parameter
    random_states: Mapping[str, Tensor]

    def apply(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """The optimizer and torch's random states are as they were."""
        optimizer.state.clear()
        for parameter, state in self.states.items():
            optimizer.state[parameter] = state
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
    found = read_optimizer_files(folder)
    position = read_position(folder / BACKEND_FILE, fields)
    parameters = dict(model.named_parameters())
    check_optimizer_files(found, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    random_states = read_random_states(found.files, ranks.rank, find_device(model))
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, step in found.steps.items():
        parameter = parameters[name]
        slices, device = compute_local_slices(parameter), get_local(parameter).device
        # fused AdamW wants the step on the parameter's device
        state = {STEP: torch.tensor(step, dtype=torch.float32, device=device)}
        for kind in MOMENTS:
            local = read_part(found, f"{kind}/{name}", slices, parameter.dtype).to(device)
            state[kind] = _shard_like(parameter, local)
        states[parameter] = state
    return LoadedState(position, states, random_states)


def _shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


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
    single = folder / OPTIMIZER_FILE
    shards = {
        (int(match[2]), int(match[1])): path
        for path in folder.glob("optimizer-*")
        if (match := SHARD_NAME.fullmatch(path.name))
    }
    if not shards:
        return [single]
    ranks = min(shards)[0]
    wanted = [(ranks, rank) for rank in range(ranks)]
    names = {place: folder / f"optimizer-{place[1]}-of-{ranks}.safetensors" for place in wanted}
    if missing := [names[place] for place in wanted if place not in shards]:
        raise CheckpointError(f"{missing[0]} is missing; {ranks} ranks saved the optimizer; {WAY_OUT}")
    others = [path for place, path in sorted(shards.items()) if place not in names]
    if single.exists() or others:
        raise CheckpointError(f"{(others or [single])[0]} and {names[wanted[0]]} are of two saves; {WAY_OUT}")
    return [names[place] for place in wanted]


def read_optimizer_files(folder: Path) -> OptimizerFiles:
    """What the headers say. Raises CheckpointError naming the file."""
    found = OptimizerFiles(find_optimizer_files(folder), {}, {}, {})
    for rank, path in enumerate(found.files):
        with _open_file(path) as file:
            sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if path.name == OPTIMIZER_FILE:
                steps = {
                    key.partition("/")[2]: float(file.get_tensor(key))
                    for key, size in sizes.items()
                    if key.startswith(f"{STEP}/") and not size
                }
                moments = {key: size for key, size in sizes.items() if key.partition("/")[0] in MOMENTS}
                tensors = {key: Extent(size, (0,) * len(size)) for key, size in moments.items()}
            else:
                layout = _read_layout(path, file.metadata(), rank, len(found.files))
                steps, tensors = layout.steps, layout.tensors
        if rank and steps != found.steps:
            raise CheckpointError(f"{path} and {found.files[0]} are of two saves: other steps; {WAY_OUT}")
        found.steps = steps
        for key, extent in tensors.items():
            if key not in sizes or found.shapes.setdefault(key, extent.shape) != extent.shape:
                raise CheckpointError(f"{path}: {key!r} is not what its {LAYOUT} says; {WAY_OUT}")
            found.pieces.setdefault(key, []).append(Piece(path, extent.offset, sizes[key]))
    return found


def _read_layout(path: Path, metadata: Mapping[str, str] | None, rank: int, ranks: int) -> Layout:
    try:
        layout = msgspec.json.decode((metadata or {}).get(LAYOUT, ""), type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: its metadata has no readable {LAYOUT} ({error}); {WAY_OUT}"
        ) from error
    if (layout.rank, layout.ranks) != (rank, ranks):
        raise CheckpointError(f"{path}: {LAYOUT} says rank {layout.rank} of {layout.ranks}; {WAY_OUT}")
    return layout


def check_optimizer_files(found: OptimizerFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError unless everything is of a parameter of the model, whose `shapes` these are, and
    what AdamW needs of it.
    """
    for key, shape in found.shapes.items():
        name = key.partition("/")[2]
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{found.pieces[key][0].file}: {key!r} has shape {shape}, the model's parameter"
                f" {shapes.get(name, 'does not exist')}; it is another model's checkpoint"
            )
    for name in sorted(found.steps.keys() | {key.partition("/")[2] for key in found.shapes}):
        kinds = {kind for kind in MOMENTS if f"{kind}/{name}" in found.shapes}
        # of a parameter without elements the files hold no moments
        complete = kinds == set(MOMENTS) or (not kinds and math.prod(shapes.get(name, (1,))) == 0)
        if name not in found.steps or not complete:
            has = sorted(kinds | ({STEP} if name in found.steps else set()))
            raise CheckpointError(f"{found.files[0]} has {has} of {name}; AdamW needs {[*MOMENTS, STEP]}")


def read_part(found: OptimizerFiles, key: str, slices: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """A part of a whole tensor, put together from the files that have something of it. Reads no more.

    dtype: of a part without elements. Raises CheckpointError if the files lack elements.
    """
    part: Tensor | None = None
    filled, size = 0, [cut.stop - cut.start for cut in slices]
    for piece in found.pieces.get(key, ()):
        bounds = [
            (max(start, cut.start), min(start + length, cut.stop))
            for start, length, cut in zip(piece.offset, piece.size, slices, strict=True)
        ]
        if any(end <= start for start, end in bounds):
            continue
        inside = tuple(
            slice(a - start, b - start) for (a, b), start in zip(bounds, piece.offset, strict=True)
        )
        with _open_file(piece.file) as file:
            content = file.get_slice(key)[inside] if inside else file.get_tensor(key)
        if part is None:
            part = torch.empty(size, dtype=content.dtype)
        part[
            tuple(slice(a - cut.start, b - cut.start) for (a, b), cut in zip(bounds, slices, strict=True))
        ] = content
        filled += content.numel()
    if filled != math.prod(size):
        raise CheckpointError(f"{found.files[0].parent}: the files lack elements of {key!r}; {WAY_OUT}")
    return torch.empty(size, dtype=dtype) if part is None else part


def read_random_states(files: Sequence[Path], rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states that this rank's generators go on with. Raises CheckpointError if torch refuses one."""
    path = files[rank % len(files)]
    with _open_file(path) as file:
        saved = {key: file.get_tensor(key) for key in (CPU_RNG, CUDA_RNG) if key in file.keys()}  # noqa: SIM118
    found: dict[str, Tensor] = {}
    for key, state in saved.items():
        if key == CUDA_RNG and device.type != "cuda":
            continue
        generator = torch.Generator(device if key == CUDA_RNG else "cpu")
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

"""Files of a checkpoint's `state/`: what is in them, checked against each other and against a model, and read
by slices.

    optimizer.safetensors              one process: whole tensors exp_avg/NAME, exp_avg_sq/NAME, the number of steps as step/NAME; rng/cpu, rng/cuda
    optimizer-R-of-W.safetensors       rank R of W: its rows of the moments, its random state; shapes of the whole, offsets and steps as JSON in
                                       the header's metadata under "layout". A tensor of which a rank has no rows is not in its file.
    backend.json                       position: counters of the backend

Nothing here changes anything. Everybody who reads the same files comes to the same errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.errors import CheckpointError

OPTIMIZER_FILE, BACKEND_FILE = "optimizer.safetensors", "backend.json"
CPU_RNG, CUDA_RNG = "rng/cpu", "rng/cuda"
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}
STEP = "step"
LAYOUT = "layout"
SHARD_NAME = re.compile(r"optimizer-(0|[1-9][0-9]*)-of-([1-9][0-9]*)\.safetensors")
WAY_OUT = "resume from another checkpoint"


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank's part of a tensor lies in the whole."""

    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank's file says of itself."""

    rank: int
    ranks: int
    steps: dict[str, float]  # of AdamW, by parameter name; the same in every file
    tensors: dict[str, Extent]  # by key


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor as it lies in a file."""

    file: Path
    key: str
    extent: Extent
    size: tuple[int, ...]  # of the part

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first, behind the last) in the whole, of each dimension."""
        return tuple((start, start + size) for start, size in zip(self.extent.offset, self.size, strict=True))


@dataclass(slots=True)
class OptimizerFiles:
    """The optimizer of a checkpoint as its files have it."""

    files: tuple[Path, ...]  # one for each rank that saved
    steps: dict[str, float] = field(default_factory=dict)  # by parameter name
    pieces: dict[str, dict[str, list[Piece]]] = field(
        default_factory=dict
    )  # parameter name → exp_avg, exp_avg_sq → its parts


def shard_name(rank: int, ranks: int) -> str:
    """The file of one rank."""
    return f"optimizer-{rank}-of-{ranks}.safetensors"


def find_optimizer_files(folder: Path) -> tuple[Path, ...]:
    """The one file of a single process, or those of all ranks in order. Raises CheckpointError naming what is
    missing or too much.
    """
    single = folder / OPTIMIZER_FILE
    shards = {
        (int(match[1]), int(match[2])): path
        for path in folder.glob("optimizer-*")
        if (match := SHARD_NAME.fullmatch(path.name))
    }
    if single.exists() and shards:
        raise CheckpointError(f"{single} and {min(shards.values())} are of two different saves; {WAY_OUT}")
    if not shards:
        return (single,)  # which says so itself where it is missing
    counts = sorted({ranks for _, ranks in shards})
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder} has optimizer files of {counts[0]} and of {counts[1]} ranks; {WAY_OUT}"
        )
    wanted = [(rank, counts[0]) for rank in range(counts[0])]
    missing = [folder / shard_name(*place) for place in wanted if place not in shards]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing; the optimizer was saved by {counts[0]} ranks, in a file each;"
            f" {WAY_OUT}"
        )
    if len(shards) > len(wanted):
        raise CheckpointError(
            f"{folder / shard_name(*max(shards))} is of a rank beyond the {counts[0]}; {WAY_OUT}"
        )
    return tuple(shards[place] for place in wanted)


def read_optimizer_files(folder: Path) -> OptimizerFiles:
    """What the headers say, in themselves consistent. Raises CheckpointError naming file and field."""
    found = OptimizerFiles(find_optimizer_files(folder))
    for rank, path in enumerate(found.files):
        try:
            with safe_open(path, framework="pt") as file:
                _add_file(found, path, file, rank)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); {WAY_OUT}") from error
    for name, kinds in found.pieces.items():
        for pieces in kinds.values():
            _check_tiling(name, pieces)
    return found


def _add_file(found: OptimizerFiles, path: Path, file: Any, rank: int) -> None:
    sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if not key.startswith("rng/")}  # noqa: SIM118
    if path.name == OPTIMIZER_FILE:
        steps = {
            key.partition("/")[2]: float(file.get_tensor(key))
            for key, size in sizes.items()
            if key.startswith(f"{STEP}/") and not size
        }
        extents = {
            key: Extent(size, (0,) * len(size))
            for key, size in sizes.items()
            if not (key.startswith(f"{STEP}/") and not size)
        }
    else:
        layout = _read_layout(path, file.metadata(), rank, len(found.files))
        steps, extents = layout.steps, layout.tensors
        if rank and steps != found.steps:
            raise CheckpointError(
                f"{path}: {LAYOUT}.steps is not what {found.files[0]} has; they are of two different saves;"
                f" {WAY_OUT}"
            )
        if set(extents) != set(sizes):
            raise CheckpointError(
                f"{path}: {LAYOUT}.tensors and the file's tensors differ in"
                f" {min(set(extents) ^ set(sizes))!r}; {WAY_OUT}"
            )
    found.steps |= steps
    for key, extent in extents.items():
        piece = Piece(path, key, extent, sizes[key])
        inside = len(extent.shape) == len(extent.offset) == len(piece.size)
        if not inside or any(
            not 0 <= start <= end <= size
            for (start, end), size in zip(piece.bounds, extent.shape, strict=True)
        ):
            raise CheckpointError(
                f"{path}: {key!r} of shape {piece.size} at {extent.offset} does not lie in the whole of"
                f" {extent.shape} that its {LAYOUT} speaks of; {WAY_OUT}"
            )
        kind, _, name = key.partition("/")
        found.pieces.setdefault(name, {}).setdefault(kind, []).append(piece)


def _read_layout(path: Path, metadata: Mapping[str, str] | None, rank: int, ranks: int) -> Layout:
    try:
        layout = msgspec.json.decode((metadata or {}).get(LAYOUT, ""), type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: its metadata has no {LAYOUT} that can be read ({error}); {WAY_OUT}"
        ) from error
    if (layout.rank, layout.ranks) != (rank, ranks):
        raise CheckpointError(
            f"{path}: {LAYOUT} says rank {layout.rank} of {layout.ranks}; the file's name says otherwise;"
            f" {WAY_OUT}"
        )
    wrong = [name for name, step in layout.steps.items() if not (math.isfinite(step) and step >= 0)]
    if wrong:
        raise CheckpointError(
            f"{path}: {LAYOUT}.steps[{wrong[0]!r}] is {layout.steps[wrong[0]]}; it must be a number of steps;"
            f" {WAY_OUT}"
        )
    return layout


def _check_tiling(name: str, pieces: Sequence[Piece]) -> None:
    """Raises CheckpointError unless the parts make the whole, each element once."""
    first = pieces[0]
    for piece in pieces[1:]:
        if piece.extent.shape != first.extent.shape:
            raise CheckpointError(
                f"{piece.file}: {piece.key!r} is of {piece.extent.shape} as a whole, in {first.file} of"
                f" {first.extent.shape}; {WAY_OUT}"
            )
    for index, piece in enumerate(pieces):
        for other in pieces[:index]:
            if math.prod(
                len(range(max(a, c), min(b, d)))
                for (a, b), (c, d) in zip(piece.bounds, other.bounds, strict=True)
            ):
                raise CheckpointError(
                    f"{piece.file}: {piece.key!r} has elements that {other.file} has too; {WAY_OUT}"
                )
    if sum(math.prod(piece.size) for piece in pieces) != math.prod(first.extent.shape):
        raise CheckpointError(
            f"{first.file.parent}: the files together lack elements of {first.key!r} of {name}; {WAY_OUT}"
        )


def check_optimizer_files(found: OptimizerFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError unless everything is of a parameter of the model, whose `shapes` these are, and
    what AdamW needs of it.
    """
    folder = found.files[0].parent
    for name, kinds in found.pieces.items():
        for piece in (pieces[0] for pieces in kinds.values()):
            if name not in shapes:
                raise CheckpointError(
                    f"{piece.file} has {piece.key!r}, which is no parameter of this model; it is another"
                    " model's checkpoint"
                )
            if piece.extent.shape != shapes[name]:
                raise CheckpointError(
                    f"{piece.file}: {piece.key!r} has shape {piece.extent.shape}, the parameter"
                    f" {shapes[name]}"
                )
    for name in found.steps.keys() | found.pieces.keys():
        has = {*found.pieces.get(name, {}), *([STEP] if name in found.steps else [])}
        if has != ADAMW_STATE and not (
            has == {STEP} and 0 in shapes.get(name, ())
        ):  # of no elements there is nothing in files
            where = found.files[0] if len(found.files) == 1 else folder
            raise CheckpointError(f"{where} has {sorted(has)} of {name}; AdamW needs {sorted(ADAMW_STATE)}")


def read_part(pieces: Sequence[Piece], slices: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """A part of the whole, put together from the files that have something of it. Reads no more. `dtype`: of
    a part without elements.

    Raises CheckpointError.
    """
    part: Tensor | None = None
    for piece in pieces:
        both = [
            (max(a, cut.start), min(b, cut.stop)) for (a, b), cut in zip(piece.bounds, slices, strict=True)
        ]
        if any(end <= start for start, end in both):
            continue
        inside = tuple(
            slice(start - origin, end - origin)
            for (start, end), (origin, _) in zip(both, piece.bounds, strict=True)
        )
        content = _read_slice(piece, inside)
        if part is None:
            part = torch.empty([cut.stop - cut.start for cut in slices], dtype=content.dtype)
        part[
            tuple(
                slice(start - cut.start, end - cut.start)
                for (start, end), cut in zip(both, slices, strict=True)
            )
        ] = content
    return torch.empty([cut.stop - cut.start for cut in slices], dtype=dtype) if part is None else part


def _read_slice(piece: Piece, slices: tuple[slice, ...]) -> Tensor:
    try:
        with safe_open(piece.file, framework="pt") as file:
            return file.get_slice(piece.key)[slices] if slices else file.get_tensor(piece.key)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{piece.file}: {piece.key!r} cannot be read ({error}); {WAY_OUT}") from error


def read_random_states(path: Path) -> dict[str, Tensor]:
    """torch's random states in one file, by rng/cpu and rng/cuda. Raises CheckpointError if one is not a
    state.
    """
    try:
        with safe_open(path, framework="pt") as file:
            states = {key: file.get_tensor(key) for key in (CPU_RNG, CUDA_RNG) if key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {WAY_OUT}") from error
    for key, state in states.items():
        if state.dtype != torch.uint8 or state.ndim != 1:
            raise CheckpointError(
                f"{path}: {key!r} has dtype {state.dtype} and shape {tuple(state.shape)}; a random state is"
                f" bytes; {WAY_OUT}"
            )
    return states


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

"""A backend's training state in a checkpoint's `state/`, written by any number of ranks, read by any.

    optimizer.safetensors         one rank: exp_avg/NAME, exp_avg_sq/NAME, step/NAME; rng/cpu, rng/cuda
    optimizer-R-of-W.safetensors  rank R of W: the same, with its own rows of the moments and its own random
                                  states; the rows of all files, in the order of the ranks, are the whole
    backend.json                  the backend's counters

Random states: rank r goes on with those of rank r; a rank that is new draws from a seed made of those of rank
r mod W and of r, for copies would make two ranks draw the same numbers.

Whole weights from shards and shards from whole weights, a bucket at a time: rank 0 gets or gives all of
them, or each rank gets its own part. On one rank the weights are whole already.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollouts.errors import BackendError, CheckpointError
from rollouts.models.export import Bucket, split_buckets, write_safetensors
from rollouts.models.lora import Adapter, Trained, list_trained
from rollouts.models.sharded import compute_local_slices, get_local
from rollouts.ranks.meet import Ranks
from rollouts.run_dir import checkpoint_state_dir, fsync_path

# --- whole weights and shards -------------------------------------------------------------------------------


BUCKET_BYTES = 256 * 2**20
# of whole tensors gathered at once: the rank that gets them holds about three times that beside its shards
RANK_BUCKET_BYTES = 8 * 2**20


def check_weights(trained: Trained, weights: Mapping[str, Tensor]) -> None:
    """Raises BackendError naming the weights that are missing, unknown or of another shape. A tied weight may
    come under each of its names.
    """
    known = parameters = list_trained(trained)
    if not isinstance(trained, Adapter):
        known = dict(trained.named_parameters(remove_duplicate=False))
    wrong = [f"{name} is missing" for name in parameters if name not in weights]
    wrong += [f"{name} is not the model's" for name in weights if name not in known]
    wrong += [
        f"{name} has the shape {tuple(weights[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if wrong:
        raise BackendError(f"{len(wrong)} weights do not fit: {'; '.join(wrong[:5])}; nothing was loaded")


def gather_bucket(ranks: Ranks, bucket: Bucket, *, to: int = 0) -> Bucket | None:
    """On rank `to` the whole tensors of a bucket of one dtype, by one collective; None on the others.

    Every shard is padded to the first one's rows: torch cuts as torch.chunk does, and the last shards have
    fewer or none. Ranks of another replica than that of `to` give nothing.
    """
    if not isinstance(bucket[0][1], DTensor):  # every rank has all of it
        return [(name, parameter.detach()) for name, parameter in bucket] if ranks.rank == to else None
    if ranks.rank // ranks.num_shards != to // ranks.num_shards:
        return None
    pieces = []
    for _, parameter in bucket:
        assert isinstance(parameter, DTensor) and parameter.placements[-1] == Shard(0), parameter
        rows, count = get_local(parameter), -(-parameter.shape[0] // ranks.num_shards)
        pieces += [torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))]).flatten()]
    mine = torch.cat(pieces)
    blocks = list(mine.new_empty(ranks.num_shards, len(mine))) if ranks.rank == to else None
    dist.gather(mine, blocks, dst=to, group=ranks.shard_mesh.get_group())
    if blocks is None:
        return None
    split = [block.split([len(piece) for piece in pieces]) for block in blocks]
    return [
        (name, torch.cat(rows)[: parameter.numel()].view(parameter.shape))
        for (name, parameter), rows in zip(bucket, zip(*split, strict=True), strict=True)
    ]


def gather_parts(ranks: Ranks, parts: Sequence[Bucket], take: Callable[[Bucket], object]) -> None:
    """Hands `take` on each rank the whole tensors of its own part of `parts` [W], bucket by bucket.
    Collective. What `take` raises is raised after the last turn, so that the ranks stay together.

    In turns: a bucket for every rank is gathered, then all take theirs at the same time.
    """
    failure: Exception | None = None
    buckets = [split_buckets(part, RANK_BUCKET_BYTES) for part in parts]
    for turn in zip_longest(*buckets):
        own = None
        for rank, bucket in enumerate(turn):
            if bucket:
                own = gather_bucket(ranks, bucket, to=rank) or own
        try:
            if own and not failure:
                take(own)
        except Exception as error:
            failure = error
    if failure:
        raise failure


def scatter_weight(ranks: Ranks, parameter: Tensor, weight: Tensor | None) -> None:
    """Copies rank 0's `weight` into a parameter, each rank its own rows."""
    local = get_local(parameter)
    whole = local.new_empty(parameter.shape) if weight is None else weight.to(local).contiguous()
    if ranks.mesh:  # whole for a moment, as in a forward pass
        dist.broadcast(whole, src=0)
    local.copy_(whole[compute_local_slices(parameter)])


# --- the training state -------------------------------------------------------------------------------------


BACKEND_FILE = "backend.json"
CPU_RNG, CUDA_RNG = "rng/cpu", "rng/cuda"
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
SHARD_NAME = re.compile(r"optimizer-\d+-of-(\d+)\.safetensors")
WAY_OUT = "resume from another checkpoint"


def name_optimizer_file(rank: int, world_size: int) -> str:
    """The file that a rank writes."""
    return "optimizer.safetensors" if world_size == 1 else f"optimizer-{rank}-of-{world_size}.safetensors"


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


class Position(msgspec.Struct, frozen=True):
    """The counters of a backend, which rank 0 keeps."""

    steps: int  # optimizer steps
    skipped_in_a_row: int  # of them the last
    weight_version: int


class HeldState(NamedTuple):
    """One rank's part of the training state between two steps."""

    tensors: Mapping[str, Tensor]  # this rank's rows of the moments, AdamW's steps, its random states
    rank: int
    world_size: int
    position: Position

    def write(self, checkpoint: Path) -> None:
        """Writes this rank's file in the checkpoint's `state/`, and on rank 0 the position. Raises OSError.

        Synced where rank 0 will not do it: another machine's memory may hold the bytes back.
        """
        folder = checkpoint_state_dir(checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name_optimizer_file(self.rank, self.world_size)
        write_safetensors(file, self.tensors)
        if self.rank:
            fsync_path(file)
            return
        (folder / BACKEND_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.position)))


def hold_state(
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    position: Position,
    ranks: Ranks,
    *,
    copied: bool,
) -> HeldState:
    """This rank's state as it is now. On the device thread; no communication. copied: in host memory of its
    own; else the tensors are the trainer's, to be written before anything trains.

    Only the ranks of the first replica keep moments, and of what every rank has all of only rank 0.
    """
    tensors = copy_random_states(ranks.device)
    keeps = ranks.rank == 0 if isinstance(trained, Adapter) else ranks.first_replica
    for name, parameter in list_trained(trained).items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == STEP or keeps:
                local = get_local(value)
                tensors[f"{kind}/{name}"] = local.to("cpu", copy=True).contiguous() if copied else local
    return HeldState(tensors, ranks.rank, ranks.world_size, position)


# --- loading ------------------------------------------------------------------------------------------------


class LoadedState(NamedTuple):
    """One rank's training state as a checkpoint has it: read and checked, nothing changed yet."""

    position: Position
    states: Mapping[Tensor, dict[str, Tensor]]  # of AdamW, by parameter
    random_states: Mapping[str, Tensor]

    def apply(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """The optimizer and torch's random states are as they were."""
        optimizer.state.clear()
        optimizer.state.update(self.states)
        set_random_states(self.random_states, device)


def read_state(checkpoint: Path, trained: Trained, ranks: Ranks) -> LoadedState:
    """This rank's part of what any number of ranks saved. No communication.

    Raises CheckpointError naming file and field, on every rank the same but where a disk fails.
    """
    folder = checkpoint_state_dir(checkpoint)
    files = open_optimizer_files(folder)
    file = folder / BACKEND_FILE
    try:
        position = msgspec.json.decode(file.read_bytes(), type=Position)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); {WAY_OUT}") from error
    random_states = read_random_states(files, ranks.rank, ranks.device)
    parameters = list_trained(trained)
    names = {key.partition("/")[2] for one in files for key in one.shapes if not key.startswith("rng/")}
    states = {}
    for name in sorted(names):
        if name not in parameters:
            raise CheckpointError(
                f"{folder} has moments of {name!r}, which the model does not have; it is another model's"
                " checkpoint"
            )
        parameter = parameters[name]
        states[parameter] = {
            # fused AdamW wants the step on the parameter's device
            STEP: read_step(files, name).to(get_local(parameter).device),
            **{kind: read_rows(files, f"{kind}/{name}", parameter) for kind in MOMENTS},
        }
    return LoadedState(position, states, random_states)


class OptimizerFile(NamedTuple):
    """One rank's file, open for reading."""

    path: Path
    content: Any  # what safe_open gives
    shapes: Mapping[str, tuple[int, ...]]  # by key


def open_optimizer_files(folder: Path) -> list[OptimizerFile]:
    """The one file of a single process, or those of all ranks in order. Raises CheckpointError naming one
    that is missing, of another save or damaged.
    """
    found = {path.name for path in folder.glob("optimizer*")}
    world_size = min((int(match[1]) for match in map(SHARD_NAME.fullmatch, found) if match), default=1)
    wanted = [name_optimizer_file(rank, world_size) for rank in range(world_size)]
    for name in sorted(found ^ set(wanted)):
        what = "is missing" if name in wanted else "is of another save"
        raise CheckpointError(f"{folder / name} {what}; {world_size} ranks saved the optimizer; {WAY_OUT}")
    files = []
    for path in (folder / name for name in wanted):
        try:
            content = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); {WAY_OUT}") from error
        shapes = {key: tuple(content.get_slice(key).get_shape()) for key in content.keys()}  # noqa: SIM118
        files.append(OptimizerFile(path, content, shapes))
    return files


def read_step(files: Sequence[OptimizerFile], name: str) -> Tensor:
    """AdamW's step of a parameter. Raises CheckpointError unless every file has the same."""
    key = f"{STEP}/{name}"
    steps = [file.content.get_tensor(key) if key in file.shapes else None for file in files]
    if steps[0] is None or any(step is None or not torch.equal(step, steps[0]) for step in steps):
        raise CheckpointError(f"{files[0].path.parent} has the steps {steps} of {name}, by rank; {WAY_OUT}")
    return steps[0]


def read_rows(files: Sequence[OptimizerFile], key: str, parameter: Tensor) -> Tensor:
    """This rank's rows of a moment, laid out as the parameter, in the precision of the files. Reads no more.
    Raises CheckpointError unless the files together have the parameter's shape.
    """
    shape, pieces = tuple(parameter.shape), [file for file in files if key in file.shapes]
    shapes = [file.shapes[key] for file in pieces]
    whole = [(sum(size[0] for size in shapes), *size[1:]) if size else size for size in shapes]
    if not shapes or any(one != shape for one in whole):
        raise CheckpointError(
            f"{files[0].path.parent}: {key!r} has shape {whole[0] if whole else None}, the model's parameter"
            f" {shape}; elements are missing, or it is another model's checkpoint; {WAY_OUT}"
        )
    local = get_local(parameter)
    if not shape:
        return pieces[0].content.get_tensor(key).to(local.device)
    rows, start, parts = compute_local_slices(parameter)[0], 0, list[Tensor]()
    for file, size in zip(pieces, shapes, strict=True):
        first, last = max(rows.start - start, 0), min(rows.stop - start, size[0])
        if first < last:
            parts.append(file.content.get_slice(key)[first:last])
        start += size[0]
    part = (torch.cat(parts) if parts else torch.empty_like(local)).to(local.device)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def read_random_states(files: Sequence[OptimizerFile], rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states that this rank's generators go on with. Raises CheckpointError if torch refuses one."""
    file = files[rank % len(files)]
    kinds = {CPU_RNG: torch.device("cpu")} | ({CUDA_RNG: device} if device.type == "cuda" else {})
    found = {}
    for key in kinds.keys() & file.shapes.keys():
        state, generator = file.content.get_tensor(key), torch.Generator(kinds[key])
        try:
            generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{file.path}: {key!r} is no random state of this torch ({error}); {WAY_OUT}"
            ) from error
        if rank >= len(files):
            digest = hashlib.sha256(state.numpy().tobytes() + f"rank {rank}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found[key] = generator.get_state()
    return found

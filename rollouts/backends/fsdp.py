"""Training on several ranks with PyTorch's FSDP2, behind the TrainingBackend that one process has.

    rank 0                                                        ranks 1 … W−1
    FSDPTrainingBackend ─► job on the device thread                serve_backends: waits at the store
                             ├─ command (JSON) ───────────────────► the same method on its own device thread
                             └─ Trainer.method ◄── collectives ───► Trainer.method

What writes a captured checkpoint is no job: a rank does it when it hears of it, beside whatever its device
thread is in, so that rank 0, which waits for it, never waits for a collective that it has left itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import trio

from rollouts.backends.captures import HeldPart
from rollouts.backends.open import check_head, choose_autocast_dtype
from rollouts.backends.pytorch import RankedTrainingBackend
from rollouts.backends.sharding import compile_sharded, plan_sharded_forward, shard_model
from rollouts.backends.shares import find_attention_cost
from rollouts.backends.steps import PackingOptions
from rollouts.backends.trainer import Trainer
from rollouts.config.load import check_same_config, dump_config
from rollouts.config.schema import RunConfig
from rollouts.config.tables import OptimConfig
from rollouts.data.packing import MICRO_BATCH_COST
from rollouts.device_thread import DeviceFuture, DeviceThread, open_device_thread
from rollouts.errors import ConfigError, ModelError, RunDirError
from rollouts.models.devices import use_device
from rollouts.models.digests import compute_model_digests
from rollouts.models.gradient_checkpointing import checkpoint_layers
from rollouts.models.load import ModelHead
from rollouts.models.optim import create_adamw_optimizer
from rollouts.models.scalar_head import set_padding_token
from rollouts.models.sharded import load_sharded_weights, make_meta_model
from rollouts.ranks.channel import Channel, Command, RankChannel
from rollouts.ranks.group import AgreedFailure, Ranks, all_gather_bytes, encode_error, run_agreed
from rollouts.ranks.meet import OpenRanks, find_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WAITING, OPENING = "waiting for rank 0", "opening the model"
FindPath = Callable[[str], Path]
"""A model directory of rank 0's as this machine has it. Blocks."""


# --- every rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedOptions:
    """What every rank must know to open its part of a backend; rank 0 sends it."""

    model_path: str
    optim: Mapping[str, Any]  # of OptimConfig
    autocast: Literal["off", "bfloat16", "auto"] = "auto"
    threads: int = 0  # torch's in each rank; 0: this machine's cores divided by its ranks
    deterministic: bool = False
    gradient_checkpointing: bool = False
    compile_backend: str | None = None  # of torch.compile; None: layers run as they are written
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = False  # see Trainer; cpu_offload does it too
    seed: int = 0  # of torch's own generators, one for each rank
    dtype: Literal["float32", "float64"] = "float32"  # of the master weights; float64 shows what is rounding
    head: ModelHead = "tokens"


def open_trainer(options: ShardedOptions, ranks: Ranks, check_open: Callable[[], None]) -> Trainer:
    """This rank's part of a model with a fresh optimizer; no rank holds the whole. Collective. Raises
    AgreedFailure.
    """
    cores = len(os.sched_getaffinity(0)) // ranks.local_world_size
    torch.set_num_threads(options.threads or max(cores, 1))
    torch.use_deterministic_algorithms(options.deterministic)
    use_device(ranks.device)
    path = Path(options.model_path)

    def load() -> PreTrainedModel:
        model = make_meta_model(path, dtype=getattr(torch, options.dtype), head=options.head)
        if options.gradient_checkpointing:
            checkpoint_layers(model)
        shard_model(model, ranks, cpu_offload=options.cpu_offload)
        device = "cpu" if options.cpu_offload else ranks.device
        load_sharded_weights(model, path, device=device, buffer_device=ranks.device, new_head=True)
        return model

    digests = run_agreed(ranks, lambda: compute_model_digests(path)).value
    check_same(ranks, digests, "copy the model directory again, so that all machines have the same files")
    model = run_agreed(ranks, load).value
    optimizer = create_adamw_optimizer(model, OptimConfig.model_validate(options.optim))
    plan = plan_sharded_forward(model, ranks)
    fields = {field.name: repr(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
    check_same(ranks, fields, "use machines with the same devices, drivers and libraries")
    autocast_dtype = choose_autocast_dtype(options.autocast, str(ranks.device))
    if options.compile_backend is not None:
        compile_sharded(model, plan, ranks, autocast_dtype, backend=options.compile_backend)
    torch.manual_seed((options.seed + ranks.rank) % 2**63)
    return Trainer(
        model,
        optimizer,
        ranks,
        plan,
        check_open=check_open,
        autocast_dtype=autocast_dtype,
        reduce_each=options.reduce_each_micro_batch or options.cpu_offload,
    )


def check_same(ranks: Ranks, values: Mapping[str, str], way_out: str) -> None:
    """Raises AgreedFailure with a ModelError naming the first of `values` that is another one on rank 0.
    Collective.
    """
    mine = json.dumps([socket.gethostname(), dict(values)]).encode()
    hosts, found = zip(*map(json.loads, all_gather_bytes(ranks, mine)), strict=True)
    difference = find_difference(found)
    if difference is not None:
        name, (other, *_) = difference
        raise AgreedFailure(
            ModelError(
                f"the model's {name} is {found[other].get(name)} on rank {other} on {hosts[other]} and"
                f" {found[0].get(name)} on rank 0 on {hosts[0]}; {way_out}"
            )
        )


# --- rank 0 -------------------------------------------------------------------------------------------------


class FSDPTrainingBackend(RankedTrainingBackend):
    """A TrainingBackend over several ranks; lives on rank 0. Made by open_fsdp_backend."""


@asynccontextmanager
async def open_fsdp_backend(
    model_path: Path,
    *,
    channel: RankChannel,
    ranks: Ranks,
    optim: OptimConfig,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    micro_batch_tokens: int = 8192,
    share_prefix: bool = True,
    skip_zero_advantage: bool = False,
    autocast: Literal["off", "bfloat16", "auto"] = "auto",
    head: ModelHead = "tokens",
    cpu_offload: bool = False,
    device_thread: DeviceThread | None = None,
    **options: Any,
) -> AsyncIterator[FSDPTrainingBackend]:
    """A backend whose model, gradients and optimizer are spread over `ranks`; on rank 0, while the others are
    in serve_backends.

    Settings as of open_pytorch_backend; `options` are those of ShardedOptions. micro_batch_tokens: of one
    rank. cpu_offload: weights, gradients and moments wait in host memory, where AdamW runs; GPUs hold what a
    micro-batch needs. reduce_each_micro_batch: see Trainer. device_thread: that of a backend which is open on
    these ranks and stays open for longer; a second one then trains beside it, a critic beside a policy, and
    no third. Raises ModelError, and ConfigError for settings that do not go together.
    """
    assert ranks.rank == 0, f"rank {ranks.rank} takes commands: use serve_backends"
    check_head(head, skip_zero_advantage=skip_zero_advantage)
    if cpu_offload and ranks.device.type == "cpu":
        raise ConfigError(
            "distributed.cpu_offload=true, but the ranks train on CPUs: all they have is in host memory;"
            " leave it out, or set model.device='cuda'"
        )
    # rank 0 chooses the precision: machines may be unlike
    precision = choose_autocast_dtype(autocast, str(ranks.device))
    sent = ShardedOptions(
        model_path=str(model_path),
        optim=optim.model_dump(),
        autocast="off" if precision is None else "bfloat16",
        cpu_offload=cpu_offload,
        head=head,
        **options,
    )
    number = 0 if device_thread is None else 1

    def open_part() -> Trainer:
        channel.phase = OPENING
        channel.send({"name": "open_backend", "options": dataclasses.asdict(sent), "backend": number})
        try:
            return open_trainer(sent, ranks, thread.check_open)
        except AgreedFailure as failure:
            error = failure.error
        raise error

    own = open_device_thread(name="trainer") if device_thread is None else nullcontext(device_thread)
    try:
        async with own as thread:
            opening = thread.submit(open_part)
            with trio.CancelScope(shield=True):  # else the others would open a backend that nobody has
                await opening
            trainer = await opening
            if head == "scalar":
                set_padding_token(trainer.model, tokenizer)
            packing = PackingOptions(
                micro_batch_tokens=micro_batch_tokens,
                micro_batch_cost=MICRO_BATCH_COST if ranks.device.type == "cpu" else micro_batch_tokens,
                share_prefix=share_prefix,
                skip_zero_advantage=skip_zero_advantage,
                attention_cost=find_attention_cost(trainer.model),
            )
            yield FSDPTrainingBackend(
                trainer,
                channel,
                thread,
                optim=optim,
                total_steps=total_steps,
                packing=packing,
                tokenizer=tokenizer,
                number=number,
            )
    finally:
        channel.send({"name": "close_backend", "backend": number})


# --- the other ranks ----------------------------------------------------------------------------------------


def send_config(opened: OpenRanks, config: RunConfig, model_path: Path) -> None:
    """On rank 0, first of all: what the other ranks compare their config with, and where the model is."""
    opened.channel.send({"name": "begin", "config": dump_config(config), "model_path": str(model_path)})


async def serve_rank(opened: OpenRanks, config: RunConfig, *, find_model: FindPath) -> None:
    """What rank 0 asks of this rank, until it closes the channel.

    A model that is not where rank 0 has it, as on another machine, is found by its name. Raises ConfigError
    if this rank's config is another one, RunDirError if it does not see the run's checkpoints, and whatever
    this rank alone has met: that ends the run on all ranks.
    """
    opened.channel.phase = WAITING
    begin = await opened.channel.receive()
    if begin is None:  # rank 0 had nothing to do
        return
    check_same_config(config, begin["config"], whose="rank 0")
    find_path = partial(
        find_directory, base_model=begin["model_path"], name=config.model.name, find_model=find_model
    )
    await serve_backends(opened.channel, opened.ranks, find_path=find_path)


def find_directory(wanted: str, *, base_model: str, name: str, find_model: FindPath) -> Path:
    """The directory `wanted` as this machine has it; `base_model` is rank 0's for the config's `name`, which
    has its own place everywhere.
    """
    if Path(wanted).is_dir():
        return Path(wanted)
    if wanted == base_model:
        return find_model(name)
    raise RunDirError(
        f"{wanted} is not to be seen on {socket.gethostname()}; put output.dir on a filesystem that all"
        " machines of the run share"
    )


async def serve_backends(channel: Channel, ranks: Ranks, *, find_path: FindPath = Path) -> None:
    """This rank's part in rank 0's backends, until rank 0 closes the channel.

    Raises whatever this rank alone has met: the job must end then, for the others wait for it.
    """
    trainers: dict[int, Trainer | None] = {}  # by the backend's number; None: all ranks failed to open it
    captures: dict[str, DeviceFuture[Any]] = {}  # by name, until they are written or dropped

    async def finish(future: DeviceFuture[Any]) -> None:
        try:
            await future
            channel.phase = WAITING
        except Exception as error:  # before the nursery waits for what is being written
            await channel.report_failure(error)
            raise

    async def write(name: str, path: Path) -> None:
        try:
            part: HeldPart = await captures.pop(name)
            said = str(await trio.to_thread.run_sync(part.write, path))
            del part  # its memory is free while the others write
        except Exception as error:  # rank 0 raises it
            said = encode_error(error).decode()
        channel.answer(name, said)

    async with open_device_thread(name="trainer") as thread, trio.open_nursery() as nursery:
        channel.phase = WAITING
        while (command := await channel.receive()) is not None:
            if command["name"] == "write_held":
                nursery.start_soon(write, command["capture"], Path(command["path"]))
            elif command["name"] == "drop_held":
                captures.pop(command["capture"], None)
            else:
                job = partial(follow, command, trainers, channel, ranks, thread, find_path)
                future = thread.submit(job)
                nursery.start_soon(finish, future)
                if command["name"] == "capture":
                    captures[command["capture"]] = future
                elif command["name"] == "close_backend":
                    for name in [*captures]:
                        if name.startswith(f"{command['backend']}-"):
                            del captures[name]


def follow(
    command: Command,
    trainers: dict[int, Trainer | None],
    channel: Channel,
    ranks: Ranks,
    thread: DeviceThread,
    find_path: FindPath,
) -> object:
    """This rank's part in one command, and what came of it; None where all ranks have failed alike, which
    rank 0 reports. On the device thread. `trainers` changes in place.
    """
    name, number = command["name"], command["backend"]
    if name == "close_backend":
        trainers.pop(number, None)
        return None
    channel.phase = command.get("phase", OPENING)
    trainer = trainers.get(number)
    try:
        if name == "open_backend":
            assert number not in trainers, f"backend {number} is open already"
            trainers[number] = None
            options = ShardedOptions(**command["options"])
            path = str(find_path(options.model_path))
            options = dataclasses.replace(options, model_path=path)
            trainers[number] = open_trainer(options, ranks, thread.check_open)
            return None
        assert trainer is not None, f"{name} for a backend that did not open"
        return TRAINER_COMMANDS[name](trainer, command)
    except AgreedFailure:
        if trainer is not None:
            trainer.discard()
        return None


TRAINER_COMMANDS: dict[str, Callable[[Trainer, Command], object]] = {
    "reset": lambda trainer, _: trainer.reset(),
    "skip_step": lambda trainer, _: trainer.skip_step(),
    "forward_backward": lambda trainer, _: trainer.forward_backward(None),
    "forward": lambda trainer, _: trainer.forward(None),
    "optim_step": lambda trainer, command: trainer.optim_step(command["lr"], command["max_grad_norm"]),
    "stream_weights": lambda trainer, _: trainer.stream_weights(None),
    "load_weights": lambda trainer, _: trainer.load_weights(None),
    "save": lambda trainer, command: trainer.save(Path(command["path"]), {}, None),
    "capture": lambda trainer, _: trainer.capture({}, None),
    "load": lambda trainer, command: trainer.load(Path(command["path"])),
}

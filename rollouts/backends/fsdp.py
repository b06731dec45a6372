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
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from rollouts.backends.captures import HeldPart
from rollouts.backends.open import (
    Autocast,
    TrainerOptions,
    check_head,
    choose_autocast_dtype,
    open_parts,
    raise_own,
)
from rollouts.backends.pytorch import RankedTrainingBackend
from rollouts.backends.trainer import COMMANDS, Trainer
from rollouts.config.load import check_same_config, dump_config
from rollouts.config.schema import RunConfig
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceFuture, DeviceThread, open_device_thread
from rollouts.errors import ConfigError, RunDirError
from rollouts.models.load import ModelHead
from rollouts.models.scalar_head import set_padding_token
from rollouts.ranks.channel import Channel, Command, RankChannel
from rollouts.ranks.group import AgreedFailure, Ranks, encode_error
from rollouts.ranks.meet import OpenRanks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WAITING, OPENING = "waiting for rank 0", "opening the model"
FindPath = Callable[[str], Path]
"""A model directory of rank 0's as this machine has it. Blocks."""


def open_trainer(options: TrainerOptions, ranks: Ranks, check_open: Callable[[], None]) -> Trainer:
    """This rank's part of a backend. Collective. Raises AgreedFailure."""
    model, optimizer, plan, autocast_dtype = open_parts(options, ranks)
    return Trainer(
        model,
        optimizer,
        ranks,
        plan,
        check_open=check_open,
        autocast_dtype=autocast_dtype,
        reduce_each=options.reduce_each_micro_batch or options.cpu_offload,
    )


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
    autocast: Autocast = "auto",
    head: ModelHead = "tokens",
    cpu_offload: bool = False,
    device_thread: DeviceThread | None = None,
    **options: Any,
) -> AsyncIterator[FSDPTrainingBackend]:
    """A backend whose model, gradients and optimizer are spread over `ranks`; on rank 0, while the others are
    in serve_backends.

    Settings as of open_pytorch_backend; `options` are those of TrainerOptions. micro_batch_tokens: of one
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
    sent = TrainerOptions(
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
        return raise_own(lambda: open_trainer(sent, ranks, thread.check_open))

    own = open_device_thread(name="trainer") if device_thread is None else nullcontext(device_thread)
    try:
        async with own as thread:
            opening = thread.submit(open_part)
            with trio.CancelScope(shield=True):  # else the others would open a backend that nobody has
                await opening
            trainer = await opening
            if head == "scalar":
                set_padding_token(trainer.model, tokenizer)
            yield FSDPTrainingBackend(
                trainer,
                channel,
                thread,
                optim=optim,
                total_steps=total_steps,
                tokenizer=tokenizer,
                micro_batch_tokens=micro_batch_tokens,
                share_prefix=share_prefix,
                skip_zero_advantage=skip_zero_advantage,
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
                    captures[command["fields"]["name"]] = future
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
            options = TrainerOptions(**command["options"])
            path = str(find_path(options.model_path))
            options = dataclasses.replace(options, model_path=path)
            trainers[number] = open_trainer(options, ranks, thread.check_open)
            return None
        assert trainer is not None and name in COMMANDS, f"{name} of a backend that did not open"
        return getattr(trainer, name)(None, **command["fields"])
    except AgreedFailure:
        if trainer is not None:
            trainer.discard()
        return None

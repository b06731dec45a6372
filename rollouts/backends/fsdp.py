"""Training on several ranks with PyTorch's FSDP2, behind the TrainingBackend that one process has.

    rank 0                                                        ranks 1 … W−1
    FSDPTrainingBackend ─► job on the device thread                serve_backends: waits at the store
                             ├─ command (JSON) ───────────────────► the same method on its own device thread
                             └─ Trainer.method ◄── collectives ───► Trainer.method

What writes a captured checkpoint is no job: a rank does it when it hears of it, beside whatever its device
thread is in, so that rank 0, which waits for it, never waits for a collective that it has left itself.
"""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import trio

from rollouts.backends.open import OPENING, OpenSettings, open_trainer, open_trainer_thread
from rollouts.backends.pytorch import RankedTrainingBackend
from rollouts.backends.trainer import Trainer
from rollouts.config.load import check_same_config, dump_config
from rollouts.config.schema import RunConfig
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceFuture, DeviceThread, open_device_thread
from rollouts.errors import ConfigError, RunDirError
from rollouts.models.load import resolve_model
from rollouts.ranks.channel import Channel, Command, RankChannel
from rollouts.ranks.meet import AgreedFailure, OpenRanks, Ranks, encode_error

WAITING = "waiting for rank 0"
FindPath = Callable[[str], Path]
"""A model directory of rank 0's as this machine has it. Blocks."""


class FSDPTrainingBackend(RankedTrainingBackend):
    """A TrainingBackend over several ranks; lives on rank 0. Made by open_fsdp_backend."""


@asynccontextmanager
async def open_fsdp_backend(
    model_path: Path,
    *,
    channel: RankChannel,
    ranks: Ranks,
    device_thread: DeviceThread | None = None,
    beside: FSDPTrainingBackend | None = None,
    **settings: Unpack[OpenSettings],
) -> AsyncIterator[FSDPTrainingBackend]:
    """A backend whose model, gradients and optimizer are spread over `ranks`; on rank 0, while the others are
    in serve_backends.

    Settings as of open_pytorch_backend; micro_batch_tokens: of one rank. cpu_offload: weights, gradients and
    moments wait in host memory, where AdamW runs; GPUs hold what a micro-batch needs.
    reduce_each_micro_batch: see Trainer. device_thread: that of a backend which is open on these ranks and
    stays open for longer; another then trains beside it, as a critic beside a policy. Raises
    ModelError, and ConfigError for settings that do not go together.
    """
    assert ranks.rank == 0, f"rank {ranks.rank} takes commands: use serve_backends"
    if settings.get("cpu_offload") and ranks.device.type == "cpu":
        raise ConfigError(
            "distributed.cpu_offload=true, but the ranks train on CPUs: all they have is in host memory;"
            " leave it out, or set model.device='cuda'"
        )
    async with open_trainer_thread(model_path, channel, ranks, device_thread, beside, settings) as opened:
        trainer, thread, number, own = opened
        yield FSDPTrainingBackend(trainer, channel, thread, number=number, **own)


# --- the other ranks ----------------------------------------------------------------------------------------


def send_config(opened: OpenRanks, config: RunConfig, model_path: Path) -> None:
    """On rank 0, first of all: what the other ranks compare their config with, and where the model is."""
    opened.channel.send({"name": "begin", "config": dump_config(config), "model_path": str(model_path)})


async def serve_rank(opened: OpenRanks, config: RunConfig) -> None:
    """What rank 0 asks of this rank, until it closes the channel.

    A model that is not where rank 0 has it, as on another machine, is found by its name. Raises ConfigError
    if this rank's config is another one, RunDirError if it does not see the run's checkpoints, and whatever
    this rank alone has met: that ends the run on all ranks.
    """
    opened.channel.phase = WAITING
    begin = await opened.channel.receive()
    if not begin:  # rank 0 had nothing to do
        return
    check_same_config(config, begin["config"])
    await serve_backends(
        opened.channel,
        opened.ranks,
        find_path=partial(
            find_directory,
            base_model=begin["model_path"],
            find_model=partial(resolve_model, config.model.name, seed=config.seed),
        ),
    )


def find_directory(wanted: str, *, base_model: str, find_model: Callable[[], Path]) -> Path:
    """The directory `wanted` as this machine has it; `base_model` is rank 0's, which may have another place
    here.
    """
    if Path(wanted).is_dir():
        return Path(wanted)
    if wanted == base_model:
        return find_model()
    raise RunDirError(
        f"{wanted} is not to be seen on {socket.gethostname()}; put output.dir on a filesystem that all"
        " machines of the run share"
    )


async def serve_backends(channel: Channel, ranks: Ranks, *, find_path: FindPath = Path) -> None:
    """This rank's part in rank 0's backends, until rank 0 closes the channel.

    Raises whatever this rank alone has met: the job must end then, for the others wait for it.
    """
    trainers = {}  # by the backend's number; without those that all ranks failed to open
    captures = {}  # by name, until they are written or dropped

    async def finish(future: DeviceFuture[Any]) -> None:
        try:
            await future
        except Exception as error:  # before the nursery waits for what is being written
            await channel.report_failure(error)
            raise

    async def write(name: str, path: Path) -> None:
        try:
            part = await captures.pop(name)
            said = str(await trio.to_thread.run_sync(part.write, path))
            del part  # its memory is free while the others write
        except Exception as error:  # rank 0 raises it
            said = encode_error(error).decode()
        channel.answer(name, said)

    async with open_device_thread(name="trainer") as thread, trio.open_nursery() as nursery:

        def submit(command: Command) -> DeviceFuture[Any]:
            def run() -> object:
                found = follow(command, trainers, channel, ranks, thread, find_path)
                channel.phase = WAITING  # here, or it might hide that the next command has begun
                return found

            future = thread.submit(run)
            nursery.start_soon(finish, future)
            return future

        channel.phase = WAITING
        while command := await channel.receive():
            match command["name"]:
                case "write_held":
                    nursery.start_soon(write, command["capture"], Path(command["path"]))
                case "drop_held":
                    captures.pop(command["capture"], None)
                case "capture":
                    captures[command["fields"]["name"]] = submit(command)
                case "close_backend":
                    submit(command)
                    own = f"{command['backend']}-"
                    captures = {name: held for name, held in captures.items() if not name.startswith(own)}
                case _:
                    submit(command)


def follow(
    command: Command,
    trainers: dict[int, Trainer],
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
            path, optim = find_path(command["model_path"]), OptimConfig.model_validate(command["optim"])
            beside = trainers.get(command["beside"])
            trainers[number] = open_trainer(
                path, optim, command["options"], ranks, thread.check_open, beside=beside
            )
            return None
        assert trainer, f"{name} of a backend that did not open"
        return getattr(trainer, name)(None, **command["fields"])
    except AgreedFailure:
        if trainer:
            trainer.discard()
        return None

"""This process as one rank of a run: connected with the others; and what the ranks do that do not drive.

    open_ranks ──► process group (gloo, NCCL) ──► control channel ──┬─► rank 0: the program, which opens backends
                                                                    └─► others: serve_rank, until rank 0 closes the channel

Only rank 0 answers SIGINT and SIGTERM, by stopping: the launcher sends them to all, and a rank that went
first would end the run without its checkpoint.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from rollouts.backends.fsdp import ShardedOptions, receive, serve_backend
from rollouts.backends.same_ranks import check_same_device, check_same_versions, read_versions, tell_device
from rollouts.config.load import check_same_config, dump_config
from rollouts.config.schema import RunConfig
from rollouts.device_thread import open_device_thread
from rollouts.distributed.commands import Command
from rollouts.distributed.control import ControlHub, ControlLink, end_after_rank_0, exit_on_lost, open_control
from rollouts.distributed.launch import Launch
from rollouts.distributed.process_group import (
    Ranks,
    all_gather_bytes,
    broadcast_bytes,
    close_ranks,
    init_ranks,
    meet_ranks,
)
from rollouts.errors import ConfigError, RunDirError

FindModel = Callable[[str], Path]
"""The directory of a model by its name in the config. Blocks. Raises ModelError."""

ChooseDevice = Callable[[], str]
"""Where this rank would compute, "cpu" or "cuda". Raises ConfigError."""


def choose_cpu() -> str:
    """The device of ranks that compute on CPUs."""
    return "cpu"


@dataclass(frozen=True, slots=True, eq=False)
class OpenRanks:
    """What connects this process with the other ranks."""

    ranks: Ranks
    control: ControlHub | ControlLink  # a hub on rank 0
    agents: tuple[str, ...] = ()  # of each rank: which process of the launcher has started it (see Launch)

    @property
    def hub(self) -> ControlHub:
        """Rank 0's end of the control channel."""
        assert isinstance(self.control, ControlHub), f"rank {self.ranks.rank} takes commands"
        return self.control

    @property
    def link(self) -> ControlLink:
        """Another rank's end."""
        assert isinstance(self.control, ControlLink), "rank 0 gives the commands"
        return self.control


@asynccontextmanager
async def open_ranks(
    launch: Launch, *, shard_size: int = 0, choose_device: ChooseDevice = choose_cpu
) -> AsyncIterator[OpenRanks]:
    """This process connected with all others of the run, once they are there.

    Leaving ends the run for the others too: as complete on rank 0 without an exception, else as a failure. A
    rank that is lost ends this process with exit code 75. Raises ConfigError for a shard_size that does not
    divide the ranks, and on all of them where they run unlike versions of what computes, have chosen unlike
    devices, or one could choose none. Ranks that do not drive ignore SIGINT and SIGTERM from the moment when
    they are connected, and end at once by either before.
    """
    if launch.rank:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # Python's handler would wait for the thread that waits for the others
    async with open_device_thread(name="ranks", torch_threads=1) as thread:
        ranks, agents = await thread.submit(
            lambda: connect(launch, choose_device=choose_device, shard_size=shard_size)
        )

        async def share(data: bytes | None) -> bytes:
            return await thread.submit(lambda: broadcast_bytes(ranks, data))

        async with open_control(
            launch, share=share, on_lost=end_after_rank_0 if launch.rank else exit_on_lost
        ) as control:
            if launch.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            yield OpenRanks(ranks, control, agents)
        await thread.submit(close_ranks)


def connect(launch: Launch, *, choose_device: ChooseDevice, shard_size: int) -> tuple[Ranks, tuple[str, ...]]:
    """The process group of the run, of ranks with the same programs on alike devices; and what has started
    each. Blocks until all are there; raises as init_ranks, and ConfigError.
    """
    meeting = meet_ranks(launch, word=tell_device(choose_device))
    ranks = init_ranks(
        launch, device=check_same_device(meeting.words), shard_size=shard_size, meeting=meeting
    )
    try:
        check_same_versions(ranks, read_versions())
    except ConfigError:
        close_ranks()
        raise
    return ranks, tuple(agent.decode() for agent in all_gather_bytes(ranks, launch.agent.encode()))


def tell_config(opened: OpenRanks, config: RunConfig, model_path: Path) -> None:
    """On rank 0, first of all: what the other ranks compare their config with, and where the model is."""
    opened.hub.send(Command("begin", {"config": dump_config(config), "model_path": str(model_path)}))


async def serve_rank(opened: OpenRanks, config: RunConfig, *, find_model: FindModel) -> None:
    """What rank 0 asks of this rank, until it closes the channel.

    A model that is not where rank 0 has it, as on another machine, is found by its name. Raises ConfigError
    if this rank's config is another one, RunDirError if it does not see the run's checkpoints, and whatever
    this rank alone has met: that ends the run on all ranks.
    """
    opened.link.set_phase("waiting for rank 0")
    begin = await receive(opened.link)
    if begin is None:  # rank 0 had nothing to do
        return
    check_same_config(config, begin.fields["config"], whose="rank 0")
    base_model: str = begin.fields["model_path"]

    def find_path(wanted: str) -> Path:
        return find_directory(wanted, base_model, config.model.name, find_model)

    while (command := await receive(opened.link)) is not None:
        options = ShardedOptions(**command.fields["options"])
        opened.link.set_phase("finding the model")
        path = await trio.to_thread.run_sync(find_path, options.model_path)
        await serve_backend(
            opened.link, opened.ranks, replace(options, model_path=str(path)), find_path=find_path
        )


def find_directory(wanted: str, base_model: str, name: str, find_model: FindModel) -> Path:
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

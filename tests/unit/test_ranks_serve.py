"""What a rank that does not drive does: compare its config, find its model, write its part of a checkpoint beside whatever it computes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from rollouts.backends import fsdp
from rollouts.backends.ranks import OpenRanks, find_directory, serve_rank
from rollouts.config.load import dump_config
from rollouts.config.schema import RunConfig
from rollouts.distributed.commands import Command
from rollouts.errors import ConfigError, RunDirError


class Link:
    """A control channel on which these commands came before rank 0 closed it."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)

    async def receive(self) -> Command:
        await trio.lowlevel.checkpoint()
        if not self.commands:
            raise trio.EndOfChannel
        return self.commands.pop(0)

    def set_phase(self, text: str) -> None:
        pass


class Opened:
    """OpenRanks as far as serve_rank needs it before a backend opens."""

    ranks = None

    def __init__(self, link: Link) -> None:
        self.link = link


def begin(config: RunConfig, model_path: str = "/models/base") -> Command:
    return Command("begin", {"config": dump_config(config), "model_path": model_path})


def serve(config: RunConfig, *commands: Command, find_model: Any = None) -> Any:
    return serve_rank(cast(OpenRanks, Opened(Link(*commands))), config, find_model=find_model)


async def test_a_rank_that_is_asked_for_nothing_ends_with_rank_0():
    await serve(RunConfig())
    await serve(RunConfig(), begin(RunConfig()))


async def test_a_rank_with_another_config_fails_before_it_opens_anything():
    with pytest.raises(ConfigError, match="seed is 2 here and 1 on rank 0"):
        await serve(RunConfig(seed=2), begin(RunConfig(seed=1)), Command("open_backend", {"model_path": "/models/base", "optim": {}}))


def test_a_directory_that_this_machine_has_is_taken_as_it_is(tmp_path: Path):
    assert find_directory(str(tmp_path), str(tmp_path), "name", never) == tmp_path


def test_the_base_model_of_another_machine_is_found_by_its_name(tmp_path: Path):
    def find_model(name: str) -> Path:
        assert name == "bundled:x"
        return tmp_path

    assert find_directory("/elsewhere/x", "/elsewhere/x", "bundled:x", find_model) == tmp_path


def test_a_checkpoint_that_this_machine_does_not_see_is_refused_with_the_way_out():
    with pytest.raises(RunDirError, match=r"/elsewhere/checkpoints/sft/step_2 is not to be seen on .*put output\.dir on a filesystem that all"):
        find_directory("/elsewhere/checkpoints/sft/step_2", "/elsewhere/x", "bundled:x", never)


def never(name: str) -> Path:
    raise AssertionError(name)


# --- a checkpoint beside training --------------------------------------------------------------------------------------------------------


class Channel:
    """A control channel that rank 0 goes on using; keeps what this rank has said."""

    def __init__(self, *commands: str) -> None:
        self.commands_in, self.commands = trio.open_memory_channel[Command](99)
        self.said_in, self.said = trio.open_memory_channel[tuple[str, str]](99)
        self.send(*commands)

    def send(self, *names: str) -> None:
        for name in names:
            self.commands_in.send_nowait(Command(name, {"phase": name, "name": "checkpoint 1", "path": "/checkpoint"}))

    async def receive(self) -> Command:
        return await self.commands.receive()

    def set_phase(self, text: str) -> None:
        pass

    def answer(self, name: str, text: str) -> None:
        self.said_in.send_nowait((name, text))

    def fail(self, text: str) -> None:
        self.said_in.send_nowait(("failed", text))

    async def wait_said(self) -> tuple[str, str]:
        with trio.fail_after(60):
            return await self.said.receive()


class Part(fsdp.HeldPart):
    """What a capture leaves; writing it does as it is told."""

    __slots__ = ("__weakref__", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        object.__setattr__(self, "work", work)

    def write(self, path: Path) -> None:
        assert path == Path("/checkpoint")
        self.work()


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what this rank does on the device thread, by the name of the command."""

    def do(**work: Callable[[], object]) -> None:
        monkeypatch.setattr(fsdp, "follow", lambda trainer, command: work[command.name]())

    monkeypatch.setattr(fsdp, "open_trainer", lambda *_: object())
    monkeypatch.setattr(fsdp, "count_threads", lambda *_: 1)
    return do


async def serve_commands(channel: Channel) -> None:
    await fsdp.serve_backend(channel, cast(Any, None), cast(Any, SimpleNamespace(threads=1)))


async def test_a_part_is_written_while_the_rank_is_in_a_step_that_rank_0_has_left(follow):
    released = threading.Event()
    follow(capture=lambda: Part(lambda: None), forward_backward=released.wait)
    channel = Channel("capture", "forward_backward", "write_held")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_commands, channel)
        try:
            assert await channel.wait_said() == ("checkpoint 1", "")
        finally:
            released.set()
        channel.send("close_backend")


async def test_memory_of_a_written_part_is_free_before_the_next_command(follow):
    parts: list[weakref.ref[Part]] = []

    def capture() -> Part:
        part = Part(lambda: None)
        parts.append(weakref.ref(part))
        return part

    follow(capture=capture)
    channel = Channel("capture", "write_held")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_commands, channel)
        assert await channel.wait_said() == ("checkpoint 1", "")
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert [part() for part in parts] == [None]
        channel.send("close_backend")


async def test_a_rank_that_fails_alone_says_so_before_its_part_is_written(follow):
    writing, released = threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        released.wait()

    def fail() -> None:
        writing.wait()
        raise RuntimeError("no memory on rank 1")

    follow(capture=lambda: Part(write), forward_backward=fail)
    channel = Channel("capture", "write_held", "forward_backward")

    async def fail_while_writing() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_commands, channel)
            try:
                assert await channel.wait_said() == ("failed", "RuntimeError: no memory on rank 1")
            finally:
                released.set()

    with pytest.raises(BaseExceptionGroup) as caught:
        await fail_while_writing()
    assert caught.group_contains(RuntimeError, match="no memory on rank 1")

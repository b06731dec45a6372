"""What a rank that does not drive does: compare its config, find its model, write its part of a checkpoint
beside whatever it computes.
"""

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

from rollouts.backends import fsdp, held_checkpoint
from rollouts.backends.held_checkpoint import HeldCheckpoint
from rollouts.backends.ranks import OpenRanks, find_directory, serve_rank
from rollouts.config.load import dump_config
from rollouts.config.schema import RunConfig
from rollouts.distributed.commands import Command
from rollouts.distributed.process_group import describe_failure
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
        await serve(
            RunConfig(seed=2),
            begin(RunConfig(seed=1)),
            Command("open_backend", {"model_path": "/models/base", "optim": {}}),
        )


def test_a_directory_that_this_machine_has_is_taken_as_it_is(tmp_path: Path):
    assert find_directory(str(tmp_path), str(tmp_path), "name", never) == tmp_path


def test_the_base_model_of_another_machine_is_found_by_its_name(tmp_path: Path):
    def find_model(name: str) -> Path:
        assert name == "bundled:x"
        return tmp_path

    assert find_directory("/elsewhere/x", "/elsewhere/x", "bundled:x", find_model) == tmp_path


def test_a_checkpoint_that_this_machine_does_not_see_is_refused_with_the_way_out():
    with pytest.raises(
        RunDirError,
        match=(
            r"/elsewhere/checkpoints/sft/step_2 is not to be seen on .*put output\.dir on a filesystem"
            r" that all"
        ),
    ):
        find_directory("/elsewhere/checkpoints/sft/step_2", "/elsewhere/x", "bundled:x", never)


def never(name: str) -> Path:
    raise AssertionError(name)


# --- a checkpoint beside training ---------------------------------------------------------------------------


class Channel:
    """A control channel that rank 0 goes on using; keeps what this rank has said."""

    def __init__(self, *commands: str) -> None:
        self.commands_in, self.commands = trio.open_memory_channel[Command](99)
        self.said_in, self.said = trio.open_memory_channel[tuple[str, str]](99)
        self.send(*commands)

    def send(self, *names: str, backend: int = 0) -> None:
        checkpoint = "checkpoint 1 of the critic" if backend else "checkpoint 1"
        fields = {
            "phase": "",
            "name": checkpoint,
            "path": "/checkpoint",
            "backend": backend,
            "options": {"model_path": "/critic", "optim": {}},
        }
        for name in names:
            self.commands_in.send_nowait(Command(name, {**fields, "phase": name}))

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

    def write(self, path: Path) -> int:
        assert path == Path("/checkpoint")
        self.work()
        return 3


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
            assert await channel.wait_said() == ("checkpoint 1", "3")
        finally:
            released.set()
        channel.send("close_backend")


async def test_a_critic_beside_the_policy_has_its_own_trainer_and_its_own_part_of_a_checkpoint(
    follow, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    written: list[str] = []
    monkeypatch.setattr(
        fsdp,
        "open_trainer",
        lambda options, *_: opened.append(getattr(options, "model_path", "policy")) or opened[-1],
    )
    monkeypatch.setattr(
        fsdp,
        "follow",
        lambda trainer, command: Part(lambda: written.append(trainer)) if command.name == "capture" else None,
    )
    channel = Channel()
    channel.send("open_backend", backend=1)
    channel.send("capture")
    channel.send("capture", backend=1)
    channel.send("write_held")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_commands, channel)
        assert await channel.wait_said() == ("checkpoint 1", "3")
        channel.send("write_held", "close_backend", backend=1)
        assert await channel.wait_said() == ("checkpoint 1 of the critic", "3")
        channel.send("reset", "capture", "write_held")  # the policy goes on when its critic is gone
        assert await channel.wait_said() == ("checkpoint 1", "3")
        channel.send("close_backend")
    assert opened == ["policy", "/critic"]
    assert written == ["policy", "/critic", "policy"]


def list_parts() -> tuple[list[weakref.ref[Part]], Callable[[], Part]]:
    """Parts that were captured, and a capture."""
    parts: list[weakref.ref[Part]] = []

    def capture() -> Part:
        part = Part(lambda: None)
        parts.append(weakref.ref(part))
        return part

    return parts, capture


async def test_memory_of_a_written_part_is_free_before_the_next_command(follow):
    parts, capture = list_parts()
    follow(capture=capture)
    channel = Channel("capture", "write_held")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_commands, channel)
        assert await channel.wait_said() == ("checkpoint 1", "3")
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert [part() for part in parts] == [None]
        channel.send("close_backend")


async def test_memory_of_a_part_that_is_not_written_is_free_once_rank_0_says_so(follow):
    """Also where that is heard before the copy is made."""
    parts, capture = list_parts()
    reached, released, reset = threading.Event(), threading.Event(), threading.Event()
    channel = Channel("capture", "forward_backward")
    follow(capture=capture, forward_backward=lambda: (reached.set(), released.wait()), reset=reset.set)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_commands, channel)
        try:
            await trio.to_thread.run_sync(reached.wait)
            gc.collect()
            assert [part() is None for part in parts] == [False], "nobody has said anything"
            channel.send("drop_held", "capture", "drop_held")
            await trio.testing.wait_all_tasks_blocked()
        finally:
            released.set()
        channel.send("reset")
        await trio.to_thread.run_sync(reset.wait)
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert [part() for part in parts] == [None, None]
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


# --- rank 0's end -------------------------------------------------------------------------------------------


class Hub:
    """Rank 0's control channel; the other ranks have answered so to whatever they were asked."""

    def __init__(self, *answers: str) -> None:
        self.sent: list[str] = []
        self.answers = answers

    def send(self, command: Command) -> None:
        self.sent.append(command.name)

    def set_phase(self, text: str) -> None:
        pass

    async def wait_answers(self, name: str) -> dict[int, str]:
        await trio.lowlevel.checkpoint()
        return dict(enumerate(self.answers, start=1))


async def test_a_copy_that_is_dropped_is_free_on_rank_0_and_the_others_are_told_once():
    hub, (parts, capture) = Hub(), list_parts()
    held = HeldCheckpoint(hub, "checkpoint 1", capture())
    held.drop()
    held.drop()
    assert (hub.sent, parts[0]()) == (["drop_held"], None)


async def test_rank_0_names_files_of_all_once_all_have_written_and_a_written_copy_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
):
    hub, (parts, capture), named = Hub("0", "12"), list_parts(), list[Any]()
    monkeypatch.setattr(
        held_checkpoint, "name_parts", lambda path, counts: named.append((path, counts, parts[0]()))
    )
    held = HeldCheckpoint(hub, "checkpoint 1", capture())
    await held(Path("/checkpoint"))
    held.drop()
    assert hub.sent == ["write_held"]
    assert named == [(Path("/checkpoint"), [3, 0, 12], None)], (
        "in the order of ranks; rank 0's memory is free by then"
    )


async def test_rank_0_raises_what_another_rank_has_met_and_names_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(held_checkpoint, "name_parts", never)
    hub = Hub("1", describe_failure(OSError(28, "No space left on device")).decode())
    with pytest.raises(OSError, match=r"rank 2 failed: OSError.*No space left") as caught:
        await HeldCheckpoint(hub, "checkpoint 1", Part(lambda: None))(Path("/checkpoint"))
    assert caught.value.errno == 28

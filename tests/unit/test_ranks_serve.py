"""What a rank that does not drive does before there is anything to train: compare its config, find its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import trio

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

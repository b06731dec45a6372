"""Fleets of servers that run already."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.config.tables import EngineConfig
from rollouts.engines.open import open_server_fleet
from tests.support.fault_server import DIALECTS, DialectName, open_fake_server


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_running_servers_are_called_by_their_kind_and_address(dialect: DialectName):
    async with open_fake_server(dialect, listens=True, vocab_size=64) as server:
        config = EngineConfig(kind=dialect, urls=[server.url])
        async with open_server_fleet(
            config, Path("model"), vocab_size=64, log_dir=Path("logs"), seed=0, warn=print
        ) as fleet:
            names = [engine.features.name for engine in fleet.members_for_update()]
    assert names == [f"{dialect}-{server.url.removeprefix('http://')}"]

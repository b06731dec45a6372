"""Fleets of servers that run already: what a config says of them reaches them, and what it says wrongly is
named before anything is asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.config.tables import EngineConfig
from rollouts.engines.open import open_server_fleet
from tests.support.fault_server import Dialect, open_fault_server

VOCAB_SIZE = 64


async def open_and_name(config: EngineConfig) -> list[str]:
    """Names of the fleet's engines."""
    async with open_server_fleet(
        config, Path("model"), vocab_size=VOCAB_SIZE, log_dir=Path("logs"), seed=0, warn=print
    ) as fleet:
        return [engine.features.name for engine in fleet.members_for_update()]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_running_servers_are_called_by_their_kind_and_address(dialect: Dialect):
    async with open_fault_server(dialect=dialect, vocab_size=VOCAB_SIZE, context_length=256) as server:
        config = EngineConfig(kind=dialect, urls=[server.url])
        assert await open_and_name(config) == [f"{dialect}-{server.url.removeprefix('http://')}"]

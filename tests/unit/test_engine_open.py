"""Fleets of servers that run already: what a config says of them reaches them, and what it says wrongly is
named before anything is asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.config.tables import EngineConfig
from rollouts.engines.open import open_server_fleet
from rollouts.errors import EngineSetupError
from tests.support.fault_server import Dialect, open_fault_server

VOCAB_SIZE = 64


async def open_and_name(config: EngineConfig) -> list[str]:
    """Names of the fleet's engines."""
    async with open_server_fleet(
        config, Path("model"), vocab_size=VOCAB_SIZE, log_dir=Path("logs"), seed=0, warn=print
    ) as fleet:
        return [engine.features.name for engine in fleet.members_for_update()]


@pytest.mark.parametrize(
    ("dialect", "flag"), [("vllm", "--max-model-len 512"), ("sglang", "--context-length 512")]
)
async def test_a_server_that_runs_with_a_shorter_context_than_the_config_says_is_refused(
    dialect: Dialect, flag: str
):
    async with open_fault_server(dialect=dialect, vocab_size=VOCAB_SIZE, context_length=256) as server:
        fits, too_long = (
            EngineConfig(kind=dialect, urls=[server.url], context_length=length) for length in (256, 512)
        )
        assert await open_and_name(fits) == [f"{dialect}-{server.url.removeprefix('http://')}"]
        with pytest.raises(EngineSetupError, match=flag):
            await open_and_name(too_long)

"""Fleets of servers that run already: what a config says of them reaches them, and what it says wrongly is
named before anything is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.config.schema import EngineConfig
from rollouts.engines.open import check_engine_config, open_server_fleet
from rollouts.errors import ConfigError, EngineSetupError
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


async def test_control_calls_of_sglang_carry_the_admin_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", "sk-requests")
    monkeypatch.setenv("THE_ADMIN_KEY", "sk-control")
    async with open_fault_server(
        dialect="sglang",
        vocab_size=VOCAB_SIZE,
        context_length=256,
        api_key="sk-requests",
        admin_key="sk-control",
    ) as server:
        config: dict[str, Any] = {"kind": "sglang", "urls": [server.url], "api_key_env": "THE_KEY"}
        assert len(await open_and_name(EngineConfig(**config, admin_key_env="THE_ADMIN_KEY"))) == 1
        with pytest.raises(EngineSetupError, match="admin_key"):
            await open_and_name(EngineConfig(**config))


def test_an_admin_key_that_is_not_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.admin_key_env='NO_SUCH_KEY'"):
        check_engine_config(
            EngineConfig(kind="sglang", urls=["http://127.0.0.1:1"], admin_key_env="NO_SUCH_KEY")
        )


@pytest.mark.parametrize(
    "config", [{"kind": "vllm", "urls": ["http://127.0.0.1:1"]}, {"kind": "sglang"}, {"kind": "local"}]
)
def test_an_admin_key_for_servers_that_have_none_is_refused(config: dict[str, Any]):
    with pytest.raises(ValueError, match="admin_key_env='KEY' is for SGLang servers that run already"):
        EngineConfig(**config, admin_key_env="KEY")

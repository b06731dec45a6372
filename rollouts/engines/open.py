"""A fleet of servers as a config describes it: started here, or running already."""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from rollouts.config.tables import EngineConfig
from rollouts.engines.fleet import Fleet, open_fleet
from rollouts.engines.fleet_members import Member
from rollouts.engines.processes import EngineCommand, open_engine_processes
from rollouts.engines.sglang import open_sglang_engine
from rollouts.engines.vllm import open_vllm_engine
from rollouts.errors import ConfigError

MAX_CONCURRENCY = 256  # requests in flight per server
DOWN_LIMIT_S = 900.0  # without any server in service
SILENCE_S = 120.0  # without an answer and without progress, after which a server is suspected


def find_server_python(config: EngineConfig) -> Path:
    """The Python that servers are started with. Raises ConfigError, saying how to make one."""
    if config.python:
        path = Path(config.python).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(
                f"engine.python={config.python!r} is no program; give the Python of an environment that has"
                f" {config.kind}"
            )
        return path.absolute()  # not resolved: a virtual environment is known by the name of its link
    beside = Path(f".venv-{config.kind}") / "bin" / "python"
    if beside.exists():
        return beside.absolute()
    if importlib.util.find_spec(config.kind) is not None:
        return Path(sys.executable)
    raise ConfigError(
        f"engine.kind={config.kind!r} but {beside} does not exist and this Python has no {config.kind}; set"
        f" engine.python to one that has, or make one: python -m rollouts engines install-{config.kind}-cpu"
    )


def read_api_key(kind: str) -> str | None:
    """The key of servers that run already: VLLM_API_KEY or SGLANG_API_KEY; None where that is not set."""
    return os.environ.get(f"{kind.upper()}_API_KEY") or None


@asynccontextmanager
async def open_server_fleet(
    config: EngineConfig,
    model_path: Path,
    *,
    vocab_size: int,
    log_dir: Path,
    seed: int,
    warn: Callable[[str], None],
    lora: tuple[int, Sequence[str]] | None,
) -> AsyncIterator[Fleet]:
    """The fleet, every engine of it stale: only a verified weight update puts one into service.

    `model_path`: what started servers load first, also when they are started again. `lora`: the rank of the
    adapters that they are to serve, and the names of the modules that these change. Their logs go to
    `log_dir`. Raises ConfigError and EngineSetupError; everything that was started has ended when this
    leaves.
    """
    assert config.kind != "local", "an embedded engine is opened by rollouts.engines.local"
    opener = open_vllm_engine if config.kind == "vllm" else open_sglang_engine
    open_engine = partial(opener, silence_s=SILENCE_S, vocab_size=vocab_size)
    async with AsyncExitStack() as stack:
        enter, key = stack.enter_async_context, read_api_key(config.kind)
        members = [Member(await enter(open_engine(url, api_key=key))) for url in config.urls]
        if not members:
            python = find_server_python(config)
            command = EngineCommand(config.kind, python, model_path, tuple(config.args), lora)
            opening = open_engine_processes(command, count=config.count, log_dir=log_dir)
            for process in await enter(opening):
                engine = await enter(open_engine(process.url, api_key=process.api_key, name=process.name))
                members.append(Member(engine, process.restart, process.wait_exited))
        fleet = open_fleet(
            members, max_concurrency=MAX_CONCURRENCY, down_limit_s=DOWN_LIMIT_S, seed=seed, warn=warn
        )
        yield await enter(fleet)

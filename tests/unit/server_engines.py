"""Fake servers with the real engines for them, for the tests of server engines."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing
from safetensors.numpy import save_file

from rollouts.engines.server import ServerEngine
from tests.support.fault_plan import Fault
from tests.support.fault_server import DIALECTS, FaultServer, open_fake_server
from tests.support.simulated_process import ServerSpeed

Opened = tuple[FaultServer, ServerEngine]
GENERATE = ("/inference/v1/generate", "/generate")
BOTH = pytest.mark.parametrize("dialect", DIALECTS)
VLLM_MODEL = {"model": "simulated", "max_model_len": 256, "logprobs_mode": "processed_logprobs"}


@asynccontextmanager
async def open_both(dialect, *, silence_s=60.0, token_s=0.01, **options):
    """A fake server and the real engine for it, after the handshake."""
    options = {"vocab_size": 300, "context_length": 256, "speed": ServerSpeed(token_s=token_s)} | options
    async with (
        open_fake_server(dialect, **options) as server,
        server.open_engine(silence_s=silence_s) as engine,
    ):
        server.calls.clear()
        yield server, engine


@asynccontextmanager
async def open_engine(dialect, **options):
    async with open_both(dialect, **options) as (_, engine):
        yield engine


def strike(server, what, *, update=False):
    """`what` happens at the next request, or the next update."""
    process = server.process
    moment = {"at_update": process.loads} if update else {"at_request": process.requests}
    process.pending.append(Fault("a", what, **moment))


def write_snapshot(path, value=1.0):
    path.mkdir()
    save_file({"weight": np.full(2, value, np.float32)}, path / "model.safetensors")
    return path


async def update(engine, path, version):
    await engine.pause("abort")
    try:
        await engine.update_weights_from_checkpoint(path, version)
    finally:
        await engine.resume()


async def never(body):
    await trio.sleep_forever()

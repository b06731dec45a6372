"""Real servers, started and ended by open_engine_processes: restarted in place, nothing left."""

import os
import signal
import uuid

import pytest
import trio

from rollouts.engines.processes import EngineCommand, open_engine_processes
from rollouts.errors import EngineSetupError
from rollouts.testing.engine_contracts import make_request

from .conftest import ARGS, RunningServer, find_python, open_engine
from .runs import find_processes

pytestmark = [pytest.mark.engines, pytest.mark.parametrize("kind", ["vllm", "sglang"])]


@pytest.fixture
def command(kind, snapshots):
    return EngineCommand(kind, find_python(kind), snapshots[0], tuple(ARGS[kind].split()))


async def generate_ids(kind, process):
    """Four tokens, greedily."""
    server = RunningServer(kind, process.url, process.api_key, process.log_path, process.process.pid)
    async with open_engine(server) as engine:
        return (await engine.generate(make_request(temperature=0.0))).token_ids.tolist()


async def test_a_real_server_starts_answers_comes_back_and_leaves_nothing(
    command, kind, tmp_path, monkeypatch
):
    monkeypatch.setenv("RUN_MARK", mark := uuid.uuid4().hex)
    async with open_engine_processes(command, count=1, log_dir=tmp_path) as (process,):
        url, first = process.url, await generate_ids(kind, process)
        assert len(first) == 4
        os.kill(process.process.pid, signal.SIGKILL)
        with trio.fail_after(60):
            assert "was killed by SIGKILL" in await process.wait_exited()
        assert find_processes(mark) == []  # no worker of a killed server is left
        await process.restart()
        assert (process.url, await generate_ids(kind, process)) == (url, first)
    assert find_processes(mark) == []


async def test_a_real_server_that_cannot_start_says_why(command, kind, tmp_path):
    wrong = command._replace(model=tmp_path / "no-model")
    with pytest.raises(EngineSetupError, match=f"{kind}-0.*before it was ready") as raised:
        async with open_engine_processes(wrong, count=1, log_dir=tmp_path):
            pytest.fail("it has no model")
    assert "no-model" in str(raised.value)

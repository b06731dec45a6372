"""Real servers, started and ended by open_engine_processes: ready with our key only, restarted in place,
nothing left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from rollouts.engines.processes import EngineCommand, EngineProcess, open_engine_processes
from rollouts.errors import EngineSetupError
from rollouts.models.load import resolve_model
from rollouts.testing.engine_contracts import make_request

from .conftest import Kind, RunningServer, open_engine

pytestmark = pytest.mark.engines
MODELS = {
    "vllm": "bundled:smollm2-135m-instruct",
    "sglang": "tiny:llama",
}  # vLLM's attention for CPUs takes no heads as small as the tiny one's
ARGS = {
    "vllm": "--enforce-eager --max-model-len 256 --dtype float32",
    "sglang": "--device cpu --max-total-tokens 4096 --context-length 256 --dtype float32",
}
VOCAB_SIZES = {"vllm": 49152, "sglang": 259}


@pytest.fixture
def command(kind: Kind, request: pytest.FixtureRequest) -> EngineCommand:
    python = request.getfixturevalue(f"{kind}_python")
    return EngineCommand(kind, python, resolve_model(MODELS[kind], seed=0), tuple(ARGS[kind].split()))


def descendants_of(pid: int) -> set[int]:
    text = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in text.splitlines()}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def command_lines(pids: set[int]) -> str:
    return "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


async def generate_ids(kind: Kind, process: EngineProcess) -> list[int]:
    """Four tokens, greedily."""
    server = RunningServer(kind, process.url, process.api_key, process.log_path, process.pid)
    async with open_engine(server, vocab_size=VOCAB_SIZES[kind]) as engine:
        return (await engine.generate(make_request(temperature=0.0))).token_ids.tolist()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_real_server_starts_answers_comes_back_and_leaves_nothing(
    command: EngineCommand, kind: Kind, tmp_path: Path
):
    began = trio.current_time()
    async with open_engine_processes(command, count=1, log_dir=tmp_path) as (process,):
        print(f"{kind}: ready on {process.url} after {trio.current_time() - began:.1f} s")
        tree = descendants_of(process.pid)
        assert process.api_key not in command_lines(tree)
        first = await generate_ids(kind, process)
        assert len(first) == 4

        url = process.url
        os.kill(process.pid, signal.SIGKILL)
        with trio.fail_after(60):
            assert "was killed by SIGKILL" in await process.wait_exited()
        assert not any(Path(f"/proc/{pid}").exists() for pid in tree), "workers of a server that was killed"
        await process.restart()
        assert process.url == url
        assert await generate_ids(kind, process) == first
        tree = descendants_of(process.pid)
    assert not any(Path(f"/proc/{pid}").exists() for pid in tree)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_real_server_that_cannot_start_says_why(command: EngineCommand, kind: Kind, tmp_path: Path):
    wrong = replace(command, model=tmp_path / "no-model")
    with pytest.raises(EngineSetupError, match=f"{kind}-0.*before it was ready") as raised:
        async with open_engine_processes(wrong, count=1, log_dir=tmp_path):
            pytest.fail("it has no model")
    assert "no-model" in str(raised.value)

"""Servers that this process starts are found ready, keep their key to themselves, come back on the same port,
and never outlive it.
"""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Literal

import psutil
import pytest
import trio

from rollouts.engines.processes import (
    EngineCommand,
    check_command,
    make_arguments,
    make_environment,
    open_engine_processes,
)
from rollouts.errors import ConfigError, EngineSetupError
from tests.support.processes import is_alive
from tests.support.text_tables import cases

FAKE = Path(__file__).with_name("fake_inference_server.py")
Kind = Literal["vllm", "sglang"]


def fake_command(folder, kind="vllm", args="--device cpu", **behaviour):
    """The fake server, which writes the ids of its processes into folder/pids."""
    python = folder / "python"
    told = shlex.quote(json.dumps(behaviour | {"pids": str(folder / "pids")}))
    python.write_text(f'#!/bin/sh\nexport FAKE_SERVER={told}\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
    python.chmod(0o755)
    return EngineCommand(kind, python, folder / "model", args=tuple(args.split()))


async def wait_said_hello(folder):
    """Returns when the fake server has written its ids, which is after its first line; however slow this
    machine is, and however little time the caller has.
    """
    pids = folder / "pids"
    with trio.CancelScope(shield=True):
        while not pids.exists() or not pids.read_text():  # noqa: ASYNC110 (it is another process)
            await trio.sleep(0.01)


def assert_nothing_left(folder):
    assert not any(map(is_alive, map(int, (folder / "pids").read_text().split())))


async def start_in_vain(command, count=1):
    async with open_engine_processes(command, count=count, log_dir=command.python.parent):
        pytest.fail("one is not ready")


async def check_not_started(command, message, count=1):
    with pytest.raises(EngineSetupError, match=message):
        await start_in_vain(command, count)
    assert_nothing_left(command.python.parent)


@cases("kind: vllm sglang")
async def test_servers_are_waited_for_and_have_a_port_a_log_and_a_secret_key_each(tmp_path, kind):
    command = fake_command(tmp_path, kind, not_ready=2)
    async with open_engine_processes(command, count=2, log_dir=tmp_path / "logs") as processes:
        first, second = processes
        assert first.url != second.url and first.api_key != second.api_key
        for number, process in enumerate(processes):
            assert process.url.startswith("http://127.0.0.1:")
            assert process.log_path == tmp_path / f"logs/{kind}-{number}.log"
            assert process.log_path.stat().st_mode & 0o777 == 0o600
            server = psutil.Process(process.process.pid)
            for one in (server, *server.parents()[:2]):  # and the inner and the outer guard
                assert process.api_key not in " ".join(one.cmdline())
            if kind == "sglang":
                assert "config mode 600" in process.log_path.read_text()
                words = server.cmdline()
                # a server that is up has read it
                assert not Path(words[words.index("--config") + 1]).exists()


@cases(r"""
behaviour | message
die | (?s)vllm-0 \(pid \d+\) ended with exit code 3; .*vllm-0\.log(?!.*line 20\n).*line 21\n.*memory
open | another server answers
""")
async def test_a_server_that_does_not_start_is_an_error_that_says_why_and_leaves_nothing(
    tmp_path, behaviour, message
):
    """Of its log 20 lines are shown: 19 of the 40 that it counted, and the error."""
    await check_not_started(fake_command(tmp_path, **{behaviour: 3}), message)


async def test_a_server_that_is_never_ready_is_an_error_after_start_s(tmp_path, monkeypatch):
    async def ask_once_it_runs(*_):
        await wait_said_hello(tmp_path)
        return "starting"

    monkeypatch.setattr("rollouts.engines.processes.ask_ready", ask_once_it_runs)
    monkeypatch.setattr("rollouts.engines.processes.START_S", 0.1)
    command = fake_command(tmp_path, never=True)
    await check_not_started(command, r"(?s)not ready after 0\.1 s.*fake server says hello")


async def test_a_failing_server_stops_the_others(tmp_path):
    """One of two runs, but is never ready; the other fails as soon as the first runs."""
    command = fake_command(tmp_path, never=True, strays=True)
    script = command.python.read_text()
    second = f'while [ ! -s "{tmp_path}/pids" ]; do sleep 0.02; done; exit 7'
    command.python.write_text(
        script.replace("exec", f'mkdir "{tmp_path}/first" 2>/dev/null || {{ {second}; }}\nexec', 1)
    )
    await check_not_started(command, "exit code 7", 2)


async def test_a_program_that_cannot_be_run_is_named(tmp_path):
    command = fake_command(tmp_path)
    command.python.write_text("#!/no/such/interpreter\n")
    with pytest.raises(EngineSetupError, match=r"did not start: .*python does not start"):
        await start_in_vain(command)


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    command = fake_command(tmp_path, never=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_in_vain, command)
        await wait_said_hello(tmp_path)
        nursery.cancel_scope.cancel()
    assert_nothing_left(tmp_path)


async def test_a_restart_keeps_port_and_key_and_one_that_fails_can_be_asked_for_again(tmp_path):
    command = fake_command(tmp_path, "sglang")
    async with open_engine_processes(command, count=1, log_dir=tmp_path) as (process,):
        url, key, pid = process.url, process.api_key, process.process.pid
        os.kill(pid, signal.SIGKILL)
        reason = await process.wait_exited()
        assert "was killed by SIGKILL" in reason
        assert "api_key=<key>" in reason and key not in reason
        script = command.python.read_text()
        command.python.write_text("#!/bin/sh\necho broken; exit 9\n")
        with pytest.raises(EngineSetupError, match="exit code 9"):
            await process.restart()
        command.python.write_text(script)
        await process.restart()
        assert (process.url, process.api_key) == (url, key) and process.process.pid != pid
        log = process.log_path.read_text()
        assert log.count("fake server says hello") == 2 and log.count("broken") == 1
        assert all(f"start {number} of sglang-0" in log for number in (1, 2, 3))


# --- command lines and environments -------------------------------------------------------------------------


WORDS = {
    "vllm": """/v/python -m vllm.entrypoints.openai.api_server --model /m --logprobs-mode processed_logprobs
--enable-scale-out --host 127.0.0.1 --served-model-name policy --port 8101 --disable-uvicorn-access-log
--max-logprobs 128 --no-enable-chunked-prefill --enforce-eager --device cpu --seed 3""",
    # the user's --max_total_tokens takes the place of ours
    "sglang": """/v/python -m sglang.launch_server --model-path /m --host 127.0.0.1
--served-model-name policy --device cpu --sleep-on-idle --port 8101 --config k.yaml --log-level-http warning
--attention-backend torch_native --device=cpu --max_total_tokens=99""",
}


@cases("""
kind   | args
vllm   | --device cpu --seed 3
sglang | --device=cpu --max_total_tokens=99
""")
def test_a_server_gets_what_training_needs_and_then_the_users_flags(kind, args):
    command = EngineCommand(kind, Path("/v/python"), Path("/m"), tuple(args.split()))
    assert make_arguments(command, port=8101, key_file=Path("k.yaml")) == tuple(WORDS[kind].split())


@cases("""
kind | args                         | named
vllm | --logprobs-mode raw_logprobs | but training needs `--logprobs-mode processed_logprobs`
vllm | --logprobs_mode=raw_logprobs | `--logprobs-mode raw_logprobs`
vllm | --no-enable-scale-out | --no-enable-scale-out
vllm | --host 0.0.0.0 | training needs `--host 127.0.0.1`
vllm | --ho 0.0.0.0 | training needs `--host 127.0.0.1`
vllm | --seed 1 --api-key x | chosen for each run
sglang | --admin-api-key x | chosen for each run
sglang | --config x.yaml | --config x.yaml
sglang | --model other | --model other
sglang | --port 80 | --port 80
""")
def test_a_flag_that_contradicts_training_is_named(tmp_path, kind, args, named):
    with pytest.raises(ConfigError, match=r"engine\.args") as raised:
        check_command(fake_command(tmp_path, kind, args))
    assert named in str(raised.value)


def test_a_server_does_not_inherit_what_is_the_trainers():
    trainers = {"RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": "/p"}
    inherited = trainers | {"HF_HUB_OFFLINE": "1", "PATH": "/bin", "OMP_NUM_THREADS": "9"}
    env = make_environment(EngineCommand("vllm", Path("/v/bin/python"), Path("m")), inherited, threads=2)
    wanted = """HF_HUB_OFFLINE=1 PATH=/v/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
        VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1 OMP_NUM_THREADS=2
        VLLM_CPU_OMP_THREADS_BIND=nobind"""
    assert env == dict(word.split("=") for word in wanted.split())

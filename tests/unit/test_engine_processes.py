"""Servers that this process starts are found ready, keep their key to themselves, come back on the same port,
and never outlive it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from rollouts.engines.processes import (
    EngineCommand,
    check_command,
    make_arguments,
    make_environment,
    open_engine_processes,
    split_flags,
)
from rollouts.errors import ConfigError, EngineSetupError

FAKE = Path(__file__).with_name("fake_inference_server.py")


def fake_command(
    tmp_path: Path,
    kind: Literal["vllm", "sglang"] = "vllm",
    *,
    args: tuple[str, ...] = ("--device", "cpu"),
    **behaviour: Any,
) -> EngineCommand:
    python = tmp_path / "python"
    told = shlex.quote(json.dumps(behaviour))
    python.write_text(f'#!/bin/sh\nexport FAKE_SERVER={told}\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
    python.chmod(0o755)
    return EngineCommand(kind, python, tmp_path / "model", args=args)


def read_pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# Readiness


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_starts_slowly_is_waited_for(tmp_path: Path, kind: Literal["vllm", "sglang"]):
    async with open_engine_processes(
        fake_command(tmp_path, kind, not_ready=2), count=1, log_dir=tmp_path / "logs"
    ) as (process,):
        assert process.url.startswith("http://127.0.0.1:")
        assert process.log_path == tmp_path / "logs" / f"{kind}-0.log"
        assert "fake server says hello" in process.log_path.read_text()


async def test_servers_have_a_port_a_key_and_a_log_each(tmp_path: Path):
    async with open_engine_processes(fake_command(tmp_path), count=2, log_dir=tmp_path) as (first, second):
        assert first.url != second.url
        assert first.api_key != second.api_key
        assert [first.log_path.name, second.log_path.name] == ["vllm-0.log", "vllm-1.log"]


async def test_a_server_that_dies_at_start_is_an_error_with_the_end_of_its_log(tmp_path: Path):
    with pytest.raises(
        EngineSetupError, match=r"vllm-0 \(pid \d+\) ended with exit code 3 before it was ready"
    ) as raised:
        async with open_engine_processes(fake_command(tmp_path, die=3), count=1, log_dir=tmp_path):
            pytest.fail("it is not ready")
    message = str(raised.value)
    assert message.endswith("RuntimeError: no memory for the cache")
    assert str(tmp_path / "vllm-0.log") in message
    assert "\nline 21\n" in message, "20 lines: the last of 40 and the error, 19 + 1"
    assert "line 20\n" not in message


async def test_a_server_that_is_never_ready_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.engines.processes.START_S", 1.0)
    command = fake_command(tmp_path, never=True, pids=str(tmp_path / "pids"))
    with pytest.raises(EngineSetupError, match="not ready after 1 s") as raised:
        async with open_engine_processes(command, count=1, log_dir=tmp_path):
            pytest.fail("it is not ready")
    assert "fake server says hello" in str(raised.value)
    assert not any(map(is_alive, read_pids(tmp_path / "pids")))


async def test_a_failing_server_stops_the_others(tmp_path: Path):
    """One of two runs, but is never ready; the other fails as soon as the first runs."""
    command = fake_command(tmp_path, never=True, strays=True, pids=str(tmp_path / "pids"))
    script = command.python.read_text()
    second = f'while [ ! -s "{tmp_path}/pids" ]; do sleep 0.02; done; exit 7'
    command.python.write_text(
        script.replace("exec", f'mkdir "{tmp_path}/first" 2>/dev/null || {{ {second}; }}\nexec', 1)
    )
    with pytest.raises(EngineSetupError, match="exit code 7"):
        async with open_engine_processes(command, count=2, log_dir=tmp_path):
            pytest.fail("one is not ready")
    assert not any(map(is_alive, read_pids(tmp_path / "pids")))


async def test_a_program_that_cannot_be_run_is_named(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/no/such/interpreter\n")
    python.chmod(0o755)
    with pytest.raises(EngineSetupError, match=r"did not start: .*python does not start"):
        async with open_engine_processes(EngineCommand("vllm", python, tmp_path), count=1, log_dir=tmp_path):
            pytest.fail("it is not ready")


async def test_a_server_that_takes_everybody_is_not_ours(tmp_path: Path):
    with pytest.raises(EngineSetupError, match="another server answers"):
        async with open_engine_processes(fake_command(tmp_path, open=True), count=1, log_dir=tmp_path):
            pytest.fail("it is not ready")


# The key


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_key_stands_in_no_command_line_and_no_readable_file(
    tmp_path: Path, kind: Literal["vllm", "sglang"]
):
    async with open_engine_processes(fake_command(tmp_path, kind), count=1, log_dir=tmp_path) as (process,):
        pid = process.pid
        for _ in range(3):  # the server, the inner and the outer guard
            assert process.api_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            pid = parent_of(pid)
        assert process.log_path.stat().st_mode & 0o777 == 0o600
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        if kind == "sglang":
            assert "config mode 600" in process.log_path.read_text()
            assert not Path(words[words.index("--config") + 1]).exists(), "a server that is up has read it"


async def test_the_key_is_blotted_out_of_messages(tmp_path: Path):
    async with open_engine_processes(fake_command(tmp_path, "sglang"), count=1, log_dir=tmp_path) as (
        process,
    ):
        os.kill(process.pid, signal.SIGKILL)
        reason = await process.wait_exited()
    assert "was killed by SIGKILL" in reason
    assert "api_key=<key>" in reason
    assert process.api_key not in reason


# Ends and restarts


async def test_a_restart_keeps_port_and_key_and_appends_to_the_log(tmp_path: Path):
    async with open_engine_processes(fake_command(tmp_path), count=1, log_dir=tmp_path) as (process,):
        url, key, pid = process.url, process.api_key, process.pid
        os.kill(pid, signal.SIGKILL)
        await process.wait_exited()
        await process.restart()
        assert (process.url, process.api_key) == (url, key)
        assert process.pid != pid
        log = process.log_path.read_text()
        assert log.count("fake server says hello") == 2
        assert "start 1 of vllm-0" in log and "start 2 of vllm-0" in log


async def test_a_restart_that_fails_can_be_asked_for_again(tmp_path: Path):
    command = fake_command(tmp_path)
    async with open_engine_processes(command, count=1, log_dir=tmp_path) as (process,):
        script = command.python.read_text()
        command.python.write_text("#!/bin/sh\necho broken; exit 9\n")
        with pytest.raises(EngineSetupError, match="exit code 9"):
            await process.restart()
        command.python.write_text(script)
        await process.restart()
        assert is_alive(process.pid)


# Nothing is left


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path):
    command = fake_command(tmp_path, never=True, pids=str(tmp_path / "pids"))
    with trio.move_on_after(1.5) as scope:
        async with open_engine_processes(command, count=1, log_dir=tmp_path):
            pytest.fail("it is not ready")
    assert scope.cancelled_caught
    assert not any(map(is_alive, read_pids(tmp_path / "pids")))


# Command lines and environments


def test_a_vllm_server_gets_what_training_needs(tmp_path: Path):
    command = EngineCommand("vllm", Path("/v/bin/python"), Path("/m"), ("--seed", "3"))
    words = make_arguments(command, port=8101, key_file=tmp_path / "k.yaml")
    assert words[:3] == ("/v/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert dict(split_flags(words[3:])) == {
        "--model": "/m",
        "--host": "127.0.0.1",
        "--port": "8101",
        "--served-model-name": "policy",
        "--logprobs-mode": "processed_logprobs",
        "--enable-scale-out": None,
        "--disable-uvicorn-access-log": None,
        "--seed": "3",
        "--no-enable-chunked-prefill": None,
        "--enforce-eager": None,
    }
    assert words[-2:] == ("--seed", "3"), "the user's flags come last"


def test_an_sglang_server_on_a_cpu_gets_what_training_needs(tmp_path: Path):
    command = EngineCommand("sglang", Path("/s/bin/python"), Path("/m"), ("--device", "cpu"))
    words = make_arguments(command, port=8101, key_file=tmp_path / "k.yaml")
    assert words[:3] == ("/s/bin/python", "-m", "sglang.launch_server")
    assert dict(split_flags(words[3:])) == {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "8101",
        "--served-model-name": "policy",
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--max-total-tokens": "16384",
        "--sleep-on-idle": None,
        "--log-level-http": "warning",
        "--config": str(tmp_path / "k.yaml"),
    }


def test_a_default_gives_way_to_the_users_flag(tmp_path: Path):
    words = make_arguments(
        EngineCommand("sglang", Path("p"), Path("m"), ("--device=cpu", "--max_total_tokens=99")),
        port=1,
        key_file=tmp_path,
    )
    assert "--max-total-tokens" not in words
    assert words[-1] == "--max_total_tokens=99"


@pytest.mark.parametrize(
    ("kind", "args", "named"),
    [
        (
            "vllm",
            ("--logprobs-mode", "raw_logprobs"),
            "`--logprobs-mode raw_logprobs`, but training needs `--logprobs-mode processed_logprobs`",
        ),
        ("vllm", ("--logprobs_mode=raw_logprobs",), "--logprobs-mode raw_logprobs"),
        ("vllm", ("--no-enable-scale-out",), "--no-enable-scale-out"),
        ("vllm", ("--host", "0.0.0.0"), "training needs `--host 127.0.0.1`"),
        ("vllm", ("--hos", "0.0.0.0"), "--hos 0.0.0.0"),
        ("vllm", ("--ho", "0.0.0.0"), "--ho 0.0.0.0"),
        ("sglang", ("--h=0.0.0.0",), "--h 0.0.0.0"),
        ("vllm", ("--po", "80"), "chosen for each run"),
        ("sglang", ("--ad", "x"), "chosen for each run"),
        ("vllm", ("--seed", "1", "--api-key", "x"), "chosen for each run"),
        ("sglang", ("--admin-api-key", "x"), "chosen for each run"),
        ("sglang", ("--config", "x.yaml"), "--config x.yaml"),
        ("sglang", ("--model", "other"), "--model other"),
        ("sglang", ("--port", "80"), "--port 80"),
    ],
)
def test_a_flag_that_contradicts_training_is_named(
    tmp_path: Path, kind: Literal["vllm", "sglang"], args: tuple[str, ...], named: str
):
    with pytest.raises(ConfigError, match=r"engine\.args") as raised:
        check_command(fake_command(tmp_path, kind, args=args))
    assert named in str(raised.value)


def test_a_python_that_is_not_there_is_named_with_the_way_out(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"engine\.python=.*none.* is not there .*engines install-sglang-cpu"
    ):
        check_command(EngineCommand("sglang", tmp_path / "none", tmp_path))


def test_a_server_does_not_inherit_what_is_the_trainers():
    inherited = {
        "RANK": "0",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "PYTHONPATH": "/p",
    }  # none of them
    inherited |= {"HF_HUB_OFFLINE": "1", "PATH": "/bin", "OMP_NUM_THREADS": "9"}
    env = make_environment(EngineCommand("vllm", Path("/v/bin/python"), Path("m")), inherited, threads=2)
    assert env == {
        "HF_HUB_OFFLINE": "1",
        "PATH": "/v/bin:/bin",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }

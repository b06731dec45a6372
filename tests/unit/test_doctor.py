"""What doctor says, each probe with a machine, server or run made up for it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from rollouts.checkpoints.manifest import compute_manifest, write_manifest
from rollouts.cli import main
from rollouts.config.schema import EngineConfig
from rollouts.doctor import machine, record, servers
from rollouts.engines.http import HttpReply
from rollouts.errors import EngineUnreachable
from rollouts.preflight.findings import Finding
from rollouts.run_dir import RunDir


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


# --- machine ------------------------------------------------------------------------------------------------


def test_an_old_python_is_a_problem():
    assert machine.check_python((3, 11, 2)).level == "ok"
    assert machine.check_python((3, 10, 9)).level == "error"


def test_versions_are_compared_with_the_floors():
    wanted = [
        "torch>=2.11",
        "transformers>=5.17",
        "trio>=0.30",
        "numpy>=1.26",
        "matplotlib>=3.9; extra == 'plot'",
    ]
    found = machine.check_packages(wanted, {"torch": "2.11.0+cpu", "transformers": "5.9", "numpy": "2.0"}.get)
    assert levels(found) == {"torch": "ok", "transformers": "error", "trio": "error"}
    assert "5.9 is older than 5.17; pip install 'transformers>=5.17'" in found[1].message


def test_versions_are_numbers_not_text():
    assert machine.parse_version("2.9.1") < machine.parse_version("2.11")
    assert machine.parse_version("3.0") == machine.parse_version("3")


def test_extras_are_installed_in_full_or_not():
    wanted = ["a>=1; extra == 'x'", "b; extra == 'x'", 'c ; extra == "y"', "rollouts-rl[x]; extra == 'all'"]
    assert machine.check_extras(wanted, {"a": "1", "c": "1"}.get).message.startswith(
        "installed: y; not: x (pip"
    )


@pytest.mark.parametrize(
    ("listed", "cuda", "level"),
    [(None, None, "ok"), ("H100, 570.1, 80 GB", "12.8", "ok"), ("H100, 570.1", None, "warning")],
)
def test_a_gpu_that_torch_cannot_use_is_a_warning(listed: str | None, cuda: str | None, level: str):
    assert machine.check_gpu(listed, cuda).level == level


def test_cores_are_compared_with_what_the_control_group_allows(tmp_path: Path):
    assert machine.check_cores(8, tmp_path, {}).level == "ok"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n")
    limited = machine.check_cores(8, tmp_path, {})
    assert (limited.level, limited.message) == (
        "warning",
        (
            "8, of whose time the control group allows 2.5 cores'; set model.threads = 2, or more threads"
            " wait for each other"
        ),
    )
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert machine.check_cores(8, tmp_path, {"OMP_NUM_THREADS": "8"}).level == "ok"
    assert machine.check_cores(8, tmp_path, {"OMP_NUM_THREADS": "9"}).level == "warning"


def test_the_first_control_groups_are_read_too(tmp_path: Path):
    folder = tmp_path / "sys/fs/cgroup/cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.read_cpu_quota(tmp_path) == 1.5
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.read_cpu_quota(tmp_path) is None


def test_little_room_is_a_warning_and_none_a_problem(tmp_path: Path):
    gib = 1 << 30
    assert [machine.check_memory(free).level for free in (None, gib, 8 * gib)] == ["warning", "warning", "ok"]
    assert [machine.check_disk(tmp_path, free, 10**6).level for free in (gib // 2, 2 * gib, 9 * gib)] == [
        "error",
        "warning",
        "ok",
    ]
    assert machine.check_disk(tmp_path, 9 * gib, 5).level == "error"
    assert machine.check_shm(tmp_path / "none").level == "warning"


def test_few_open_files_are_a_warning_with_the_command():
    assert machine.check_open_files((1024, 4096)).message.endswith("ulimit -n 4096")
    assert machine.check_open_files((65536, 65536)).level == "ok"
    assert machine.check_open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).level == "ok"


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert levels(machine.check_file_system(tmp_path, lambda: tmp_path.stat().st_mtime)) == {
        "flock": "ok",
        "clock": "ok",
    }
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "ENOLCK" in machine.check_file_system(tmp_path, lambda: tmp_path.stat().st_mtime)[0].message
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_off_is_found(tmp_path: Path):
    mtime = tmp_path.stat().st_mtime
    assert levels(machine.check_file_system(tmp_path, lambda: mtime + 3600))["clock"] == "warning"
    assert levels(machine.check_file_system(tmp_path, lambda: 12.0)) == {"clock": "error"}


def test_an_engine_is_found_by_its_metadata(tmp_path: Path):
    assert machine.check_engine_environment("vllm", tmp_path).message.startswith("not installed")
    (tmp_path / "lib/python3.12/site-packages/vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    assert machine.check_engine_environment("vllm", tmp_path).level == "warning", "no Python is there"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    assert machine.check_engine_environment("vllm", tmp_path).message.startswith(f"0.32.0+cpu in {tmp_path}")


def test_a_guard_or_follower_whose_run_has_ended_is_an_orphan():
    guard = ("python", "-S", "/x/process_guard.py", json.dumps({"parent_pid": 7, "inner": False}))
    inner = ("python", "-S", "/x/process_guard.py", json.dumps({"parent_pid": 11, "inner": True}))
    follower = ("python", "-m", "rollouts.trackers.supervisor", "runs/demo", "8", "tensorboard")
    commands = [(11, guard), (12, inner), (13, follower), (14, ("vim", "process_guard.py")), (15, ())]
    assert machine.check_orphans(commands, lambda pid: True).level == "ok"
    found = machine.check_orphans(commands, lambda pid: pid == 8)
    assert found.message.startswith("guard of a server 11 of process 7, which has ended")
    assert found.message.endswith("kill 11")


# --- servers ------------------------------------------------------------------------------------------------


class FakeClient:
    def __init__(self, answers: dict[str, tuple[int, bytes]]) -> None:
        self.answers = answers

    async def request(self, method: str, path: str, *, silence_s: float) -> HttpReply:
        await trio.lowlevel.checkpoint()
        if path not in self.answers:
            raise EngineUnreachable(f"{method} {path}: refused")
        status, body = self.answers[path]
        return HttpReply(status, {}, body)


def look(
    url: str, answers: dict[str, tuple[int, bytes]], stranger: dict[str, tuple[int, bytes]] | None = None
) -> list[Finding]:
    @asynccontextmanager
    async def open_client(url: str, *, api_key: str | None) -> AsyncIterator[Any]:
        yield FakeClient(answers if api_key else stranger or {})

    return trio.run(servers.examine_server, "sglang", url, "key", open_client)


HEALTHY = {"/health": (200, b""), "/server_info": (200, b'{"version": "0.5.23", "api_key": "secret-key"}')}


def test_a_server_says_its_version_and_no_more():
    assert look("http://127.0.0.1:30000", HEALTHY) == [
        Finding("ok", "http://127.0.0.1:30000", "sglang 0.5.23, healthy")
    ]


def test_a_server_that_strangers_may_control_is_a_warning():
    found = look("http://10.0.0.5:30000", HEALTHY, {"/server_info": (200, b"{}")})
    assert [finding.level for finding in found] == ["ok", "warning"]
    assert "whoever reaches it controls it" in found[1].message
    assert [
        finding.level for finding in look("http://10.0.0.5:30000", HEALTHY, {"/server_info": (401, b"")})
    ] == ["ok"]


def test_a_server_that_is_down_or_refuses_the_key_is_a_problem():
    assert look("http://127.0.0.1:1", {})[0].level == "error"
    assert look("http://127.0.0.1:1", {"/health": (503, b"")})[0].message.startswith("GET /health: 503")
    refused = look("http://127.0.0.1:1", {"/health": (200, b""), "/server_info": (401, b"")})
    assert [(finding.level, "engine.api_key_env" in finding.message) for finding in refused] == [
        ("error", True)
    ]


def test_a_key_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = EngineConfig(kind="sglang", urls=["http://127.0.0.1:1"], api_key_env="NO_SUCH_KEY")
    assert [finding.level for finding in trio.run(servers.examine_servers, config)] == ["error"]
    assert [finding.level for finding in trio.run(servers.examine_servers, EngineConfig())] == ["ok"]


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.9", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False), ("a", False)],
)
def test_loopback_is_told_by_the_address(host: str, own: bool):
    assert servers.is_loopback(f"http://{host}:1") is own


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    rows = [
        {"stage": "rl", "step": step, "attempt": 1, "time_unix": 1.0, "optim/skipped_steps": step - 1}
        for step in (1, 2)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = root / "checkpoints/rl/step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, compute_manifest(checkpoint, stage="rl", step=2))
    return root


def test_a_run_that_died_and_skipped_steps_are_warnings(run: Path):
    assert levels(record.examine_run(RunDir(run), deep=True)) == {
        "run": "warning", "metrics.jsonl": "ok", "skipped steps": "warning", "checkpoints": "ok",
    }  # fmt: skip
    (run / "summary.json").write_text("{}")
    assert levels(record.examine_run(RunDir(run), deep=False))["run"] == "ok"


def test_a_run_whose_machine_cannot_be_asked_may_be_at_work(run: Path):
    (run / "run.lock").write_text('{"pid": 7, "host": "node3"}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "r')  # as it is while a row is written
    os.utime(run / "metrics.jsonl", (0.0, time.time() - 60.0))
    life, rows = record.examine_run(RunDir(run), deep=False)[:2]
    assert (life.level, rows.level) == ("warning", "ok")
    assert (
        "is perhaps running on node3, whose lock may not be seen here; last row 6" in life.message
    )  # 60 s, or a few more


def test_a_torn_line_is_a_warning_and_a_damaged_one_a_problem(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "r')
    found = record.examine_run(RunDir(run), deep=False)[1]
    assert (found.level, "torn (12 bytes)" in found.message) == ("warning", True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    found = record.examine_run(RunDir(run), deep=False)[1]
    assert (found.level, found.message.split(":")[:2]) == ("error", ["metrics.jsonl", "3"])


def test_a_flipped_bit_shows_only_when_every_byte_is_read(run: Path):
    weights = run / "checkpoints/rl/step_2/model.safetensors"
    weights.write_bytes(b"weighTs")
    assert record.find_damage(weights.parent, deep=False) == ""
    assert "SHA-256 differs" in record.find_damage(weights.parent, deep=True)
    weights.write_bytes(b"weights and more")
    assert "has 16 bytes, not 7" in record.find_damage(weights.parent, deep=False)
    weights.unlink()
    assert levels(record.examine_run(RunDir(run), deep=False))["checkpoints/rl/step_2"] == "error"


def test_a_tracker_that_is_behind_is_a_warning_with_the_command(run: Path):
    (run / "trackers").mkdir()
    held = {"schema": 1, "id": "a" * 32, "files": {}, "sending": None, "number": 0, "handed": 0, "mark": None}
    (run / "trackers/tensorboard.json").write_text(json.dumps(held))
    found = {finding.subject: finding for finding in record.examine_run(RunDir(run), deep=False)}[
        "tracker tensorboard"
    ]
    assert found.level == "warning"
    assert f"python -m rollouts track {run} --to tensorboard --once" in found.message
    (run / "trackers/tensorboard.json").write_text("{")
    assert levels(record.examine_run(RunDir(run), deep=False))["tracker tensorboard"] == "error"


def test_the_command_exits_1_where_something_is_a_problem(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", str(run)]) == 0
    assert "0 problems" in capsys.readouterr().out
    (run / "checkpoints/rl/step_2/manifest.json").unlink()
    assert main(["doctor", str(run)]) == 1
    assert "problem  checkpoints/rl/step_2: " in capsys.readouterr().out
    assert main(["doctor", "--deep"]) == 2
    assert main(["doctor", str(run / "nothing")]) == 2

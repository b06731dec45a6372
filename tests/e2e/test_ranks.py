"""Several ranks are the same run as one: under torchrun, started by themselves, across changes of their number, and when one is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from rollouts.metrics.jsonl import newest_attempts, read_rows
from tests.e2e.conftest import TRAIN, Train

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
STEPS = 12
SETTINGS = ("--sft.optim.schedule", "constant", "--rl.steps", "2", "--rl.eval_every", "0", "--sft.eval_every", "6")


def command(train: Train, out: Path, *arguments: str, mode: str, ranks: int, restarts: int = 0, steps: int = STEPS) -> list[str]:
    """train.py on so many ranks, under torchrun if there are several."""
    python, *script = train.command(out, *SETTINGS, "--sft.steps", str(steps), *arguments, mode=mode)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [python, *(launcher if ranks > 1 else []), *script]


def run(train: Train, words: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(words, capture_output=True, text=True, env=train.environment(), timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 0, result.stderr
    return result


def start(train: Train, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, env=train.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def rows_of(out: Path, stage: str) -> list[dict[str, Any]]:
    """The rows of the stage, one a step."""
    return [row for row in newest_attempts(read_rows(out / "metrics.jsonl")) if row["stage"] == stage]


def assert_same_sft(one: Path, several: Path, *, steps: int = STEPS) -> None:
    """Equal up to the order of sums."""
    expected, found = rows_of(one, "sft")[:steps], rows_of(several, "sft")[:steps]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, steps + 1))
    for name in ("loss/total", "optim/grad_norm", "entropy/mean"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4), name


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(train, command(train, out, mode="sft+rl", ranks=1))
    return out


def test_two_ranks_under_torchrun_are_the_run_of_one(train: Train, alone: Path, tmp_path: Path):
    result = run(train, command(train, tmp_path / "run", mode="sft+rl", ranks=2))
    assert "the engine has a copy on rank 0" in result.stderr
    assert_same_sft(alone, tmp_path / "run")
    expected, found = rows_of(alone, "rl"), rows_of(tmp_path / "run", "rl")
    assert [row["step"] for row in found] == [1, 2]
    assert found[0]["reward/mean"] == pytest.approx(expected[0]["reward/mean"], abs=0.05)  # a sampled token may fall on the other side of a rounding
    assert found[0]["weight_sync/engines_updated"] == 1.0
    left, right = (read_rows(out / "evaluations.jsonl") for out in (alone, tmp_path / "run"))
    assert [(row["stage"], row["step"]) for row in right] == [(row["stage"], row["step"]) for row in left]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "sft" / f"step_{STEPS}") for out in (alone, tmp_path / "run"))
    difference = torch.cat([(a - b).flatten() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)])
    assert difference.norm() <= 1e-4 * torch.cat([parameter.flatten() for parameter in ours.parameters()]).norm()


def test_a_run_goes_on_with_another_number_of_ranks(train: Train, alone: Path, tmp_path: Path):
    """Two ranks that the program starts itself, then one, then two under torchrun."""
    out = tmp_path / "run"
    run(train, command(train, out, "--distributed.ranks", "2", mode="sft", ranks=1, steps=4))
    run(train, command(train, out, "--resume", mode="sft", ranks=1, steps=8))
    run(train, command(train, out, "--resume", mode="sft", ranks=2, steps=STEPS))
    assert_same_sft(alone, out)
    assert [row["attempt"] for row in rows_of(out, "sft")] == [1] * 4 + [2] * 4 + [3] * 4


async def test_a_run_that_loses_a_rank_is_started_again_by_torchrun_and_finishes(train: Train, alone: Path, tmp_path: Path):
    out = tmp_path / "run"
    with start(train, command(train, out, mode="sft", ranks=2, restarts=1, steps=60)) as process:
        try:
            await wait_for_row(out / "metrics.jsonl", 5, process)
            os.kill(find_rank(process.pid, 1), signal.SIGKILL)
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.terminate()  # nothing is left to end unless the test has failed
    assert process.returncode == 0, stderr
    assert "rollouts: rank 1 was lost during" in stderr
    assert_same_sft(alone, out)
    rows = rows_of(out, "sft")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert {row["attempt"] for row in rows} == {1, 2}


def test_a_setting_that_the_ranks_do_not_allow_ends_the_launch_with_one_message(train: Train, tmp_path: Path):
    words = command(train, tmp_path / "run", "--distributed.shard_size", "3", mode="sft", ranks=2)
    result = subprocess.run(words, capture_output=True, text=True, env=train.environment(), timeout=PATIENCE_S, check=False)
    assert result.returncode != 0
    assert "ConfigError: distributed.shard_size=3 does not divide the 2 ranks" in result.stderr
    assert "exitcode  : 2" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_recipe_for_two_machines_runs_on_one(train: Train, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**train.environment(), "HEAD": f"localhost:{port}", "PYTHON": sys.executable}
    script = TRAIN.parent / "launch" / "two_nodes.sh"
    words = [str(script), *train.command(tmp_path / "run", *SETTINGS, "--sft.steps", "2", mode="sft")[2:]]
    machines = [subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        said = [machine.communicate(timeout=PATIENCE_S) for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert [row["step"] for row in rows_of(tmp_path / "run", "sft")] == [1, 2]


async def wait_for_row(path: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the file has the row. The file is another process's: there is no event to wait for."""
    with trio.fail_after(PATIENCE_S):
        while not (path.exists() and any(row["step"] >= step for row in read_rows(path))):
            assert process.poll() is None, process.communicate()
            await trio.sleep(0.02)


def find_rank(launcher: int, rank: int) -> int:
    """The process of a rank that the launcher has started."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{launcher}/task").glob("*/children")).split()
    return next(int(pid) for pid in children if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


if sys.platform != "linux":  # /proc
    pytestmark = [pytestmark, pytest.mark.skip(reason="finds ranks by /proc")]

"""SIGTERM in each phase of a run: the process is gone in time, what is complete is on disk, nothing is left, and the run goes on exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from rollouts.checkpoints.load import check_checkpoint, find_newest_checkpoint
from rollouts.metrics.jsonl import read_rows
from tests.e2e.compare import assert_same_run
from tests.e2e.conftest import REPOSITORY, TINY, Train
from tests.e2e.held_train import RELEASED

pytestmark = pytest.mark.slow  # two whole runs a phase

EXIT_S = 25.0  # from the signal; torchrun kills after 30
REACH_S = 120.0
HERE = Path(__file__).with_name("held_train.py")
SETTINGS = (
    "--sft.steps", "2", "--rl.steps", "4", "--rl.eval_every", "2", "--rl.rollout.filters", "[]", "--rl.micro_batch_tokens", "32",
    "--rl.rollout.reward", f"{HERE}:reward", "--rl.rollout.reward_timeout_s", "300", "--eval.reward", f"{HERE}:eval_reward",
    "--rl.loss", "tests.e2e.held_train:loss", "--output.keep_checkpoints", "0",
)  # fmt: skip
NEWEST = {"startup": None, "generate": 1, "reward": 1, "train": 1, "sync": 2, "save": 1, "evaluate": 2}  # RL steps on disk after the stop, at least


def command(out: Path, *arguments: str, torchrun: bool = False) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=1"] if torchrun else []
    options = ["--config", str(TINY), "--mode", "sft+rl", *SETTINGS, "--output.dir", str(out), *arguments]
    return [sys.executable, *launcher, "-m", "tests.e2e.held_train", *options]


def environment(train: Train, out: Path, hold: str = "") -> dict[str, str]:
    found = {name: value for name, value in train.environment().items() if not name.startswith("HOLD")}
    held = {"HOLD": hold, "HOLD_METRICS": str(out / "metrics.jsonl"), "HOLD_REACHED": str(out.parent / "reached")} if hold else {}
    return {**found, **held, "PYTHONPATH": str(REPOSITORY), "STOP_TEST": str(out)}


def run(train: Train, out: Path, *arguments: str) -> None:
    done = subprocess.run(
        command(out, *arguments), env=environment(train, out), capture_output=True, text=True, timeout=300, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def start(train: Train, out: Path, hold: str, *arguments: str, torchrun: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A held run in a session of its own; whatever of it is left at the end is killed."""
    process = subprocess.Popen(
        command(out, *arguments, torchrun=torchrun),
        env=environment(train, out, hold),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in processes_of(out):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def processes_of(out: Path) -> list[int]:
    """Living processes with this run's mark in their environment: the run's own, its workers, its guards."""
    mark = f"STOP_TEST={out}\0".encode()
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and mark in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue  # it ended meanwhile, or is not ours
    return found


async def wait_reached(out: Path, process: subprocess.Popen[str]) -> None:
    """Until the run stands in its phase. The file is another process's: there is no event to wait for."""
    with trio.fail_after(REACH_S):
        while not (out.parent / "reached").exists():
            assert process.poll() is None, process.communicate()
            await trio.sleep(0.02)


async def wait_gone(out: Path, *, within_s: float) -> float:
    """Seconds until nothing of the run is left."""
    began = trio.current_time()
    with trio.fail_after(within_s):
        while processes_of(out):  # noqa: ASYNC110  (other processes: there is no event)
            await trio.sleep(0.05)
    return trio.current_time() - began


@pytest.fixture(scope="module")
def unbroken(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    run(train, out)
    return out


async def stop_and_read(train: Train, out: Path, phase: str, number: int, *arguments: str) -> tuple[str, str]:
    """stdout and stderr of a run that was stopped in the phase, and is gone in time with exit code 0."""
    with start(train, out, phase, *arguments) as process:
        await wait_reached(out, process)
        began = time.monotonic()
        process.send_signal(number)
        (out.parent / RELEASED).touch()  # of a held save, which goes on; nothing else looks
        stdout, stderr = process.communicate(timeout=60)
        took = time.monotonic() - began
        assert took <= EXIT_S, (took, stderr)
        assert process.returncode == 0, stderr
        await wait_gone(out, within_s=EXIT_S - took + 1)
    assert "Traceback" not in stderr, stderr
    return stdout, stderr


@pytest.mark.parametrize("phase", list(NEWEST))
async def test_sigterm_in_a_phase_ends_in_time_and_the_run_goes_on_exactly(train: Train, unbroken: Path, tmp_path: Path, phase: str):
    out = tmp_path / "run"
    every = ("--output.checkpoint_every", "1") if phase == "save" else ()
    stdout, stderr = await stop_and_read(train, out, phase, signal.SIGTERM, *every)
    assert "--resume" in stdout and not (out / "summary.json").exists()
    assert "by force" not in stderr
    newest = find_newest_checkpoint(out / "checkpoints" / "rl")
    assert (newest and newest.name) == (NEWEST[phase] and f"step_{NEWEST[phase]}") or phase == "save", stderr  # which goes on beside a step
    assert newest is not None or phase == "startup"
    if newest is not None:
        check_checkpoint(newest, hashes=True)
    run(train, out, "--resume", *every)
    rows = [(row["stage"], row["step"]) for row in read_rows(out / "metrics.jsonl")]
    assert rows == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3), ("rl", 4)], "one row a step"
    assert_same_run(unbroken, out, stopped=True)


async def test_sigterm_to_torchrun_ends_it_with_its_rank_in_time(train: Train, tmp_path: Path):
    out = tmp_path / "run"
    with start(train, out, "reward", torchrun=True) as process:
        await wait_reached(out, process)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - began <= EXIT_S, stderr
        await wait_gone(out, within_s=5)
    assert "stopping: generate" in stderr
    assert (out / "checkpoints" / "rl" / "step_1" / "manifest.json").exists(), stderr

"""Whole runs of the tiny config, as a user starts them: a process of their own, a directory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = REPOSITORY / "integration_training" / "train.py"
TINY = REPOSITORY / "integration_training" / "configs" / "tiny.toml"
SHORT = (
    "--sft.steps", "20", "--rl.steps", "4", "--rl.eval_every", "2", "--rl.rollout.filters", "[]",
    "--output.checkpoint_every", "4", "--output.keep_checkpoints", "0",
)  # fmt: skip


@dataclass(frozen=True)
class Train:
    """Starts train.py with the tiny config, shortened, writing into a directory of this test."""

    cache: Path

    def command(self, out: Path, *arguments: str, mode: str = "sft+rl", torchrun: bool = False) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=1"] if torchrun else []
        return [sys.executable, *launcher, str(TRAIN), "--config", str(TINY), "--mode", mode, *SHORT, "--output.dir", str(out), *arguments]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ROLLOUTS_CACHE": str(self.cache), "PYTHONWARNINGS": "default"}

    def run(self, out: Path, *arguments: str, mode: str = "sft+rl", torchrun: bool = False) -> subprocess.CompletedProcess[str]:
        return self._start(self.command(out, *arguments, mode=mode, torchrun=torchrun))

    def run_config(self, config: Path, out: Path, *arguments: str, mode: str = "sft+rl") -> subprocess.CompletedProcess[str]:
        """The same with a config of the test's own, as it is."""
        return self._start([sys.executable, str(TRAIN), "--config", str(config), "--mode", mode, "--output.dir", str(out), *arguments])

    def _start(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=300, stdin=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return Train(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def finished_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sft+rl run that nobody disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    result = train.run(out)
    assert result.returncode == 0, result.stderr
    return out

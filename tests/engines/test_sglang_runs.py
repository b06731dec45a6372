"""Whole RL runs on a real SGLang server, as a user starts them. Needs ROLLOUTS_SGLANG_PYTHON, or SGLang in .venv-sglang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT
from .sglang_server import SGLangServer, sglang_python, sglang_server

pytestmark = pytest.mark.engines
__all__ = ["sglang_python", "sglang_server"]  # fixtures
STEPS, SYNC_EVERY = 4, 2
# demo_sglang.toml, smaller; the random model's answers are scored by their bytes, so that every batch has something to learn from
SHORT = (
    "--model.threads", "1", "--rl.steps", str(STEPS), "--rl.sync_every", str(SYNC_EVERY), "--rl.rollout.num_prompts", "4",
    "--rl.rollout.samples_per_prompt", "8", "--rl.optim.lr", "1e-3", "--eval.data.size", "16", "--rl.data.size", "64",
)  # fmt: skip
REWARD = """
def share_of_even_bytes(sample):
    tokens = [int(token) for token, trained in zip(sample.tokens, sample.loss_mask, strict=True) if trained]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
"""


def train(folder: Path, *arguments: str, **environment: str) -> Path:
    """The directory of a run that ended well and of which nothing runs any more."""
    (folder / "reward.py").write_text(REWARD)
    config = ROOT / "integration_training" / "configs" / "demo_sglang.toml"
    reward = ("--rl.rollout.reward", f"{folder}/reward.py:share_of_even_bytes")
    command = [
        sys.executable, str(ROOT / "integration_training" / "train.py"), "--config", str(config), "--mode", "rl", *SHORT, *reward, *arguments,
        "--output.dir", str(folder / "run"),
    ]  # fmt: skip
    mark = uuid.uuid4().hex
    settings = {"OMP_NUM_THREADS": "1", "RUN_MARK": mark, "ROLLOUTS_CACHE": str(folder / "cache")} | environment
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, timeout=400, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert find_processes(mark) == []
    return folder / "run"


def find_processes(mark: str) -> list[str]:
    """The processes whose environment has `mark`: what a run started, and what that started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(f"{process.name} {(process / 'cmdline').read_text()}")
        except OSError:
            continue  # it has ended
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_proven(run: Path) -> None:
    """Every step was trained on samples one step old at most, and every second one brought the server to its weights, proven by the probe."""
    rows = read_rows(run / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [("rl", step) for step in range(1, STEPS + 1)]
    assert [row["off_policy/max"] for row in rows] == [0, 1] * (STEPS // 2)
    for row in rows:
        assert row["optim/grad_norm"] > 0
        assert ("weight_sync/probe_difference/max" in row) == (row["step"] % SYNC_EVERY == 0)
        if row["step"] % SYNC_EVERY == 0:
            assert row["weight_sync/probe_difference/max"] < 1e-3


def count_updates(log: Path) -> tuple[int, int]:
    """How often a server loaded weights from disk and how often it took a bucket out of a process group."""
    text = log.read_text(errors="replace")
    return text.count("weights online from disk begin"), text.count("POST /update_weights_from_distributed ")


def test_run_starts_a_server_updates_it_from_disk_and_leaves_nothing(sglang_python: Path, tmp_path: Path):
    run = train(tmp_path, "--model.name", "tiny:llama", "--engine.python", str(sglang_python))
    assert_proven(run)
    assert count_updates(run / "engines" / "sglang-0.log") == (1 + STEPS // SYNC_EVERY, 0)


def test_run_on_a_running_server_updates_it_in_memory(sglang_server: SGLangServer, snapshots: tuple[Path, Path], tmp_path: Path):
    from_disk, in_memory = count_updates(sglang_server.log)
    run = train(
        tmp_path, "--model.name", str(snapshots[0]), "--engine.urls", json.dumps([sglang_server.url]), "--engine.api_key_env", "SGLANG_KEY",
        "--engine.transport", "memory", SGLANG_KEY=sglang_server.api_key,
    )  # fmt: skip
    assert_proven(run)
    assert count_updates(sglang_server.log) == (from_disk, in_memory + 1 + STEPS // SYNC_EVERY)

"""Settings that change what the RL loop computes, through the whole program in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration_training.train import main
from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import TINY

COMMON = (
    "--rl.steps",
    "4",
    "--rl.rollout.num_prompts",
    "2",
    "--rl.rollout.filters",
    "[]",
    "--rl.eval_every",
    "0",
    "--eval.data.size",
    "4",
)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path_factory.getbasetemp() / "recipes_cache"))


def run(out: Path, *arguments: str, config: Path = TINY, mode: str = "rl") -> list[dict]:
    assert main(["--config", str(config), "--mode", mode, "--output.dir", str(out), *COMMON, *arguments]) == 0
    return read_rows(out / "metrics.jsonl")


def test_a_copied_engine_is_synchronised_every_second_step_and_verified(tmp_path: Path):
    rows = run(tmp_path / "run", "--engine.mode", "copied", "--rl.sync_every", "2", "--rl.max_staleness", "1")
    assert ["weight_sync/probe_difference/max" in row for row in rows] == [False, True, False, True]
    assert all(
        row["weight_sync/probe_difference/max"] < 1e-4
        for row in rows
        if "weight_sync/probe_difference/max" in row
    )
    assert [row["off_policy/max"] for row in rows] == [0.0, 1.0, 0.0, 1.0]


def test_the_kl_to_the_reference_is_zero_at_first_and_then_is_not(tmp_path: Path):
    rows = run(tmp_path / "run", "--rl.kl_coef", "0.1", "--rl.optim.lr", "1e-2")
    assert rows[0]["kl/ref_per_sample"] == pytest.approx(0.0, abs=1e-4)
    assert abs(rows[-1]["kl/ref_per_sample"]) > 0.01  # an estimate from few samples, of either sign


def test_kl_in_the_loss_with_recomputed_old_log_probs(tmp_path: Path):
    rows = run(
        tmp_path / "run",
        "--rl.kl_coef",
        "0.1",
        "--rl.kl_in",
        "loss",
        "--rl.kl_estimator",
        "k3",
        "--rl.recompute_old",
        "true",
        "--rl.updates_per_batch",
        "2",
        "--rl.advantage",
        "centred",
        "--rl.normalise_by",
        "constant",
    )
    assert rows[0]["importance_weight/mean"] == pytest.approx(1.0, abs=1e-4)
    assert rows[0]["mismatch_kl/max"] < 1e-6
    assert "kl/ref" in rows[0]


@pytest.mark.parametrize("loss", ["reinforce", "importance_sampling", "cispo", "gspo"])
def test_every_loss_trains(tmp_path: Path, loss: str):
    rows = run(tmp_path / "run", "--rl.loss", loss, "--rl.steps", "2")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["optim/skipped_steps"] == 0 for row in rows)


def test_ones_own_files_beside_the_config_are_enough(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom rollouts.generation.generate import make_chat_generate\nfrom"
        " rollouts.types import FilterDecision, RewardResult\nasync def short(sample):\n    if"
        " sample.id.endswith('s001'):\n        raise RuntimeError('no verdict on this one')\n    return"
        " RewardResult(-float(sample.response_length), {'length': float(sample.response_length)},"
        " note=sample.metadata['colour'])\ndef keep(group):\n    return"
        " FilterDecision(keep=len(group.samples) == 7, reason='odd_size')\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{n}", "colour": "blue"}) + "\n" for n in range(12))
    )
    text = TINY.read_text()
    rl_data = text[text.index("[rl.data]") : text.index("[rl.rollout]")]
    text = text.replace(rl_data, '[rl.data]\nkind = "jsonl"\npath = "rows.jsonl"\n\n').replace(
        "../tasks", str(TINY.parents[1] / "tasks")
    )
    text = text.replace(f"{TINY.parents[1] / 'tasks'}/arithmetic.py:close_answer", "mine.py:short")
    (tmp_path / "mine.toml").write_text(text)
    rows = run(
        tmp_path / "run",
        "--rl.rollout.filters",
        f'["{tmp_path}/mine.py:keep"]',
        "--rl.steps",
        "2",
        config=tmp_path / "mine.toml",
    )
    assert rows[0]["fail/reward"] >= 2
    samples = [row for row in read_rows(tmp_path / "run" / "samples.jsonl") if row["stage"] == "rl"]
    failed = [row for row in samples if row["status"] == "failed"]
    assert failed
    assert "no verdict on this one" in failed[0]["metadata"]["failure"]["message"]
    assert "reward" not in failed[0], "a failure is not a reward"
    assert any(row["metadata"].get("reward_note") == "blue" for row in samples)

"""A whole run on a GPU: stages, evaluations, checkpoints, and every part that computes; make test-gpu."""

import json

import pytest
import torch

from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import STEPS
from tests.support.text_tables import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@cases("mode: shared copied")
def test_sft_and_rl_run_on_a_gpu_with_engine_and_reference_and_go_on_there(train, tmp_path, mode):
    settings = f"--deterministic false --model.device cuda --engine.mode {mode} --rl.kl_coef 0.01".split()
    train.run_fresh(tmp_path, *settings, "--rl.steps", "2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"].startswith("cuda (")
    assert set(summary["accuracy"]) == {"base", "sft", "rl"}
    train.run_fresh(tmp_path, *settings, "--rl.steps", "4", "--resume")
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == STEPS
    assert all(row["optim/grad_norm"] > 0 for row in rows if row["stage"] == "sft")
    assert all("kl/ref_per_sample" in row for row in rows if row["stage"] == "rl")

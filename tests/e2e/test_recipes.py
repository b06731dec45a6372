"""Settings that change what the RL loop computes, through the whole program in one process."""

import pytest

from integration_training.train import main
from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import TINY
from tests.support.text_tables import cases

COMMON = (
    "--rl.steps 4 --rl.rollout.num_prompts 2 --rl.rollout.filters [] --rl.eval_every 0 --eval.data.size 4"
)


def run(out, flags):
    start = ["--config", str(TINY), "--mode", "rl", "--output.dir", str(out)]
    assert main([*start, *COMMON.split(), *flags.split()]) == 0
    return read_rows(out / "metrics.jsonl")


ADAPTERS = (
    "--model.lora.rank 4 --model.lora.alpha 8 --rl.optim.lr 1e-2"
    " --rl.rollout.reward tests.e2e.test_rl_changes:score_letters"
)


@cases("more", ["", pytest.param(ADAPTERS, marks=pytest.mark.slow)], ids=["all", "adapters"])
def test_a_copied_engine_is_synchronised_every_second_step_and_verified(tmp_path, more):
    rows = run(tmp_path / "run", f"--engine.mode copied --rl.sync_every 2 --rl.max_staleness 1 {more}")
    differences = [row.get("weight_sync/probe_difference/max") for row in rows]
    assert [None if found is None else found < 1e-4 for found in differences] == [None, True, None, True]
    assert [row["off_policy/max"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    assert not more or all(row["optim/grad_norm"] > 0 for row in rows)


def test_the_kl_to_the_reference_is_zero_at_first_and_then_is_not(tmp_path):
    # The task's reward is 0 for every answer of a random model: only rounding would move the policy.
    (tmp_path / "low.py").write_text("def reward(sample):\n    return -float(sum(sample.tokens[-4:]))\n")
    flags = f"--rl.kl_coef 0.1 --rl.optim.lr 1e-2 --rl.rollout.reward {tmp_path}/low.py:reward"
    rows = run(tmp_path / "run", flags)
    assert rows[0]["kl/ref_per_sample"] == pytest.approx(0.0, abs=1e-4)
    assert max(abs(row["kl/ref_per_sample"]) for row in rows[1:]) > 0.01  # estimates, of either sign


def test_kl_in_the_loss_with_recomputed_old_log_probs(tmp_path):
    flags = """--rl.kl_coef 0.1 --rl.kl_in loss --rl.kl_estimator k3 --rl.recompute_old true
        --rl.updates_per_batch 2 --rl.advantage centred --rl.normalise_by constant"""
    rows = run(tmp_path / "run", flags)
    assert rows[0]["importance_weight/mean"] == pytest.approx(1.0, abs=1e-4)
    assert rows[0]["mismatch_kl/max"] < 1e-6
    assert "kl/ref" in rows[0]


def test_the_exact_kl_trains_in_the_loss_and_moves_its_coefficient(tmp_path):
    (tmp_path / "low.py").write_text("def reward(sample):\n    return -float(sum(sample.tokens[-4:]))\n")
    flags = f"""--rl.kl_coef 0.1 --rl.kl_in loss --rl.kl_estimator exact --rl.optim.lr 1e-2
        --rl.kl_control two_sided(target=0.02,tolerance=0.01) --rl.updates_per_batch 2 --rl.minibatches 2
        --rl.rollout.reward {tmp_path}/low.py:reward"""
    rows = run(tmp_path / "run", flags)
    coef = 0.1
    for row in rows:
        kl = row["kl/ref_per_sample"]
        assert row["kl/coef"] == pytest.approx(coef) and 0 < row["kl/exact"] <= kl
        assert row["loss/kl"] == pytest.approx(coef * row["kl/exact"], rel=1e-4)
        coef *= 1.5 if kl > 0.03 else 1 / 1.5 if kl < 0.01 else 1.0
    assert rows[-1]["kl/coef"] != 0.1 and rows[-1]["kl/exact"] > 1e-3
    assert all(row["optim/skipped_steps"] == 0 and "kl/ref" not in row for row in rows)


@cases("loss: reinforce importance_sampling cispo gspo")
def test_every_loss_trains(tmp_path, loss):
    rows = run(tmp_path / "run", f"--rl.loss {loss} --rl.steps 2")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["optim/skipped_steps"] == 0 for row in rows)

"""What benchmarks.train_step and benchmarks.e2e_reward compute from what they measure, and what both sides
are given.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import train_step
from benchmarks.e2e.children import open_child
from benchmarks.e2e.runs import Setting, make_config, order_rows
from benchmarks.e2e.step_batch import make_step_batch
from benchmarks.e2e.tasks import make_rows, score_digits, score_sum
from rollouts.config.load import load_config

# --- what both sides get ------------------------------------------------------------------------------------


def test_scores() -> None:
    assert score_digits(" 1234567890 ", "") == pytest.approx(10 / 12)
    assert score_digits("12 a b c d e f g", "") == pytest.approx(2 / 16)
    assert score_sum("the answer is 7.", "7") == 1.0
    assert score_sum("9", "7") == pytest.approx(0.5 * 0.9)
    assert score_sum("seven", "7") == score_sum("-99", "7") == 0.0


def test_the_peer_gets_rows_in_the_order_in_which_our_run_draws_them(tmp_path: Path) -> None:
    from rollouts.data.data_buffer import DataBuffer
    from rollouts.preflight.rows import load_all_rows

    setting = Setting("digits", "tiny:byte", steps=14, lr=1e-5, seed=1, threads=1, micro_batch_rows=64)
    path, config_path = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in make_rows("digits", count=96, seed=1)), encoding="utf-8"
    )
    config_path.write_text(make_config(setting, path, tmp_path / "run"), encoding="utf-8")
    config = load_config(config_path, [])
    drawn = DataBuffer(load_all_rows(config, ["rl"]).training["rl"], seed=config.seed).get_prompts(14 * 8)
    assert [row.row["prompt"] for row in drawn] == [row["prompt"] for row in order_rows(setting)]


def test_step_batch_has_groups_with_a_prompt_in_common_and_centred_advantages() -> None:
    batch = make_step_batch(vocab_size=500, tied_groups=1)
    prompts = batch.prompts.reshape(4, 8, 64)
    assert (prompts == prompts[:, :1]).all()
    assert not np.array_equal(prompts[0, 0], prompts[1, 0])
    groups = batch.advantages.reshape(4, 8)
    assert np.all(groups[0] == 0)
    np.testing.assert_allclose(groups.sum(1), 0, atol=1e-5)
    assert np.all(np.abs(groups[1:]).max(1) > 0.5)


# --- gradients ----------------------------------------------------------------------------------------------


def test_gradient_error_is_relative_and_after_clipping(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    ours, trl = tmp_path / "ours", tmp_path / "trl"
    save_file({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, ours)  # norm 5
    save_file({"a": torch.tensor([0.6, 0.0]), "b": torch.tensor([0.8])}, trl)
    assert train_step.compare_gradients(ours, trl, 1.0) < 1e-6
    save_file({"a": torch.tensor([0.6, 0.1]), "b": torch.tensor([0.8])}, trl)
    assert train_step.compare_gradients(ours, trl, 1.0) == pytest.approx(0.1 / 1.01**0.5, rel=1e-5)


# --- processes ----------------------------------------------------------------------------------------------


def test_a_child_that_ends_shows_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the following arguments are required"),
        open_child("benchmarks.e2e.step_ours", [], log=tmp_path / "log") as child,
    ):
        child.ask(do="step")

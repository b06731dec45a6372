"""`rollouts evaluate` on what a run left: the numbers of the run."""

import shutil
from pathlib import Path

import pytest

from integration_training.train import main
from rollouts.cli import main as rollouts
from rollouts.inspect.record import open_record
from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import TINY

SETTINGS = "--sft.steps 20 --rl.steps 2 --rl.eval_every 0 --rl.rollout.filters [] --eval.data.size 6"
GRADED = "--eval.temperature 1.0 --eval.samples_per_prompt 2 --eval.policy_metrics true"
REWARD = TINY.parents[1] / "tasks/arithmetic.py"


def test_a_model_and_checkpoints_get_the_digits_that_their_run_gave_them(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    given = [*SETTINGS.split(), *GRADED.split(), "--eval.reward", f"{REWARD}:close_answer"]
    assert main(["--config", str(TINY), "--mode", "sft+rl", "--output.dir", "runs/tiny", *given]) == 0
    of_run = read_rows(Path("runs/tiny/evaluations.jsonl"))
    rows = []
    for name, written in (
        ("tiny:byte --config runs/tiny/config.toml", "tiny-byte"),
        ("runs/tiny/checkpoints/sft/step_20", "tiny-sft-step_20"),
        ("runs/tiny --against runs/tiny", "tiny-rl-step_2"),
    ):
        assert rollouts(["evaluate", *name.split()]) == 0, capfd.readouterr().err
        rows += read_rows(Path(f"runs/evaluate-{written}/evaluations.jsonl"))
    assert rows[-1].pop("eval/heldout/kl") == 0  # from itself
    assert f"eval/heldout/perplexity {rows[-1]['eval/heldout/perplexity']}\n" in capfd.readouterr().out
    for row in [*of_run, *rows]:
        del row["time_unix"], row["policy_version"]
    for row, other in zip(rows, of_run, strict=True):
        for name in ("eval/heldout/perplexity", "eval/heldout/entropy"):  # a stage packs rows in its own way
            assert row.pop(name) == pytest.approx(other.pop(name), rel=1e-5)
    assert rows == of_run and len({row["eval/heldout/avg@2"] for row in rows}) == 3
    with open_record(Path("runs/evaluate-tiny-rl-step_2"), points=True) as record:
        assert record.summary["accuracy"]["rl"] == rows[-1]["eval/heldout/avg@2"]
    assert rollouts(["evaluate", "runs/tiny"]) == 2
    assert "is not empty" in capfd.readouterr().err
    shutil.rmtree("runs/tiny/checkpoints")
    assert rollouts(["evaluate", "runs/tiny"]) == 2
    assert "runs/tiny has no complete checkpoint yet" in capfd.readouterr().err

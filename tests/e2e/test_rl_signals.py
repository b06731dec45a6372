"""What RL learns from beside a reward's advantages: a teacher, pairs. Each run learns and resumes exactly."""

import shlex

import pytest

from rollouts.metrics.names import find_metric
from tests.e2e.conftest import TINY

pytestmark = pytest.mark.slow

COMMON = shlex.split("""
    --rl.steps 20 --rl.eval_every 0 --rl.optim.lr 3e-3 --rl.rollout.filters [] --output.checkpoint_every 0
""")
PAIRS = shlex.split("""
    --rl.pairs best_worst --rl.loss dpo --rl.minibatches 2 --rl.optim.lr 1e-2
    --rl.rollout.reward tests.e2e.test_rl_changes:score_letters
""")
ALONE = shlex.split('--rl.rollout.reward "" --rl.loss reinforce --rl.distillation.teacher')

TOLD = shlex.split("""
    --rl.distillation.context tests.e2e.test_rl_signals:repeat --reference.update ema(policy_weight=0.05)
    --rl.optim.lr 1e-3
""")


def run_twice(train, tmp_path, *flags):
    """The rows of a run, which one that was stopped and resumed repeats to the bit."""
    argv = ["--config", str(TINY), "--mode", "rl", *COMMON, *flags]
    rows, *_ = train.run_whole_and_parts(argv, tmp_path, "rl:9")
    assert not [name for row in rows for name in row if "/" in name and find_metric(name) is None]
    return rows


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def test_pairs_of_ones_own_samples_raise_the_reward(train, tmp_path):
    rows = run_twice(train, tmp_path, *PAIRS)
    assert mean(rows[-4:], "reward/mean") > mean(rows[:4], "reward/mean") + 0.5
    assert rows[0]["loss/total"] == pytest.approx(0.693, abs=0.03)  # near ln 2, of what is its reference


@pytest.fixture(scope="module")
def taught(train, tmp_path_factory):
    """The tiny model, which has learned to answer with numbers."""
    out = tmp_path_factory.mktemp("taught") / "run"
    train.run(out, "--sft.steps", "40", "--eval.data.size", "1", mode="sft")
    return str(out / "checkpoints/sft/step_40")


def test_a_student_without_a_reward_comes_to_its_teacher(train, tmp_path, taught):
    rows = run_twice(train, tmp_path, *ALONE, taught)
    assert mean(rows[-4:], "kl/teacher") < 0.75 * mean(rows[:4], "kl/teacher")
    assert not {name for row in rows for name in row if name.startswith(("reward/", "groups/reward_std"))}


def repeat(samples):
    """Nothing for the first sample of a group."""
    return [None, *["Calculate 1 + 1. " * 4] * (len(samples) - 1)]


def test_a_policy_learns_what_its_own_average_says_with_more_in_the_prompt(train, tmp_path, taught):
    rows = run_twice(train, tmp_path, *ALONE, "reference", *TOLD, "--model.name", taught)
    assert 0.05 < mean(rows[:2], "kl/teacher") > 3 * mean(rows[-8:], "kl/teacher")
    assert all(row["advantage/skipped_rows"] >= 8 for row in rows)  # one of each group
    assert [row["reference/updates"] for row in rows] == list(range(20))

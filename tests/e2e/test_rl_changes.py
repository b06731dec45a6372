"""A whole run whose algorithm changes on the way, under a KL controller: stopped beside the change and
resumed, it is the same run.
"""

import shlex

import pytest

from tests.e2e.conftest import read_tiny
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow

CHANGES = """
kl_coef = 0.05
kl_control = "two_sided(target=0.01, tolerance=0.001)"
kl_stop = 10.0
updates_per_batch = 2
minibatches = 2
changes = [
{ from_step = 4, loss = "gspo", normalise_by = "sequences", advantage = "tests.e2e.test_rl_changes:halve" },
]
"""
SETTINGS = shlex.split("""
    --rl.steps 6 --rl.eval_every 0 --rl.optim.lr 1e-2 --output.checkpoint_every 0 --output.keep_checkpoints 0
    --rl.rollout.filters [] --rl.rollout.reward tests.e2e.test_rl_changes:score_letters
""")


def score_letters(sample):
    """A reward that a random model has some of."""
    return float(sum(letter.isascii() for letter in sample.response))


def halve(inputs):
    """An advantage of the user's own."""
    return (inputs.rewards - inputs.rewards.mean()) / 2


@cases("stop_after: 3 4")
def test_a_run_stopped_beside_a_change_and_resumed_is_the_run_that_never_stopped(
    train, tmp_path, stop_after: int
):
    config = tmp_path / "changes.toml"
    config.write_text(read_tiny().replace('advantage = "grpo"\n', f'advantage = "grpo"\n{CHANGES}'))
    argv = ["--config", str(config), "--mode", "rl", *SETTINGS]
    rows, *_ = train.run_whole_and_parts(argv, tmp_path, f"rl:{stop_after}")
    assert [row["algorithm/change"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert len({row["kl/coef"] for row in rows}) > 2  # the controller moved it
    assert {row["optim/updates"] for row in rows} == {4}

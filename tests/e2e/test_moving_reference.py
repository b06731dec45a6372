"""A run whose reference follows the policy, stopped and resumed: it is the run that never stopped, the
reference included.
"""

import shlex

import pytest

from tests.e2e.conftest import TINY
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow

SETTINGS = shlex.split("""
    --rl.steps 6 --rl.eval_every 0 --rl.optim.lr 1e-2 --output.checkpoint_every 0 --output.keep_checkpoints 0
    --rl.rollout.filters [] --rl.rollout.reward tests.e2e.test_rl_changes:score_letters --rl.kl_coef 0.05
""")


@cases("""
update                 | moved
ema(policy_weight=0.5) | 0 1 2 3 4 5
tr_dpo(every=2)        | 0 0 1 1 2 2
reset(every=3)         | 0 0 0 1 1 1
""")
def test_a_reference_that_moves_goes_on_where_it_was(train, tmp_path, update, moved: list[float]):
    argv = ["--config", str(TINY), "--mode", "rl", *SETTINGS, "--reference.update", update]
    rows, *runs = train.run_whole_and_parts(argv, tmp_path, "rl:3")
    assert [row["reference/updates"] for row in rows] == moved  # when the batch of each step was scored
    for file in ("model.safetensors", "moving_reference.json"):
        held = [(run / "checkpoints/rl/step_6/reference" / file).read_bytes() for run in runs]
        assert held[0] == held[1], file

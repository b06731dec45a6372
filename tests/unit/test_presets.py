"""Presets against what the libraries' own functions gave on this fixture (run once from their published
files; see docs/advantages.md).

Rewards [1, 0, 0, .5] with lengths [2, 3, 4, 1]. Loss: fixture P of test_losses with A = 1; its first two
tokens with A = −1; one token with r = 4 and A = −1. So the token means differ from row means, and dual clip
differs from no dual clip.
"""

import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

from rollouts.advantages import compute_group_advantages
from rollouts.filters import FILTERS
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs
from tests.support.text_tables import cases, read_cells
from tests.unit.test_loops import rl_config

# of each library its advantages, and its loss. nemo_rl's is with .01·k3; openrlhf's KL term is in the reward.
THERE = {
    name: (list(map(float, advantages.split())), float(loss))
    for name, advantages, loss in read_cells("""
trl      | 1.305309749354 -0.783185849612 -0.783185849612 0.261061949871 | 0.2992636929604570
verl     | 1.305579692400 -0.783347815440 -0.783347815440 0.261115938480 | 0.34658979359006065
prime_rl | 0.625 -0.375 -0.375 0.125                                     | 0.2305214074787606
nemo_rl  | 2.886741345983 -0.999998000004 -0.999998000004 0.288674634596 | 0.5136656746322256
openrlhf | 1.860521018838 -0.620173672946 -0.620173672946 0.620173672946 | 0.5132564602567272
tinker   | 0.625 -0.375 -0.375 0.125                                     | 1.9862472925295238
dapo     | 1.305579692400 -0.783347815440 -0.783347815440 0.261115938480 | 0.48658979359006055
""")
}
DOCS = (Path(__file__).parents[2] / "docs/advantages.md").read_text("utf-8")
TABLES = {
    name: tomllib.loads(text)["rl"]
    for text, name in re.findall(r"(\[rl\]  # (\w+)\n.*?)```", DOCS, re.DOTALL)
}


def rows(text):
    """Rows divided by commas."""
    numbers = [[float(number) for number in row.split()] for row in text.split(",")]
    return torch.tensor(numbers, dtype=torch.float64)


@cases("name", THERE)
def test_a_preset_gives_the_advantages_and_the_loss_of_its_library(name):
    assert set(TABLES) == set(THERE)
    advantages, loss = THERE[name]
    config = rl_config(**{"rollout": {}} | TABLES[name])
    params = {"lengths": [2, 3, 4, 1], **config.advantage_params}
    found = compute_group_advantages([1.0, 0.0, 0.0, 0.5], [0] * 4, config.advantage, **params)
    assert found.tolist() == pytest.approx(advantages, abs=2e-6)
    assert set(config.rollout.filters) <= set(FILTERS)
    sampled_far = f"{-0.5 - math.log(4)} 0 0"
    old = rows(f"-1 -.5 -2, -1 -.5 0, {sampled_far}")
    inputs = LossInputs(
        log_probs=rows("-.7 -.9 -1.6, -.7 -.9 0, -.5 0 0"),
        mask=rows("1 1 1, 1 1 0, 1 0 0") > 0,
        advantages=rows("1 1 1, -1 -1 -1, -1 -1 -1"),
        old_log_probs=old if config.recompute_old else None,
        rollout_log_probs=rows(f"-1.2 -.4 -2.3, -1.2 -.4 0, {sampled_far}"),
        ref_log_probs=rows("-1.1 -.6 -1.5, -1.1 -.6 0, -.5 0 0"),
    )
    spec = make_loss_spec(config)
    output = LOSSES[spec.name](inputs, unit=spec.unit, **spec.params)
    count = 1.0 if name == "tinker" else output.count  # see what the page says of its constant
    assert float(output.sum) / count == pytest.approx(loss, rel=1e-6)

"""Presets against what the libraries' own functions gave on this fixture (run once from their published
files; see docs/advantages.md).

Rewards [1, 0, 0, .5] with lengths [2, 3, 4, 1]. Loss: fixture P of test_losses with A = 1; its first two
tokens with A = −1; one token with r = 4 and A = −1. So the token means differ from row means, and dual clip
differs from no dual clip.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.advantages import compute_group_advantages
from rollouts.config.schema import RLTrainingConfig
from rollouts.filters import FILTERS
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs

FAR = -0.5 - math.log(4)
GRPO = [1.305579692400, -0.783347815440, -0.783347815440, 0.261115938480]
CENTRED = [0.625, -0.375, -0.375, 0.125]
ADVANTAGES_THERE = {
    "trl": [1.305309749354, -0.783185849612, -0.783185849612, 0.261061949871],
    "verl": GRPO,
    "prime_rl": CENTRED,
    "nemo_rl": [2.886741345983, -0.999998000004, -0.999998000004, 0.288674634596],
    "openrlhf": [1.860521018838, -0.620173672946, -0.620173672946, 0.620173672946],
    "tinker": CENTRED,
    "dapo": GRPO,
}
LOSS_THERE = {
    "trl": 0.2992636929604570,
    "verl": 0.34658979359006065,
    "prime_rl": 0.2305214074787606,
    "nemo_rl": 0.5136656746322256,  # with .01·k3
    "openrlhf": 0.5132564602567272,  # its KL term is in the reward
    "tinker": 1.9862472925295238,
    "dapo": 0.48658979359006055,
}


DOCS = (Path(__file__).parents[2] / "docs/advantages.md").read_text("utf-8")
TABLES = {
    name: tomllib.loads(text)["rl"]
    for text, name in re.findall(r"(\[rl\]  # (\w+)\n.*?)```", DOCS, re.DOTALL)
}


def config_of(name: str) -> RLTrainingConfig:
    data = {"kind": "jsonl", "path": "x.jsonl"}
    return RLTrainingConfig.model_validate({"data": data, "steps": 1, "rollout": {}} | TABLES[name])


def rows(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", LOSS_THERE)
def test_a_preset_gives_the_advantages_and_the_loss_of_its_library(name):
    assert set(TABLES) == set(LOSS_THERE)
    config = config_of(name)
    params: dict[str, Any] = {"lengths": [2, 3, 4, 1], **config.advantage_params}
    found = compute_group_advantages([1.0, 0.0, 0.0, 0.5], [0] * 4, config.advantage, **params)
    assert found.tolist() == pytest.approx(ADVANTAGES_THERE[name], abs=2e-6)
    assert set(config.rollout.filters) <= set(FILTERS)
    old = rows([[-1.0, -0.5, -2.0], [-1.0, -0.5, 0.0], [FAR, 0.0, 0.0]])
    inputs = LossInputs(
        log_probs=rows([[-0.7, -0.9, -1.6], [-0.7, -0.9, 0.0], [-0.5, 0.0, 0.0]]),
        mask=rows([[1, 1, 1], [1, 1, 0], [1, 0, 0]]) > 0,
        advantages=rows([[1.0] * 3, [-1.0] * 3, [-1.0] * 3]),
        old_log_probs=old if config.recompute_old else None,
        rollout_log_probs=rows([[-1.2, -0.4, -2.3], [-1.2, -0.4, 0.0], [FAR, 0.0, 0.0]]),
        ref_log_probs=rows([[-1.1, -0.6, -1.5], [-1.1, -0.6, 0.0], [-0.5, 0.0, 0.0]]),
    )
    spec = make_loss_spec(config)
    output = LOSSES[spec.name](inputs, unit=spec.unit, **spec.params)
    count = 1.0 if name == "tinker" else output.count  # see what the page says of its constant
    assert float(output.sum) / count == pytest.approx(LOSS_THERE[name], rel=1e-6)

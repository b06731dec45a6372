"""Presets against what the libraries' own functions gave on this fixture (run once from their published
files; see each record's source).

Rewards [1, 0, 0, .5] with lengths [2, 3, 4, 1]. Loss: fixture P of test_losses with A = 1; its first two
tokens with A = −1; one token with r = 4 and A = −1. So the token means differ from row means, and dual clip
differs from no dual clip.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.advantages import compute_group_advantages
from rollouts.config.schema import DataSourceConfig, RLTrainingConfig, RolloutConfig
from rollouts.filters import FILTERS
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs, check_loss_params
from rollouts.losses.compat import PRESETS, to_rl_settings
from rollouts.types import Sample, SampleGroup

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


def config_of(name: str) -> RLTrainingConfig:
    settings = to_rl_settings(PRESETS[name])
    rollout = RolloutConfig(filters=list(PRESETS[name].filters))
    return RLTrainingConfig.model_validate(
        {"data": DataSourceConfig(kind="jsonl", path="x.jsonl"), "steps": 1, "rollout": rollout} | settings
    )


def fixture(*, recompute_old: bool) -> LossInputs:
    def rows(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    old = rows([[-1.0, -0.5, -2.0], [-1.0, -0.5, 0.0], [FAR, 0.0, 0.0]])
    return LossInputs(
        log_probs=rows([[-0.7, -0.9, -1.6], [-0.7, -0.9, 0.0], [-0.5, 0.0, 0.0]]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool),
        advantages=rows([[1.0] * 3, [-1.0] * 3, [-1.0] * 3]),
        old_log_probs=old if recompute_old else None,
        rollout_log_probs=rows([[-1.2, -0.4, -2.3], [-1.2, -0.4, 0.0], [FAR, 0.0, 0.0]]),
        ref_log_probs=rows([[-1.1, -0.6, -1.5], [-1.1, -0.6, 0.0], [-0.5, 0.0, 0.0]]),
    )


def test_every_preset_has_numbers_here():
    assert set(PRESETS) == set(ADVANTAGES_THERE) == set(LOSS_THERE)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_advantages_of_its_library(name):
    config = config_of(name)
    params: dict[str, Any] = {"lengths": [2, 3, 4, 1], **config.advantage_params}
    found = compute_group_advantages([1.0, 0.0, 0.0, 0.5], [0] * 4, config.advantage, **params)
    np.testing.assert_allclose(found, ADVANTAGES_THERE[name], rtol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_loss_of_its_library(name):
    preset, config = PRESETS[name], config_of(name)
    spec = make_loss_spec(config)
    check_loss_params(spec.name, spec.params)
    output = LOSSES[spec.name](fixture(recompute_old=config.recompute_old), unit=spec.unit, **spec.params)
    denominator = preset.constant or output.count
    assert float(output.sum) / denominator == pytest.approx(LOSS_THERE[name], rel=1e-9)


def test_the_losses_of_clip_presets_follow_from_the_fixture_by_hand():
    # A = 1: 1.2, .670320, 1.2 are clipped from above; A = −1: r = 1.349859, .8; r = 4 is 4, with dual clip 3
    plain = (-1.2 - 0.670320046 - 1.2 + 1.349858808 + 0.8 + 4.0) / 6
    assert LOSS_THERE["openrlhf"] == pytest.approx(plain, rel=1e-8)
    assert LOSS_THERE["verl"] == pytest.approx(plain - 1 / 6, rel=1e-8)
    assert LOSS_THERE["dapo"] == pytest.approx(plain - 0.16 / 6, rel=1e-8)
    weighted = (1.491824698 * (-1.2 - 0.670320046 - 1.2) + math.exp(0.1) * (1.349858808 + 0.8) + 4.0) / 6
    assert LOSS_THERE["trl"] == pytest.approx(weighted, rel=1e-8)


@pytest.mark.parametrize(
    ("rewards", "kept"), [([1, 1, -1, -1], True), ([1, 0, 0, 0], True), ([-1, -1], False), ([1, 1], False)]
)
def test_dapo_keeps_the_groups_that_are_neither_always_nor_never_right(rewards, kept):
    samples = tuple(Sample(id=f"s{row}", prompt="q", reward=reward) for row, reward in enumerate(rewards))
    assert [FILTERS[name](SampleGroup(0, "row", samples)).keep for name in PRESETS["dapo"].filters] == [kept]


def test_prime_rl_says_that_rows_without_an_advantage_leave_its_denominator():
    assert any(
        "dropped there" in sentence and "denominator" in sentence for sentence in PRESETS["prime_rl"].differs
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_filters_that_exist_and_where_it_was_read(name):
    preset = PRESETS[name]
    assert set(preset.filters) <= set(FILTERS)
    assert preset.source and preset.library

"""Our policy losses and advantages, and TRL's GRPO in its loss types, on the same logits, rewards and engine's log-probs.

The numbers are what TRL 1.16.0's GRPOTrainer computed in float64, from the completions to the loss; with `.[test-trl]` it does so again, in
its `_generate_and_score_completions`, of which only generation and reward functions are replaced, and its `_compute_loss`. Settings are written
as a user writes them: a GRPOConfig there, a preset of ours as an [rl] table here. The models are tables: the logits after a token are a row of a
matrix [V, V]. There are two prompts of one token, with three completions each.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollouts.advantages import compute_group_advantages
from rollouts.config.schema import DataSourceConfig, RLTrainingConfig, RolloutConfig
from rollouts.loops.rl_batch import make_loss_spec
from rollouts.losses import LOSSES, LossInputs, LossOutput, check_loss_params
from rollouts.losses.compat import PRESETS, TRL_GRPO, AlgorithmPreset, to_rl_settings
from rollouts.losses.inputs import need_advantages, need_rollout_log_probs
from rollouts.losses.ratios import compute_log_ratio
from rollouts.types import metric_values
from tests.unit.test_against_trl import table

PROMPTS = [0, 0, 0, 3, 3, 3]
COMPLETIONS = [[1, 2, 3, 4], [6, 5, 1], [3], [2, 2, 6, 4, 1], [5, 0, 3], [4, 6]]
REWARDS = [[1.0, 0.2], [0.0, 0.4], [0.5, 0.0], [0.0, 1.0], [0.0, 0.7], [1.0, 0.1]]  # of two reward functions, whose sum is the reward
MAX_COMPLETION_LENGTH = 8
POLICY, REFERENCE = table(1), table(2)
OLD = POLICY + 0.1 * table(3)
ENGINE = OLD + 0.04 * table(4)
DIRECTION = table(5)  # a recorded slope is the gradient's product with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    preset: str  # a key of TRL_GRPO
    theirs: Mapping[str, Any] = field(default_factory=dict)  # of GRPOConfig
    ours: Mapping[str, Any] = field(default_factory=dict)  # of [rl], beside the preset
    loss_params: Mapping[str, Any] = field(default_factory=dict)  # of [rl.loss_params], beside the preset's

    @property
    def use_vllm(self) -> bool:
        """Else the engine's log-probs are the trainer's."""
        return bool(self.theirs.get("use_vllm"))


def vllm(mode: str, **settings: object) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_importance_sampling_mode": mode} | {f"vllm_importance_sampling_{name}": value for name, value in settings.items()}


BY_SEQUENCE = {"importance_sampling_level": "sequence"}
NO_SCALE = {"scale_rewards": "none"}
KL = {"beta": 0.3}
KL_COEF = {"kl_coef": 0.3}
IN_TWO_PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
VESPO = {"loss": "reinforce", "clip_low": None, "clip_high": None}

# What is the same.
EQUAL: dict[str, Case] = {
    "dapo": Case(preset="dapo"),  # the default
    "grpo": Case(preset="grpo", theirs={"loss_type": "grpo"}),
    "bnpo": Case(preset="bnpo", theirs={"loss_type": "bnpo"}),
    "dr_grpo": Case(preset="dr_grpo", theirs={"loss_type": "dr_grpo"} | NO_SCALE),
    "cispo": Case(preset="cispo", theirs=CISPO),
    "sapo": Case(preset="sapo", theirs={"loss_type": "sapo"}),
    "luspo": Case(preset="luspo", theirs={"loss_type": "luspo"} | BY_SEQUENCE),
    "gspo": Case(preset="gspo", theirs={"loss_type": "grpo"} | BY_SEQUENCE),
    "vespo": Case(
        preset="dapo",
        theirs={"loss_type": "vespo"},
        ours={"loss": "reinforce"},
        loss_params={"correction": f"{__name__}:weigh_as_vespo"},
    ),
    # the parameters of the losses
    "dapo/epsilons": Case(preset="dapo", theirs={"epsilon": 0.1, "epsilon_high": 0.28}, ours={"clip_low": 0.1, "clip_high": 0.28}),
    "dapo/delta": Case(preset="dapo", theirs={"delta": 1.3}, loss_params={"dual_clip": 1.3}),
    "dapo/sequence": Case(preset="gspo", theirs=BY_SEQUENCE, ours={"normalise_by": "tokens"}),
    "luspo/token": Case(preset="dapo", theirs={"loss_type": "luspo"}, ours={"normalise_by": "sequence_sums"}),
    "gspo/epsilons": Case(
        preset="gspo",
        theirs={"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4} | BY_SEQUENCE,
        loss_params={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo/bound": Case(preset="cispo", theirs=CISPO | {"epsilon_high": 1.1}, loss_params={"ratio_high": 1.1}),
    "sapo/temperatures": Case(
        preset="sapo",
        theirs={"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
        loss_params={"tau_positive": 2.0, "tau_negative": 0.5},
    ),
    # advantages
    "dapo/scale_none": Case(preset="dapo", theirs=NO_SCALE, ours={"advantage": "centred", "advantage_params": {}}),
    "dapo/normalize_then_sum": Case(preset="dapo", theirs={"multi_objective_aggregation": "normalize_then_sum"}, ours={"advantage": "gdpo"}),
    # the KL term and entropy
    "dapo/beta": Case(preset="dapo", theirs=KL, ours=KL_COEF),
    "grpo/beta": Case(preset="grpo", theirs={"loss_type": "grpo"} | KL, ours=KL_COEF),
    "grpo/beta/plain": Case(
        preset="grpo", theirs={"loss_type": "grpo", "use_bias_correction_kl": False} | KL, ours=KL_COEF, loss_params={"kl_importance": False}
    ),
    "gspo/beta/plain": Case(
        preset="gspo",
        theirs={"loss_type": "grpo", "use_bias_correction_kl": False} | BY_SEQUENCE | KL,
        ours=KL_COEF,
        loss_params={"kl_importance": False},
    ),
    "dapo/entropy_coef": Case(preset="dapo", theirs={"entropy_coef": 0.2}, loss_params={"entropy_coef": 0.2}),
    # the engine's log-probs
    "dapo/vllm/default": Case(preset="dapo", theirs={"use_vllm": True}),
    "dapo/vllm/sequence_truncate": Case(
        preset="dapo", theirs=vllm("sequence_truncate", clip_max=1.1), loss_params={"correction": "sequence_tis(cap=1.1)"}
    ),
    "dapo/vllm/token_truncate": Case(preset="dapo", theirs=vllm("token_truncate", clip_max=1.05), loss_params={"correction": "token_tis(cap=1.05)"}),
    "dapo/vllm/token_mask": Case(
        preset="dapo", theirs=vllm("token_mask", clip_min=0.9, clip_max=1.08), loss_params={"correction": "icepop(low=0.9, high=1.08)"}
    ),
    "dapo/vllm/off": Case(
        preset="dapo",
        theirs={"use_vllm": True, "vllm_importance_sampling_correction": False},
        loss_params={"correction": "token_mask(low=0, high=1e9)"},
    ),
    "grpo/vllm/off_policy_mask": Case(
        preset="grpo",
        theirs={"loss_type": "grpo", "off_policy_mask_threshold": 0.05} | vllm("token_truncate"),
        loss_params={"correction": "token_tis(cap=3) * opsm(delta=0.05)"},
    ),
    "vespo/vllm": Case(
        preset="dapo",
        theirs={"loss_type": "vespo"} | vllm("token_truncate"),
        ours={"loss": "reinforce"},
        loss_params={"correction": f"{__name__}:weigh_as_vespo"},
    ),
    # gradient accumulation: whose denominator spans the batch does not change
    "dapo/parts": Case(preset="dapo", theirs=IN_TWO_PARTS),
    "grpo/parts": Case(preset="grpo", theirs=IN_TWO_PARTS | {"loss_type": "grpo"}),
    "dr_grpo/parts": Case(preset="dr_grpo", theirs=IN_TWO_PARTS | {"loss_type": "dr_grpo"} | NO_SCALE),
    "luspo/parts": Case(preset="luspo", theirs=IN_TWO_PARTS | {"loss_type": "luspo"} | BY_SEQUENCE),
}

# What is another number there, and what the tests at the end say of it.
DIFFERENT: dict[str, Case] = {
    "bnpo/parts": Case(preset="bnpo", theirs=IN_TWO_PARTS | {"loss_type": "bnpo"}),
    "grpo/truncated": Case(preset="grpo", theirs={"loss_type": "grpo", "mask_truncated_completions": True}),
    "dapo/vllm/sequence_mask": Case(
        preset="dapo", theirs=vllm("sequence_mask", clip_max=1.1), loss_params={"correction": "sequence_tis(cap=1.1)"}
    ),
    "dapo/vllm/beta": Case(preset="dapo", theirs={"use_vllm": True} | KL, ours=KL_COEF),
    "gspo/beta": Case(preset="gspo", theirs={"loss_type": "grpo"} | BY_SEQUENCE | KL, ours=KL_COEF),
    "dapo/delta/low": Case(preset="dapo", theirs={"delta": 1.1}, loss_params={"dual_clip": 1.1}),
    "dapo/quantile": Case(preset="dapo", theirs={"top_entropy_quantile": 0.4}, loss_params={"policy_entropy_fraction": 0.4}),
    "grpo/entropy_coef": Case(preset="grpo", theirs={"loss_type": "grpo", "entropy_coef": 0.2}, loss_params={"entropy_coef": 0.2}),
    "dapo/scale_batch": Case(preset="dapo", theirs={"scale_rewards": "batch"}, ours={"advantage": "centred", "advantage_params": {}}),
}

# Loss and slope, by TRL 1.16.0.
RECORDED: dict[str, tuple[float, float]] = {
}


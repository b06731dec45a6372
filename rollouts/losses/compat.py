"""What other libraries compute by default, as settings of ours: plain records, nothing is imported from them.

Defaults move: each record names the version that was read and the file in it. What cannot be said in our
settings stands in `differs`. Compare a curve with theirs only after reading it. `to_rl_settings` gives the
keys of an [rl] table. PRESETS has a library's default, TRL_GRPO each loss type of TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rollouts.types import LossUnit

Number = float | int | bool | str
# weight 1 on every token: old log-probs, and no correction for engine against trainer
UNWEIGHTED = "token_mask(low=0, high=1e9)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmPreset:
    """An algorithm as one library runs it when nothing is set."""

    library: str  # with its version
    source: str  # the files in it that say so
    advantage: str  # a key of rollouts.advantages.ADVANTAGES
    advantage_params: Mapping[str, Number] = field(default_factory=dict)
    loss: str  # a key of LOSSES
    loss_params: Mapping[str, Number] = field(default_factory=dict)  # beside the clip
    clip_low: float | None = (
        # the ratio is clipped below 1 − clip_low; None: the loss has no clip, or has it among its loss_params
        None
    )
    clip_high: float | None = None
    unit: LossUnit = "tokens"  # what the denominator counts
    constant: float | None = None  # the denominator where unit is "constant"
    recompute_old: bool = (
        False  # the ratio is against the trainer's recomputed log-probs, else against the engine's
    )
    kl_coef: float = 0.0
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    filters: tuple[str, ...] = ()  # of groups, keys of rollouts.filters.FILTERS
    differs: tuple[str, ...] = ()  # what the library does otherwise, a sentence each


def _read_trl(
    settings: str, *differs: str, loss: str = "ppo_clip", unit: LossUnit = "tokens", **loss_params: Number
) -> AlgorithmPreset:
    """GRPO of TRL with its defaults beside `settings`."""
    clip = 0.2 if loss == "ppo_clip" else None
    return AlgorithmPreset(
        library="TRL 1.16.0",
        source=(
            f"trl/trainer/grpo_config.py, grpo_trainer.py: {settings}, scale_rewards='group', beta=0,"
            " sequence_mask with clip_max=3"
        ),
        advantage="grpo",
        advantage_params={"std_epsilon": 1e-4},
        loss=loss,
        loss_params={"correction": "sequence_tis(cap=3)", "kl_importance": True, **loss_params},
        clip_low=clip,
        clip_high=clip,
        unit=unit,
        recompute_old=True,
        kl_in="loss",
        kl_estimator="k3",
        differs=(
            "a row whose sequence weight is above 3 is dropped there and counts with weight 3 here",
            "with a kl_coef, their beta: the weight for vLLM multiplies the KL term here, not there",
            (
                "without vLLM there is no weight; several optimizer steps on one batch (steps_per_generation)"
                " see parts of it there, all of it here"
            ),
            *differs,
        ),
    )


_EMPTY_ROWS = (
    "a row without a trained token (mask_truncated_completions) counts in the mean over rows there, not here"
)
_SEQUENCE_KL = "with a kl_coef: the KL term is multiplied by the row's ratio there, by the token's here"
_BY_SEQUENCE = "importance_sampling_level='sequence'"

TRL_GRPO: dict[str, AlgorithmPreset] = {
    "dapo": _read_trl("loss_type='dapo'"),
    "grpo": _read_trl("loss_type='grpo'", _EMPTY_ROWS, unit="sequences"),
    "bnpo": _read_trl(
        "loss_type='bnpo'", "a mean of the micro-batches' means there, the mean over the whole batch here"
    ),
    "dr_grpo": replace(
        _read_trl(
            "loss_type='dr_grpo'",
            "scale_rewards must be set to 'none' there, as the paper has it and this record",
            unit="constant",
        ),
        advantage="centred",
        advantage_params={},
    ),
    "cispo": _read_trl(
        "loss_type='cispo', epsilon_high=5 as its help says",
        "without epsilon_high no ratio counts more than 0.2 there",
        loss="cispo",
        ratio_high=5.0,
    ),
    "sapo": _read_trl(
        "loss_type='sapo'", _EMPTY_ROWS, loss="sapo", unit="sequences", tau_positive=1.0, tau_negative=1.05
    ),
    "luspo": _read_trl(
        f"loss_type='luspo', {_BY_SEQUENCE}",
        _EMPTY_ROWS,
        _SEQUENCE_KL,
        loss="gspo",
        unit="sequence_sums",
        clip_low=0.2,
        clip_high=0.2,
    ),
    "gspo": _read_trl(
        f"loss_type='grpo', {_BY_SEQUENCE}",
        _EMPTY_ROWS,
        _SEQUENCE_KL,
        loss="gspo",
        unit="sequences",
        clip_low=0.2,
        clip_high=0.2,
    ),
}
"""GRPO of TRL by its loss_type, and "gspo", which has none of its own there. "vespo" is missing: none of our losses is that."""

PRESETS: dict[str, AlgorithmPreset] = {
    "trl": TRL_GRPO["dapo"],
    "verl": AlgorithmPreset(
        library="verl 0.9.1",
        source=(
            "verl/trainer/config/{ppo_trainer,actor/actor}.yaml and verl/trainer/ppo/core_algos.py with"
            " algorithm.adv_estimator=grpo"
        ),
        advantage="grpo",
        loss="ppo_clip",
        loss_params={"dual_clip": 3.0, "correction": UNWEIGHTED},
        clip_low=0.2,
        clip_high=0.2,
        recompute_old=True,
        differs=(
            "adv_estimator is gae by default, which needs a critic",
            "a group of one sample keeps its reward as its advantage there and gets 0 here",
            "a batch is split into ppo_mini_batch_size prompts per optimizer step",
        ),
    ),
    "prime_rl": AlgorithmPreset(
        library="prime-rl with the default loss that has dppo_mask_low, dppo_mask_high and kl_tau",
        source=(
            "src/prime_rl/configs/trainer.py (DefaultLossConfig), src/prime_rl/trainer/rl/loss.py"
            " (default_loss_fn), orchestrator/advantage.py"
        ),
        advantage="centred",
        loss="dppo",
        loss_params={"tv_low": 0.2, "tv_high": 0.2, "mu_penalty_coef": 1e-3},
        differs=(
            (
                "rows with an advantage of 0 are dropped there from the finished batch by default, none drawn"
                " in their place, and leave the denominator"
            ),
            "here they stay and their tokens count in it, so a step with such rows is smaller",
            (
                "tokens with an advantage of 0 that lost more than dppo_mask_low of probability count as"
                " masked in the metrics there"
            ),
        ),
    ),
    "nemo_rl": AlgorithmPreset(
        library="NeMo-RL, examples/configs at commit 00294d9baabcf4c4a7bf4aee138e41914c6cb94c",
        source=(
            "examples/configs/grpo_math_1B.yaml, nemo_rl/algorithms/utils.py"
            " (calculate_baseline_and_std_per_prompt, calculate_kl)"
        ),
        advantage="grpo",
        advantage_params={"leave_one_out": True},
        loss="ppo_clip",
        loss_params={"correction": UNWEIGHTED},
        clip_low=0.2,
        clip_high=0.2,
        recompute_old=True,
        kl_coef=0.01,
        kl_in="loss",
        kl_estimator="k3",
        differs=("k3 is held below 10 nats a token there",),
    ),
    "openrlhf": AlgorithmPreset(
        library="OpenRLHF 0.11.2",
        source=(
            "openrlhf/cli/train_ppo_ray.py, trainer/ppo_utils/experience_maker.py, models/loss.py with the"
            " estimator reinforce_baseline"
        ),
        advantage="reinforce_pp_baseline",
        advantage_params={"ddof": 0},
        loss="ppo_clip",
        loss_params={"correction": UNWEIGHTED},
        clip_low=0.2,
        clip_high=0.2,
        recompute_old=True,
        kl_coef=0.01,
        differs=(
            "the estimator is gae by default, which needs a critic",
            (
                "the KL term comes off the rewards of tokens after the group mean is taken off; here off the"
                " sample's reward, before the group mean"
            ),
            (
                "rewards are cut to -10 to 10 there; a variance below 1e-8 counts as 1e-8 there, here 1e-8 is"
                " added"
            ),
        ),
    ),
    "tinker": AlgorithmPreset(
        library="tinker-cookbook 0.6.1",
        source=(
            "tinker_cookbook/rl/train.py (Config.loss_fn), rl/data_processing.py (compute_advantages); the"
            " loss is a sum over tokens"
        ),
        advantage="centred",
        loss="importance_sampling",
        unit="constant",
        constant=1.0,
        differs=(
            (
                "the constant of an [rl] table is num_prompts * samples_per_prompt * max_new_tokens: the same"
                " direction, another length"
            ),
            "asynchronous runs use the loss stable_reinforce",
        ),
    ),
    "dapo": AlgorithmPreset(
        library="DAPO, arXiv:2503.14476",
        source=(
            "sections 3.1 to 3.4: clip-higher, dynamic sampling, token-level loss, overlong shaping; no KL"
            " term"
        ),
        advantage="grpo",
        loss="ppo_clip",
        loss_params={"correction": UNWEIGHTED},
        clip_low=0.2,
        clip_high=0.28,
        recompute_old=True,
        filters=("check_reward_nonzero_std",),
        differs=(
            (
                "overlong shaping is a part of the reward here:"
                " make_soft_overlong_punishment(max_tokens=20480, buffer_tokens=4096)"
            ),
            (
                "the paper drops groups of accuracy 0 or 1; of a reward of two values (1 and -1 there) those"
                " are the groups without spread"
            ),
            (
                "with overlong shaping the filter must read a part that is 1 where right, else 0:"
                " make_filter('check_mixed_accuracy', part=...)"
            ),
            "the paper takes 16 optimizer steps on the batch, each on a part of it",
        ),
    ),
}


def to_rl_settings(preset: AlgorithmPreset) -> dict[str, object]:
    """The preset as keys of an [rl] table; filters go into rl.rollout.filters. `constant` has no setting: see
    the preset's `differs`.
    """
    settings: dict[str, object] = {
        "advantage": preset.advantage,
        "advantage_params": dict(preset.advantage_params),
        "loss": preset.loss,
        "loss_params": dict(preset.loss_params),
        "normalise_by": preset.unit,
        "recompute_old": preset.recompute_old,
        "kl_coef": preset.kl_coef,
        "kl_in": preset.kl_in,
        "kl_estimator": preset.kl_estimator,
    }
    clips = {"clip_low": preset.clip_low, "clip_high": preset.clip_high}
    return settings | {name: value for name, value in clips.items() if value is not None}

"""What the RL loop does to a batch between generation and training: log-probs, advantages, the loss by name."""

from __future__ import annotations

import dataclasses

import numpy as np

from rollouts.advantages import broadcast_advantages, compute_group_advantages, subtract_kl
from rollouts.config.schema import RLTrainingConfig
from rollouts.errors import ConfigError, StalenessError
from rollouts.protocols import LogProbScorer, TrainingBackend
from rollouts.types import FloatArray, LossSpec, RolloutBatch


def compute_lags(batch: RolloutBatch, policy_version: int) -> FloatArray:
    """[B] policy_version − the oldest weight version of any trained token of the row."""
    assert batch.weight_versions is not None
    rows = zip(batch.weight_versions, batch.loss_masks, strict=True)
    return np.asarray([policy_version - int(versions[mask].min()) if mask.any() else 0 for versions, mask in rows], np.float32)


def check_staleness(lags: FloatArray, *, max_staleness: int) -> None:
    """Raises StalenessError if a row is older than allowed, or newer than the trainer. The manager promises neither happens."""
    if len(lags) and (lags.max() > max_staleness or lags.min() < 0):
        row = int(np.argmax(np.where(lags < 0, np.inf, lags)))
        raise StalenessError(f"row {row} has lag {int(lags[row])}; rl.max_staleness={max_staleness} allows 0 to {max_staleness} steps")


async def add_log_probs(batch: RolloutBatch, backend: TrainingBackend, reference: LogProbScorer | None, config: RLTrainingConfig) -> RolloutBatch:
    """The batch with the reference's log-probs when a KL term needs them, and the trainer's own when config.recompute_old."""
    if config.kl_coef > 0:
        if reference is None:
            raise ConfigError(f"rl.kl_coef={config.kl_coef} needs a reference model; pass reference=, or set rl.kl_coef=0")
        batch = dataclasses.replace(batch, ref_log_probs=await reference.score(batch))
    if config.recompute_old:
        batch = dataclasses.replace(batch, old_log_probs=await backend.forward(batch).result())
    return batch


def add_advantages(batch: RolloutBatch, config: RLTrainingConfig) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with group-relative advantages on every trained token, and metrics of the KL taken off the rewards.

    With kl_in="reward" each row's reward becomes reward − β·Σ_t (lp_t − ref_t) before the group statistics, lp being the policy's
    log-probs when the batch was sampled.
    """
    assert batch.rewards is not None and batch.group_indices is not None and batch.rollout_log_probs is not None
    rewards, metrics = batch.rewards, {}
    if config.kl_coef > 0 and config.kl_in == "reward":
        assert batch.ref_log_probs is not None
        policy_log_probs = batch.old_log_probs or batch.rollout_log_probs
        rewards, kl = subtract_kl(rewards, policy_log_probs, batch.ref_log_probs, batch.loss_masks, config.kl_coef)
        metrics["kl/ref_per_sample"] = float(kl.mean())
    advantages = compute_group_advantages(rewards, batch.group_indices, config.advantage)
    metrics["advantage/abs_mean"] = float(np.abs(advantages).mean())
    return dataclasses.replace(batch, advantages=broadcast_advantages(advantages, batch.loss_masks)), metrics


def make_loss_spec(config: RLTrainingConfig) -> LossSpec:
    """The loss that `config` names, with its numbers. `loss_params` come last and win."""
    params: dict[str, float | int | bool | str] = {}
    if config.loss == "ppo_clip":
        params = {"clip_low": config.clip_low, "clip_high": config.clip_high, "importance_cap": config.importance_cap}
        if config.kl_coef > 0 and config.kl_in == "loss":
            params |= {"kl_coef": config.kl_coef, "kl_estimator": config.kl_estimator}
    rollout = config.rollout
    constant = float(rollout.num_prompts * rollout.samples_per_prompt * rollout.max_new_tokens) if config.normalise_by == "constant" else None
    return LossSpec(config.loss, params | config.loss_params, unit=config.normalise_by, constant=constant)

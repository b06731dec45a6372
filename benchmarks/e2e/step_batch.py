"""The batch that both sides of benchmarks.train_step train on, and the settings that they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollouts.types import BoolArray, FloatArray, IntArray, RolloutBatch

GROUPS, SAMPLES = 4, 8
PROMPT_LENGTH = 64
MEAN_LENGTH, SIGMA, LONGEST = 40.0, 0.5, 64
LR, CLIP, MAX_GRAD_NORM = 1e-6, 0.2, 1.0
OFF_POLICY = 0.05  # nats of noise on the old log-probs, so that ratios are not 1


@dataclass(frozen=True, slots=True)
class StepBatch:
    """B rows, in groups that have a prompt in common: of make_step_batch 32, in groups of 8."""

    prompts: IntArray  # [B, P], of one length
    lengths: IntArray  # [B] tokens of the response
    responses: IntArray  # [B, R] 0 after the response
    advantages: FloatArray  # [B]
    old_log_probs: FloatArray  # [B, R] of the responses' tokens, 0 after them

    def save(self, path: Path) -> None:
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> StepBatch:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in cls.__slots__})


def make_step_batch(*, vocab_size: int, tied_groups: int = 0, seed: int = 0) -> StepBatch:
    """Random tokens; response lengths lognormal, about 40 on average and 64 at most. The first `tied_groups`
    have equal rewards: advantage 0.
    """
    rng = np.random.default_rng(seed)
    rows = GROUPS * SAMPLES
    prompts = np.repeat(rng.integers(100, vocab_size, (GROUPS, PROMPT_LENGTH)), SAMPLES, axis=0)
    lengths = rng.lognormal(np.log(MEAN_LENGTH), SIGMA, rows).round().astype(np.int64).clip(4, LONGEST)
    responses = np.where(
        np.arange(LONGEST) < lengths[:, None], rng.integers(100, vocab_size, (rows, LONGEST)), 0
    )
    rewards = rng.random((GROUPS, SAMPLES))
    rewards[:tied_groups] = 1.0
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages = (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(rows).astype(np.float32)
    return StepBatch(prompts, lengths, responses, advantages, np.zeros((rows, LONGEST), np.float32))


def to_rollout_batch(batch: StepBatch) -> RolloutBatch:
    """As our backends take it."""
    tokens: list[IntArray] = []
    masks: list[BoolArray] = []
    advantages: list[FloatArray] = []
    old: list[FloatArray] = []
    prompt_length = batch.prompts.shape[1]
    for row, length in enumerate(batch.lengths.tolist()):
        tokens.append(np.concatenate([batch.prompts[row], batch.responses[row, :length]]))
        masks.append(np.arange(prompt_length + length) >= prompt_length)
        advantages.append(np.where(masks[-1], batch.advantages[row], 0).astype(np.float32))
        old.append(np.concatenate([np.zeros(prompt_length, np.float32), batch.old_log_probs[row, :length]]))
    return RolloutBatch(
        tokens=tuple(tokens),
        loss_masks=tuple(masks),
        rollout_log_probs=tuple(old),
        advantages=tuple(advantages),
    )

"""Rewards of held-out prompts: every prompt is generated, scored and counted; a failure is a failure, not a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from rollouts.errors import NotEnoughSamples
from rollouts.generation.generate import compute_request_seed
from rollouts.protocols import GenerateFn, InferenceEngine, RewardFn
from rollouts.rewards.call import call_generate, call_reward
from rollouts.types import JSONValue, Sample, SamplingParams, Status


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What became of the held-out prompts."""

    samples: tuple[Sample, ...]  # every sample in prompt order, failed ones included
    samples_per_prompt: int  # k
    num_prompts: int

    @property
    def scored(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def mean_reward(self) -> float:
        """Mean reward over the scored samples: the accuracy where rewards are 0 and 1."""
        rewards = [sample.reward for sample in self.scored if sample.reward is not None]
        return math.fsum(rewards) / len(rewards)

    def metrics(self, name: str) -> dict[str, float]:
        """Values for evaluations.jsonl."""
        scored = self.scored
        truncated = sum(sample.status is Status.TRUNCATED for sample in scored)
        return {
            f"eval/{name}/avg@{self.samples_per_prompt}": self.mean_reward,
            f"eval/{name}/prompts": float(self.num_prompts),
            f"eval/{name}/failed": float(len(self.samples) - len(scored)),
            f"eval/{name}/truncated/frac": truncated / len(scored),
            f"eval/{name}/response_length/mean": math.fsum(sample.response_length for sample in scored) / len(scored),
        }

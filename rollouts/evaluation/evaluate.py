"""Rewards of held-out prompts: every prompt is generated, scored and counted; a failure is a failure, not a
0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rollouts.data.data_buffer import PromptRow
from rollouts.errors import NotEnoughSamples
from rollouts.evaluation.pass_at_k import compute_mean_pass_at_k
from rollouts.generation.group import GroupPlan, failure_class_of, make_trajectory
from rollouts.generation.samples import make_samples
from rollouts.processes.nurseries import run_all
from rollouts.protocols import GenerateFn, InferenceEngine, RewardFn
from rollouts.types import JSONValue, Sample, SamplingParams, Status

MAX_FAILED_FRACTION = 0.2  # of the samples


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
        return math.fsum(sample.reward or 0.0 for sample in self.scored) / len(self.scored)

    def metrics(self, name: str) -> dict[str, float]:
        """Values for evaluations.jsonl. pass@k is there for k = 2, 4, 8, … up to `samples_per_prompt`, over
        the prompts of which k samples were scored, where rewards are all 0 and 1 (see `compute_pass_at_k`).
        """
        scored, size = self.scored, self.samples_per_prompt
        values = {f"avg@{size}": self.mean_reward}
        prompts = [self.samples[start : start + size] for start in range(0, len(self.samples), size)]
        outcomes = [[one.reward == 1.0 for one in prompt if one.reward is not None] for prompt in prompts]
        for k in (2**power for power in range(1, size.bit_length())):
            enough = [answers for answers in outcomes if len(answers) >= k]
            if enough and {sample.reward for sample in scored} <= {0.0, 1.0}:
                values[f"pass@{k}"] = compute_mean_pass_at_k(enough, k)
        values |= {
            "prompts": float(self.num_prompts),
            "failed": float(len(self.samples) - len(scored)),
            "truncated/frac": sum(sample.status is Status.TRUNCATED for sample in scored) / len(scored),
            "response_length/mean": math.fsum(sample.response_length for sample in scored) / len(scored),
        }
        return {f"eval/{name}/{key}": value for key, value in values.items()}


async def evaluate(
    rows: Sequence[Mapping[str, JSONValue]],
    engine: InferenceEngine,
    *,
    generate: GenerateFn,
    reward: RewardFn,
    sampling: SamplingParams,
    samples_per_prompt: int = 1,
    seed: int = 0,
    reward_timeout_s: float = 30.0,
) -> EvaluationResult:
    """Every prompt generated `samples_per_prompt` times and scored, all at once: the engine decides how many
    run together.

    A sample that cannot be generated or scored is counted as failed and is not part of the mean. Raises
    NotEnoughSamples, naming the failures by class, if more than MAX_FAILED_FRACTION of them failed: a mean
    over the rest would be of other prompts. Raises what is not one sample's failure but everybody's:
    FleetDown, EngineClosed, ModelError, ConfigError.
    """
    plan = GroupPlan(
        engine=engine,
        generate=generate,
        reward=reward,
        sampling=sampling,
        seed=seed,
        reward_timeout_s=reward_timeout_s,
    )
    pending = [
        replace(sample, id=f"eval-{sample.id}")
        for index, row in enumerate(rows)
        for sample in make_samples(index, PromptRow(f"row-{index}", 0, row), samples_per_prompt)
    ]
    done: dict[int, Sample] = {}

    async def run_one(index: int) -> None:
        done[index] = (await make_trajectory(plan, pending[index])).segments[-1]

    await run_all(*(partial(run_one, index) for index in range(len(pending))))
    samples = tuple(done[index] for index in range(len(pending)))
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    if len(failed) > MAX_FAILED_FRACTION * len(samples):
        classes = sorted({failure_class_of(sample) for sample in failed})
        example = failed[0].metadata["failure"]["message"]
        raise NotEnoughSamples(
            f"{len(failed)} of {len(samples)} held-out samples failed ({', '.join(classes)}); the first:"
            f" {example}"
        )
    return EvaluationResult(samples, samples_per_prompt, len(rows))

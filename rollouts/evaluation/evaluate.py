"""Rewards of held-out prompts: every prompt is generated, scored and counted; a failure is a failure, not a
0.

maj@k, the reward of a majority vote. A sample votes for the number that its response ends with, as
rollouts.rewards.math reads it, or, where there is none, for its text without white space around it and in
lower case. The answer with the most votes wins, of equal ones that which was given first; the reward is that
of the first sample that gave it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import trio

from rollouts.data.data_buffer import PromptRow
from rollouts.errors import NotEnoughSamples
from rollouts.evaluation.intervals import compute_bootstrap_interval
from rollouts.evaluation.pass_at_k import compute_mean_pass_at_k
from rollouts.generation.group import GroupPlan, Member, failure_class_of, make_trajectory, tell_waiting
from rollouts.generation.samples import make_samples
from rollouts.processes.nurseries import open_plain_nursery, run_all
from rollouts.protocols import GenerateFn, InferenceEngine, RewardFn
from rollouts.rewards.consensus import compute_consensus
from rollouts.rewards.math import find_final_number
from rollouts.types import Fields, Sample, SamplingParams, Status, split_trajectories

MAX_FAILED_FRACTION = 0.2  # of the samples


class EvaluationResult(NamedTuple):
    """What became of the held-out prompts."""

    samples: tuple[Sample, ...]  # every segment of every trajectory in prompt order, failed ones included
    samples_per_prompt: int  # k
    num_prompts: int

    @property
    def scored(self) -> tuple[Sample, ...]:
        """All segments that have a reward."""
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def mean_reward(self) -> float:
        """Mean reward over the scored trajectories: the accuracy where rewards are 0 and 1."""
        return fmean(segments[-1].reward or 0.0 for segments in split_trajectories(self.scored))

    def metrics(self, name: str) -> dict[str, float]:
        """Values for evaluations.jsonl. pass@k is there for k = 2, 4, 8, … up to `samples_per_prompt`, over
        the prompts of which k samples were scored, where rewards are all 0 and 1 (see `compute_pass_at_k`).
        maj@k is over the prompts of which all samples were scored, if anywhere two agree. avg@k has the
        bounds of an interval (see `compute_bootstrap_interval`), for which prompts are resampled, each with
        the mean of its scored samples: samples of one prompt are alike. A sample is the last segment of a
        trajectory; its length is that of all.
        """
        ends = [segments[-1] for segments in split_trajectories(self.samples)]
        scored, size = [end for end in ends if end.reward is not None], self.samples_per_prompt
        values = {f"avg@{size}": self.mean_reward}
        groups = (ends[start : start + size] for start in range(0, len(ends), size))
        prompts = [[sample for sample in group if sample.reward is not None] for group in groups]
        outcomes = [[sample.reward == 1.0 for sample in prompt] for prompt in prompts]
        for k in (2**power for power in range(1, size.bit_length())):
            enough = [answers for answers in outcomes if len(answers) >= k]
            if enough and {sample.reward for sample in scored} <= {0.0, 1.0}:
                values[f"pass@{k}"] = compute_mean_pass_at_k(enough, k)
        polls = [hold_vote(prompt) for prompt in prompts if len(prompt) == size]
        if any(votes > 1 for _, votes in polls):
            values[f"maj@{size}"] = fmean(winner.reward or 0.0 for winner, _ in polls)
        means = [fmean(sample.reward or 0.0 for sample in prompt) for prompt in prompts if prompt]
        interval = compute_bootstrap_interval(means, seed=0)
        values |= {
            f"avg@{size}/low": interval.low,
            f"avg@{size}/high": interval.high,
            "prompts": float(self.num_prompts),
            "failed": float(len(ends) - len(scored)),
            "truncated/frac": fmean(sample.status is Status.TRUNCATED for sample in scored),
            "response_length/mean": sum(one.response_length for one in self.scored) / len(scored),
        }
        return {f"eval/{name}/{key}": value for key, value in values.items()}


def hold_vote(samples: Sequence[Sample]) -> tuple[Sample, int]:
    """The sample that first gave the answer with the most votes, by the rules at the top of this file, and
    their number.
    """
    texts = [sample.response.strip().casefold() for sample in samples]
    answers = [text if (number := find_final_number(text)) is None else number for text in texts]
    consensus = compute_consensus(answers, ties="first")
    return samples[consensus.rewards.index(1.0)], consensus.votes


async def evaluate(
    rows: Sequence[Fields],
    engine: InferenceEngine,
    *,
    generate: GenerateFn,
    reward: RewardFn | None,
    sampling: SamplingParams,
    samples_per_prompt: int = 1,
    seed: int = 0,
    reward_timeout_s: float = 30.0,
    generate_timeout_s: float = math.inf,
) -> EvaluationResult:
    """Every prompt generated `samples_per_prompt` times and scored, all at once: the engine decides how many
    run together.

    Without `reward` the generate function gives it. A sample that cannot be generated or scored is counted as
    failed and is not part of the mean. Raises NotEnoughSamples, naming the failures by class, if more than
    MAX_FAILED_FRACTION of them failed: a mean over the rest would be of other prompts. Raises what is not one
    sample's failure but everybody's: FleetDown, EngineClosed, ModelError, ConfigError.
    """
    plan = GroupPlan(
        engine, generate, reward, sampling, seed, reward_timeout_s, generate_timeout_s=generate_timeout_s
    )
    changed, waiting = trio.lowlevel.ParkingLot(), dict[str, None]()

    async def make(sample: Sample) -> Member:
        waiting[sample.id] = None
        made = await make_trajectory(plan, sample)
        del waiting[sample.id]
        changed.unpark_all()
        return made

    works = [
        partial(make, replace(sample, id=f"eval-{sample.id}"))
        for index, row in enumerate(rows)
        for sample in make_samples(index, PromptRow(f"row-{index}", 0, row), samples_per_prompt)
    ]
    async with open_plain_nursery() as nursery:
        nursery.start_soon(tell_waiting, changed, lambda: [*waiting])
        trajectories = await run_all(*works)
        nursery.cancel_scope.cancel()
    samples = tuple(segment for one in trajectories for segment in one.segments)
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    if len(failed) > MAX_FAILED_FRACTION * len(trajectories):
        raise NotEnoughSamples(
            f"{len(failed)} of {len(trajectories)} held-out samples failed"
            f" ({', '.join(sorted(set(map(failure_class_of, failed))))}); the first:"
            f" {failed[0].metadata['failure']['message']}"
        )
    return EvaluationResult(samples, samples_per_prompt, len(rows))

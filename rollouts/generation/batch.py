"""Groups as the batch that one step consumes, and as metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.config.tables import RolloutConfig
from rollouts.errors import NotEnoughSamples
from rollouts.generation.draw import Draw
from rollouts.generation.group import INFRASTRUCTURE, ClosedGroup, failure_class_of
from rollouts.generation.ledger import FILTERED, STALE
from rollouts.generation.rollouts import convert_to_batch
from rollouts.types import Max, Mean, Metric, Min, RolloutBatch, Sample, SampleGroup, Status, Total


def make_batch(groups: Sequence[SampleGroup], *, temperature: float) -> RolloutBatch:
    """One row per sample, groups by group index, samples of a group in launch order. Temperature 0 is greedy,
    whose log-probs are at 1.
    """
    samples = tuple(
        sample for group in sorted(groups, key=lambda group: group.group_index) for sample in group.samples
    )
    assert all(sample.reward is not None for sample in samples), "a sample without a reward reached the batch"
    return convert_to_batch(samples, temperature=temperature)


def compute_batch_metrics(
    groups: Sequence[SampleGroup], *, decided: Sequence[ClosedGroup], drawn: int, dropped: Mapping[str, int]
) -> dict[str, Metric]:
    """What the groups of a batch look like and what they cost; `decided` are those that this call closed, in
    or out of the batch.

    reward/…, response_length/… and truncated/… are of the rows that train. groups/zero_std_frac and
    groups/reward_std are of every group that was scored, filtered ones included: a filter would hide what it
    looks for. Spreads are the population's; those of groups count a trajectory of several segments once.
    groups/accepted_frac is the share of the groups decided in this call that the filters kept; a group that
    failed or was not needed counts neither way.
    """
    metrics: dict[str, Metric] = {"groups/drawn": Total(drawn), "groups/kept": Total(len(groups))}
    for reason, count in sorted(dropped.items()):
        _merge(metrics, f"groups/dropped/{metric_segment(reason.removeprefix(FILTERED))}", Total(count))
    failures = Counter(failure_class_of(sample) for closed in decided for sample in closed.failed)
    metrics.update({f"fail/{name}": Total(count) for name, count in sorted(failures.items())})
    metrics.update(_sample_metrics([sample for group in groups for sample in group.samples]))
    filtered = [
        closed.group for closed in decided if not closed.decision.keep and closed.failure_class is None
    ]
    metrics.update(_spread_metrics([*groups, *filtered]))
    accepted = sum(closed.decision.keep for closed in decided)
    metrics["groups/accepted_frac"] = Mean(accepted, accepted + len(filtered))
    seconds = [trajectory for closed in decided for trajectory in closed.trajectories]
    metrics["perf/generate_s/mean"] = _mean([trajectory.generate_s for trajectory in seconds])
    metrics["perf/reward_s/mean"] = _mean(
        [trajectory.reward_s for trajectory in seconds if trajectory.reward_s is not None]
    )
    return metrics


def metric_segment(name: str) -> str:
    """A user's name as part of a metric's name: lower case, anything but letters, digits and _ becomes _."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()) or "unnamed"


def _sample_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    lengths = [sample.response_length for sample in samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    metrics: dict[str, Metric] = {
        "response_length/mean": _mean(lengths),
        "response_length/min": Min(min(lengths)),
        "response_length/max": Max(max(lengths)),
        "truncated/frac": _mean([sample.status is Status.TRUNCATED for sample in samples]),
        "reward/mean": _mean(rewards),
        "reward/std": Mean(float(np.std(rewards)), 1),
    }
    for sample in samples:
        for name, value in sample.rewards.items():
            _merge(metrics, f"reward/part/{metric_segment(name)}/mean", Mean(value, 1))
    return metrics


def _spread_metrics(groups: Sequence[SampleGroup]) -> dict[str, Metric]:
    rewards = [replace(group, samples=group.ends).rewards.astype(np.float64) for group in groups]
    alike = [
        values.min() == values.max() for values in rewards
    ]  # rounding can leave equal rewards a tiny deviation
    return {
        "groups/zero_std_frac": _mean(alike),
        "groups/reward_std/mean": _mean([values.std() for values in rewards]),
    }


def _mean(values: Iterable[float]) -> Mean:
    numbers = [float(value) for value in values]
    return Mean(float(np.sum(numbers)), len(numbers))


def _merge(metrics: dict[str, Metric], name: str, metric: Metric) -> None:
    held = metrics.get(name)
    metrics[name] = metric if held is None else held.merge(metric)  # pyright: ignore[reportArgumentType]  (one name has one kind)


# --- when a batch is given up -------------------------------------------------------------------------------


def draw_limit(config: RolloutConfig) -> int:
    """Groups that may be drawn for one batch."""
    return config.num_prompts * config.max_attempts


def check_budget(draw: Draw, config: RolloutConfig, *, max_staleness: int) -> None:
    """Raises NotEnoughSamples when so many samples failed, or so many groups were drawn, that the batch is
    given up.
    """
    seen = (
        max(len(draw.decided), config.num_prompts) * config.samples_per_prompt
    )  # else the first failure would be a share of 1
    failed = draw.failed
    if len(failed) > config.max_failed_fraction * seen:
        failed = [
            sample for sample in failed if failure_class_of(sample) != INFRASTRUCTURE
        ]  # bounded by max_attempts alone
    if len(failed) > config.max_failed_fraction * seen:
        classes = Counter(failure_class_of(sample) for sample in failed)
        raise NotEnoughSamples(
            f"{len(failed)} of {seen} samples failed ({_count_text(classes)}), more than"
            f" max_failed_fraction={config.max_failed_fraction:g} allows; the first:"
            f" {failed[0].metadata['failure']['message']}"
        )
    if len(draw.kept) + len(draw.undecided) < config.num_prompts and draw.drawn >= draw_limit(config):
        hints = f"; the first failure: {draw.failed[0].metadata['failure']['message']}" if draw.failed else ""
        if STALE in draw.dropped:
            hints += (
                f"; stale: the engine's weights are more than max_staleness={max_staleness} steps behind the"
                " trainer's"
            )
        raise NotEnoughSamples(
            f"{len(draw.kept)} of num_prompts={config.num_prompts} groups were kept of {draw.drawn} drawn"
            f" ({_count_text(draw.dropped)}), and max_attempts={config.max_attempts} allows no more; loosen"
            f" the filters, use easier or harder prompts, or raise max_attempts{hints}"
        )


def _count_text(counts: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name.removeprefix(FILTERED)}: {count}" for name, count in sorted(counts.items()))
        or "nothing dropped"
    )

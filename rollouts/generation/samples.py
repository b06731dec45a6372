"""What the manager and the synchronous tier share: a prompt's samples, when a group trains, samples as a
batch. Loads neither trio nor torch.

What the groups of a batch look like and what they cost, as metrics.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollouts.data.data_buffer import PromptRow
from rollouts.filters import rewards_of
from rollouts.generation.group import Group, failure_class_of
from rollouts.types import (
    BoolArray,
    FilterDecision,
    FloatArray,
    FloatRows,
    IntArray,
    JSONValue,
    Max,
    Mean,
    Metric,
    Min,
    RolloutBatch,
    Sample,
    Status,
    Total,
)

FILTERED = "filtered:"  # begins the reason of a drop by a filter, which the filter's own follows


def compute_batch_metrics(
    groups: Sequence[Group],
    *,
    outranked: Sequence[Group],
    decided: Sequence[Group],
    drawn: int,
    dropped: Mapping[str, int],
) -> dict[str, Metric]:
    """What the groups of a batch look like and what they cost; `decided` are those that this call closed, in
    or out of the batch.

    reward/…, response_length/… and truncated/… are of the rows that train. groups/zero_std_frac and
    groups/reward_std are of every group that was scored, filtered and outranked ones included: what chooses
    would hide what it looks for. Spreads are the population's; those of groups count a trajectory of several
    segments once. groups/accepted_frac is the share of the groups decided in this call that the filters kept;
    a group that failed or was not needed counts neither way. Samples without a reward have no metric of one.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_length for sample in samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    accepted = sum(group.decision is not None and group.decision.keep for group in decided)
    filtered = [
        group
        for group in decided
        if group.decision is not None and not group.decision.keep and group.failure_class is None
    ]
    members = [member for group in decided for member in group.members]
    scored = [*groups, *outranked, *filtered] if rewards else []
    spread = [rewards_of(group.sample_group) for group in scored]
    failures = Counter(failure_class_of(sample) for group in decided for sample in group.failed)
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.rewards.items():
            parts.setdefault(metric_segment(name), []).append(value)
    drops: Counter[str] = Counter()
    for reason, count in dropped.items():
        drops[metric_segment(reason.removeprefix(FILTERED))] += count
    return {
        "groups/drawn": Total(drawn),
        "groups/kept": Total(len(groups)),
        **{f"groups/dropped/{name}": Total(count) for name, count in sorted(drops.items())},
        **{f"fail/{name}": Total(count) for name, count in sorted(failures.items())},
        "response_length/mean": _mean(lengths),
        "response_length/min": Min(min(lengths)),
        "response_length/max": Max(max(lengths)),
        "truncated/frac": _mean(sample.status is Status.TRUNCATED for sample in samples),
        **({"reward/mean": _mean(rewards), "reward/std": Mean(float(np.std(rewards)), 1)} if rewards else {}),
        **{f"reward/part/{name}/mean": _mean(values) for name, values in parts.items()},
        # by min and max: rounding can leave equal rewards a tiny deviation
        "groups/zero_std_frac": _mean(values.min() == values.max() for values in spread),
        "groups/reward_std/mean": _mean(values.std() for values in spread),
        "groups/accepted_frac": Mean(accepted, accepted + len(filtered)),
        "perf/generate_s/mean": _mean(member.generate_s for member in members),
        "perf/reward_s/mean": _mean(one.reward_s for one in members if one.reward_s is not None),
    }


def metric_segment(name: str) -> str:
    """A user's name as part of a metric's name: lower case, anything but letters, digits and _ becomes _."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()) or "unnamed"


def _mean(values: Iterable[float]) -> Mean:
    numbers = [float(value) for value in values]
    return Mean(float(np.sum(numbers)), len(numbers))


class PromptSource(Protocol):
    """Where prompts are drawn from, and what takes them back: a DataBuffer."""

    def get_prompts(self, count: int) -> list[PromptRow]: ...
    def return_prompts(self, prompts: Sequence[PromptRow]) -> None: ...


def make_samples(group_index: int, prompt: PromptRow, count: int) -> list[Sample]:
    """Pending samples g00000012-s000, -s001, …: sorted by id they are in launch order. The row's other fields
    become their metadata, with the prompt's id and epoch.
    """
    rest = {key: value for key, value in prompt.row.items() if key != "prompt"}
    own = {"prompt_id": prompt.prompt_id, "epoch": prompt.epoch}
    return [
        Sample(
            id=f"g{group_index:08d}-s{index:03d}",
            prompt=_copy(prompt.row["prompt"]),
            group_index=group_index,
            metadata={**_copy(rest), **own},
        )
        for index in range(count)
    ]


def _copy(value: Any) -> Any:
    """A copy of JSON values: its siblings and later epochs do not see what a function changes in a sample."""
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


def check_enough(left: int, size: int) -> FilterDecision:
    """Keeps a group of `size` trajectories of which `left` did not fail: one alone has nothing to be compared
    with.
    """
    if left >= min(2, size):
        return FilterDecision(keep=True)
    return FilterDecision(False, "failed_samples", f"{size - left} of {size} samples failed")


# --- samples as arrays --------------------------------------------------------------------------------------


class SampleFields(NamedTuple):
    """The columns of B samples; token-level ones are ragged, one array [T_i] per sample."""

    tokens: tuple[IntArray, ...]
    loss_masks: tuple[BoolArray, ...]
    rewards: FloatArray | None  # [B]; None if no sample has one
    rollout_log_probs: FloatRows  # nats; 0 where the mask is 0
    weight_versions: tuple[IntArray, ...]  # -1 where the mask is 0
    group_indices: IntArray | None  # [B]; None if no sample has one


def extract_sample_fields(samples: Sequence[Sample]) -> SampleFields:
    """The columns of the samples, in their order. Raises ValueError naming the first sample without a reward
    (or group) if others have one.
    """
    return SampleFields(
        tokens=tuple(sample.tokens for sample in samples),
        loss_masks=tuple(sample.loss_mask for sample in samples),
        rewards=_column(samples, "reward", np.float32),
        rollout_log_probs=tuple(sample.rollout_log_probs for sample in samples),
        weight_versions=tuple(sample.weight_versions for sample in samples),
        group_indices=_column(samples, "group_index", np.int64),
    )


def _column(samples: Sequence[Sample], name: str, dtype: Any) -> Any:
    values = [getattr(sample, name) for sample in samples]
    if values.count(None) == len(values) > 0:
        return None
    if None in values:
        raise ValueError(
            f"sample {samples[values.index(None)].id} has no {name} and other samples of the batch do; give"
            " all of them one, or leave it out"
        )
    return np.asarray(values, dtype)


def compute_response_lengths(loss_masks: Sequence[BoolArray]) -> IntArray:
    """[B] number of tokens that train in each row. No rows give an empty array."""
    return np.asarray([np.count_nonzero(mask) for mask in loss_masks], np.int64)


def build_batch_metadata(
    samples: Sequence[Sample], *, step: int | None = None, epoch: int | None = None
) -> tuple[dict[str, JSONValue], ...]:
    """One new dict per sample: its metadata and, where given, `step` and `epoch` under these names, in place
    of what the sample has there.
    """
    added = {name: number for name, number in (("step", step), ("epoch", epoch)) if number is not None}
    return tuple({**sample.metadata, **added} for sample in samples)


def convert_to_batch(samples: Iterable[Sample], *, temperature: float = 1.0) -> RolloutBatch:
    """One row per sample, in their order, with the samples themselves behind the rows.

    temperature: that the samples were drawn at; 0 is greedy, whose log-probs are at 1. Samples without any
    reward give a batch for supervised training. Raises ValueError, naming the sample, if one is pending or
    failed, or if only some have a reward or a group; a zero in place of a failed sample's reward would move
    the mean of its whole group.
    """
    rows = tuple(samples)
    unfit = next((sample for sample in rows if sample.status in (Status.PENDING, Status.FAILED)), None)
    if unfit is not None:
        raise ValueError(
            f"sample {unfit.id} is {unfit.status}; only what was generated and scored can train: leave it out"
            " of the batch"
        )
    return RolloutBatch(
        **extract_sample_fields(rows)._asdict(),
        metadata=build_batch_metadata(rows),
        temperature=temperature or 1.0,
        samples=rows,
    )

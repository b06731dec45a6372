"""What the groups of a batch look like and what they cost, as metrics."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rollouts.filters import rewards_of
from rollouts.generation.group import Group, failure_class_of
from rollouts.types import TRAJECTORY, Max, Mean, Metric, Min, Sample, Status, Total, split_trajectories

FILTERED = "filtered:"  # begins the reason of a drop by a filter, which the filter's own follows


def compute_batch_metrics(
    groups: Sequence[Group],
    *,
    outranked: Sequence[Group],
    decided: Sequence[Group],
    drawn: int,
    dropped: Counter[str],
) -> dict[str, Metric]:
    """What the groups of a batch look like and what they cost; `decided` are those that this call closed, in
    or out of the batch.

    reward/…, response_length/… and truncated/… are of the trajectories that train, of whose segments the last
    has the status and all have the tokens. groups/zero_std_frac and
    groups/reward_std are of every group that was scored, filtered and outranked ones included: what chooses
    would hide what it looks for. Spreads are the population's; those of groups count a trajectory of several
    segments once. groups/accepted_frac is the share of the groups decided in this call that the filters kept;
    a group that failed or was not needed counts neither way. Samples without a reward have no metric of one.
    """
    trajectories = [one for group in groups for one in split_trajectories(group.samples)]
    lengths = [sum(segment.response_length for segment in one) for one in trajectories]
    samples = [one[-1] for one in trajectories]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    judged = [group for group in decided if group.failure_class is None]
    filtered = [group for group in judged if group.decision and not group.decision.keep]
    members = [member for group in decided for member in group.members]
    scored = [*groups, *outranked, *filtered] if rewards else []
    spread = [rewards_of(group.sample_group) for group in scored]
    parts = {}
    for sample in samples:
        for name, value in sample.rewards.items():
            parts.setdefault(metric_segment(name), []).append(value)
    drops = (metric_segment(reason.removeprefix(FILTERED)) for reason in dropped.elements())
    return {
        "groups/drawn": Total(drawn),
        "groups/kept": Total(len(groups)),
        **_count("groups/dropped", drops),
        **_count("fail", (failure_class_of(sample) for group in decided for sample in group.failed)),
        "response_length/mean": _mean(lengths),
        "response_length/min": Min(min(lengths)),
        "response_length/max": Max(max(lengths)),
        "truncated/frac": _mean(sample.status is Status.TRUNCATED for sample in samples),
        **({"reward/mean": _mean(rewards), "reward/std": Mean(float(np.std(rewards)), 1)} if rewards else {}),
        **{f"reward/part/{name}/mean": _mean(values) for name, values in parts.items()},
        **{f"reward/part/{name}/std": Mean(float(np.std(values)), 1) for name, values in parts.items()},
        # by min and max: rounding can leave equal rewards a tiny deviation
        "groups/zero_std_frac": _mean(values.min() == values.max() for values in spread),
        "groups/reward_std/mean": _mean(values.std() for values in spread),
        "groups/accepted_frac": Mean(len(judged) - len(filtered), len(judged)),
        **compute_trajectory_metrics(trajectories),
        "perf/generate_s/mean": _mean(member.generate_s for member in members),
        "perf/reward_s/mean": _mean(one.reward_s for one in members if one.reward_s is not None),
    }


def compute_trajectory_metrics(trajectories: Sequence[Sequence[Sample]]) -> dict[str, Metric]:
    """Of trajectories with environments or tools: turns, segments, how they ended, and what became of tool
    calls. Empty where there are none.
    """
    played = [one for one in trajectories if TRAJECTORY in one[-1].metadata]
    if not played:
        return {}
    records = [one[-1].metadata[TRAJECTORY] for one in played]
    turns = [len(record["turns"]) for record in records]
    # the name of a tool that there is not is the model's invention
    calls = (
        "unknown" if call["outcome"] == "unknown" else f"{metric_segment(call['name'])}/{call['outcome']}"
        for record in records
        for turn in record["turns"]
        for call in turn.get("calls", ())
    )
    return {
        "trajectories/turns/mean": _mean(turns),
        "trajectories/turns/max": Max(max(turns)),
        "trajectories/segments/mean": _mean(map(len, played)),
        "perf/waiting_frac": Mean(
            sum(record["time/tools"] for record in records), sum(record["time/all"] for record in records)
        ),
        "trajectories/restarts": Total(sum(record["restarts"] for record in records)),
        "trajectories/resumed": Total(sum(record["resumed"] for record in records)),
        **_count("trajectories/ended", (str(record["end"]) for record in records)),
        **_count("tools", calls),
    }


def metric_segment(name: str) -> str:
    """A user's name as part of a metric's name: lower case, anything but letters, digits and _ becomes _."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()) or "unnamed"


def _count(area: str, names: Iterable[str]) -> dict[str, Metric]:
    """How often each of the names is there."""
    return {f"{area}/{name}": Total(count) for name, count in sorted(Counter(names).items())}


def _mean(values: Iterable[float]) -> Mean:
    numbers = np.fromiter(values, float)
    return Mean(float(numbers.sum()), len(numbers))

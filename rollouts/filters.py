"""Group filters: which groups are worth training on, and why a group is not. Rankers: which of them are worth
more. Plain functions of a scored group.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollouts.errors import PlugInError, check_keywords
from rollouts.types import FilterDecision, Numbers, SampleGroup, Status, split_trajectories

GroupFilter = Callable[..., FilterDecision]
KEEP = FilterDecision(keep=True)
ROUNDING = 1e-6  # by which a sum of parts that should be 0 or 1 may miss it


def check_reward_nonzero_std(group: SampleGroup, *, min_std: float = 1e-6) -> FilterDecision:
    """Drops a group whose rewards are all alike ("zero_variance"): group-relative advantages would all be 0.

    The standard deviation is the population's, over the whole group. A group of one trajectory has none and
    is dropped.
    """
    rewards = rewards_of(group)
    std = float(rewards.std())
    return _decide(
        std > min_std,
        "zero_variance",
        f"standard deviation {std:.3g} of {len(rewards)} rewards around {rewards.mean():.4g} is not above"
        f" {min_std:.3g}",
    )


def check_min_reward(group: SampleGroup, *, min_reward: float = 0.0) -> FilterDecision:
    """Drops a group whose mean reward is below `min_reward` ("low_reward")."""
    rewards = rewards_of(group)
    mean = float(rewards.mean())
    detail = f"mean reward {mean:.4g} of {len(rewards)} samples is below {min_reward:.4g}"
    return _decide(mean >= min_reward, "low_reward", detail)


def check_mixed_accuracy(
    group: SampleGroup, *, part: str = "", low: float = 0.0, high: float = 1.0
) -> FilterDecision:
    """Drops a group that is always or never right ("too_easy", "too_hard"): keeps low < accuracy < high,
    dynamic sampling of DAPO (2503.14476).

    Accuracy is the mean of a part of the reward, or of the reward itself with part "". Named, because a
    shaped reward (a length penalty) still varies in a group where every answer is right. Raises ValueError if
    a sample lacks the part, or has a value outside 0 to 1: of rewards of 1 and -1 the mean is no accuracy.
    """
    values = _part_of(group, part, "check_mixed_accuracy") if part else rewards_of(group)
    outside = values[(values < -ROUNDING) | (values > 1 + ROUNDING)]
    if len(outside):
        raise ValueError(
            f"check_mixed_accuracy: {part or 'the reward'} of a sample of group {group.group_index} is"
            f" {outside[0]:.4g}; an accuracy is a mean of values from 0 to 1: name such a part of the reward"
            " with part=, or use check_reward_nonzero_std"
        )
    accuracy = float(values.mean())
    rule = f"not above {low:.4g}" if accuracy <= low else f"not below {high:.4g}"
    return _decide(
        low < accuracy < high,
        "too_hard" if accuracy <= low else "too_easy",
        f"accuracy {accuracy:.4g} of {len(values)} samples ({part or 'the reward'}) is {rule}",
    )


def check_consensus(group: SampleGroup, *, min_ratio: float = 0.0) -> FilterDecision:
    """Drops a group whose vote found no label, or one with a vote ratio below `min_ratio` ("no_consensus").

    Reads the parts has_label and vote_ratio of rollouts.rewards.consensus. Raises ValueError if a sample
    lacks them.
    """
    has_label = _part_of(group, "has_label", "check_consensus")[0]
    ratio = _part_of(group, "vote_ratio", "check_consensus")[0]
    rule = f"below {min_ratio:.4g}" if has_label else "no label"
    detail = f"vote ratio {ratio:.4g} of {len(group.samples)} samples: {rule}"
    return _decide(bool(has_label) and ratio >= min_ratio, "no_consensus", detail)


def _decide(keep: bool, reason: str, detail: str) -> FilterDecision:
    return KEEP if keep else FilterDecision(False, reason, detail)


def _part_of(group: SampleGroup, part: str, name: str) -> NDArray[np.float64]:
    """That part of the reward of each trajectory."""
    values = [sample.rewards.get(part, _detail(sample.rewards, part)) for sample in group.ends]
    if None in values:
        raise ValueError(
            f"{name} needs the part {part!r} of the reward, which a sample of group {group.group_index} has"
            " not; report it there"
        )
    return np.asarray(values, np.float64)


def _detail(parts: Numbers, name: str) -> float | None:
    """That of the one part which has a detail of this name."""
    found = [value for part, value in parts.items() if part.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None


def rewards_of(group: SampleGroup) -> NDArray[np.float64]:
    """One reward per trajectory: its segments share it, and none may count more for having more of them."""
    return replace(group, samples=group.ends).rewards.astype(np.float64)


def check_response_diversity(group: SampleGroup, *, min_unique_fraction: float = 0.25) -> FilterDecision:
    """Drops a group in which too few responses differ ("low_diversity"). Responses, those of all segments of
    a trajectory, are compared as text without white space around it.
    """
    trajectories = split_trajectories(group.samples)
    unique = len({tuple(one.response.strip() for one in segments) for segments in trajectories})
    count = len(trajectories)
    return _decide(
        unique / count >= min_unique_fraction,
        "low_diversity",
        f"{unique} of {count} responses are distinct, a share of {unique / count:.3g}, below"
        f" {min_unique_fraction:.3g}",
    )


def check_some_complete(group: SampleGroup) -> FilterDecision:
    """Drops a group all of whose trajectories were cut at the token limit ("truncated"), which is what
    `rl.mask_truncated` would leave nothing of.
    """
    complete = any(sample.status is not Status.TRUNCATED for sample in group.ends)
    return _decide(complete, "truncated", f"all {len(group.ends)} samples were cut at the token limit")


def check_reasonable_length(
    group: SampleGroup, *, min_tokens: int = 1, max_tokens: int = 4096, max_outside_fraction: float = 0.5
) -> FilterDecision:
    """Drops a group in which too many responses are shorter or longer than allowed ("unreasonable_length").
    Lengths are the trained tokens of a trajectory.
    """
    lengths = [sum(one.response_length for one in segments) for segments in split_trajectories(group.samples)]
    outside = sum(not min_tokens <= length <= max_tokens for length in lengths)
    fraction = outside / len(lengths)
    return _decide(
        fraction <= max_outside_fraction,
        "unreasonable_length",
        f"{outside} of {len(lengths)} responses have a length outside {min_tokens} to {max_tokens} tokens"
        f" (shortest {min(lengths)}, longest {max(lengths)}), a share of {fraction:.3g}, above"
        f" {max_outside_fraction:.3g}",
    )


def check_quality_and_diversity(
    group: SampleGroup, *, min_reward: float = 0.0, min_std: float = 1e-6, min_unique_fraction: float = 0.25
) -> FilterDecision:
    """The first objection of check_min_reward, check_reward_nonzero_std and check_response_diversity, in this
    order.
    """
    decisions = (
        check_min_reward(group, min_reward=min_reward),
        check_reward_nonzero_std(group, min_std=min_std),
        check_response_diversity(group, min_unique_fraction=min_unique_fraction),
    )
    return next((decision for decision in decisions if not decision.keep), KEEP)


FILTERS: Mapping[str, GroupFilter] = {
    function.__name__: function
    for function in (
        check_reward_nonzero_std,
        check_min_reward,
        check_mixed_accuracy,
        check_consensus,
        check_response_diversity,
        check_some_complete,
        check_reasonable_length,
        check_quality_and_diversity,
    )
}


def reward_std(group: SampleGroup) -> float:
    """The population's standard deviation of the group's rewards, one per trajectory."""
    return float(rewards_of(group).std())


RANKERS = {"reward_std": reward_std}


def make_filter(name: str, **thresholds: float | str) -> GroupFilter:
    """The filter of that name with some of its thresholds replaced. Raises PlugInError naming the filters,
    ConfigError naming the thresholds there are.
    """
    if name not in FILTERS:
        raise PlugInError(f"filter={name!r} is not one of {', '.join(FILTERS)}")
    check_keywords(f"filter {name}", FILTERS[name], thresholds, beside=("group",))
    return functools.partial(FILTERS[name], **thresholds)

"""Advantages of samples against the other samples of their prompt, or of the whole batch.

Every function takes AdvantageInputs and returns one number per row [B], in float64. A group of one row, or of
equal rewards, has nothing to compare: its rows get exactly 0 before anything is whitened. Of a function that
works on whole batches this holds for a batch without spread.

What is compared are trajectories: one of several segments counts once, with its one reward and the sum of
their lengths, and its segments get the same advantage. "Row" below means such a trajectory.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.advantages.inputs import (
    AdvantageFn,
    AdvantageInputs,
    Floats,
    GAEResult,
    merge_segments,
    need_lengths,
    require,
    split_segments,
)
from rollouts.types import IntArray

STD_EPSILON = 1e-6  # of 2402.03300; keeps a nearly constant group from dividing by nothing
VARIANCE_EPSILON = 1e-8  # inside the root when a batch is whitened


ADVANTAGES: dict[str, AdvantageFn] = {}


def per_trajectory(function: AdvantageFn) -> AdvantageFn:
    """The function applied to one row per trajectory, its numbers spread over the rows [B] of the segments,
    its arrays per token cut into theirs. Enters what it makes into ADVANTAGES: compute_NAME_advantages as
    NAME.
    """

    @wraps(function)
    def of_rows(inputs: AdvantageInputs, **params: Any) -> Any:
        merged, places = merge_segments(inputs)
        found = function(merged, **params)
        if isinstance(found, np.ndarray):
            return found[places]
        split = partial(split_segments, places=places, loss_masks=inputs.loss_masks)
        return GAEResult(*map(split, found)) if isinstance(found, GAEResult) else split(found)

    ADVANTAGES[function.__name__.removeprefix("compute_").removesuffix("_advantages")] = of_rows
    return of_rows


def per_group(function: Callable[..., Floats]) -> Callable[..., Floats]:
    """The function of a group's rewards [G] applied to every group with spread, once per trajectory; other
    rows get 0.
    """

    @wraps(function)
    def of_groups(inputs: AdvantageInputs, **params: Any) -> Floats:
        advantages = np.zeros_like(inputs.rewards)
        for rows in groups_with_spread(inputs.rewards, inputs.group_indices):
            advantages[rows] = function(inputs.rewards[rows], **params)
        return advantages

    return per_trajectory(of_groups)


def standardise(values: Floats, std_epsilon: float) -> Floats:
    """(value − mean) / (std + std_epsilon), std with the number − 1 in its denominator."""
    return (values - values.mean()) / compute_spread(values, std_epsilon)


def compute_spread(values: Floats, std_epsilon: float) -> float:
    """std + std_epsilon; an epsilon below 0 would turn the sign of advantages. Raises ValueError for one."""
    require(std_epsilon >= 0, f"std_epsilon={std_epsilon}; it must be 0 or above")
    return values.std(ddof=1) + std_epsilon


@per_group
def compute_grpo_advantages(
    rewards: Floats, *, std_epsilon: float = STD_EPSILON, leave_one_out: bool = False
) -> Floats:
    """(r − mean) / (std + std_epsilon) over the group, std with G − 1 in its denominator. Paper: GRPO,
    2402.03300.

    With leave_one_out mean and std are those of the others of the group, not divided where the others are all
    alike. That jumps: in the group 1, 0, 0, 0 the first row keeps 1, and in 1, 0, 0, 1e-3 it gets 1728.
    Filter on the std of the whole group in any case.
    """
    if not leave_one_out:
        return standardise(rewards, std_epsilon)
    advantages = np.empty_like(rewards)
    for row, reward in enumerate(rewards):
        others = np.delete(rewards, row)
        spread = compute_spread(others, std_epsilon) if len(others) > 1 and np.ptp(others) > 0 else 1.0
        advantages[row] = (reward - others.mean()) / spread
    return advantages


@per_group
def compute_centred_advantages(rewards: Floats, *, positive: bool = False) -> Floats:
    """r − mean of the group: no division, so hard and easy prompts keep their scale. Paper: Dr. GRPO,
    2503.20783.

    positive: never below 0. With votes as rewards, what dissents holds most of the right answers that the
    vote missed, and pushing it down leaves the shortest answer.
    """
    centred = rewards - rewards.mean()
    return np.maximum(centred, 0.0) if positive else centred


@per_trajectory
def compute_lite_ppo_advantages(inputs: AdvantageInputs, *, std_epsilon: float = STD_EPSILON) -> Floats:
    """(r − mean of the group) / (std + std_epsilon), std that of all rewards of the batch, with their number
    − 1 in its denominator: a group of little spread is not blown up. Paper: LitePPO, 2508.08221.
    """
    centred, rewards = compute_centred_advantages(inputs), inputs.rewards
    return centred / compute_spread(rewards, std_epsilon) if np.ptp(rewards) > 0 else centred


@per_group
def compute_rloo_advantages(rewards: Floats) -> Floats:
    """r − mean of the others of the group. Paper: RLOO, 2402.14740."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


@per_group
def compute_maxrl_advantages(rewards: Floats) -> Floats:
    """(r − mean) / mean of the group: for rewards of 0 and 1, hard prompts weigh by 1/p. Paper: MaxRL,
    2602.02710.

    A group whose mean is not above 0 gets 0: it has no success to weigh by.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


@per_trajectory
def compute_opo_advantages(inputs: AdvantageInputs) -> Floats:
    """r − Σ(length·r)/Σlength of the group: the baseline of least variance when a row's gradient grows with
    its length. Paper: OPO, 2505.23585.

    A group in which nothing trains gets 0. Raises ValueError without lengths.
    """
    lengths = need_lengths(inputs, "opo")
    advantages = np.zeros_like(inputs.rewards)
    for rows in groups_with_spread(inputs.rewards, inputs.group_indices):
        if lengths[rows].any():
            rewards = inputs.rewards[rows]
            advantages[rows] = rewards - np.average(rewards, weights=lengths[rows])
    return advantages


@per_group
def compute_pass_at_k_advantages(
    rewards: Floats, *, k: int = 0, divide_by_std: bool = False, std_epsilon: float = STD_EPSILON
) -> Floats:
    """What a row adds to the best of k samples: the mean, over the k-subsets S of its group that hold it, of
    max(S) − max(S without it).

    k = 0 (or above G) is the whole group: best − second best for the best row, 0 for the others. k = 2 is the
    mean over the others of max(0, r − r_other). Unbiased for the gradient of E[max of k]. divide_by_std
    divides by the group's std + std_epsilon. Paper: 2503.19595. Raises ValueError on k = 1, which is `rloo`,
    and below 0.
    """
    require(k == 0 or k > 1, f"k={k}; it must be at least 2, or 0 for the whole group (for k = 1 use 'rloo')")
    size = len(rewards)
    chosen = min(k or size, size)
    order = np.argsort(rewards, kind="stable")
    ascending = rewards[order]
    subsets = math.comb(size - 1, chosen - 1)  # whole numbers: no overflow
    ways = np.asarray([math.comb(place, chosen - 2) / subsets for place in range(size)])
    gains = np.zeros(size)
    # the row at `place` is the best of a subset; the second best is at one of the places below
    for place in range(1, size):
        gains[order[place]] = (ways[:place] * (ascending[place] - ascending[:place])).sum()
    return gains / compute_spread(rewards, std_epsilon) if divide_by_std else gains


@per_trajectory
def compute_reinforce_pp_advantages(inputs: AdvantageInputs, *, ddof: int = 1) -> Floats:
    """r whitened over all trained tokens of the batch: no group is needed. Paper: REINFORCE++, 2501.03262.

    See `whiten_over_tokens`. Raises ValueError without lengths.
    """
    return whiten_over_tokens(inputs.rewards, need_lengths(inputs, "reinforce_pp"), ddof=ddof)


@per_trajectory
def compute_reinforce_pp_baseline_advantages(inputs: AdvantageInputs, *, ddof: int = 1) -> Floats:
    """r − mean of the group, then whitened over all trained tokens of the batch. Paper: REINFORCE++ with
    baseline, 2501.03262.

    Long rows count more in mean and std, so the rows of a group without spread come out near 0 rather than at
    0. Raises ValueError without lengths.
    """
    return whiten_over_tokens(
        compute_centred_advantages(inputs), need_lengths(inputs, "reinforce_pp_baseline"), ddof=ddof
    )


@per_trajectory
def compute_gdpo_advantages(inputs: AdvantageInputs, *, std_epsilon: float = STD_EPSILON) -> Floats:
    """Each named reward standardised over its group, their weighted sum, standardised over the batch. Paper:
    GDPO, 2601.05242.

    A reward of large scale cannot drown another, as it does when rewards are added first. `rewards` are not
    read, so a KL term in them is lost. Weights are reward_weights, 1 each if empty; details of a part
    (`exact.exact` beside `exact`) count only when they have a weight. Raises ValueError without named
    rewards, and for a weight whose reward is not there.
    """
    named = inputs.named_rewards
    require(
        named,
        "advantage 'gdpo' needs named rewards in every row; let the reward function return a mapping, or use"
        " 'grpo'",
    )
    total = np.zeros_like(inputs.rewards)
    every = {name: 1.0 for name in named if name.rpartition(".")[0] not in named}
    for name, weight in (inputs.reward_weights or every).items():
        known = f"reward_weights has {name!r} and there is no such named reward; there are {', '.join(named)}"
        require(name in named, known)
        for rows in groups_with_spread(named[name], inputs.group_indices):
            total[rows] += weight * standardise(named[name][rows], std_epsilon)
    if len(total) < 2 or np.ptp(total) == 0:
        return np.zeros_like(total)
    return standardise(total, std_epsilon)


@per_trajectory
def compute_remax_advantages(inputs: AdvantageInputs, *, baseline: str = "greedy_reward") -> Floats:
    """r − the reward of the greedy answer to the same prompt, which the reward function reports as the part
    `baseline`. Paper: ReMax, 2310.10505.

    The parts of a mapping are added up, the baseline too, and then r holds it: answer with
    RewardResult(reward, parts), or give the part the weight 0 in reward_weights. No group is needed; equal
    rewards do not give 0. Raises ValueError when a row has no such part.
    """
    known = ", ".join(inputs.named_rewards) or "none"
    require(
        baseline in inputs.named_rewards,
        f"advantage 'remax' needs the named reward {baseline!r} in every row; there are: {known}. Report it"
        " as a part of the reward",
    )
    return inputs.rewards - inputs.named_rewards[baseline]


@per_trajectory
def compute_raw_advantages(inputs: AdvantageInputs) -> Floats:
    """The rewards as they are: no baseline, no scale. For one sample per prompt, or rewards that are
    advantages already.
    """
    return inputs.rewards.copy()


def whiten_over_tokens(values: Floats, lengths: IntArray, *, ddof: int = 1) -> Floats:
    """(value − mean) / sqrt(variance + 1e-8) of row values [B], each counted once for each of its `lengths`
    trained tokens.

    ddof 1: the variance has the number of tokens − 1 in its denominator. Values without spread, or fewer than
    ddof + 1 tokens, give 0.
    """
    count = int(lengths.sum())
    if count <= ddof or np.ptp(values[lengths > 0]) == 0:
        return np.zeros_like(values)
    centred = values - np.average(values, weights=lengths)
    variance = np.average(centred**2, weights=lengths) * count / (count - ddof)
    return np.where(lengths > 0, centred / np.sqrt(variance + VARIANCE_EPSILON), 0.0)


def groups_with_spread(values: Floats, group_indices: IntArray) -> Iterator[NDArray[np.intp]]:
    """The rows of every group of at least two rows whose values differ, groups in ascending order."""
    for group in np.unique(group_indices):
        rows = np.flatnonzero(group_indices == group)
        if len(rows) > 1 and np.ptp(values[rows]) > 0:
            yield rows

"""What an advantage function takes and returns. numpy only. Axes: B rows, T_i tokens of row i, G rows of one
group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.types import BoolArray, FloatArray, Sample

Floats = NDArray[np.float64]

AdvantageFn = Callable[..., Any]
"""Called as `function(inputs, **params)`: one number per row [B], or one array [T_i] per row with a value
for each of its tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """What is known of a batch when advantages are computed. Lists are accepted for arrays.

    Failed samples must have left the batch: a zero in their place would move the mean of every other row.
    Raises ValueError on lengths that differ, naming the row whose reward is not finite (one bad row would
    spoil its whole group), and naming the row whose group, reward or named reward is another than that of its
    trajectory.
    """

    rewards: Floats  # [B]; less the KL term where that goes into the reward
    group_indices: NDArray[
        np.int64
    ]  # [B] rows of one prompt share a number; the order of the rows does not matter
    lengths: NDArray[np.int64] | None = None  # [B] tokens that train; None where the caller does not know
    named_rewards: Mapping[str, Floats] = field(
        default_factory=dict
    )  # parts of the reward that every row has, each [B]
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # of the named rewards; empty: 1 each
    samples: tuple[
        Sample, ...
    ] = ()  # [B] the records behind the rows, or empty; for functions that need more than the above
    trajectories: NDArray[np.int64] | None = (
        None  # [B] segments of one trajectory share a number, and their reward; None: each row is one
    )
    values: tuple[
        FloatArray, ...
    ] = ()  # [T_i] per row: the critic's, before each token; empty where there is no critic
    token_rewards: tuple[
        FloatArray,
        ...,
        # [T_i] per row, beside `values`: the KL term of each token, and the reward on the last trained one
    ] = ()
    loss_masks: tuple[BoolArray, ...] = ()  # [T_i] per row, beside `values`: the tokens that train

    def __post_init__(self) -> None:
        put = object.__setattr__
        rewards, groups = np.asarray(self.rewards, np.float64), np.asarray(self.group_indices)
        if rewards.ndim != 1 or rewards.shape != groups.shape:
            raise ValueError(
                f"rewards have shape {rewards.shape} and group_indices {groups.shape}; both must be [B]"
            )
        check_finite(rewards, "rewards")
        put(self, "rewards", rewards)
        put(self, "group_indices", groups)
        if self.lengths is not None:
            lengths = np.asarray(self.lengths, np.int64)
            if lengths.shape != rewards.shape or (lengths < 0).any():
                raise ValueError(
                    f"lengths have shape {lengths.shape}, smallest {lengths.min(initial=0)}; one per row of"
                    f" {rewards.shape}, at least 0"
                )
            put(self, "lengths", lengths)
        named = {name: np.asarray(values, np.float64) for name, values in self.named_rewards.items()}
        for name, values in named.items():
            if values.shape != rewards.shape:
                raise ValueError(
                    f"named_rewards[{name!r}] has shape {values.shape}; one per row, {rewards.shape}"
                )
            check_finite(values, f"named_rewards[{name!r}]")
        put(self, "named_rewards", named)
        if self.trajectories is not None:
            self._check_trajectories(np.asarray(self.trajectories, np.int64))
        if self.samples and len(self.samples) != len(rewards):
            raise ValueError(f"there are {len(self.samples)} samples for {len(rewards)} rows")
        if not len(self.values) == len(self.token_rewards) == len(self.loss_masks):
            raise ValueError(
                f"there are {len(self.values)} rows of values, {len(self.token_rewards)} of token_rewards and"
                f" {len(self.loss_masks)} of loss_masks; they come together, or not at all"
            )
        if self.values and len(self.values) != len(rewards):
            raise ValueError(f"there are {len(self.values)} rows of values for {len(rewards)} rows")
        for name, weight in self.reward_weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"reward_weights[{name!r}] is {weight}; a weight is a finite number")

    def _check_trajectories(self, trajectories: NDArray[np.int64]) -> None:
        if trajectories.shape != self.rewards.shape:
            raise ValueError(
                f"trajectories have shape {trajectories.shape}; one per row, {self.rewards.shape}"
            )
        object.__setattr__(self, "trajectories", trajectories)
        _, first, places = np.unique(trajectories, return_index=True, return_inverse=True)
        columns = {"group_indices": self.group_indices, "rewards": self.rewards}
        for name, values in (
            columns | {f"named_rewards[{key!r}]": part for key, part in self.named_rewards.items()}
        ).items():
            shared = values[first][places]
            bad = np.flatnonzero(values != shared)
            if len(bad):
                row = bad[0]
                raise ValueError(
                    f"{name}[{row}] is {values[row]}, and {shared[row]} in another segment of its trajectory;"
                    " segments share it"
                )


def merge_segments(inputs: AdvantageInputs) -> tuple[AdvantageInputs, NDArray[np.intp]]:
    """The inputs with one row per trajectory, and for each of the B rows [B] which of those it belongs to:
    `of_trajectories[places]` is one per row.

    A trajectory has its one reward, the sum of its segments' lengths, and the sample of its last segment.
    Inputs without `trajectories` stay as they are.
    """
    if inputs.trajectories is None:
        return inputs, np.arange(len(inputs.rewards))
    numbers, places = np.unique(inputs.trajectories, return_inverse=True)
    last = np.zeros(len(numbers), np.intp)
    last[places] = np.arange(len(places))  # of equal places the last one stays
    lengths = None
    if inputs.lengths is not None:
        lengths = np.zeros(len(numbers), np.int64)
        np.add.at(lengths, places, inputs.lengths)
    merged = AdvantageInputs(
        rewards=inputs.rewards[last],
        group_indices=inputs.group_indices[last],
        lengths=lengths,
        named_rewards={name: values[last] for name, values in inputs.named_rewards.items()},
        reward_weights=inputs.reward_weights,
        samples=tuple(inputs.samples[row] for row in last) if inputs.samples else (),
    )
    return merged, places


def need_lengths(inputs: AdvantageInputs, kind: str) -> NDArray[np.int64]:
    """Tokens that train [B]. Raises ValueError when the inputs do not say."""
    if inputs.lengths is None:
        raise ValueError(
            f"advantage {kind!r} needs lengths, the number of tokens that train in each row; pass lengths="
        )
    return inputs.lengths


def check_finite(values: Floats, name: str) -> None:
    """Raises ValueError naming the first row that is not finite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"{name}[{bad[0]}] is {values[bad[0]]}; a reward must be finite: one bad row would spoil its"
            " whole group"
        )

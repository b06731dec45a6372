"""What an advantage function takes and returns. numpy only. Axes: B rows, T_i tokens of row i, G rows of one
group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    group_indices: NDArray[np.int64]  # [B] rows of one prompt share a number, in any order of the rows
    lengths: NDArray[np.int64] | None = None  # [B] tokens that train; None where the caller does not know
    # parts of the reward that every row has, each [B], and their weights; no weights: 1 each
    named_rewards: Mapping[str, Floats] = field(default_factory=dict)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[
        Sample, ...
    ] = ()  # [B] the records behind the rows, or empty; for functions that need more
    # [B] segments of one trajectory share a number, and their reward; None: each row is one
    trajectories: NDArray[np.int64] | None = None
    values: tuple[FloatArray, ...] = ()  # [T_i] per row: the critic's, before each token; empty: no critic
    # [T_i] per row, beside `values`: the KL term of each token, and the reward on the last trained one
    token_rewards: tuple[FloatArray, ...] = ()
    loss_masks: tuple[BoolArray, ...] = ()  # [T_i] per row, beside `values`: the tokens that train

    def __post_init__(self) -> None:
        rewards = np.asarray(self.rewards, np.float64)
        groups = np.asarray(self.group_indices)
        named = {name: np.asarray(values, np.float64) for name, values in self.named_rewards.items()}
        lengths, trajectories = (
            None if values is None else np.asarray(values, np.int64)
            for values in (self.lengths, self.trajectories)
        )
        floats = {"rewards": rewards} | {f"named_rewards[{name!r}]": part for name, part in named.items()}
        shared = {"group_indices": groups, **floats}
        for name, values in {**shared, "lengths": lengths, "trajectories": trajectories}.items():
            if values is not None and (values.ndim != 1 or len(values) != rewards.size):
                raise ValueError(
                    f"{name} has shape {values.shape}; there must be one per row of {rewards.shape}"
                )
        for name, values in floats.items():
            check_finite(values, name)
        if lengths is not None and lengths.min(initial=0) < 0:
            raise ValueError(f"lengths has {lengths.min()}; a number of tokens is at least 0")
        for name in ("samples", "values", "token_rewards", "loss_masks"):
            count = len(getattr(self, name))
            if count not in (0 if name == "samples" else len(self.values), len(rewards)):
                raise ValueError(
                    f"{name} has {count} rows for {len(rewards)} rewards; there must be one per row"
                )
        for name, weight in self.reward_weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"reward_weights[{name!r}] is {weight}; a weight is a finite number")
        if trajectories is not None:
            _, first, places = np.unique(trajectories, return_index=True, return_inverse=True)
            for name, values in shared.items():
                for row in np.flatnonzero(values != values[first][places]):
                    raise ValueError(
                        f"{name}[{row}] is {values[row]}, and {values[first][places][row]} in another"
                        " segment of its trajectory; segments share it"
                    )
        found = {"rewards": rewards, "group_indices": groups, "named_rewards": named}
        for name, values in {**found, "lengths": lengths, "trajectories": trajectories}.items():
            object.__setattr__(self, name, values)


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
    sums = None if inputs.lengths is None else np.bincount(places, inputs.lengths).astype(np.int64)
    merged = AdvantageInputs(
        rewards=inputs.rewards[last],
        group_indices=inputs.group_indices[last],
        lengths=sums,
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
    for row in np.flatnonzero(~np.isfinite(values)):
        raise ValueError(
            f"{name}[{row}] is {values[row]}; a reward must be finite, or it spoils its whole group"
        )


def take_trained(name: str, row: int, values: ArrayLike, mask: BoolArray) -> Floats:
    """The values of a row's trained tokens. Raises ValueError unless there is one value per token, and each
    of these is finite.
    """
    wide = np.asarray(values, np.float64)
    if wide.shape != mask.shape:
        raise ValueError(
            f"{name}[{row}] has shape {wide.shape} and its loss mask {mask.shape}; one per token"
        )
    for token in np.flatnonzero(mask & ~np.isfinite(wide)):
        raise ValueError(
            f"{name}[{row}], token {token} is {wide[token]}; it must be finite where a token trains"
        )
    return wide[mask]


def scatter_trained(trained: ArrayLike, mask: BoolArray) -> FloatArray:
    """[T_i] the values of the trained tokens in their places, 0 elsewhere."""
    row = np.zeros(len(mask), np.float32)
    row[mask] = trained
    return row

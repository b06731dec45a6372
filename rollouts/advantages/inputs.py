"""What an advantage function takes and returns. numpy only. Axes: B rows, T_i tokens of row i, G rows of one
group.

Advantages in self-play: each role against a running mean of its own rewards. The caller keeps the running
means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.types import BoolArray, FloatArray, FloatRows, Function, IntArray, Numbers, Sample

Floats = NDArray[np.float64]
Rows = Sequence[ArrayLike]  # one array [T_i] per row, as a caller may give it
Masks = Sequence[BoolArray]  # [T_i] per row: True where the token trains

AdvantageFn = Function
"""Called as `function(inputs, **params)`: one number per row [B], or one array [T_i] per row with a value
for each of its tokens.
"""


class GAEResult(NamedTuple):
    """Per-token results, one array [T_i] per row, 0 outside the loss masks."""

    advantages: FloatRows
    returns: FloatRows  # what the critic's values are regressed on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """What is known of a batch when advantages are computed. Lists are accepted for arrays.

    Failed samples must have left the batch: a zero in their place would move the mean of every other row.
    Raises ValueError on lengths that differ, naming the row whose reward is not finite (one bad row would
    spoil its whole group), and naming the row whose group, reward or named reward is another than that of its
    trajectory.
    """

    rewards: Floats  # [B]; less the KL term where that goes into the reward
    group_indices: IntArray  # [B] rows of one prompt share a number, in any order of the rows
    lengths: IntArray | None = None  # [B] tokens that train; None where the caller does not know
    # parts of the reward that every row has, each [B], and their weights; no weights: 1 each
    named_rewards: Mapping[str, Floats] = field(default_factory=dict)
    reward_weights: Numbers = field(default_factory=dict)
    # [B] the records behind the rows, or empty; for functions that need more
    samples: tuple[Sample, ...] = ()
    # [B] segments of one trajectory share a number, and their reward; None: each row is one
    trajectories: IntArray | None = None
    values: FloatRows = ()  # [T_i] per row: the critic's, before each token; empty: no critic
    # [T_i] per row: the KL term of each token, the rewards of turns, and what they leave of a trajectory's
    # reward on the last token of it that trains; empty: not known
    token_rewards: FloatRows = ()
    loss_masks: tuple[BoolArray, ...] = ()  # [T_i] per row, beside `token_rewards`: the tokens that train

    def __post_init__(self) -> None:
        kinds = {"rewards": np.float64, "group_indices": None, "lengths": np.int64, "trajectories": np.int64}
        columns = {
            name: np.asarray(getattr(self, name), kind)
            for name, kind in kinds.items()
            if getattr(self, name) is not None
        }
        named = {name: np.asarray(values, np.float64) for name, values in self.named_rewards.items()}
        for name, values in {**columns, "named_rewards": named}.items():
            object.__setattr__(self, name, values)
        columns |= {f"named_rewards[{name!r}]": values for name, values in named.items()}
        count = self.rewards.size
        for name, values in columns.items():
            check_rows(values, name, count)
        lengths = columns.pop("lengths", np.zeros(0))
        require(
            (lengths >= 0).all(), f"lengths has {lengths.min(initial=0)}; a number of tokens is at least 0"
        )
        require(
            len(self.samples) in (0, count),
            f"samples has {len(self.samples)} rows for {count} rewards; there must be one per row",
        )
        if self.trajectories is not None:
            _, first, places = np.unique(self.trajectories, return_index=True, return_inverse=True)
            for name, values in columns.items():
                for row in np.flatnonzero(values != values[first][places]):
                    raise ValueError(
                        f"{name}[{row}] is {values[row]}, and {values[first][places][row]} in another"
                        " segment of its trajectory; segments share it"
                    )


def merge_segments(inputs: AdvantageInputs) -> tuple[AdvantageInputs, NDArray[np.intp]]:
    """The inputs with one row per trajectory, and for each of the B rows [B] which of those it belongs to:
    `of_trajectories[places]` is one per row.

    A trajectory has its one reward, the sum of its segments' lengths, the sample of its last segment, and
    their token-level arrays one after the other: `split_segments` cuts such arrays. Inputs in which every row
    is a trajectory stay as they are.
    """
    rows = np.arange(len(inputs.rewards))
    given = rows if inputs.trajectories is None else inputs.trajectories
    numbers, places = np.unique(given, return_inverse=True)
    if len(numbers) == len(rows):
        return inputs, rows

    segments = np.split(np.argsort(places, kind="stable"), np.cumsum(np.bincount(places))[:-1])

    def join(values: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        return tuple(np.concatenate([values[row] for row in rows]) for rows in segments if values)

    last = np.asarray([rows[-1] for rows in segments])
    return AdvantageInputs(
        rewards=inputs.rewards[last],
        group_indices=inputs.group_indices[last],
        lengths=None if inputs.lengths is None else np.bincount(places, inputs.lengths).astype(np.int64),
        named_rewards={name: values[last] for name, values in inputs.named_rewards.items()},
        reward_weights=inputs.reward_weights,
        samples=tuple(inputs.samples[row] for row in last) if inputs.samples else (),
        values=join(inputs.values),
        token_rewards=join(inputs.token_rewards),
        loss_masks=join(inputs.loss_masks),
    ), places


def split_segments(joined: FloatRows, places: NDArray[np.intp], loss_masks: Masks) -> FloatRows:
    """[T_i] per row, out of one array per trajectory of merge_segments; loss_masks are those of the rows."""
    left, rows = list(joined), list[FloatArray]()
    for place, mask in zip(places, loss_masks, strict=True):
        row, left[place] = np.split(left[place], [len(mask)])
        rows.append(row)
    return tuple(rows)


def require(condition: object, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def need_lengths(inputs: AdvantageInputs, kind: str) -> IntArray:
    """Tokens that train [B]. Raises ValueError when the inputs do not say."""
    if inputs.lengths is None:
        raise ValueError(
            f"advantage {kind!r} needs lengths, the tokens that train in each row; pass lengths="
        )
    return inputs.lengths


def check_rows(values: NDArray[Any], name: str, count: int) -> None:
    """Raises ValueError unless there is one value per row, and naming the first row that is not finite."""
    require(
        values.shape == (count,),
        f"{name} has shape {values.shape} for {count} rows; there must be one per row",
    )
    for row in np.flatnonzero(~np.isfinite(values)):
        raise ValueError(f"{name}[{row}] is {values[row]}; it must be finite, or it spoils its whole group")


def take_trained(name: str, rows: Rows, masks: Masks) -> list[Floats]:
    """The values of each row's trained tokens. Raises ValueError unless there is one value per token, and
    each of these is finite.
    """
    require(len(rows) == len(masks), f"there are {len(rows)} rows of {name} for {len(masks)} loss masks")
    taken = []
    for row, (values, mask) in enumerate(zip(rows, masks, strict=True)):
        wide = np.asarray(values, np.float64)
        require(
            wide.shape == mask.shape,
            f"{name}[{row}] has shape {wide.shape} and its loss mask {mask.shape}; one per token",
        )
        for token in np.flatnonzero(mask & ~np.isfinite(wide)):
            raise ValueError(
                f"{name}[{row}], token {token} is {wide[token]}; it must be finite where a token trains"
            )
        taken.append(wide[mask])
    return taken


def scatter_trained(trained: ArrayLike, mask: BoolArray) -> FloatArray:
    """[T_i] the values of the trained tokens in their places, 0 elsewhere."""
    row = np.zeros(len(mask), np.float32)
    row[mask] = trained
    return row


# --- self-play ----------------------------------------------------------------------------------------------


class RoleAdvantages(NamedTuple):
    """Advantages and what to pass as `baselines` next time."""

    advantages: FloatArray  # [B]
    baselines: dict[str, float]  # running mean reward of each role seen so far


def compute_role_advantages(
    rewards: ArrayLike, roles: Sequence[str], baselines: Numbers, *, decay: float = 0.95
) -> RoleAdvantages:
    """A = r − b[role], and then b[role] ← decay·b[role] + (1 − decay)·r, row by row in the order given: A is
    taken before r moves b.

    Roles of an unfair game (who moves first) have different means; one baseline for all would reward the
    role. An unknown role starts at 0. The same rewards in another order give other advantages, so keep the
    order fixed. Paper: SPIRAL's role-conditioned advantage estimation, 2506.24119. Raises ValueError on
    lengths that differ, a decay outside 0 to 1 (1 excluded), a reward or baseline not finite.
    """
    values = np.asarray(rewards, np.float64)
    require(0 <= decay < 1, f"decay={decay}; it must be at least 0 and below 1, 0.95 is usual")
    check_rows(values, "rewards", len(roles))
    means = {role: float(mean) for role, mean in baselines.items()}
    for role, mean in means.items():
        require(math.isfinite(mean), f"baselines[{role!r}] is {mean}; it must be finite")
    advantages = []
    for role, reward in zip(roles, values.tolist(), strict=True):
        mean = means.get(role, 0.0)
        advantages.append(reward - mean)
        means[role] = decay * mean + (1.0 - decay) * reward
    return RoleAdvantages(np.asarray(advantages, np.float32), means)

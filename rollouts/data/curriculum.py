"""Curricula: the weights of a mixture as a function of the step and of how the sources went so far.

curriculum(step, statistics) ─► check_weights ─► DataBuffer.set_weights ─► a batch
    ─► update_statistics ─► the next step
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rollouts.config.spelling import nearest
from rollouts.data.mixture import SOURCE_FIELD
from rollouts.errors import DataError, UserFunctionError
from rollouts.types import JSONValue, Sample


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """How a source went so far in this stage. Samples are those that trained."""

    drawn: int = 0  # prompts drawn off the source, each once, trained or not
    batches: int = 0  # batches that had a sample of it
    samples: int = 0
    reward_sum: float = 0.0  # of all its samples
    last_batch_reward: float | None = (
        None  # mean reward of its samples in the last batch that had one; None: no batch had
    )
    last_batch_step: int | None = None  # the step that batch trained

    @property
    def mean_reward(self) -> float | None:
        """Of all its samples; None without any."""
        return self.reward_sum / self.samples if self.samples else None


Curriculum = Callable[[int, Mapping[str, SourceStatistics]], Mapping[str, float]]
"""From the step about to run (from 1) and every source's statistics to the weights of all sources; 0
pauses a source. A pure function.
"""


def start_statistics(names: Iterable[str]) -> dict[str, SourceStatistics]:
    """What a stage begins with."""
    return {name: SourceStatistics() for name in names}


def update_statistics(
    statistics: Mapping[str, SourceStatistics],
    samples: Sequence[Sample],
    *,
    step: int,
    drawn: Mapping[str, int],
) -> dict[str, SourceStatistics]:
    """The statistics after the batch of `step`. `samples` are scored; `drawn` is how many prompts were drawn
    off each source so far.

    A sample is of the source that its metadata names; with one source it need not name it. Raises DataError
    for a sample of another source.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    only = next(iter(statistics)) if len(statistics) == 1 else None
    for sample in samples:
        name = only or str(sample.metadata.get(SOURCE_FIELD))
        if name not in statistics:
            raise DataError(
                f"sample {sample.id} has metadata.{SOURCE_FIELD}={name!r}, which is none of the sources"
                f" {', '.join(statistics)}"
            )
        assert sample.reward is not None, f"sample {sample.id} was not scored"
        rewards[name].append(sample.reward)
    return {
        name: _add_batch(replace(before, drawn=drawn[name]), rewards[name], step)
        for name, before in statistics.items()
    }


def _add_batch(before: SourceStatistics, rewards: Sequence[float], step: int) -> SourceStatistics:
    if not rewards:
        return before
    total = math.fsum(rewards)
    return replace(
        before,
        batches=before.batches + 1,
        samples=before.samples + len(rewards),
        reward_sum=before.reward_sum + total,
        last_batch_reward=total / len(rewards),
        last_batch_step=step,
    )


def encode_statistics(statistics: Mapping[str, SourceStatistics]) -> dict[str, JSONValue]:
    """As JSON, for a checkpoint."""
    return {name: asdict(source) for name, source in statistics.items()}


def decode_statistics(state: Mapping[str, JSONValue]) -> dict[str, SourceStatistics]:
    """The statistics that `encode_statistics` was given, to the last bit."""
    names = [field.name for field in fields(SourceStatistics)]
    return {
        name: SourceStatistics(**{field: source[field] for field in names}) for name, source in state.items()
    }


# --- the user's function ------------------------------------------------------------------------------------


def call_curriculum(
    curriculum: Curriculum, step: int, statistics: Mapping[str, SourceStatistics], *, function: str
) -> dict[str, float]:
    """The weights for `step`, checked. `function` is its name. Raises UserFunctionError, with the cause, if
    it raises or answers nonsense.
    """
    try:
        weights = curriculum(step, dict(statistics))
    except Exception as error:
        raise UserFunctionError(
            f"curriculum {function} raised {type(error).__name__} in step {step}: {error}"
        ) from error
    return check_weights(weights, list(statistics), function=function, step=step)


def check_weights(weights: object, names: Sequence[str], *, function: str, step: int) -> dict[str, float]:
    """The weights in the order of `names`. Raises UserFunctionError naming the function, the step and the
    value that breaks a rule.
    """
    what = f"curriculum {function} in step {step}"
    if not isinstance(weights, Mapping):
        raise UserFunctionError(
            f"{what} gave a value of type {type(weights).__name__}; it must give a weight for each of"
            f" {', '.join(names)}"
        )
    for name in weights:
        if name not in names:
            close = nearest(str(name), names)
            hint = f"; did you mean {close}?" if close else ""
            raise UserFunctionError(
                f"{what} gave a weight to {name!r}; the sources are {', '.join(names)}{hint}"
            )
    for name in names:
        if name not in weights:
            raise UserFunctionError(f"{what} gave no weight to {name}; every source needs one, 0 pauses it")
    checked = {name: _check_weight(weights[name], f"{what} gave {name}") for name in names}
    if not any(checked.values()):
        raise UserFunctionError(f"{what} gave every source the weight 0; one of them must be drawn")
    return checked


def _check_weight(weight: Any, what: str) -> float:
    if (
        isinstance(weight, bool)
        or not isinstance(weight, numbers.Real)
        or not math.isfinite(weight)
        or weight < 0
    ):
        raise UserFunctionError(f"{what} the weight {weight!r}; a weight is a finite number, 0 or more")
    return float(weight)


# --- ready ones ---------------------------------------------------------------------------------------------


def linear_shift(
    start: Mapping[str, float], end: Mapping[str, float], *, first_step: int, last_step: int
) -> Curriculum:
    """A curriculum that has the shares of `start` up to `first_step`, those of `end` from `last_step`, and
    goes straight between them.

    Raises ValueError if the two name different sources, have a negative weight or none above 0, or last_step
    is not after first_step.
    """
    if set(start) != set(end):
        raise ValueError(
            f"start names {', '.join(start)} but end names {', '.join(end)}; both name every source"
        )
    if last_step <= first_step:
        raise ValueError(f"last_step={last_step} is not after first_step={first_step}")
    for name, weights in (("start", start), ("end", end)):
        if any(weight < 0 for weight in weights.values()) or not sum(weights.values()) > 0:
            raise ValueError(f"{name} is {dict(weights)}; weights are 0 or more, and one is above 0")

    def shift(step: int, statistics: Mapping[str, SourceStatistics]) -> Mapping[str, float]:
        done = min(max((step - first_step) / (last_step - first_step), 0.0), 1.0)
        return {
            name: (1 - done) * start[name] / sum(start.values()) + done * end[name] / sum(end.values())
            for name in start
        }

    return shift


def favour_medium(
    step: int,
    statistics: Mapping[str, SourceStatistics],
    *,
    low: float = 0.0,
    high: float = 1.0,
    floor: float = 0.1,
) -> dict[str, float]:
    """The most weight to sources that are neither solved nor hopeless: floor + (1 - floor) * 4 * p * (1 - p).

    p is the mean reward of the last batch that had the source, from 0 at reward `low` to 1 at `high`; a
    source no batch had yet has p = 1/2. `floor` keeps the others drawn, so that a change is noticed.
    """
    assert low < high and 0 < floor <= 1, (low, high, floor)
    weights: dict[str, float] = {}
    for name, source in statistics.items():
        reward = source.last_batch_reward
        share = 0.5 if reward is None else min(max((reward - low) / (high - low), 0.0), 1.0)
        weights[name] = floor + (1 - floor) * 4 * share * (1 - share)
    return weights

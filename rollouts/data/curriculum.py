"""Curricula: the weights of a mixture as a function of the step and of how the sources went so far.

curriculum(step, statistics) ─► call_curriculum checks the weights ─► DataBuffer.set_weights ─► a batch
    ─► update_statistics ─► the next step
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rollouts.data.mixture import SOURCE_FIELD, parse_weights
from rollouts.errors import DataError, UserFunctionError
from rollouts.types import Fields, Numbers, Sample, split_trajectories


class SourceStatistics(NamedTuple):
    """How a source went so far in this stage. Samples are those that trained and have a reward."""

    drawn: int = 0  # prompts drawn off the source, each once, trained or not
    batches: int = 0  # batches that had a sample of it
    samples: int = 0
    reward_sum: float = 0.0  # of all its samples
    # mean reward of its samples in the last batch that had one; None: no batch had
    last_batch_reward: float | None = None
    last_batch_step: int | None = None  # the step that batch trained

    @property
    def mean_reward(self) -> float | None:
        """Of all its samples; None without any."""
        return self.reward_sum / self.samples if self.samples else None


BySource = Mapping[str, SourceStatistics]
Curriculum = Callable[[int, BySource], Numbers]
"""From the step about to run (from 1) and every source's statistics to the weights of all sources; 0
pauses a source. A pure function.
"""


def update_statistics(
    statistics: BySource,
    samples: Sequence[Sample],
    *,
    step: int,
    drawn: Mapping[str, int],
) -> dict[str, SourceStatistics]:
    """The statistics after the batch of `step`. `drawn` is how many prompts were drawn
    off each source so far.

    A sample is of the source that its metadata names; with one source it need not name it. A trajectory of
    several segments counts once. Raises DataError
    for a sample of another source.
    """
    after = {name: before._replace(drawn=drawn[name]) for name, before in statistics.items()}
    rewards = {}
    for *_, sample in split_trajectories(samples):
        name = next(iter(after)) if len(after) == 1 else str(sample.metadata.get(SOURCE_FIELD))
        if name not in after:
            raise DataError(
                f"sample {sample.id} has metadata.{SOURCE_FIELD}={name!r}, which is none of the sources"
                f" {', '.join(after)}"
            )
        if sample.reward is not None:
            rewards.setdefault(name, []).append(sample.reward)
    for name, batch in rewards.items():
        one, count, total = after[name], len(batch), math.fsum(batch)
        after[name] = SourceStatistics(
            one.drawn, one.batches + 1, one.samples + count, one.reward_sum + total, total / count, step
        )
    return after


def decode_statistics(state: Fields, names: Collection[str]) -> dict[str, SourceStatistics]:
    """The statistics, to the last bit, of the sources `names` out of a checkpoint, which has each as its
    `_asdict()` gives it. The only source may have another name than it had.
    """
    found = dict(zip(names, state.values(), strict=True)) if len(state) == 1 else state
    return {name: SourceStatistics(**found[name]) for name in names}


def call_curriculum(curriculum: Curriculum, step: int, statistics: BySource, *, function: str) -> Numbers:
    """The weights for `step`, checked. `function` is its name. Raises UserFunctionError, with the cause, if
    it raises, and naming the value if that is no weight of each source.
    """
    where = f"curriculum {function} in step {step}"
    try:
        weights = curriculum(step, dict(statistics))
        values, shown = parse_weights(weights, list(statistics)), repr(weights)
    except (Exception, SystemExit, GeneratorExit) as error:  # or what it gave, when it was looked at
        raise UserFunctionError(f"{where} raised {type(error).__name__}: {error}") from error
    if values is None:
        raise UserFunctionError(
            f"{where} gave {shown}; it must give each of {', '.join(statistics)} a finite number, 0 or more,"
            " and one above 0"
        )
    return dict(zip(statistics, values, strict=True))


# --- ready ones ---------------------------------------------------------------------------------------------


def linear_shift(start: Numbers, end: Numbers, *, first_step: int, last_step: int) -> Curriculum:
    """A curriculum that has the shares of `start` up to `first_step`, those of `end` from `last_step`, and
    goes straight between them.

    Raises ValueError if the two name different sources, have a negative weight or none above 0, or last_step
    is not after first_step.
    """
    first, last = (parse_weights(weights, list(start)) for weights in (start, end))
    if first is None or last is None or last_step <= first_step:
        raise ValueError(
            f"start={dict(start)}, end={dict(end)}, first_step={first_step}, last_step={last_step}: both name"
            " every source, weights are 0 or more and one is above 0, and last_step is after first_step"
        )

    def shift(step: int, statistics: BySource) -> Numbers:
        done = min(max((step - first_step) / (last_step - first_step), 0.0), 1.0)
        pairs = zip(start, first, last, strict=True)
        return {name: (1 - done) * one / sum(first) + done * two / sum(last) for name, one, two in pairs}

    return shift


def favour_medium(
    step: int,
    statistics: BySource,
    *,
    low: float = 0.0,
    high: float = 1.0,
    floor: float = 0.1,
) -> Numbers:
    """The most weight to sources that are neither solved nor hopeless: floor + (1 - floor) * 4 * p * (1 - p).

    p is the mean reward of the last batch that had the source, from 0 at reward `low` to 1 at `high`; a
    source no batch had yet has p = 1/2. `floor` keeps the others drawn, so that a change is noticed.
    """
    assert low < high and 0 < floor <= 1, (low, high, floor)
    weights = {}
    for name, source in statistics.items():
        reward = source.last_batch_reward
        share = 0.5 if reward is None else min(max((reward - low) / (high - low), 0.0), 1.0)
        weights[name] = floor + (1 - floor) * 4 * share * (1 - share)
    return weights

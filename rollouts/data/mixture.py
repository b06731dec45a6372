"""Several sources drawn in exact proportions, each in its own seeded order.

After k draws a source of share w has been drawn more than w * k - 1 and fewer than w * k + 1 times. Whichever
would be a whole draw behind soonest goes next: serving the largest deficit instead lets small sources fall
behind by more than one. Shares are fractions of whole numbers, so nothing drifts.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from rollouts.data.rows import BadRow
from rollouts.types import IntArray

S = TypeVar("S")
T = TypeVar("T")
SOURCE_FIELD = "source"  # of a sample's metadata, when there are several sources
OWED_UNIT = 1_000_000  # parts of a draw in which a debt is kept when weights change


@dataclass(frozen=True, eq=False)  # without slots: what is counted once is kept
class Source(Generic[T]):
    """The rows of one source in its own order, as they were read or made ready to train."""

    name: str  # of the source in a mixture
    weight: float  # relative to the other sources of the mixture
    rows: tuple[T | None, ...]  # None: a hole, which keeps its place and is never drawn
    bad: tuple[BadRow, ...] = ()  # what is wrong with the malformed ones

    @cached_property
    def good(self) -> list[T]:
        """The rows that are no holes."""
        return [row for row in self.rows if row is not None]


@dataclass(frozen=True, eq=False)
class Mixture(Generic[T]):
    """Sources with their names and weights. One source alone is a mixture too."""

    sources: tuple[Source[T], ...]
    truncated: int = 0  # token rows cut at max_length; the tokens after it do not train
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason → samples left out

    @cached_property
    def samples(self) -> list[T]:
        """The rows of all sources that are no holes, in order."""
        return [row for source in self.sources for row in source.good]

    def with_samples(self, samples: Iterable[S]) -> Mixture[S]:
        """The same with other samples in the places of these, in order."""
        left = iter(samples)
        sources = [
            Source(
                source.name, source.weight, tuple(None if row is None else next(left) for row in source.rows)
            )
            for source in self.sources
        ]
        return Mixture(tuple(sources), self.truncated, self.dropped)


def make_mixture(rows: Sequence[T | None]) -> Mixture[T]:
    """One source of these rows, where None is a hole."""
    return Mixture((Source("source-0", 1.0, tuple(rows)),))


def order_rows(rows: Sequence[object | None], key: int) -> IntArray:
    """The positions of the rows that are no holes, in an order that depends on the number of rows and `key`:
    a stable sort of raw 64-bit draws of Philox, which numpy promises not to change, unlike its shuffles.
    """
    order = np.argsort(np.random.Philox(key=key).random_raw(len(rows)), kind="stable").astype(np.int64)
    return order[np.array([row is not None for row in rows])[order]]


def parse_weights(weights: object, names: Sequence[str]) -> tuple[float, ...] | None:
    """The weights in the order of `names`; None unless each name, and no other, has a finite number of 0 or
    more, and one is above 0.
    """
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        return None
    values = [weights[name] for name in names]
    are_numbers = all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in values)
    if not are_numbers or not any(values) or not all(0 <= one < math.inf for one in values):
        return None
    return tuple(float(one) for one in values)


# --- whose turn it is ---------------------------------------------------------------------------------------


class Turns:
    """Whose turn it is, draw by draw."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self.amounts = compute_amounts(weights)
        self.counts = [0] * len(weights)  # draws of each source since the weights were last changed
        self.owed = [0] * len(
            weights
        )  # what each had coming then, in OWED_UNIT parts of a draw; the sum is 0

    def take(self) -> int:
        """The source that is drawn now: of those whose next draw is due, the one that would be a whole draw
        behind soonest; among equals the one that is furthest behind, then the first.
        """
        total, turn = sum(self.amounts), sum(self.counts) + 1
        due: list[tuple[int, int, int]] = []
        for index, (amount, count, owed) in enumerate(zip(self.amounts, self.counts, self.owed, strict=True)):
            had = OWED_UNIT * count - owed
            behind = OWED_UNIT * amount * turn - had * total
            if amount and behind > 0:
                deadline = -(-total * (had + OWED_UNIT) // (OWED_UNIT * amount))
                due.append((deadline, -behind, index))
        index = min(due)[2]
        self.counts[index] += 1
        return index

    def set_weights(self, weights: Sequence[float]) -> None:
        """Draws from here on in the proportions of `weights`; those in force already change nothing.

        What a source has coming it keeps: a small source would never have its turn if weights changed before
        every batch. A source whose share becomes 0 gives up what it had coming, or is forgiven; the others
        share the difference in their new proportions.
        """
        self.weights, amounts = tuple(weights), compute_amounts(weights)
        if amounts == self.amounts:
            return
        drawn = Fraction(sum(self.counts), sum(self.amounts))
        debts = [
            amount * drawn - count + Fraction(owed, OWED_UNIT)
            for amount, count, owed in zip(self.amounts, self.counts, self.owed, strict=True)
        ]
        left = sum(debt for debt, new in zip(debts, amounts, strict=True) if not new) / sum(amounts)
        self.owed = [
            math.floor((debt + left * new) * OWED_UNIT) if new else 0
            for debt, new in zip(debts, amounts, strict=True)
        ]
        self.owed[amounts.index(max(amounts))] -= sum(self.owed)
        self.amounts, self.counts = amounts, [0] * len(amounts)


def compute_amounts(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of `weights`, each of which means its shortest decimal:
    0.1 is a tenth.
    """
    parts = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(part.denominator for part in parts))
    amounts = [int(part * scale) for part in parts]
    return tuple(amount // math.gcd(*amounts) for amount in amounts)


# --- batches that need no state -----------------------------------------------------------------------------


def select_samples(mixture: Mixture[T], batch_size: int, step: int, seed: int) -> list[T]:
    """The samples of the step after `step` completed ones: a pure function, so a resumed run needs no state.

    The sources take turns in exact proportions over the whole run, and each goes through its own epochs:
    every row once, in an order that depends on seed, epoch and, in a mixture, the source's name. A batch may
    reach into the next epoch.
    """
    assert batch_size > 0 and step >= 0, (batch_size, step)
    sources = mixture.sources
    turns, taken = _start_turns(tuple(source.weight for source in sources))
    cycle, first = sum(turns.amounts), step * batch_size
    while len(taken) < min(cycle, first + batch_size):
        taken.append(turns.take())  # after a cycle the turns begin again
    cycles, rest = divmod(first, cycle)
    before = np.bincount(np.array(taken)[:rest], minlength=len(sources))
    drawn = (cycles * np.array(turns.amounts) + before).tolist()
    chosen: list[T] = []
    for turn in range(first, first + batch_size):
        index = taken[turn % cycle]
        source = sources[index]
        epoch, place = divmod(drawn[index], len(source.good))
        order = _order_epoch(source, epoch, seed, source.name if len(sources) > 1 else "")
        sample = source.rows[order[place]]
        assert sample is not None, "a hole was drawn"
        chosen.append(sample)
        drawn[index] += 1
    return chosen


@lru_cache(maxsize=8)
def _start_turns(weights: tuple[float, ...]) -> tuple[Turns, array[int]]:
    """The turns of SFT's draws with these weights, and those that were taken so far: a caller takes more."""
    return Turns(weights), array("H")


@lru_cache(maxsize=32)
def _order_epoch(source: Source[Any], epoch: int, seed: int, name: str) -> IntArray:
    digest = hashlib.sha256(f"sft/{seed}/{name}/{epoch}".encode()).digest()
    key = int.from_bytes(digest[:16], "little") if name else epoch << 64 | seed % 2**64
    return order_rows(source.rows, key)

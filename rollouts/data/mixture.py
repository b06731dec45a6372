"""Several sources drawn in exact proportions, each in its own seeded order.

After k draws a source of share w has been drawn more than w * k - 1 and fewer than w * k + 1 times. Whichever
would be a whole draw behind soonest goes next: serving the largest deficit instead lets small sources fall
behind by more than one. Shares are fractions of whole numbers, so nothing drifts.
"""

import hashlib
import math
import numbers
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Generic

import numpy as np

from rollouts.errors import DataError
from rollouts.types import IntArray, T

SOURCE_FIELD = "source"  # of a sample's metadata, when there are several sources
DRAW_PARTS = 1_000_000  # of a draw, in which a debt is kept when weights change


@dataclass(frozen=True, eq=False)  # without slots: what is counted once is kept
class Source(Generic[T]):
    """The rows of one source in its own order, as they were read or made ready to train."""

    name: str  # of the source in a mixture
    weight: float  # relative to the other sources of the mixture
    rows: tuple[T | None, ...]  # None: a hole, which keeps its place and is never drawn
    bad: tuple[str, ...] = ()  # the malformed ones: the place of each and what is wrong with it

    @cached_property
    def good(self) -> list[T]:
        """The rows that are no holes."""
        return [row for row in self.rows if row is not None]

    @cached_property
    def _orders(self) -> dict[int, IntArray]:
        return {}

    def order(self, key: int) -> IntArray:
        """The positions of the rows that are no holes, in an order that depends on the number of rows and
        `key`: a stable sort of raw 64-bit draws of Philox, which numpy promises not to change, unlike its
        shuffles. A negative key is their own order. The newest order is kept.
        """
        if key not in self._orders:
            places = np.arange(len(self.rows))
            if key >= 0:
                places = np.argsort(np.random.Philox(key=key).random_raw(len(places)), kind="stable")
            self._orders.clear()
            self._orders[key] = places[np.array([row is not None for row in self.rows])[places]]
        return self._orders[key]


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

    def keep(self, wanted: Callable[[T], bool], problem: str) -> "Mixture[T]":
        """The rows that are wanted, and the holes. Raises DataError for a source without a row left:
        `problem` with " from NAME" for its {}.
        """
        kept = tuple(
            replace(one, rows=tuple(row for row in one.rows if row is None or wanted(row)))
            for one in self.sources
        )
        for before, source in zip(self.sources, kept, strict=True):
            if before.good and not source.good:
                raise DataError(problem.format(f" from {source.name}" if len(kept) > 1 else ""))
        return replace(self, sources=kept)

    def with_samples(self, samples: Iterable[Any]) -> "Mixture[Any]":
        """The same with other samples in the places of these, in order."""
        left = iter(samples)
        sources = tuple(
            replace(one, rows=tuple(None if row is None else next(left) for row in one.rows))
            for one in self.sources
        )
        return replace(self, sources=sources)


def make_mixture(rows: Iterable[T | None]) -> Mixture[T]:
    """One source of these rows, where None is a hole."""
    return Mixture((Source("source-0", 1.0, tuple(rows)),))


def parse_weights(weights: object, names: Sequence[str]) -> tuple[float, ...] | None:
    """The weights in the order of `names`; None unless each name, and no other, has a finite number of 0 or
    more, and one is above 0.
    """
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        return None
    values = [weights[name] for name in names]
    fit = all(
        isinstance(one, numbers.Real) and not isinstance(one, bool) and 0 <= float(one) < math.inf
        for one in values
    )
    return tuple(map(float, values)) if fit and any(values) else None


# --- whose turn it is ---------------------------------------------------------------------------------------


class Turns:
    """Whose turn it is, draw by draw."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self.amounts = compute_amounts(weights)
        # what each source has coming, in parts of which a draw has DRAW_PARTS * sum(amounts); the sum is 0
        self.owed = [0] * len(weights)

    def take(self) -> int:
        """The source that is drawn now: of those whose next draw is due, the one that would be a whole draw
        behind soonest; among equals the one that is furthest behind, then the first.
        """
        shares = [DRAW_PARTS * amount for amount in self.amounts]
        self.owed = [owed + share for owed, share in zip(self.owed, shares, strict=True)]
        draw = sum(shares)
        due = [index for index, owed in enumerate(self.owed) if owed > 0]
        index = max(due, key=lambda one: ((self.owed[one] - draw) // shares[one], self.owed[one]))
        self.owed[index] -= draw
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
        before, after = sum(self.amounts), sum(amounts)
        given_up = sum(owed for owed, amount in zip(self.owed, amounts, strict=True) if not amount)
        self.owed = [
            (owed * after + given_up * amount) // before if amount else 0
            for owed, amount in zip(self.owed, amounts, strict=True)
        ]
        self.owed[amounts.index(max(amounts))] -= sum(self.owed)
        self.amounts = amounts


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
    turns, counts, taken = _start_turns(tuple(source.weight for source in sources))
    chosen = []
    for turn in range(step * batch_size, (step + 1) * batch_size):
        cycle, place = divmod(turn, sum(turns.amounts))  # after a cycle the turns begin again
        while len(taken) <= place:
            index = turns.take()
            taken.append(counts[index] << 16 | index)
            counts[index] += 1
        earlier, index = divmod(taken[place], 1 << 16)
        source = sources[index]
        epoch, place = divmod(cycle * turns.amounts[index] + earlier, len(source.good))
        key = epoch << 64 | seed % 2**64
        if len(sources) > 1:
            text = f"sft/{seed}/{source.name}/{epoch}"
            key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
        sample = source.rows[source.order(key)[place]]
        assert sample is not None, "a hole was drawn"
        chosen.append(sample)
    return chosen


@lru_cache(maxsize=8)
def _start_turns(weights: tuple[float, ...]) -> "tuple[Turns, list[int], array[int]]":
    """The turns of SFT's draws with these weights, how often each source was drawn, and each draw so far, as
    the earlier draws of its source << 16 | the source: a caller takes more.
    """
    return Turns(weights), [0] * len(weights), array("Q")

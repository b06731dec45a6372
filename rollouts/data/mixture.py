"""Several sources drawn in exact proportions, each in its own seeded order.

After k draws a source of share w has been drawn more than w * k - 1 and fewer than w * k + 1 times. Whichever
would be a whole draw behind soonest goes next: serving the largest deficit instead lets small sources fall
behind by more than one. Shares are fractions of whole numbers, so nothing drifts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from rollouts.data.rows import SourceRows
from rollouts.errors import DataError
from rollouts.types import IntArray

S = TypeVar("S")
SOURCE_FIELD = "source"  # of a sample's metadata, when there are several sources
OWED_UNIT = 1_000_000  # parts of a draw in which a debt is kept when weights change


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources with their names and weights. One source alone is a mixture too."""

    sources: tuple[SourceRows, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources, in order."""
        return tuple(source.name for source in self.sources)

    @property
    def weights(self) -> Mapping[str, float]:
        """By source, relative to each other."""
        return {source.name: source.weight for source in self.sources}

    @property
    def row_count(self) -> int:
        """Rows of all sources that are no holes."""
        return sum(source.good_count for source in self.sources)

    def check_fields(self, *, name: str) -> None:
        """Raises DataError if there are several sources and a row has the field that will say which one it is
        of.
        """
        if len(self.sources) == 1:
            return
        for index, source in enumerate(self.sources):
            if any(row is not None and SOURCE_FIELD in row for row in source.rows):
                raise DataError(
                    f"{name}.{index} ({source.name}): its rows have a field {SOURCE_FIELD}, which says in a"
                    " mixture what source a sample is of; "
                    f'give it another name with columns.NAME = "{SOURCE_FIELD}", or leave it out with'
                    f' columns.{SOURCE_FIELD} = ""'
                )


def make_mixture(rows: Sequence[Mapping[str, Any] | None]) -> Mixture:
    """One source of these rows, where None is a hole."""
    return Mixture((SourceRows("source-0", 1.0, tuple(None if row is None else dict(row) for row in rows)),))


def metric_name(source: str) -> str:
    """A source's name as part of a metric's name."""
    return re.sub(r"[^a-z0-9_]", "_", source.lower())


# --- whose turn it is ---------------------------------------------------------------------------------------


def compute_amounts(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of `weights`, each of which means its shortest decimal:
    0.1 is a tenth.
    """
    parts = [Fraction(str(weight)) for weight in weights]
    assert parts and all(part >= 0 for part in parts) and any(parts), weights
    amounts = [int(part * math.lcm(*(other.denominator for other in parts))) for part in parts]
    common = math.gcd(*amounts)
    return tuple(amount // common for amount in amounts)


def choose_source(amounts: Sequence[int], counts: Sequence[int], owed: Sequence[int] | None = None) -> int:
    """Whose turn it is after `counts` draws of each: of those whose next draw is due, the one that would be a
    whole draw behind soonest.

    `owed` is what each had coming before the first of these draws, in OWED_UNIT parts of a draw; the sum is
    0. Among equals the one that is furthest behind, then the first.
    """
    owed = owed or (0,) * len(amounts)
    total, turn = sum(amounts), sum(counts) + 1
    best: tuple[int, int, int] | None = None
    for index, (amount, count, owes) in enumerate(zip(amounts, counts, owed, strict=True)):
        behind = OWED_UNIT * (amount * turn - count * total) + owes * total
        if amount and behind > 0:
            deadline = -(-total * (OWED_UNIT * (count + 1) - owes) // (OWED_UNIT * amount))
            best = min(best or (deadline, -behind, index), (deadline, -behind, index))
    assert best is not None, "the deficits do not sum to one draw"
    return best[2]


def settle(
    amounts: Sequence[int], counts: Sequence[int], owed: Sequence[int], new_amounts: Sequence[int]
) -> tuple[int, ...]:
    """What every source has coming when the proportions become `new_amounts`, in OWED_UNIT parts of a draw;
    the sum is 0.

    Without this, a small source would never have its turn if weights changed before every batch. A source
    whose share becomes 0 gives up what it had coming, or is forgiven; the others share the difference in
    their new proportions.
    """
    total, drawn, new_total = sum(amounts), sum(counts), sum(new_amounts)
    debts = [
        Fraction(amount * drawn, total) - count + Fraction(owes, OWED_UNIT)
        for amount, count, owes in zip(amounts, counts, owed, strict=True)
    ]
    left = sum(debt for debt, new in zip(debts, new_amounts, strict=True) if not new)
    shared = [
        debt + left * Fraction(new, new_total) if new else Fraction(0)
        for debt, new in zip(debts, new_amounts, strict=True)
    ]
    rounded = [math.floor(debt * OWED_UNIT) for debt in shared]
    largest = max(range(len(new_amounts)), key=lambda index: new_amounts[index])
    rounded[largest] -= sum(rounded)
    return tuple(rounded)


BLOCK = 4096  # draws between the places whose counts are kept


@lru_cache(maxsize=2048)
def _take_block(amounts: tuple[int, ...], block: int) -> tuple[IntArray, tuple[int, ...]]:
    """Whose turn each draw of a block is, and the draws of each source after it."""
    counts = [0] * len(amounts)
    for number in range(block):
        counts = list(_take_block(amounts, number)[1])
    turns = np.empty(BLOCK, np.int64)
    for place in range(BLOCK):
        turns[place] = index = choose_source(amounts, counts)
        counts[index] += 1
    turns.flags.writeable = False
    return turns, tuple(counts)


# --- batches that need no state -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchSource:
    """What the order of a source's rows in SFT depends on."""

    name: str
    size: int  # positions, holes included
    weight: float = 1.0
    holes: frozenset[int] = frozenset()  # positions that are never drawn; the others keep their order


def make_batch_source(name: str, weight: float, slots: Sequence[object | None]) -> BatchSource:
    """A source whose holes are the slots that are None."""
    holes = frozenset(index for index, slot in enumerate(slots) if slot is None)
    return BatchSource(name, len(slots), weight, holes)


@dataclass(frozen=True, slots=True)
class SampleMixture(Generic[S]):
    """The samples of all sources, one after the other, and what the order of their draws depends on."""

    slots: tuple[S | None, ...]  # None: a malformed row, which keeps its place and is never drawn
    sources: tuple[BatchSource, ...]
    truncated: int  # token rows cut at max_length; the tokens after it do not train
    dropped: Mapping[str, int]  # reason → samples left out

    @property
    def samples(self) -> tuple[S, ...]:
        """In the order of their rows, without holes."""
        return tuple(slot for slot in self.slots if slot is not None)


def make_sample_mixture(samples: Sequence[S]) -> SampleMixture[S]:
    """One source of these samples."""
    return SampleMixture(tuple(samples), (make_batch_source("", 1.0, samples),), 0, {})


def prepare_samples(
    mixture: Mixture,
    prepare: Callable[[Mapping[str, Any], int, str], tuple[S, int] | str],
    *,
    max_length: int,
    name: str,
) -> SampleMixture[S]:
    """The samples of all rows. `prepare(row, row id, where)` gives a sample and how many of its token rows
    are cut, or the reason for which it is dropped; then it takes no place.

    Raises DataError naming max_length if nothing is left of a source.
    """
    slots: list[S | None] = []
    sources: list[BatchSource] = []
    all_dropped: Counter[str] = Counter()
    truncated = 0
    for index, source in enumerate(mixture.sources):
        key = f"{name}.{index}" if len(mixture.sources) > 1 else name
        own: list[S | None] = []
        dropped: Counter[str] = Counter()
        for row_id, row in enumerate(source.rows):
            if row is None:
                own.append(None)
                continue
            answer = prepare(row, row_id, f"{key}: row {row_id}")
            if isinstance(answer, str):
                dropped[answer] += 1
            else:
                own.append(answer[0])
                truncated += answer[1]
        if all(slot is None for slot in own):
            counts = ", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "there is none"
            advice = f"raise {name.partition('.')[0]}.max_length={max_length}, or use other rows"
            raise DataError(f"{key}: none of {dropped.total()} rows can train ({counts}); {advice}")
        all_dropped += dropped
        slots += own
        sources.append(make_batch_source(source.name, source.weight, own))
    return SampleMixture(tuple(slots), tuple(sources), truncated, dict(all_dropped))


def select_samples(mixture: SampleMixture[S], batch_size: int, step: int, seed: int) -> list[S]:
    """The samples of the step after `step` completed ones; see select_mixture_batch."""
    chosen = [mixture.slots[slot] for slot in select_mixture_batch(mixture.sources, batch_size, step, seed)]
    samples = [sample for sample in chosen if sample is not None]
    assert len(samples) == len(chosen), "a hole was drawn"
    return samples


def select_mixture_batch(sources: Sequence[BatchSource], batch_size: int, step: int, seed: int) -> list[int]:
    """The rows of the step after `step` completed ones, numbered through all sources: a pure function, so a
    resumed run needs no state.

    The sources take turns in exact proportions over the whole run, and each goes through its own epochs:
    every row once, in an order that depends on seed, epoch and, in a mixture, the source's name. A batch may
    reach into the next epoch.
    """
    assert sources and batch_size > 0 and step >= 0, (sources, batch_size, step)
    assert all(source.size > len(source.holes) for source in sources), "a source has no row"
    amounts = compute_amounts([source.weight for source in sources])
    turns, drawn = _turns_from(amounts, step * batch_size, batch_size)
    starts = np.cumsum([0, *(source.size for source in sources)])
    chosen: list[int] = []
    for index in turns:
        source = sources[index]
        epoch, place = divmod(drawn[index], source.size - len(source.holes))
        chosen.append(
            int(
                starts[index]
                + _epoch_order(
                    source.size, epoch, seed, source.name if len(sources) > 1 else "", source.holes
                )[place]
            )
        )
        drawn[index] += 1
    return chosen


def _turns_from(amounts: tuple[int, ...], first: int, count: int) -> tuple[list[int], list[int]]:
    """(whose turn draws `first` … `first + count - 1` are, from 0; draws of each source before them).

    After sum(amounts) draws the turns begin again.
    """
    cycles, rest = divmod(first, sum(amounts))
    block, skipped = divmod(rest, BLOCK)
    turns = np.concatenate(
        [_take_block(amounts, number)[0] for number in range(block, (rest + count - 1) // BLOCK + 1)]
    )
    before = _take_block(amounts, block - 1)[1] if block else (0,) * len(amounts)
    skips = np.bincount(turns[:skipped], minlength=len(amounts)).tolist()
    drawn = [
        cycles * amount + start + more for amount, start, more in zip(amounts, before, skips, strict=True)
    ]
    return turns[skipped : skipped + count].tolist(), drawn


def select_sft_batch(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The rows of the step after `step` completed ones, of one source without holes; see
    `select_mixture_batch`.
    """
    return select_mixture_batch([BatchSource("", num_rows)], batch_size, step, seed)


@lru_cache(maxsize=32)
def _epoch_order(num_rows: int, epoch: int, seed: int, name: str, holes: frozenset[int]) -> IntArray:
    """A stable sort of raw 64-bit draws of Philox, which numpy promises not to change, unlike its shuffles;
    without the holes.
    """
    if name:
        key = np.frombuffer(
            hashlib.sha256(f"sft/{seed}/{name}/{epoch}".encode()).digest()[:16], "<u8"
        ).astype(np.uint64)
    else:
        key = np.array([seed % 2**64, epoch], np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")
    return order[~np.isin(order, list(holes))] if holes else order

"""Several sources drawn in exact proportions, each in its own seeded order.

After k draws a source of share w has been drawn more than w * k - 1 and fewer than w * k + 1 times. Whichever
would be a whole draw behind soonest goes next: serving the largest deficit instead lets small sources fall
behind by more than one. Shares are fractions of whole numbers, so nothing drifts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

import numpy as np

from rollouts.data.rows import SourceRows
from rollouts.errors import DataError
from rollouts.types import IntArray

S = TypeVar("S")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
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


def check_names(names: Sequence[str], *, name: str) -> None:
    """Raises DataError for a source whose name is out of form, or would have the metrics of another."""
    seen: dict[str, str] = {}
    for index, source in enumerate(names):
        if not NAME.fullmatch(source):
            raise DataError(
                f"{name}.{index}.name={source!r}; a name has letters, digits, '_', '.' and '-' and begins"
                " with a letter or digit"
            )
        other = seen.setdefault(metric_name(source), source)
        if len(seen) <= index:
            raise DataError(
                f"{name}.{index}.name={source!r} is too like {other!r}: their metrics would have one name;"
                " choose another"
            )


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


def compute_turns(amounts: tuple[int, ...], count: int) -> IntArray:
    """Whose turn each of the first `count` draws is; after sum(amounts) of them it begins again."""
    needed = min(count, sum(amounts))
    blocks = [_turns_of_block(amounts, block) for block in range(-(-needed // BLOCK))]
    return np.concatenate(blocks)[:needed] if blocks else np.empty(0, np.int64)


BLOCK = 4096  # draws between the places whose counts are kept


@lru_cache(maxsize=8)
def _counts_of_blocks(amounts: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Draws of each source before a block, for the blocks that were asked for and all before them: it grows
    as a run goes on.
    """
    return {0: (0,) * len(amounts)}


def _counts_before(amounts: tuple[int, ...], block: int) -> tuple[int, ...]:
    known = _counts_of_blocks(amounts)
    for number in range(min(block, len(known) - 1), block):
        if number + 1 not in known:
            known[number + 1] = take_turns(amounts, known[number], BLOCK)[1]
    return known[block]


@lru_cache(maxsize=16)
def _turns_of_block(amounts: tuple[int, ...], block: int) -> IntArray:
    turns, after = take_turns(amounts, _counts_before(amounts, block), BLOCK)
    _counts_of_blocks(amounts)[block + 1] = after
    array = np.array(turns, np.int64)
    array.flags.writeable = False
    return array


def take_turns(
    amounts: Sequence[int], counts: Sequence[int], length: int
) -> tuple[list[int], tuple[int, ...]]:
    """(whose turn the `length` draws after `counts` are, the counts then): what `choose_source` says draw by
    draw, but much faster.

    A source's next draw is due from one draw on and late after another, and both stay as they are until it is
    drawn, so two heaps hold them: numbers place * size + index. The place moves on by total / amount, in
    whole numbers with a rest.
    """
    total, drawn, size = sum(amounts), sum(counts), len(amounts)
    after = list(counts)
    strides = [divmod(total, amount) if amount else (0, 0) for amount in amounts]
    ends = [
        divmod(total * (count + 1), amount) if amount else (0, 0)
        for amount, count in zip(amounts, counts, strict=True)
    ]
    floors, rests = [floor for floor, _ in ends], [rest for _, rest in ends]
    due: list[int] = []  # by deadline
    waiting = [
        (total * count // amount + 1) * size + index
        for index, (amount, count) in enumerate(zip(amounts, counts, strict=True))
        if amount
    ]
    heapify(waiting)
    turns: list[int] = []
    for turn in range(drawn + 1, drawn + length + 1):
        now_due = (turn + 1) * size
        while waiting and waiting[0] < now_due:
            index = heappop(waiting) % size
            heappush(due, (floors[index] + (rests[index] > 0)) * size + index)
        deadline, index = divmod(heappop(due), size)
        if due and due[0] < (deadline + 1) * size:
            index = _furthest_behind(amounts, after, turn, (deadline, index), due)
        turns.append(index)
        after[index] += 1
        heappush(waiting, (floors[index] + 1) * size + index)
        whole, part = strides[index]
        rest = rests[index] + part
        carry = rest >= amounts[index]
        floors[index] += whole + carry
        rests[index] = rest - amounts[index] if carry else rest
    return turns, tuple(after)


def _furthest_behind(
    amounts: Sequence[int], counts: Sequence[int], turn: int, first: tuple[int, int], due: list[int]
) -> int:
    """Which of the source that was taken off `due` and the others with its deadline is furthest behind, then
    first; the rest go back.
    """
    total, size = sum(amounts), len(amounts)
    deadline, index = first
    equals = [index]
    while due and due[0] < (deadline + 1) * size:
        equals.append(heappop(due) % size)
    chosen = min(equals, key=lambda other: (counts[other] * total - amounts[other] * turn, other))
    for other in equals:
        if other != chosen:
            heappush(due, deadline * size + other)
    return chosen


# --- batches that need no state -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchSource:
    """What the order of a source's rows in SFT depends on."""

    name: str
    size: int  # positions, holes included
    weight: float = 1.0
    holes: frozenset[int] = frozenset()  # positions that are never drawn; the others keep their order


def make_slots(rows: Sequence[object | None], samples: Mapping[int, S]) -> list[S | None]:
    """The samples in the order of their rows, with a hole for every malformed row; rows without a sample that
    are no holes take no place.
    """
    return [samples.get(position) for position, row in enumerate(rows) if row is None or position in samples]


def make_batch_source(name: str, weight: float, slots: Sequence[object | None]) -> BatchSource:
    """A source whose holes are the slots that are None."""
    return BatchSource(
        name, len(slots), weight, frozenset(index for index, slot in enumerate(slots) if slot is None)
    )


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
    """(whose turn draws `first` … `first + count - 1` are, numbered from 0; draws of each source before
    them).
    """
    cycles, rest = divmod(first, sum(amounts))
    block, skipped = divmod(rest, BLOCK)
    blocks = [_turns_of_block(amounts, number) for number in range(block, (rest + count - 1) // BLOCK + 1)]
    turns = np.concatenate(blocks)
    before = np.bincount(turns[:skipped], minlength=len(amounts)).tolist()
    counts = _counts_before(amounts, block)
    drawn = [
        cycles * amount + start + more for amount, start, more in zip(amounts, counts, before, strict=True)
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

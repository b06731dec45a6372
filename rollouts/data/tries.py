"""Rows that begin alike: in which order they lie, what neighbours share, and which of them to keep together.

Sorted rows and what each shares with the one before say everything about a trie: a node is a row's token that
the row before does not have. Only whole rows are looped over here, never their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollouts.types import IntArray

LITTLE = 256  # rows are cut apart where that loses less than this part of the shorter one


class SortedRows(NamedTuple):
    """Rows [n] in lexicographic order."""

    numbers: IntArray  # of the batch's rows
    lengths: IntArray  # tokens, at least 1
    common: IntArray  # first tokens that a row has in common with the one before; 0 of the first
    least: tuple[IntArray, ...]  # least[k][i]: the least of common[i : i + 2**k]; empty if nothing is shared

    @property
    def shared(self) -> int:
        """First tokens that all rows have in common."""
        return int(self.common[1:].min()) if len(self.common) > 1 else 0


class Placed(NamedTuple):
    """Rows in bins: those of one bin one after the other, in lexicographic order."""

    order: IntArray  # [n] places in SortedRows
    common: IntArray  # [n] tokens shared with the row before in the same bin; 0 of its first
    starts: IntArray  # [K] index in `order` of each bin's first row
    nodes: IntArray  # [K] of each bin
    pairs: IntArray  # [K] (query, key) pairs of its attention: every node sees itself and what is above it


def sort_rows(tokens: Sequence[IntArray], numbers: IntArray, lengths: IntArray, *, share: bool) -> SortedRows:
    """The first `lengths` tokens of the rows `numbers`, sorted; without `share` in their own order, as if
    none had anything in common.
    """
    common = np.zeros(len(numbers), np.int64)
    if not share:
        return SortedRows(numbers, lengths, common, ())
    inputs = [tokens[row][:length] for row, length in zip(numbers.tolist(), lengths.tolist(), strict=True)]
    keys = [one.astype(">u8").tobytes() for one in inputs]  # big-endian: comparing memory is comparing tokens
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for place in range(1, len(order)):
        one, other = inputs[order[place - 1]], inputs[order[place]]
        length = min(len(one), len(other))
        different = one[:length] != other[:length]
        common[place] = int(different.argmax()) if different.any() else length
    least = [common]
    while 2 << (len(least) - 1) <= len(common):
        half = 1 << (len(least) - 1)
        least.append(np.minimum(least[-1][:-half], least[-1][half:]))
    return SortedRows(numbers[order], lengths[order], common, tuple(least))


def count_common(rows: SortedRows, earlier: IntArray, later: IntArray) -> IntArray:
    """First tokens that rows at the sorted places `earlier` < `later` have in common."""
    found = np.zeros(len(later), np.int64)
    if not rows.least:
        return found
    scale = np.frexp((later - earlier).astype(np.float64))[1] - 1  # 2**scale <= later - earlier
    for power in np.unique(scale).tolist():
        mine, least = scale == power, rows.least[power]
        found[mine] = np.minimum(least[earlier[mine] + 1], least[later[mine] + 1 - (1 << power)])
    return found


def place_rows(rows: SortedRows, labels: IntArray) -> Placed:
    """What the bins named by `labels` [n] hold. A bin that no label names is left out."""
    order = np.argsort(labels, kind="stable")
    is_first = np.diff(labels[order], prepend=-1) != 0
    common = np.zeros(len(order), np.int64)
    inside = np.flatnonzero(~is_first)
    common[inside] = count_common(rows, order[inside - 1], order[inside])
    lengths, starts = rows.lengths[order], np.flatnonzero(is_first)
    nodes = np.add.reduceat(lengths - common, starts)
    pairs = np.add.reduceat((lengths * (lengths + 1) - common * (common + 1)) // 2, starts)
    return Placed(order, common, starts, nodes, pairs)


def cut_rows(rows: SortedRows, capacity: int, *, apart: bool) -> IntArray:
    """[n] the item of each row: neighbours fill one item after the other, each of at most `capacity` nodes or
    one longer row. `apart`: rows that share little beside what all share are not kept together.
    """
    shared = rows.shared
    labels = np.zeros(len(rows.numbers), np.int64)
    held = number = before = 0
    for place, (length, common) in enumerate(zip(rows.lengths.tolist(), rows.common.tolist(), strict=True)):
        little = apart and (common - shared) * LITTLE <= min(length, before) - shared
        if place and (little or held + length - common > capacity):
            held, number = 0, number + 1
        held += length - common if held else length
        labels[place], before = number, length
    return labels

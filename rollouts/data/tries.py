"""Rows that begin alike: which they are, which of them to keep together, and the trie that they become.

    rows ─sort─► neighbours share the most ─cut where little is shared─► items, a subtree each
        ─► bins (rollouts.data.bins)

Sorted rows and what each shares with the one before say everything about a trie: a node is a row's token that
the row before does not have. Only whole rows are looped over here, never their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollouts.types import IntArray

LITTLE = 256  # rows are cut apart where that loses less than this part of the shorter one
MOST_LEVELS = 64  # beginnings inside beginnings; below that rows are cut where the capacity ends


class SortedRows(NamedTuple):
    """Rows [n] in lexicographic order."""

    numbers: IntArray  # of the batch's rows
    lengths: IntArray  # tokens, at least 1
    common: IntArray  # first tokens that a row has in common with the one before; 0 of the first
    least: tuple[IntArray, ...]  # least[k][i]: the least of common[i : i + 2**k]


class Trie(NamedTuple):
    """Q rows as a forest in depth-first order; rows of one packed row come one after the other. Nodes are
    counted over all packed rows.
    """

    starts: IntArray  # [Q + 1] first own node of each row, and the number of nodes
    line_starts: IntArray  # [R + 1] first node of each packed row, and the number of nodes
    segments: IntArray  # [K, 4] (packed row, first node, node after the last, parent segment or -1)
    subtree_end: IntArray  # [K] node after the subtree of each of the segment's nodes
    before: IntArray  # [Q] the row that has the node above a row's first own one; itself where there is none


def sort_rows(tokens: Sequence[IntArray], numbers: IntArray, lengths: IntArray, *, share: bool) -> SortedRows:
    """The first `lengths` tokens of the rows `numbers`, sorted; without `share` in their own order, as if
    none had anything in common.
    """
    common = np.zeros(len(numbers), np.int64)
    if not share:
        return SortedRows(numbers, lengths, common, ())
    inputs = [
        tokens[number][:length] for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
    ]
    keys = [one.astype(">u8").tobytes() for one in inputs]  # big-endian: comparing memory is comparing tokens
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for place in range(1, len(order)):
        common[place] = _count_common(inputs[order[place - 1]], inputs[order[place]])
    least = [common]
    while 2 << (len(least) - 1) <= len(common):
        half = 1 << (len(least) - 1)
        least.append(np.minimum(least[-1][:-half], least[-1][half:]))
    return SortedRows(numbers[order], lengths[order], common, tuple(least))


def _count_common(one: IntArray, other: IntArray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def count_common_of(rows: SortedRows, earlier: IntArray, later: IntArray) -> IntArray:
    """First tokens that rows at the sorted places `earlier` < `later` have in common."""
    if not rows.least:
        return np.zeros(len(later), np.int64)
    found = np.empty(len(later), np.int64)
    scale = np.frexp((later - earlier).astype(np.float64))[1] - 1  # 2**scale <= later - earlier
    for power in np.unique(scale).tolist():
        mine = scale == power
        least = rows.least[power]
        found[mine] = np.minimum(least[earlier[mine] + 1], least[later[mine] + 1 - (1 << power)])
    return found


# --- what to keep together ----------------------------------------------------------------------------------


class Placed(NamedTuple):
    """Rows in bins: those of one bin one after the other, in lexicographic order."""

    order: IntArray  # [n] places in SortedRows
    common: IntArray  # [n] tokens shared with the row before in the same bin; 0 of its first
    starts: IntArray  # [K] index in `order` of each bin's first row
    nodes: IntArray  # [K] of each bin
    pairs: IntArray  # [K] (query, key) pairs of its attention: every node sees itself and what is above it


def place_rows(rows: SortedRows, labels: IntArray) -> Placed:
    """What the bins named by `labels` [n] hold. A bin that no label names is left out."""
    order = np.argsort(labels, kind="stable")
    sorted_labels = labels[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = sorted_labels[1:] != sorted_labels[:-1]
    common = np.zeros(len(order), np.int64)
    inside = np.flatnonzero(~is_first)
    common[inside] = count_common_of(rows, order[inside - 1], order[inside])
    lengths, starts = rows.lengths[order], np.flatnonzero(is_first)
    nodes = np.add.reduceat(lengths - common, starts)
    pairs = np.add.reduceat((lengths * (lengths + 1) - common * (common + 1)) // 2, starts)
    return Placed(order, common, starts, nodes, pairs)


def keep_together(
    rows: SortedRows, capacity: Callable[[IntArray], IntArray], fill: Callable[[IntArray, int], IntArray]
) -> IntArray:
    """[n] the item of each row: the largest subtrees whose nodes fit. `capacity(shared)` says how many do
    where all rows share so many tokens.

    A beginning whose rows are too many for one item has several, each with its own copy of it; `fill(sizes,
    capacity)` puts the subtrees below it into those. What all rows share does not make them one item. O(n log
    n) for each level of beginnings inside beginnings.
    """
    new = np.concatenate([[0], np.cumsum(rows.lengths - rows.common)])
    labels = np.zeros(len(rows.numbers), np.int64)

    def split(first: int, last: int, level: int) -> tuple[list[IntArray], IntArray, int]:
        """Parts of the interval, each as places of rows; their nodes; and how many tokens all rows share."""
        inner = rows.common[first + 1 : last]
        shared = int(inner.min()) if len(inner) else int(rows.lengths[first])
        if level == MOST_LEVELS:
            return (
                *_cut_where_full(first, last, rows.lengths, new, int(capacity(np.asarray([shared]))[0])),
                shared,
            )
        shorter = np.minimum(rows.lengths[first : last - 1], rows.lengths[first + 1 : last])
        apart = (inner == shared) | ((inner - shared) * LITTLE < shorter - shared)
        starts = np.concatenate([[first], first + 1 + np.flatnonzero(apart)])
        ends = np.append(starts[1:], last)
        sizes = rows.lengths[starts] + new[ends] - new[starts + 1]
        own = rows.common[first:last].copy()
        own[starts - first] = np.iinfo(np.int64).max >> 1
        fits = (ends - starts == 1) | (sizes <= capacity(np.minimum.reduceat(own, starts - first)))
        parts = [
            np.arange(begin, end)
            for begin, end in zip(starts[fits].tolist(), ends[fits].tolist(), strict=True)
        ]
        found = [sizes[fits]]
        for begin, end in zip(starts[~fits].tolist(), ends[~fits].tolist(), strict=True):
            inner_parts, inner_sizes, below = split(begin, end, level + 1)
            chosen = fill(inner_sizes - below, int(capacity(np.asarray([below]))[0]) - below)
            together: list[list[IntArray]] = [[] for _ in range(int(chosen.max()) + 1)]
            for part, number in zip(inner_parts, chosen.tolist(), strict=True):
                together[number].append(part)
            parts += [np.concatenate(one) for one in together]
            found.append(np.bincount(chosen, weights=inner_sizes - below).astype(np.int64) + below)
        return parts, np.concatenate(found), shared

    parts, _, _ = split(0, len(labels), 0)
    for number, part in enumerate(parts):
        labels[part] = number
    return labels


def fill_in_order(rows: SortedRows, has_room: Callable[[int, int, int], bool]) -> IntArray:
    """[n] the bin of each row when neighbours fill one bin after the other, so that only the cuts lose what
    is shared, wherever they fall.

    `has_room(held, length, common)`: whether a row of that length, of which the row before has the first
    `common` tokens, joins `held` nodes.
    """
    labels = np.zeros(len(rows.numbers), np.int64)
    held, number = 0, 0
    for place, (length, common) in enumerate(zip(rows.lengths.tolist(), rows.common.tolist(), strict=True)):
        if held and not has_room(held, length, common):
            held, number = 0, number + 1
        held += length - common if held else length
        labels[place] = number
    return labels


def _cut_where_full(
    first: int, last: int, lengths: IntArray, new: IntArray, capacity: int
) -> tuple[list[IntArray], IntArray]:
    parts: list[IntArray] = []
    sizes: list[int] = []
    while first < last:
        fits = int(np.searchsorted(new, capacity - lengths[first] + new[first + 1], side="right")) - 1
        end = min(max(fits, first + 1), last)
        parts.append(np.arange(first, end))
        sizes.append(int(lengths[first] + new[end] - new[first + 1]))
        first = end
    return parts, np.asarray(sizes)


# --- the trie -----------------------------------------------------------------------------------------------


def make_trie(lengths: IntArray, common: IntArray, line_rows: IntArray) -> Trie:
    """The forest of Q rows, in lexicographic order inside each packed row; the r-th packed row begins with
    row line_rows[r].
    """
    count = len(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths - common)])
    lines = np.zeros(count, np.int64)
    lines[line_rows] = 1
    seen = np.where(lines == 1, -1, common)  # nobody looks beyond the first row of a packed row
    lines = np.cumsum(lines) - 1
    same, above, after = _find_neighbours(seen)
    # a row branches off, unless it goes on where the one before ends
    branch = np.flatnonzero(
        (lengths > common) & ((seen < 0) | (common < np.concatenate([[0], lengths[:-1]])))
    )
    beside = branch[seen[branch] >= 0]
    sibling = (
        starts[same[beside]] + common[beside] - common[same[beside]]
    )  # what follows the branching point on the path before
    # of a node found twice the first counts: a packed row's first tree ends where the next begins, though
    # `after` looks for the next packed row
    nodes, kept = np.unique(np.concatenate([sibling, starts[branch]]), return_index=True)
    subtree_end = np.concatenate([starts[beside], starts[after[branch]]])[kept]

    owner = np.searchsorted(starts, nodes, side="right") - 1
    is_root = (nodes == starts[owner]) & (common[owner] == 0)
    holder = above[owner]
    over = np.where(nodes > starts[owner], nodes - 1, starts[holder] + common[owner] - 1 - common[holder])
    parents = np.where(is_root, -1, np.searchsorted(nodes, over, side="right") - 1)
    stops = np.append(nodes[1:], starts[-1])
    line_starts = np.append(starts[line_rows], starts[-1])
    segments = np.stack([lines[owner], nodes, stops, parents], axis=1)
    return Trie(starts, line_starts, segments, subtree_end, above)


def _find_neighbours(values: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """For each value the last one before it that is no larger, the last one before it that is smaller (itself
    if there is none), and the first one after it that is no larger (their number if there is none).
    """
    before, smaller = np.arange(len(values)), np.arange(len(values))
    after = np.full(len(values), len(values))
    rising: list[tuple[int, int]] = []  # (value, index)
    for index, value in enumerate(values.tolist()):
        while rising and rising[-1][0] > value:
            after[rising.pop()[1]] = index
        if rising:
            before[index] = rising[-1][1]
            if rising[-1][0] == value:
                after[rising.pop()[1]] = index
        if rising:
            smaller[index] = rising[-1][1]
        rising.append((value, index))
    return before, smaller, after


def find_nodes(trie: Trie, common: IntArray, rows: IntArray, depths: IntArray) -> IntArray:
    """The node of the token at `depths` [N] of each of `rows` [N]: a row's own, or that of the row which it
    shares it with.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    jumps = [trie.before]
    while not np.array_equal(longer := jumps[-1][jumps[-1]], jumps[-1]):
        jumps.append(longer)
    for jump in reversed(jumps):
        farther = jump[rows]
        rows = np.where(common[farther] > depths, farther, rows)
    rows = np.where(common[rows] > depths, trie.before[rows], rows)
    return trie.starts[rows] + depths - common[rows]

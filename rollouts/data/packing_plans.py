"""Which rows lie together in which micro-batch: some plans are made from lengths alone, and the cheapest is
taken.

    one packed row a micro-batch   items ─best fit, or evenly for several ranks─► bins of at most the budget
    padded rows                    longest first, as many as the budget holds

An item is rows that begin alike (rollouts.data.tries). Large ones keep most shared, small ones fill bins
better and even out ranks. Costs are in tokens: what a node costs in the linear layers is 1. Everything here
is deterministic.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.data.tries import SortedRows, cut_rows, place_rows
from rollouts.types import IntArray

# tokens; on a CPU mostly the head's and the embedding's gradients, which are as large as the vocabulary
MICRO_BATCH_COST = 128
ATTENTION_COST = 1 / 1000  # tokens; of a (query, key) pair, on small models
PARTS = (1, 2, 4, 8)  # items are tried of up to the capacity, half of it and so on
GOOD = 1.01  # times what cannot be undercut: no other plan is tried
MORE_ROUNDS = 1  # rounds beyond the fewest that are tried
Costs = NDArray[np.float64]


class MicroBatchPlan(NamedTuple):
    """b rows of one micro-batch."""

    order: IntArray  # [b] places in SortedRows
    common: IntArray  # [b] tokens shared with the row before; 0 in padded rows


def estimate_attention_cost(*, layers: int, attention_width: int, parameters: int) -> float:
    """What a (query, key) pair costs in tokens, by FLOPs: 4·layers·attention_width over 2·parameters.

    `attention_width`: heads times the size of one; `parameters`: those that every token is multiplied by, the
    head included.
    """
    return 2 * layers * attention_width / parameters


def compute_round_cost(costs: Sequence[float] | Costs, ranks: int) -> float:
    """What all rounds cost together when `ranks` bins at a time are computed, the dearest first: each round
    its dearest bin.
    """
    return float(np.sort(np.asarray(costs, np.float64))[::-1][::ranks].sum())


# --- one packed row a micro-batch ---------------------------------------------------------------------------


def plan_one_row(
    rows: SortedRows, budget: int, *, ranks: int, micro_batch_cost: int, attention_cost: float
) -> list[MicroBatchPlan]:
    """Micro-batches of one packed row of at most `budget` nodes, or of one longer row; on one rank as few as
    best fit finds, on several of even cost, with rows for each rank where there are enough.
    """
    whole = place_rows(rows, np.zeros(len(rows.numbers), np.int64))
    bound = (float(whole.nodes[0]) + attention_cost * float(whole.pairs[0])) / ranks
    bound += micro_batch_cost * -(-int(whole.nodes[0]) // (budget * ranks))
    best, least = whole, float("inf")
    for labels in _find_bins(rows, budget, ranks, attention_cost):
        placed = place_rows(rows, labels)
        cost = compute_round_cost(placed.nodes + attention_cost * placed.pairs + micro_batch_cost, ranks)
        if len(placed.starts) >= min(ranks, len(rows.numbers)) and cost < least:
            best, least = placed, cost
        if least <= GOOD * bound:
            break
    assert least < float("inf"), "single rows fit somewhere, and leave no rank without"
    ends = np.append(best.starts[1:], len(best.order))
    largest_first = np.lexsort((rows.numbers[best.order[best.starts]], -best.nodes))
    cuts = [slice(best.starts[one], ends[one]) for one in largest_first.tolist()]
    return [MicroBatchPlan(best.order[cut], best.common[cut]) for cut in cuts]


def _find_bins(rows: SortedRows, budget: int, ranks: int, attention_cost: float) -> Iterator[IntArray]:
    """[n] the bin of each row, in several ways: items of several sizes, single rows, neighbours in order."""
    shared = rows.shared  # first tokens of all rows, which each bin has once
    capacity = budget - shared
    singles = np.arange(len(rows.numbers))
    sizes_tried: set[int] = set()
    for parts in (*PARTS, 0) if rows.least else (0,):
        items = cut_rows(rows, shared + max(capacity, 0) // parts, apart=True) if parts else singles
        if parts and int(items[-1]) in sizes_tried:
            continue
        sizes_tried.add(int(items[-1]))
        placed = place_rows(rows, items)
        sizes = placed.nodes - shared
        if capacity <= 0:
            yield items
            continue
        filled = fill_bins(sizes, capacity)
        if ranks == 1:
            yield filled[items]
            continue
        # 1: equal rows, which cost nothing more, go round too
        costs = 1 + sizes + attention_cost * (placed.pairs - shared * (shared + 1) / 2)
        tried, step = 0, 1
        rounds = max(-(-(int(filled.max()) + 1) // ranks), 1)  # what best fit needs; evenness may need more
        while tried <= MORE_ROUNDS:
            bins = spread_over_bins(sizes, costs, rounds * ranks, capacity)
            if bins is None:
                step *= 2
            else:
                yield bins[items]
                tried, step = tried + 1, 1
            rounds += step
    if rows.least:
        yield cut_rows(rows, budget, apart=False)


def fill_bins(sizes: IntArray, capacity: int) -> IntArray:
    """[n] the bin of each item, as few bins as best fit finds: the largest item first, each into the fullest
    bin that has room for it.

    An item above the capacity gets a bin of its own. Bins are numbered from 0, none is empty. O(n log n).
    """
    bins = np.zeros(len(sizes), np.int64)
    rooms: list[tuple[int, int]] = []  # (room, bin), rising
    used = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            room, chosen, used = capacity, used, used + 1
        else:
            room, chosen = rooms.pop(at)
        bins[item] = chosen
        if room > size:
            insort(rooms, (room - size, chosen))
    return bins


def spread_over_bins(sizes: IntArray, costs: Costs, count: int, capacity: int) -> IntArray | None:
    """[n] the bin of each item, in `count` bins of even cost: the largest item first, each into the cheapest
    bin that has room for it. None if an item finds no room. An item above the capacity fills a bin.
    O((n + count) log count).
    """
    sizes = np.minimum(sizes, capacity)
    room = [capacity] * count
    cheapest = [(0.0, number) for number in range(count)]
    parked: list[tuple[int, float, int]] = []  # (-room, cost, bin): no room for the last item
    bins = np.zeros(len(sizes), np.int64)
    for item in np.lexsort((-costs, -sizes)).tolist():
        size = int(sizes[item])
        while parked and -parked[0][0] >= size:
            heapq.heappush(cheapest, heapq.heappop(parked)[1:])
        while cheapest and room[cheapest[0][1]] < size:
            cost, number = heapq.heappop(cheapest)
            heapq.heappush(parked, (-room[number], cost, number))
        if not cheapest:
            return None
        cost, number = cheapest[0]
        bins[item] = number
        room[number] -= size
        heapq.heapreplace(cheapest, (cost + float(costs[item]), number))
    return bins


# --- padded rows --------------------------------------------------------------------------------------------


def plan_padded(rows: SortedRows, budget: int, *, ranks: int, micro_batch_cost: int) -> list[MicroBatchPlan]:
    """Micro-batches of rows, padded to their longest, of at most `budget` tokens or of one longer row.

    For several ranks the cheapest among some budgets: `budget`, and those that divide the batch evenly; with
    rows for each rank where there are enough.
    """
    order = np.argsort(-rows.lengths, kind="stable")
    lengths = rows.lengths[order].tolist()

    def cut(tokens: int) -> list[tuple[int, int]]:
        starts = [0]
        for place in range(1, len(lengths)):
            if (place - starts[-1] + 1) * lengths[starts[-1]] > tokens:
                starts.append(place)
        return list(pairwise([*starts, len(lengths)]))

    found = [cut(budget)]
    if ranks > 1:
        rounds = -(-len(found[0]) // ranks)
        tokens = min(budget, sum(lengths) // (ranks * (rounds + MORE_ROUNDS)))
        found += [cut(min(budget, sum(lengths) // (ranks * rounds))), cut(tokens)]
        while len(found[-1]) < min(ranks, len(lengths)):
            tokens //= 2
            found.append(cut(tokens))

    def cost(cuts: list[tuple[int, int]]) -> float:
        sizes = [(last - first) * lengths[first] + micro_batch_cost for first, last in cuts]
        return compute_round_cost(sizes, ranks)

    chosen = min((cuts for cuts in found if len(cuts) >= min(ranks, len(lengths))), key=cost)
    return [MicroBatchPlan(order[first:last], np.zeros(last - first, np.int64)) for first, last in chosen]

"""Which rows lie together in which packed row and micro-batch: some plans are made from lengths alone, and
the cheapest is taken.

    padded  items ─fill_bins─► packed rows of up to a length ─divide_lengths─► micro-batches padded to
        their longest
    one row  items ─fill_bins, or spread_over_bins for several ranks─► micro-batches that are one packed
        row each

An item is a subtree of the rows' trie (rollouts.data.tries). Large ones keep most shared, small ones fill
bins better and even out ranks. Costs are in tokens: what a node costs in the linear layers is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rollouts.data.bins import Costs, compute_round_cost, divide_lengths, fill_bins, spread_over_bins
from rollouts.data.tries import Placed, SortedRows, fill_in_order, keep_together, place_rows
from rollouts.types import IntArray

# up to so many nodes, filling a packed row is always worth it: less padding, and attention is a small part
PACKED_LENGTH = 512
# tokens; on a CPU mostly the head's and the embedding's gradients, which are as large as the vocabulary
MICRO_BATCH_COST = 128
# one node costs as much in the linear layers as a query does over so many nodes of a dense mask, on small
# models
LINEAR_COST = 1000
ATTENTION_COST = 1 / LINEAR_COST
PARTS = (1, 2, 4, 8)  # items are tried of up to the capacity, half of it and so on
GOOD = 1.01  # times what cannot be undercut: no other plan is tried
MORE_ROUNDS = 1  # rounds beyond the fewest that are tried


class MicroBatchPlan(NamedTuple):
    """b rows of one micro-batch in R packed rows."""

    order: IntArray  # [b] places in SortedRows
    common: IntArray  # [b] tokens shared with the row before in the same packed row
    starts: IntArray  # [R] index in `order` of each packed row's first row


class _Candidate(NamedTuple):
    placed: Placed
    cuts: Sequence[
        tuple[int, int]
    ]  # [first, last) packed rows of each micro-batch, in the order of _sort_bins
    costs: Costs  # [micro-batches]


def estimate_attention_cost(*, layers: int, attention_width: int, parameters: int) -> float:
    """What a (query, key) pair costs in tokens, by FLOPs: 4·layers·attention_width over 2·parameters.

    `attention_width`: heads times the size of one; `parameters`: those that every token is multiplied by, the
    head included.
    """
    return 2 * layers * attention_width / parameters


# --- one packed row a micro-batch ---------------------------------------------------------------------------


def plan_one_row(
    rows: SortedRows, budget: int, *, ranks: int, micro_batch_cost: int, attention_cost: float
) -> list[MicroBatchPlan]:
    """Micro-batches of one packed row of at most `budget` nodes, or of one longer row; on one rank as few as
    best fit finds, on several of even cost.
    """
    whole = place_rows(rows, np.zeros(len(rows.numbers), np.int64))
    bound = (float(whole.nodes[0]) + attention_cost * float(whole.pairs[0])) / ranks
    bound += micro_batch_cost * -(-int(whole.nodes[0]) // (budget * ranks))
    enough = min(ranks, len(rows.numbers))
    best, least = None, float("inf")
    for labels in _find_items(rows, budget):
        for placed in _fill_one_row(rows, labels, budget, ranks, attention_cost):
            costs = placed.nodes + attention_cost * placed.pairs
            cost = compute_round_cost(costs + micro_batch_cost, ranks)
            if len(costs) >= enough and cost < least:
                best, least = (
                    _Candidate(placed, [(index, index + 1) for index in range(len(costs))], costs),
                    cost,
                )
            if least <= GOOD * bound:
                break
        if least <= GOOD * bound:
            break
    assert best is not None, "single rows fit somewhere, and leave no rank without"
    return _make_plans(rows, best)


def _find_items(rows: SortedRows, budget: int) -> Iterator[IntArray]:
    """[n] items of each row, smaller and smaller ones; at last single rows. Without anything shared only
    these.
    """
    shared = _find_shared(rows)
    largest = 0
    for parts in PARTS:
        capacity = shared + (budget - shared) // parts
        labels = keep_together(
            rows, lambda depths, capacity=capacity: np.full(len(depths), capacity), fill_bins
        )
        count = int(labels.max()) + 1
        if count > largest and count < len(labels):
            largest = count
            yield labels
        if count == len(labels):
            break
    yield np.arange(len(rows.numbers))


def _find_shared(rows: SortedRows) -> int:
    """First tokens that all rows share."""
    return int(rows.common[1:].min()) if len(rows.common) > 1 else 0


def _fill_one_row(
    rows: SortedRows, labels: IntArray, budget: int, ranks: int, attention_cost: float
) -> Iterator[Placed]:
    shared = _find_shared(rows)
    items = place_rows(rows, labels)
    sizes, capacity = items.nodes - shared, budget - shared
    if capacity <= 0:
        yield items
        return
    if ranks == 1:
        yield place_rows(rows, fill_bins(sizes, capacity)[labels])
        return
    costs = (
        1 + sizes + attention_cost * (items.pairs - shared * (shared + 1) / 2)
    )  # 1: equal rows, which cost nothing more, go round too
    tried, rounds = (
        0,
        max(-(-(int(fill_bins(sizes, capacity).max()) + 1) // ranks), 1),
    )  # what best fit needs, evenness may need a little more
    step = 1
    while tried <= MORE_ROUNDS:
        bins = spread_over_bins(sizes, costs, rounds * ranks, capacity, ranks=ranks)
        if bins is not None:
            yield place_rows(rows, bins[labels])
        tried += bins is not None
        rounds += step
        step *= 1 if bins is not None else 2


# --- padded packed rows -------------------------------------------------------------------------------------


def plan_padded(
    rows: SortedRows, budget: int, *, packed_length: int, ranks: int, micro_batch_cost: int
) -> list[MicroBatchPlan]:
    """Micro-batches of packed rows of about `packed_length` nodes, at most `budget` tokens with their
    padding, or one longer row.

    For several ranks the packing whose rounds cost least among some budgets: `budget`, and those that divide
    the batch evenly among the ranks. Each rank has rows, where there are enough, unless the rounds cost less
    than half without that: rows that begin alike lose much when they are parted.
    """

    def plan(tokens: int) -> _Candidate:
        return _plan_padded(
            rows, tokens, packed_length=min(packed_length, tokens), micro_batch_cost=micro_batch_cost
        )

    best = plan(budget)
    if ranks == 1:
        return _make_plans(rows, best)
    total = int(best.costs.sum()) - micro_batch_cost * len(best.costs)
    rounds, enough = -(-len(best.costs) // ranks), min(ranks, len(rows.numbers))
    budgets = sorted(
        {min(-(-total // (ranks * (rounds + more))), budget) for more in range(MORE_ROUNDS + 1)}, reverse=True
    )
    candidates = [best, *(plan(tokens) for tokens in budgets)]
    smallest = budgets[-1]
    while len(candidates[-1].costs) < enough and smallest > 1:
        smallest = max(smallest // 2, 1)
        candidates.append(plan(smallest))
    cheapest = min(candidates, key=lambda one: compute_round_cost(one.costs, ranks))
    shared_out = [one for one in candidates if len(one.costs) >= enough]
    chosen = min(shared_out or [cheapest], key=lambda one: compute_round_cost(one.costs, ranks))
    worth_it = compute_round_cost(chosen.costs, ranks) <= 2 * compute_round_cost(cheapest.costs, ranks)
    return _make_plans(rows, chosen if worth_it else cheapest)


def _plan_padded(rows: SortedRows, budget: int, *, packed_length: int, micro_batch_cost: int) -> _Candidate:
    best, least = None, float("inf")
    for labels in _find_packed_rows(rows, budget, packed_length):
        placed = place_rows(rows, labels)
        nodes = placed.nodes[_sort_bins(rows, placed)]
        cuts = divide_lengths(nodes, budget, micro_batch_cost)
        padded = np.asarray([(last - first) * nodes[first] for first, last in cuts])
        cost = float(padded.sum()) + micro_batch_cost * len(cuts)
        if cost < least:
            best, least = _Candidate(placed, cuts, (padded + micro_batch_cost).astype(np.float64)), cost
    assert best is not None
    return best


def _find_packed_rows(rows: SortedRows, budget: int, packed_length: int) -> Iterator[IntArray]:
    """[n] the packed row of each row: neighbours one after the other, and subtrees of several sizes by best
    fit. Without sharing, its own.
    """
    if not rows.least:
        yield np.arange(len(rows.numbers))
        return

    def capacity(shared: IntArray) -> IntArray:
        """Nodes of a packed row whose rows share so many: where linear layers and dense mask cost least for
        each node that is not shared.

        The minimum over S of (LINEAR_COST·S + S²) / (S - shared), but not below `packed_length`.
        """
        wide = np.minimum(shared, budget).astype(np.float64)
        return np.clip(wide + np.sqrt(wide * wide + LINEAR_COST * wide), packed_length, budget).astype(
            np.int64
        )

    def has_room(held: int, length: int, common: int) -> bool:
        """Beyond `packed_length` while sharing saves more in the linear layers than the larger dense mask
        costs.
        """
        nodes = held + length - common
        saves = LINEAR_COST * common > nodes**2 - held**2 - length**2
        return nodes <= (budget if saves else packed_length)

    yield fill_in_order(rows, has_room)
    shared = _find_shared(rows)
    most = int(capacity(np.asarray([shared]))[0])
    counts: set[int] = set()
    for parts in PARTS:
        fraction: Callable[[IntArray], IntArray] = lambda depths, parts=parts: (  # noqa: E731
            shared + (capacity(depths) - shared) // parts
        )
        labels = keep_together(rows, fraction, fill_bins)
        if (count := int(labels.max()) + 1) in counts:
            continue
        counts.add(count)
        yield fill_bins(place_rows(rows, labels).nodes - shared, most - shared)[labels]


# --- plans --------------------------------------------------------------------------------------------------


def _sort_bins(rows: SortedRows, placed: Placed) -> IntArray:
    """Bins with the most nodes first; among equals the one whose first row comes first in the batch."""
    return np.lexsort((rows.numbers[placed.order[placed.starts]], -placed.nodes))


def _make_plans(rows: SortedRows, chosen: _Candidate) -> list[MicroBatchPlan]:
    placed = chosen.placed
    ends = np.append(placed.starts[1:], len(placed.order))
    sizes = ends - placed.starts
    by_size = _sort_bins(rows, placed)
    # rows of the bins in their new order, one bin after the other
    starts = np.concatenate([[0], np.cumsum(sizes[by_size])])
    moved = np.arange(starts[-1]) + np.repeat(placed.starts[by_size] - starts[:-1], sizes[by_size])
    order, common = placed.order[moved], placed.common[moved]
    plans: list[MicroBatchPlan] = []
    for first, last in chosen.cuts:
        begin, end = int(starts[first]), int(starts[last])
        plans.append(MicroBatchPlan(order[begin:end], common[begin:end], starts[first:last] - begin))
    return plans

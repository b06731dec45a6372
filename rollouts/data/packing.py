"""How the rows of a batch become micro-batches: which tokens are computed, in which order, and who may see
whom.

Every packed row is a forest of token tries in depth-first order. Node j is visible to node i exactly when i
lies in j's subtree:

    j <= i < subtree_end[j]

One sequence is a trie without branches, where this is the causal mask. Several sequences side by side are
several trees, which see nothing of each other. Sequences that begin with the same tokens share those nodes,
so that a group's prompt, or a template common to a whole batch, is computed once: gradients of a shared node
add up over everything that continues it, exactly as if each had its own copy.

Only nodes that predict a trained token need vocabulary logits; a pair (node, target) that several rows share
is scored once.

    lengths and what rows share ─► which rows lie together ─► the arrays of each micro-batch

Plans are made from lengths alone, and the cheapest is taken:

    one packed row a micro-batch   items ─best fit, or evenly for several ranks─► bins of at most the budget
    padded rows                    longest first, as many as the budget holds

Sorted rows and what each shares with the one before say everything about a trie: a node is a row's token that
the row before does not have. An item is rows that begin alike. Large ones keep most shared, small ones fill
bins better and even out ranks. Costs are in tokens: what a node costs in the linear layers is 1. Everything
here is deterministic, and only whole rows are looped over, never their tokens.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.types import BoolArray, FloatArray, FloatRows, IntArray

# tokens; on a CPU mostly the head's and the embedding's gradients, which are as large as the vocabulary
MICRO_BATCH_COST = 128
ATTENTION_COST = 1 / 1000  # tokens; of a (query, key) pair, on small models
PARTS = (1, 2, 4, 8)  # items are tried of up to the capacity, half of it and so on
GOOD = 1.01  # times what cannot be undercut: no other plan is tried
LITTLE = 256  # rows are cut apart where that loses less than this part of the shorter one
Costs = NDArray[np.float64]
TokenRows = Sequence[IntArray]  # [T_i] of each row of the batch


class MicroBatch(NamedTuple):
    """R rows of S nodes holding b rows of the batch: one packed row, or rows padded to the longest; N
    distinct (node, target) pairs; M trained tokens.
    """

    rows: IntArray  # [b] numbers of the batch's rows that are in here, each whole
    input_ids: IntArray  # [R, S] padding is 0
    position_ids: IntArray  # [R, S] depth in the trie; padding is 0
    subtree_end: IntArray  # [R, S] first node after the subtree
    causal: bool  # every one of the R rows is one sequence, so that a plain causal mask says the same
    predictors: IntArray  # [N] r * S + s of the node whose hidden state predicts; rising
    targets: IntArray  # [N] the token it should predict
    token_rows: IntArray  # [M] index into `rows`, rising
    token_positions: IntArray  # [M] position of the trained token in its row
    token_pairs: IntArray  # [M] index into predictors and targets
    fences: tuple[int, ...] = ()  # nodes at which no kernel of attention may begin before and end behind

    @property
    def computed_tokens(self) -> int:
        """Positions that the model computes, padding included."""
        return self.input_ids.size


def make_micro_batches(
    tokens: TokenRows,
    loss_masks: Sequence[BoolArray],
    *,
    micro_batch_tokens: int,
    share_prefix: bool,
    padding_free: bool = False,
    ranks: int = 1,
    attention_cost: float = ATTENTION_COST,
    micro_batch_cost: int = MICRO_BATCH_COST,
    skip_rows: BoolArray | None = None,
    targets: TokenRows | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` computed tokens (a longer single row gets its own),
    holding every row that trains a token.

    `targets`: what is predicted at each place, where it is not the token. `padding_free`: a micro-batch is
    one packed row, in which rows that begin alike share nodes with `share_prefix`; without it one row each,
    padded to the longest of the micro-batch. `micro_batch_cost`: what a micro-batch costs beside its tokens,
    in tokens; `attention_cost`: what a (query, key) pair costs, in tokens. With several `ranks` the
    micro-batches cost least when each rank computes one at a time and waits for the slowest: their costs are
    even, and each rank has rows where there are enough. On one rank they are as few as best fit finds. The
    largest comes first. Deterministic, O(n log n) in the rows. Raises ValueError if a row trains its first
    token, which nothing predicts.
    """
    lengths = np.zeros(len(loss_masks), np.int64)  # of what must be computed: what is before the last target
    for row, mask in enumerate(loss_masks):
        if mask[:1].any():
            raise ValueError(
                f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask"
                " it out"
            )
        lengths[row] = len(mask) - 1 - mask[::-1].argmax() if mask.any() else 0
    trained = np.flatnonzero(lengths > 0 if skip_rows is None else (lengths > 0) & ~skip_rows)
    if not len(trained):
        return []
    rows = sort_rows(tokens, trained, lengths[trained], share=share_prefix and padding_free)
    budget = micro_batch_tokens
    best, least = place_rows(rows, np.zeros(len(trained), np.int64), packed=True), float("inf")
    nodes, pairs = best.nodes[0], best.pairs[0]
    # no plan costs less
    bound = (nodes + attention_cost * pairs) / ranks + micro_batch_cost * -(-nodes // (budget * ranks))
    found = _find_packed_bins(rows, budget, ranks, attention_cost)
    for labels in found if padding_free else _find_padded_bins(rows, budget, ranks):
        placed = place_rows(rows, labels, packed=padding_free)
        cost = compute_round_cost(placed.nodes + attention_cost * placed.pairs + micro_batch_cost, ranks)
        if len(placed.starts) >= min(ranks, len(trained)) and cost < least:
            best, least = placed, cost
        if least <= GOOD * bound:
            break
    assert least < float("inf"), "single rows fit somewhere, and leave no rank without"
    largest_first = np.lexsort((rows.numbers[best.order[best.starts]], -best.nodes))
    orders, commons = (np.split(one, best.starts[1:]) for one in (best.order, best.common))
    return [
        _make_micro_batch(
            rows, orders[one], commons[one], tokens, loss_masks, targets or tokens, packed=padding_free
        )
        for one in largest_first
    ]


def _make_micro_batch(
    rows: "SortedRows",
    order: IntArray,
    common: IntArray,
    tokens: TokenRows,
    loss_masks: Sequence[BoolArray],
    targets: TokenRows,
    *,
    packed: bool,
) -> MicroBatch:
    numbers, lengths = rows.numbers[order], rows.lengths[order]
    longest = lengths.max()
    own = lengths - common if packed else np.full(len(lengths), longest)  # nodes, padding included
    starts, total = np.cumsum(own) - own, own.sum()
    width = total if packed else longest
    input_ids, position_ids = np.zeros((2, total), np.int64)
    ends = np.full(total, width)
    path, end_by_depth = np.zeros(longest, np.int64), np.full(longest, width)  # of the nodes of each depth
    trained = []
    keys = []
    cut = np.stack([numbers, starts, common, lengths], axis=1).tolist()
    for row, start, shared, length in cut:
        mine = slice(start, start + length - shared)
        input_ids[mine], position_ids[mine] = tokens[row][shared:length], np.arange(shared, length)
        path[shared:length] = np.arange(mine.start, mine.stop)
        trained.append(np.flatnonzero(loss_masks[row][: length + 1]))
        # a node and a token id fit 32 bits each
        keys.append(path[trained[-1] - 1] << 32 | targets[row][trained[-1]])
    for _, start, shared, length in reversed(cut if packed else []):
        # a node's subtree ends with the first later row that shares at most the tokens above the node
        ends[start : start + length - shared] = end_by_depth[shared:length]
        end_by_depth[shared:] = start
    pairs = np.concatenate(keys)
    token_pairs = np.arange(len(pairs))
    if np.any(pairs[1:] <= pairs[:-1]):
        pairs, token_pairs = np.unique(pairs, return_inverse=True)
    return MicroBatch(
        rows=numbers,
        input_ids=input_ids.reshape(-1, width),
        position_ids=position_ids.reshape(-1, width),
        subtree_end=ends.reshape(-1, width),
        causal=not packed or len(lengths) == 1,
        predictors=pairs >> 32,
        targets=pairs & 0xFFFFFFFF,
        token_rows=np.repeat(np.arange(len(trained)), [len(one) for one in trained]),
        token_positions=np.concatenate(trained),
        token_pairs=token_pairs,
    )


def join_packed_rows(
    micro_batches: Sequence[MicroBatch], *, align: int = 1
) -> tuple[MicroBatch, list[slice]]:
    """One packed row with the nodes of several, which see nothing of each other, and where each lies: from a
    multiple of `align` to the next one's. Which rows and tokens they are of, only the parts know.
    """
    sizes = [-(-one.computed_tokens // align) * align for one in micro_batches]
    starts = np.cumsum([0, *sizes]).tolist()
    inputs, depths = np.zeros((2, starts[-1]), np.int64)
    ends, predictors = np.arange(1, starts[-1] + 1), list[IntArray]()  # of padding: each node is alone
    for one, start in zip(micro_batches, starts, strict=False):
        mine = slice(start, start + one.computed_tokens)
        inputs[mine], depths[mine], ends[mine] = one.input_ids, one.position_ids, one.subtree_end + start
        predictors.append(one.predictors + start)
    return micro_batches[0]._replace(
        input_ids=inputs[None],
        position_ids=depths[None],
        subtree_end=ends[None],
        causal=len(micro_batches) == 1 and micro_batches[0].causal,
        predictors=np.concatenate(predictors),
        targets=np.concatenate([one.targets for one in micro_batches]),
        fences=tuple(starts[1:-1]),
    ), [slice(*edges) for edges in itertools.pairwise(starts)]


def spread_to_rows(
    micro_batches: Sequence[MicroBatch],
    values: Sequence[FloatArray],
    tokens: TokenRows,
    *,
    per_pair: bool = True,
) -> FloatRows:
    """[T_i] per row of the batch: the value of each trained token, 0.0 elsewhere. `values` holds one array
    per micro-batch: [N] of its pairs, or without `per_pair` [M] of its trained tokens.
    """
    rows = tuple(np.zeros(len(row), np.float32) for row in tokens)
    for micro_batch, per_token in zip(micro_batches, values, strict=True):
        if per_pair:
            per_token = per_token[micro_batch.token_pairs]
        edges = np.flatnonzero(np.diff(micro_batch.token_rows)) + 1
        found = (np.split(one, edges) for one in (micro_batch.token_positions, per_token))
        for row, positions, own in zip(micro_batch.rows, *found, strict=True):
            rows[row][positions] = own
    return rows


# --- which rows lie together --------------------------------------------------------------------------------


class SortedRows(NamedTuple):
    """Rows [n] in lexicographic order; in any order where nothing is shared."""

    numbers: IntArray  # of the batch's rows
    lengths: IntArray  # tokens, at least 1
    common: IntArray  # first tokens that a row has in common with the one before; 0 of the first

    @property
    def shared(self) -> int:
        """First tokens that all rows have in common."""
        return int(self.common[1:].min()) if len(self.common) > 1 else 0


class Placed(NamedTuple):
    """Rows in bins: those of one bin one after the other, in their sorted order."""

    order: IntArray  # [n] places in SortedRows
    common: IntArray  # [n] tokens shared with the row before in the same bin; 0 of its first
    starts: IntArray  # [K] index in `order` of each bin's first row
    nodes: IntArray  # [K] of each bin
    pairs: IntArray  # [K] (query, key) pairs of its attention: every node sees itself and what is above it


def compute_round_cost(costs: Costs, ranks: int) -> float:
    """What all rounds cost together when `ranks` bins at a time are computed, the dearest first: each round
    its dearest bin.
    """
    return np.sort(costs)[::-ranks].sum()


def sort_rows(tokens: TokenRows, numbers: IntArray, lengths: IntArray, *, share: bool) -> SortedRows:
    """The first `lengths` tokens of the rows `numbers`, sorted; without `share` in their own order, as if
    none had anything in common.
    """
    common = np.zeros(len(numbers), np.int64)
    if not share:
        return SortedRows(numbers, lengths, common)
    inputs = [tokens[row][:length] for row, length in zip(numbers, lengths, strict=True)]
    keys = [one.astype(">u8").tobytes() for one in inputs]  # big-endian: comparing memory is comparing tokens
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for place in range(1, len(order)):
        one, other = inputs[order[place - 1]], inputs[order[place]]
        length = min(len(one), len(other))
        different = one[:length] != other[:length]
        common[place] = different.argmax() if different.any() else length
    return SortedRows(numbers[order], lengths[order], common)


def place_rows(rows: SortedRows, labels: IntArray, *, packed: bool) -> Placed:
    """What the bins named by `labels` [n] hold. A bin that no label names is left out."""
    order = np.argsort(labels, kind="stable")
    is_first = np.diff(labels[order], prepend=-1) != 0
    lengths, starts = rows.lengths[order], np.flatnonzero(is_first)
    common = np.zeros(len(order), np.int64)
    if rows.common.any():  # with any earlier row: the least that a row up to the later one has with its own
        inside = np.flatnonzero(~is_first)
        edges = np.stack([order[inside - 1], order[inside]], axis=1).ravel() + 1
        common[inside] = np.minimum.reduceat(np.append(rows.common, 0), edges)[::2] if len(inside) else 0
    if not packed:  # every row is as long as the longest of its bin
        lengths = np.maximum.reduceat(lengths, starts)[np.cumsum(is_first) - 1]
    nodes = np.add.reduceat(lengths - common, starts)
    pairs = np.add.reduceat((lengths * (lengths + 1) - common * (common + 1)) // 2, starts)
    return Placed(order, common, starts, nodes, pairs)


# --- one packed row a micro-batch ---------------------------------------------------------------------------


def _find_packed_bins(rows: SortedRows, budget: int, ranks: int, attention_cost: float) -> Iterator[IntArray]:
    """[n] the bin of each row, in several ways: items of several sizes, single rows, neighbours in order."""
    shared, is_trie = rows.shared, rows.common.any()  # each bin has the `shared` tokens once
    capacity = max(budget - shared, 1)
    counts = set()
    for parts in (*PARTS, 0) if is_trie else (0,):
        items = np.arange(len(rows.numbers))
        if parts:
            items = cut_rows(rows, shared + capacity // parts, apart=True)
        placed = place_rows(rows, items, packed=True)
        if len(placed.starts) in counts:
            continue
        counts.add(len(placed.starts))
        sizes = placed.nodes - shared
        filled = fill_bins(sizes, capacity)
        if ranks == 1:
            yield filled[items]
            continue
        # 1: equal rows, which cost nothing more, go round too
        costs = 1 + sizes + attention_cost * (placed.pairs - shared * (shared + 1) / 2)
        rounds = -(-(int(filled.max()) + 1) // ranks)  # what best fit needs; evenness may need more
        tried, step = 0, 1
        while tried < 2:
            bins = spread_over_bins(sizes, costs, rounds * ranks, capacity)
            if bins is None:
                step *= 2
            else:
                yield bins[items]
                tried, step = tried + 1, 1
            rounds += step
    if is_trie:
        yield cut_rows(rows, budget, apart=False)


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


def fill_bins(sizes: IntArray, capacity: int) -> IntArray:
    """[n] the bin of each item, as few bins as best fit finds: the largest item first, each into the fullest
    bin that has room for it.

    An item above the capacity gets a bin of its own. Bins are numbered from 0, none is empty. O(n log n).
    """
    bins = np.zeros(len(sizes), np.int64)
    rooms = []  # (room, bin), rising
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
    bins = np.zeros(len(sizes), np.int64)
    cheapest = [(0.0, number, capacity) for number in range(count)]  # (cost, bin, room)
    parked = []  # (-room, cost, bin): no room for the last item
    for item in np.lexsort((-costs, -sizes)).tolist():
        size = int(sizes[item])
        while parked and -parked[0][0] >= size:
            room, cost, number = heapq.heappop(parked)
            heapq.heappush(cheapest, (cost, number, -room))
        while cheapest and cheapest[0][2] < size:
            cost, number, room = heapq.heappop(cheapest)
            heapq.heappush(parked, (-room, cost, number))
        if not cheapest:
            return None
        cost, number, room = cheapest[0]
        heapq.heapreplace(cheapest, (cost + float(costs[item]), number, room - size))
        bins[item] = number
    return bins


# --- padded rows --------------------------------------------------------------------------------------------


def _find_padded_bins(rows: SortedRows, budget: int, ranks: int) -> Iterator[IntArray]:
    """[n] the bin of each row, the longest first, as many as the budget holds; for several ranks also as many
    as smaller budgets hold, which divide the batch evenly.
    """
    order = np.argsort(-rows.lengths, kind="stable").tolist()
    labels, tokens, rounds = np.zeros(len(order), np.int64), budget, 0
    for turn in itertools.count():
        number = held = width = 0
        for row in order:
            if held and (held + 1) * width > tokens:
                number, held = number + 1, 0
            labels[row], held = number, held + 1
            if held == 1:
                width = int(rows.lengths[row])
        yield labels.copy()
        if ranks == 1 or (turn > 1 and number + 1 >= min(ranks, len(order))):
            return
        rounds = rounds + 1 if turn else -(-(number + 1) // ranks)
        tokens = min(budget, int(rows.lengths.sum()) // (ranks * rounds))

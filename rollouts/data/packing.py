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

    lengths and what rows share ─► rollouts.data.packing_plans: which rows lie together
        ─► the arrays of each micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rollouts.data.packing_plans import (
    ATTENTION_COST,
    MICRO_BATCH_COST,
    MicroBatchPlan,
    plan_one_row,
    plan_padded,
)
from rollouts.data.tries import SortedRows, sort_rows
from rollouts.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
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

    @property
    def computed_tokens(self) -> int:
        """Positions that the model computes, padding included."""
        return int(self.input_ids.size)


def make_micro_batches(
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
    *,
    micro_batch_tokens: int,
    share_prefix: bool,
    padding_free: bool = False,
    ranks: int = 1,
    attention_cost: float = ATTENTION_COST,
    micro_batch_cost: int = MICRO_BATCH_COST,
    skip_rows: BoolArray | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` computed tokens (a longer single row gets its own),
    holding every row that trains a token.

    `padding_free`: a micro-batch is one packed row, in which rows that begin alike share nodes with
    `share_prefix`; without it one row each, padded to the longest of the micro-batch. `micro_batch_cost`:
    what a micro-batch costs beside its tokens, in tokens; `attention_cost`: what a (query, key) pair costs,
    in tokens. With several `ranks` the micro-batches cost least when each rank computes one at a time and
    waits for the slowest: their costs are even, and each rank has rows where there are enough. Deterministic,
    O(n log n) in the rows. Raises ValueError if a row trains its first token, which nothing predicts.
    """
    lengths = np.asarray([_needed_length(row, mask) for row, mask in enumerate(loss_masks)], np.int64)
    trained = np.flatnonzero(lengths > 0 if skip_rows is None else (lengths > 0) & ~skip_rows)
    if not len(trained):
        return []
    rows = sort_rows(tokens, trained, lengths[trained], share=share_prefix and padding_free)
    plan = partial(plan_one_row, attention_cost=attention_cost) if padding_free else plan_padded
    plans = plan(rows, micro_batch_tokens, ranks=ranks, micro_batch_cost=micro_batch_cost)
    return [_make_micro_batch(rows, one, tokens, loss_masks, packed=padding_free) for one in plans]


def _needed_length(row: int, mask: BoolArray) -> int:
    """How many tokens of a row must be computed: those before its last trained token."""
    if not len(mask):
        return 0
    if mask[0]:
        raise ValueError(
            f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask"
            " it out"
        )
    behind = int(mask[::-1].argmax())
    return len(mask) - 1 - behind if mask[-1 - behind] else 0


def _make_micro_batch(
    rows: SortedRows,
    plan: MicroBatchPlan,
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
    *,
    packed: bool,
) -> MicroBatch:
    numbers, lengths = rows.numbers[plan.order], rows.lengths[plan.order]
    width = int((lengths - plan.common).sum() if packed else lengths.max())
    starts = np.cumsum(lengths - plan.common) - (lengths - plan.common)
    if not packed:
        starts = np.arange(len(lengths)) * width
    input_ids, position_ids = np.zeros((2, width if packed else len(lengths) * width), np.int64)
    path = np.zeros(int(lengths.max()), np.int64)  # the node of each depth of the row
    nodes: list[IntArray] = []
    trained: list[IntArray] = []
    cut = zip(numbers.tolist(), starts.tolist(), plan.common.tolist(), lengths.tolist(), strict=True)
    for row, start, common, length in cut:
        own = slice(start, start + length - common)
        input_ids[own], position_ids[own] = tokens[row][common:length], np.arange(common, length)
        path[common:length] = np.arange(own.start, own.stop)
        positions = np.flatnonzero(loss_masks[row][: length + 1])
        trained.append(positions)
        nodes.append(path[positions - 1])
    wanted = [tokens[row][at] for row, at in zip(numbers.tolist(), trained, strict=True)]
    keys = np.concatenate(nodes) << 32 | np.concatenate(wanted)  # a node and a token id fit 32 bits each
    if np.any(keys[1:] <= keys[:-1]):
        pairs, token_pairs = np.unique(keys, return_inverse=True)
    else:
        pairs, token_pairs = keys, np.arange(len(keys))
    ends = find_subtree_ends(lengths, plan.common) if packed else np.full(len(input_ids), width)
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


def find_subtree_ends(lengths: IntArray, common: IntArray) -> IntArray:
    """[S] first node after each node's subtree, of rows in lexicographic order, each with the tokens that it
    has in common with the one before.

    The subtree of a row's node at depth d ends with the first later row that has at most d tokens in common
    with the one before it.
    """
    starts = np.concatenate([[0], np.cumsum(lengths - common)]).tolist()
    found = np.empty(starts[-1], np.int64)
    later = [(-1, starts[-1])]  # (common, first node) of later rows that end subtrees, the nearest last
    for row in reversed(range(len(lengths))):
        top, shared, start = int(lengths[row]), int(common[row]), starts[row]
        while top > shared:
            limit, end = later[-1]
            bottom = max(limit, shared)
            found[start + bottom - shared : start + top - shared] = end
            top = min(top, bottom)
            if limit > shared:
                later.pop()
        while later[-1][0] >= shared:
            later.pop()
        later.append((shared, start))
    return found


def spread_to_rows(
    micro_batches: Sequence[MicroBatch], values: Sequence[FloatArray], tokens: Sequence[IntArray]
) -> tuple[FloatArray, ...]:
    """[T_i] per row of the batch: the value of each trained token's pair, 0.0 elsewhere. `values` holds one
    array [N] per micro-batch.
    """
    return spread_tokens_to_rows(
        micro_batches, [of[one.token_pairs] for one, of in zip(micro_batches, values, strict=True)], tokens
    )


def spread_tokens_to_rows(
    micro_batches: Sequence[MicroBatch], values: Sequence[FloatArray], tokens: Sequence[IntArray]
) -> tuple[FloatArray, ...]:
    """As spread_to_rows, of one array [M] per micro-batch: a value of each trained token, in the order of
    `token_rows`.
    """
    rows = tuple(np.zeros(len(row), np.float32) for row in tokens)
    for micro_batch, per_token in zip(micro_batches, values, strict=True):
        ends = np.cumsum(np.bincount(micro_batch.token_rows, minlength=len(micro_batch.rows))).tolist()
        first = 0
        for row, last in zip(micro_batch.rows.tolist(), ends, strict=True):
            rows[row][micro_batch.token_positions[first:last]] = per_token[first:last]
            first = last
    return rows

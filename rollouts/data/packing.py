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

import numpy as np

from rollouts.data.packing_plans import ATTENTION_COST, MICRO_BATCH_COST, SortedRows, plan_rows, sort_rows
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
    plans = plan_rows(
        rows,
        micro_batch_tokens,
        packed=padding_free,
        ranks=ranks,
        attention_cost=attention_cost,
        micro_batch_cost=micro_batch_cost,
    )
    return [_make_micro_batch(rows, *plan, tokens, loss_masks, packed=padding_free) for plan in plans]


def _needed_length(row: int, mask: BoolArray) -> int:
    """How many tokens of a row must be computed: those before its last trained token."""
    if mask[:1].any():
        raise ValueError(
            f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask"
            " it out"
        )
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else 0


def _make_micro_batch(
    rows: SortedRows,
    order: IntArray,
    common: IntArray,
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
    *,
    packed: bool,
) -> MicroBatch:
    numbers, lengths = rows.numbers[order], rows.lengths[order]
    own, longest = lengths - common, int(lengths.max())
    width = int(own.sum()) if packed else longest
    starts = np.cumsum(own) - own if packed else np.arange(len(lengths)) * width
    input_ids, position_ids = np.zeros((2, width if packed else len(lengths) * width), np.int64)
    ends = np.full(len(input_ids), width)
    path, end_by_depth = np.zeros(longest, np.int64), np.full(longest, width)  # of the nodes of each depth
    trained: list[IntArray] = []
    keys: list[IntArray] = []
    cut = list(zip(*(one.tolist() for one in (numbers, starts, common, lengths)), strict=True))
    for row, start, shared, length in cut:
        mine = slice(start, start + length - shared)
        input_ids[mine], position_ids[mine] = tokens[row][shared:length], np.arange(shared, length)
        path[shared:length] = np.arange(mine.start, mine.stop)
        trained.append(np.flatnonzero(loss_masks[row][: length + 1]))
        # a node and a token id fit 32 bits each
        keys.append(path[trained[-1] - 1] << 32 | tokens[row][trained[-1]])
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
        edges = np.flatnonzero(np.diff(micro_batch.token_rows)) + 1
        found = (np.split(one, edges) for one in (micro_batch.token_positions, per_token))
        for row, positions, own in zip(micro_batch.rows.tolist(), *found, strict=True):
            rows[row][positions] = own
    return rows

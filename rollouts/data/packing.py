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

from rollouts.data.packing_plans import (
    ATTENTION_COST,
    MICRO_BATCH_COST,
    PACKED_LENGTH,
    plan_one_row,
    plan_padded,
)
from rollouts.data.tries import Trie, find_nodes, make_trie, sort_rows
from rollouts.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """R packed rows of S nodes holding b rows of the batch; N distinct (node, target) pairs; M trained
    tokens.
    """

    rows: IntArray  # [b] numbers of the batch's rows that are in here, each whole
    input_ids: IntArray  # [R, S] padding is 0
    position_ids: IntArray  # [R, S] depth in the trie; padding is 0
    subtree_end: IntArray  # [R, S] first node after the subtree; padding sees itself only
    # [K, 4] unbranched pieces of the tries: (r, first s, s after the last, parent segment or -1), by r and s;
    # no padding
    segments: IntArray
    causal: bool  # every packed row is one sequence, so that a plain causal mask says the same
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
    packed_length: int = PACKED_LENGTH,
    micro_batch_cost: int = MICRO_BATCH_COST,
    skip_rows: BoolArray | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` computed tokens (a longer single row gets its own),
    holding every row that trains a token.

    `share_prefix`: rows that begin alike share nodes. `padding_free`: a micro-batch is one packed row, filled
    up to `micro_batch_tokens`; without it packed rows of about `packed_length` nodes (without sharing, of one
    sequence) are padded to the longest of their micro-batch. `micro_batch_cost`: what a micro-batch costs
    beside its tokens, in tokens; `attention_cost`: what a (query, key) pair costs, in tokens. With several
    `ranks` the micro-batches cost least when each rank computes one at a time and waits for the slowest:
    their costs are even, and each has rows where there are enough and parting them does not cost far more
    than it saves. Deterministic, O(n log n) in the rows. Raises ValueError if a row trains its first token,
    which nothing predicts.
    """
    lengths = np.asarray([_needed_length(row, mask) for row, mask in enumerate(loss_masks)], np.int64)
    trained = np.flatnonzero(lengths > 0 if skip_rows is None else (lengths > 0) & ~skip_rows)
    if not len(trained):
        return []
    rows = sort_rows(tokens, trained, lengths[trained], share=share_prefix)
    if padding_free:
        plan = plan_one_row(
            rows,
            micro_batch_tokens,
            ranks=ranks,
            micro_batch_cost=micro_batch_cost,
            attention_cost=attention_cost,
        )
    else:
        plan = plan_padded(
            rows,
            micro_batch_tokens,
            packed_length=packed_length,
            ranks=ranks,
            micro_batch_cost=micro_batch_cost,
        )
    return [
        _make_micro_batch(
            rows.numbers[part.order], rows.lengths[part.order], part.common, part.starts, tokens, loss_masks
        )
        for part in plan
    ]


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
    numbers: IntArray,
    lengths: IntArray,
    common: IntArray,
    line_rows: IntArray,
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
) -> MicroBatch:
    """Of the batch's rows `numbers`, whose first `lengths` tokens are computed, of which a row shares
    `common` with the one before it; the r-th packed row begins with the `line_rows[r]`-th of them.
    """
    trie = make_trie(lengths, common, line_rows)
    cut = list(zip(numbers.tolist(), common.tolist(), lengths.tolist(), strict=True))
    input_ids = np.concatenate([tokens[row][first:last] for row, first, last in cut])
    segments, line_starts = trie.segments, trie.line_starts
    nodes = np.arange(len(input_ids))
    position_ids = nodes - np.repeat(trie.starts[:-1] - common, np.diff(trie.starts))
    subtree_end = np.repeat(trie.subtree_end - line_starts[segments[:, 0]], segments[:, 2] - segments[:, 1])
    lines, width = len(line_rows), int(np.diff(line_starts).max())
    shift = np.arange(lines) * width - line_starts[:-1]  # from a node's number to its place
    if lines * width > len(nodes):
        places = nodes + np.repeat(shift, np.diff(line_starts))
        padded = (
            np.zeros(lines * width, np.int64),
            np.zeros(lines * width, np.int64),
            np.tile(np.arange(1, width + 1), lines),
        )
        for whole, values in zip(padded, (input_ids, position_ids, subtree_end), strict=True):
            whole[places] = values
        input_ids, position_ids, subtree_end = padded
    segments[:, 1:3] -= line_starts[segments[:, :1]]

    masks = [loss_masks[row][: last + 1] for row, _, last in cut]
    ends = np.cumsum(lengths + 1)
    found = np.flatnonzero(np.concatenate(masks))
    counts = np.diff(np.searchsorted(found, ends), prepend=0)
    token_rows = np.repeat(np.arange(len(cut)), counts)
    token_positions = found - np.repeat(ends - lengths - 1, counts)
    wanted = np.concatenate([tokens[row][: last + 1] for row, _, last in cut])[found]
    line_of_row = np.searchsorted(line_rows, np.arange(len(cut)), side="right") - 1
    predictors, targets, token_pairs = _find_pairs(trie, common, token_rows, token_positions - 1, wanted)
    return MicroBatch(
        rows=numbers,
        input_ids=input_ids.reshape(lines, width),
        position_ids=position_ids.reshape(lines, width),
        subtree_end=subtree_end.reshape(lines, width),
        segments=segments,
        causal=lines == len(cut),
        predictors=predictors
        + shift[line_of_row[0] if lines == 1 else np.searchsorted(line_starts, predictors, side="right") - 1],
        targets=targets,
        token_rows=token_rows,
        token_positions=token_positions,
        token_pairs=token_pairs,
    )


def _find_pairs(
    trie: Trie, common: IntArray, rows: IntArray, depths: IntArray, targets: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct (node, target) of M tokens, each predicted at a depth of its row, by node; and which of them
    each token is.
    """
    own = depths >= common[rows]
    nodes = trie.starts[rows] + depths - common[rows]
    if own.all():  # a node of a row's own predicts one token of it, and comes after those before
        return nodes, targets, np.arange(len(nodes))
    shared = np.flatnonzero(~own)
    nodes[shared] = find_nodes(trie, common, rows[shared], depths[shared])
    keys = (nodes << 32) | targets  # a node and a token id fit 32 bits each
    single = np.flatnonzero(own)
    first, others = keys[single], np.unique(keys[shared])
    at = np.searchsorted(first, others)
    new = (
        (at == len(first)) | (first[np.minimum(at, len(first) - 1)] != others)
        if len(first)
        else np.ones(len(others), np.bool_)
    )
    pairs = np.insert(first, at[new], others[new])
    token_pairs = np.empty(len(keys), np.int64)
    token_pairs[single] = (
        np.arange(len(first)) + np.cumsum(np.bincount(at[new], minlength=len(first) + 1))[: len(first)]
    )
    token_pairs[shared] = np.searchsorted(pairs, keys[shared])
    return pairs >> 32, pairs & 0xFFFFFFFF, token_pairs


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

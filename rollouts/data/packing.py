"""How the rows of a batch become micro-batches: which tokens are computed, in which order, and who may see whom.

Every packed row is a forest of token tries in depth-first order. Node j is visible to node i exactly when i lies in j's subtree:

    j <= i < subtree_end[j]

One sequence is a trie without branches, where this is the causal mask. Several sequences side by side are several trees, which see nothing
of each other. Sequences that begin with the same tokens share those nodes, so that a group's prompt, or a template common to a whole
batch, is computed once: gradients of a shared node add up over everything that continues it, exactly as if each had its own copy.

Only nodes that predict a trained token need vocabulary logits; a pair (node, target) that several rows share is scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollouts.types import BoolArray, FloatArray, IntArray

PACKED_LENGTH = 512  # up to so many nodes, filling a packed row is always worth it: less padding, and attention is a small part
MICRO_BATCH_COST = 128  # tokens; on a CPU mostly the head's and the embedding's gradients, which are as large as the vocabulary
LINEAR_COST = 1000  # one node costs as much in the linear layers as a query does over so many nodes of a dense mask, on small models


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """R packed rows of S nodes holding b rows of the batch; N distinct (node, target) pairs; M trained tokens."""

    rows: IntArray  # [b] numbers of the batch's rows that are in here, each whole
    input_ids: IntArray  # [R, S] padding is 0
    position_ids: IntArray  # [R, S] depth in the trie; padding is 0
    subtree_end: IntArray  # [R, S] first node after the subtree; padding sees itself only
    causal: bool  # every packed row is one sequence, so that a plain causal mask says the same
    predictors: IntArray  # [N] r * S + s of the node whose hidden state predicts
    targets: IntArray  # [N] the token it should predict
    token_rows: IntArray  # [M] index into `rows`
    token_positions: IntArray  # [M] position of the trained token in its row
    token_pairs: IntArray  # [M] index into predictors and targets

    @property
    def computed_tokens(self) -> int:
        """Positions that the model computes, padding included."""
        return int(self.input_ids.size)


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """One packed row while it is made."""

    input_ids: IntArray  # [nodes]
    position_ids: IntArray
    subtree_end: IntArray
    rows: list[int]
    paths: list[IntArray]  # per row: the node of each of its tokens


def make_micro_batches(
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
    *,
    micro_batch_tokens: int,
    share_prefix: bool,
    packed_length: int = PACKED_LENGTH,
    micro_batch_cost: int = MICRO_BATCH_COST,
    skip_rows: BoolArray | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` computed tokens (a longer single row gets its own), holding every row that trains a token.

    `share_prefix` packs rows into tries; without it each row is padded to the longest of its micro-batch. `micro_batch_cost`: what a
    micro-batch costs beside its tokens, in tokens; rows are divided so that padding and that are least together. `skip_rows` [B] are left
    out. Deterministic. Raises ValueError if a row trains its first token, which nothing predicts.
    """
    lengths = [_needed_length(row, mask) for row, mask in enumerate(loss_masks)]
    trained = [row for row, length in enumerate(lengths) if length > 0 and (skip_rows is None or not skip_rows[row])]
    inputs = {row: tokens[row][: lengths[row]] for row in trained}
    if share_prefix:
        packed = _pack_tries(inputs, min(packed_length, micro_batch_tokens), micro_batch_tokens)
    else:
        packed = [_pack_tries({row: inputs[row]}, 0, 0)[0] for row in trained]
    packed.sort(key=lambda one: (-len(one.input_ids), one.rows))
    cuts = divide_lengths([len(one.input_ids) for one in packed], micro_batch_tokens, micro_batch_cost)
    return [_make_micro_batch(packed[first:last], tokens, loss_masks) for first, last in cuts]


def divide_lengths(lengths: Sequence[int], budget: int, cost: int) -> list[tuple[int, int]]:
    """[first, last) of every micro-batch over `lengths`, which fall: the division with the fewest padded tokens, each micro-batch costing `cost`.

    Each holds (last − first)·lengths[first] <= budget padded tokens, or one row. Quadratic in the number of rows, in numpy.
    """
    longest = np.asarray(lengths, np.int64)
    count = len(longest)
    best = np.zeros(count + 1, np.int64)  # best[n]: cost of the first n rows
    came_from = np.zeros(count + 1, np.int64)
    for last in range(1, count + 1):
        padded = (last - np.arange(last)) * longest[:last]
        allowed = padded <= budget
        allowed[last - 1] = True
        totals = np.where(allowed, best[:last] + padded + cost, np.iinfo(np.int64).max)
        came_from[last] = np.argmin(totals)
        best[last] = totals[came_from[last]]
    cuts: list[tuple[int, int]] = []
    while count:
        cuts.append((int(came_from[count]), count))
        count = int(came_from[count])
    return cuts[::-1]


def _needed_length(row: int, mask: BoolArray) -> int:
    """How many tokens of a row must be computed: those before its last trained token."""
    positions = np.flatnonzero(mask)
    if len(positions) and positions[0] == 0:
        raise ValueError(f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask it out")
    return int(positions[-1]) if len(positions) else 0


def _pack_tries(inputs: dict[int, IntArray], packed_length: int, longest: int) -> list[_Packed]:
    """Rows in lexicographic order, so that those with a common beginning are neighbours, cut into packed rows.

    Up to `packed_length` nodes a row is filled; up to `longest` it goes on while sharing saves more in the linear layers than the larger
    dense mask costs.
    """
    order = sorted(inputs, key=lambda row: (inputs[row].tolist(), row))
    packed: list[_Packed] = []
    builder = _TrieBuilder()
    for row in order:
        held, new = len(builder.position_ids), builder.new_nodes(inputs[row])
        saved = LINEAR_COST * (len(inputs[row]) - new) - ((held + new) ** 2 - held**2 - len(inputs[row]) ** 2)
        if builder.rows and held + new > (longest if saved > 0 else packed_length):
            packed.append(builder.finish())
            builder = _TrieBuilder()
        builder.add(row, inputs[row])
    return [*packed, builder.finish()] if builder.rows else packed


class _TrieBuilder:
    """One packed row in the making: sequences are added in lexicographic order, so only the last one's path can be continued."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.subtree_end: list[int] = []
        self.paths: list[IntArray] = []
        self._last = np.zeros(0, np.int64)

    def shared(self, tokens: IntArray) -> int:
        """How many first tokens the last sequence has in common with `tokens`."""
        length = min(len(self._last), len(tokens))
        different = np.flatnonzero(self._last[:length] != tokens[:length])
        return int(different[0]) if len(different) else length

    def new_nodes(self, tokens: IntArray) -> int:
        return len(tokens) - self.shared(tokens)

    def add(self, row: int, tokens: IntArray) -> None:
        shared, count = self.shared(tokens), len(self.input_ids)
        path = np.concatenate([self.paths[-1][:shared] if self.paths else self._last, np.arange(count, count + len(tokens) - shared)])
        if self.paths:
            self._close(self.paths[-1][shared:], count)
        self.input_ids += tokens[shared:].tolist()
        self.position_ids += range(shared, len(tokens))
        self.subtree_end += [0] * (len(tokens) - shared)
        self.rows.append(row)
        self.paths.append(path)
        self._last = tokens

    def _close(self, nodes: IntArray, end: int) -> None:
        for node in nodes.tolist():
            self.subtree_end[node] = end

    def finish(self) -> _Packed:
        self._close(self.paths[-1], len(self.input_ids))
        return _Packed(np.asarray(self.input_ids), np.asarray(self.position_ids), np.asarray(self.subtree_end), self.rows, self.paths)


def _make_micro_batch(packed: Sequence[_Packed], tokens: Sequence[IntArray], loss_masks: Sequence[BoolArray]) -> MicroBatch:
    width = max(len(one.input_ids) for one in packed)
    input_ids = np.zeros((len(packed), width), np.int64)
    position_ids = np.zeros_like(input_ids)
    subtree_end = np.tile(np.arange(1, width + 1), (len(packed), 1))
    rows: list[int] = []
    token_rows, token_positions, nodes, targets = [], [], [], []
    for line, one in enumerate(packed):
        count = len(one.input_ids)
        input_ids[line, :count], position_ids[line, :count], subtree_end[line, :count] = one.input_ids, one.position_ids, one.subtree_end
        for row, path in zip(one.rows, one.paths, strict=True):
            positions = np.flatnonzero(loss_masks[row])
            token_rows.append(np.full(len(positions), len(rows)))
            token_positions.append(positions)
            nodes.append(line * width + path[positions - 1])
            targets.append(tokens[row][positions])
            rows.append(row)
    keys = (np.concatenate(nodes) << 32) | np.concatenate(targets)  # a node and a token id fit 32 bits each
    pairs, token_pairs = np.unique(keys, return_inverse=True)
    return MicroBatch(
        rows=np.asarray(rows),
        input_ids=input_ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        causal=all(len(one.rows) == 1 for one in packed),
        predictors=pairs >> 32,
        targets=pairs & 0xFFFFFFFF,
        token_rows=np.concatenate(token_rows),
        token_positions=np.concatenate(token_positions),
        token_pairs=token_pairs,
    )


def spread_to_rows(micro_batches: Sequence[MicroBatch], values: Sequence[FloatArray], tokens: Sequence[IntArray]) -> tuple[FloatArray, ...]:
    """[T_i] per row of the batch: the value of each trained token's pair, 0.0 elsewhere. `values` holds one array [N] per micro-batch."""
    rows = tuple(np.zeros(len(row), np.float32) for row in tokens)
    for micro_batch, per_pair in zip(micro_batches, values, strict=True):
        per_token = per_pair[micro_batch.token_pairs]
        for index, row in enumerate(micro_batch.rows.tolist()):
            mine = micro_batch.token_rows == index
            rows[row][micro_batch.token_positions[mine]] = per_token[mine]
    return rows

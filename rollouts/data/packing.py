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

PACKED_LENGTH = 512  # nodes of one packed row, unless a single sequence is longer: attention over a dense mask grows with the square


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
    tokens: Sequence[IntArray], loss_masks: Sequence[BoolArray], *, micro_batch_tokens: int, share_prefix: bool, packed_length: int = PACKED_LENGTH
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` computed tokens (a longer single row gets its own), holding every row that trains a token.

    `share_prefix` packs rows into tries; without it each row is padded to the longest of its micro-batch. Deterministic.
    Raises ValueError if a row trains its first token, which nothing predicts.
    """
    lengths = [_needed_length(row, mask) for row, mask in enumerate(loss_masks)]
    trained = [row for row, length in enumerate(lengths) if length > 0]
    inputs = {row: tokens[row][: lengths[row]] for row in trained}
    packed = _pack_tries(inputs, packed_length) if share_prefix else [_pack_tries({row: inputs[row]}, 0)[0] for row in trained]
    packed.sort(key=lambda one: (-len(one.input_ids), one.rows))
    batches: list[list[_Packed]] = []
    for one in packed:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].input_ids) <= micro_batch_tokens:
            batches[-1].append(one)
        else:
            batches.append([one])
    return [_make_micro_batch(batch, tokens, loss_masks) for batch in batches]


def _needed_length(row: int, mask: BoolArray) -> int:
    """How many tokens of a row must be computed: those before its last trained token."""
    positions = np.flatnonzero(mask)
    if len(positions) and positions[0] == 0:
        raise ValueError(f"loss_masks[{row}] trains the first token; nothing comes before it to predict it from: mask it out")
    return int(positions[-1]) if len(positions) else 0


def _pack_tries(inputs: dict[int, IntArray], packed_length: int) -> list[_Packed]:
    """Rows in lexicographic order, so that those with a common beginning are neighbours, cut into packed rows of about `packed_length`."""
    order = sorted(inputs, key=lambda row: (inputs[row].tolist(), row))
    packed: list[_Packed] = []
    builder = _TrieBuilder()
    for row in order:
        if builder.rows and len(builder.position_ids) + builder.new_nodes(inputs[row]) > packed_length:
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
    pairs, token_pairs = np.unique(np.stack([np.concatenate(nodes), np.concatenate(targets)]), axis=1, return_inverse=True)
    return MicroBatch(
        rows=np.asarray(rows),
        input_ids=input_ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        causal=all(len(one.rows) == 1 for one in packed),
        predictors=pairs[0],
        targets=pairs[1],
        token_rows=np.concatenate(token_rows),
        token_positions=np.concatenate(token_positions),
        token_pairs=token_pairs.reshape(-1),
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

"""How the rows of a batch go into forward passes: no padding, a shared prompt once, and only positions that predict something.

    rows of a group     p p p a a a      one pack     p p p a a | b b b | c        positions  0 1 2 3 4 | 3 4 5 | 3
                        p p p b b b b                 └trunk┘└────── branches ──────┘
                        p p p c c

A row enters up to the token before its last trained one: that is the last position which predicts anything. Tokens lie one after another,
in segments. A trunk attends to itself, causally; a branch attends to its whole trunk and, causally, to itself. A row that shares nothing
is a trunk without branches. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollouts.types import BoolArray, IntArray

BRANCH_KEYS_FACTOR = 4  # keys of branches, their trunks repeated, may be this many times micro_batch_tokens: they are a small part of memory


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward pass over N tokens without padding. b original rows, K trained tokens."""

    input_ids: IntArray  # [N]
    position_ids: IntArray  # [N] position in the original row
    segment_starts: IntArray  # [segments] where each begins in [N]; they follow one another and cover it
    segment_lengths: IntArray  # [segments] tokens
    segment_trunks: IntArray  # [segments] which segment a branch continues; -1 for a trunk
    rows: IntArray  # [b] original rows, ascending
    row_lengths: IntArray  # [b] tokens of each original row, what does not enter included
    predicted_by: IntArray  # [K] index into [N] of the position that predicts the token
    target_ids: IntArray  # [K] the token
    target_rows: IntArray  # [K] index into `rows`
    target_positions: IntArray  # [K] index of the token in its original row

    @property
    def shares(self) -> bool:
        """Whether some tokens are computed once for several rows."""
        return bool((self.segment_trunks >= 0).any())


@dataclass(frozen=True, slots=True)
class _Pack:
    """Rows that share their first `prefix_length` tokens, or one row."""

    rows: tuple[int, ...]
    prefix_length: int  # of the trunk; the whole input when there is one row
    branch_lengths: tuple[int, ...]  # of each row's branch, 0 where the trunk is all; empty when there is one row

    @property
    def longest_branch(self) -> int:
        return max(self.branch_lengths, default=0)


def pack_micro_batches(
    tokens: Sequence[IntArray],
    loss_masks: Sequence[BoolArray],
    *,
    micro_batch_tokens: int,
    group_indices: IntArray | None = None,
    skip_rows: BoolArray | None = None,
) -> list[MicroBatch]:
    """Micro-batches that compute every trained token exactly once; the same input gives the same micro-batches.

    A micro-batch holds at most `micro_batch_tokens` tokens, counted as if its trunks were padded to the longest trunk and its branches to
    the longest branch; a row longer than that goes alone. Packs are taken longest first. Rows of one group share the longest prefix that
    lies before the first trained token of each; group_indices None: nothing is shared. Rows without a trained token, and those that
    `skip_rows` [B] names, are left out. Raises ValueError if the first token of a row is trained: nothing predicts it.
    """
    if micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens={micro_batch_tokens}; it must be at least 1")
    for row, mask in enumerate(loss_masks):
        if len(mask) and mask[0]:
            raise ValueError(f"loss_masks[{row}][0] is 1; the first token of a row has nothing before it that predicts it; set it to 0")
    active = [row for row, mask in enumerate(loss_masks) if mask.any() and (skip_rows is None or not skip_rows[row])]
    packs = _make_packs(tokens, loss_masks, active, group_indices, micro_batch_tokens)
    packs.sort(key=lambda pack: (-pack.prefix_length, -pack.longest_branch, pack.rows[0]))
    return [_build_micro_batch(tokens, loss_masks, chosen) for chosen in _fill(packs, micro_batch_tokens)]


def find_common_prefix(rows: Sequence[IntArray]) -> int:
    """Number of leading tokens that all rows have in common."""
    shortest = min(len(row) for row in rows)
    same = (np.stack([row[:shortest] for row in rows]) == rows[0][:shortest]).all(axis=0)
    return shortest if same.all() else int(np.argmin(same))


def _make_packs(
    tokens: Sequence[IntArray], loss_masks: Sequence[BoolArray], active: Sequence[int], group_indices: IntArray | None, budget: int
) -> list[_Pack]:
    trained = {row: np.flatnonzero(loss_masks[row]) for row in active}
    groups: dict[int, list[int]] = {}
    for row in active:
        groups.setdefault(-1 - row if group_indices is None else int(group_indices[row]), []).append(row)
    packs: list[_Pack] = []
    for members in groups.values():
        prefix = find_common_prefix([tokens[row][: trained[row][0]] for row in members]) if len(members) > 1 else 0
        lengths = {row: int(trained[row][-1]) for row in members}  # tokens that enter: the last trained one is only a target
        if prefix == 0:
            packs += [_Pack((row,), lengths[row], ()) for row in members]
        else:
            packs += _share(members, prefix, lengths, budget)
    return packs


def _share(members: Sequence[int], prefix: int, lengths: dict[int, int], budget: int) -> list[_Pack]:
    """Packs of rows with one prefix, each within the budget where that is possible."""
    waiting = sorted(members, key=lambda row: (-lengths[row], row))
    packs: list[_Pack] = []
    while waiting:
        longest = lengths[waiting[0]] - prefix
        room = (budget - prefix) // max(longest, 1)
        room = min(room, BRANCH_KEYS_FACTOR * budget // (prefix + longest))
        chosen, waiting = waiting[: max(room, 1)], waiting[max(room, 1) :]
        if len(chosen) == 1:
            packs.append(_Pack((chosen[0],), lengths[chosen[0]], ()))
        else:
            packs.append(_Pack(tuple(sorted(chosen)), prefix, tuple(lengths[row] - prefix for row in sorted(chosen))))
    return packs


def _fill(packs: Sequence[_Pack], budget: int) -> list[list[_Pack]]:
    """Packs in the given order, as many together as the budget allows."""
    filled: list[list[_Pack]] = []
    trunk = branch = branches = 0  # longest trunk, longest branch, number of branches of the open micro-batch
    for pack in packs:
        new_trunk, new_branch = max(trunk, pack.prefix_length), max(branch, pack.longest_branch)
        new_branches = branches + len(pack.branch_lengths)
        within = filled and (
            (len(filled[-1]) + 1) * new_trunk + new_branches * new_branch <= budget
            and new_branches * (new_trunk + new_branch) <= BRANCH_KEYS_FACTOR * budget
        )
        if within:
            filled[-1].append(pack)
            trunk, branch, branches = new_trunk, new_branch, new_branches
        else:
            filled.append([pack])
            trunk, branch, branches = pack.prefix_length, pack.longest_branch, len(pack.branch_lengths)
    return filled


def _build_micro_batch(tokens: Sequence[IntArray], loss_masks: Sequence[BoolArray], packs: Sequence[_Pack]) -> MicroBatch:
    rows = np.sort(np.asarray([row for pack in packs for row in pack.rows], np.int64))
    row_index = {int(row): index for index, row in enumerate(rows)}
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    segments: list[tuple[int, int, int]] = []  # start, length, trunk
    predicted_by: list[IntArray] = []
    targets: list[tuple[int, IntArray]] = []  # row, positions in it
    end = 0

    def add_segment(row: int, first: int, length: int, trunk: int) -> int:
        nonlocal end
        start = end
        ids.append(tokens[row][first : first + length])
        positions.append(np.arange(first, first + length))
        segments.append((start, length, trunk))
        end += length
        return start

    for pack in packs:
        trunk = len(segments)
        trunk_start = add_segment(pack.rows[0], 0, pack.prefix_length, -1)
        for row, length in zip(pack.rows, pack.branch_lengths or (0,), strict=True):
            branch_start = add_segment(row, pack.prefix_length, length, trunk) if length else end
            trained = np.flatnonzero(loss_masks[row])
            before = trained - 1  # the position in the row that predicts each trained token
            in_trunk = before < pack.prefix_length
            predicted_by.append(np.where(in_trunk, trunk_start + before, branch_start + before - pack.prefix_length))
            targets.append((row, trained))
    table = np.asarray(segments, np.int64)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        segment_starts=table[:, 0],
        segment_lengths=table[:, 1],
        segment_trunks=table[:, 2],
        rows=rows,
        row_lengths=np.asarray([len(tokens[row]) for row in rows], np.int64),
        predicted_by=np.concatenate(predicted_by).astype(np.int64),
        target_ids=np.concatenate([tokens[row][trained] for row, trained in targets]).astype(np.int64),
        target_rows=np.concatenate([np.full(len(trained), row_index[row], np.int64) for row, trained in targets]),
        target_positions=np.concatenate([trained for _, trained in targets]).astype(np.int64),
    )

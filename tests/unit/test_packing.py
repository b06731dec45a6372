from __future__ import annotations

import numpy as np
import pytest

from rollouts.data.packing import MicroBatch, find_common_prefix, pack_micro_batches


def row(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int64)


def mask(text: str) -> np.ndarray:
    return np.asarray([character == "1" for character in text])


def visible(micro: MicroBatch) -> np.ndarray:
    """[N, N]: the attention rule, written out."""
    count = len(micro.input_ids)
    segment_of = np.repeat(np.arange(len(micro.segment_lengths)), micro.segment_lengths)
    sees = np.zeros((count, count), bool)
    for i in range(count):
        for j in range(count):
            same = segment_of[i] == segment_of[j]
            from_trunk = micro.segment_trunks[segment_of[i]] == segment_of[j]
            sees[i, j] = (same and j <= i) or from_trunk
    return sees


def read_back(micro: MicroBatch) -> set[tuple[int, int, int, tuple[int, ...]]]:
    """(row, position, target, what the predicting position sees in order) of every trained token."""
    sees = visible(micro)
    found = set()
    for k in range(len(micro.target_ids)):
        seen = np.flatnonzero(sees[micro.predicted_by[k]])
        seen = seen[np.argsort(micro.position_ids[seen], kind="stable")]
        assert micro.position_ids[seen].tolist() == list(range(len(seen)))
        original_row = int(micro.rows[micro.target_rows[k]])
        found.add((original_row, int(micro.target_positions[k]), int(micro.target_ids[k]), tuple(micro.input_ids[seen].tolist())))
    return found


def expected(tokens, masks, rows=None) -> set[tuple[int, int, int, tuple[int, ...]]]:
    """The same from the rows themselves: a token at position t is predicted from tokens[:t]."""
    wanted = range(len(tokens)) if rows is None else rows
    return {(r, int(t), int(tokens[r][t]), tuple(tokens[r][:t].tolist())) for r in wanted for t in np.flatnonzero(masks[r])}


def random_batch(seed: int, groups: int, size: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, masks, indices = [], [], []
    for group in range(groups):
        prompt = rng.integers(0, 9, rng.integers(1, 8))
        for _ in range(size):
            response = rng.integers(0, 9, rng.integers(1, 12))
            trained = rng.random(len(response)) < 0.8
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), trained]))
            indices.append(group)
    return tokens, masks, np.asarray(indices)


def test_a_shared_prompt_is_one_trunk_with_a_branch_per_row():
    tokens = [row(1, 2, 3, 7, 8, 9), row(1, 2, 3, 5, 6), row(1, 2, 3, 4)]
    masks = [mask("000111"), mask("00001"), mask("0001")]
    (micro,) = pack_micro_batches(tokens, masks, micro_batch_tokens=100, group_indices=row(0, 0, 0))
    assert micro.input_ids.tolist() == [1, 2, 3, 7, 8, 5]  # the last trained token of a row is only a target
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert micro.segment_starts.tolist() == [0, 3, 5]
    assert micro.segment_lengths.tolist() == [3, 2, 1]
    assert micro.segment_trunks.tolist() == [-1, 0, 0]  # the third row's branch has no token
    assert micro.predicted_by.tolist() == [2, 3, 4, 5, 2]  # the first tokens of rows 0 and 2 by the last prompt token; 5 is not trained
    assert micro.target_ids.tolist() == [7, 8, 9, 6, 4]
    assert micro.target_rows.tolist() == [0, 0, 0, 1, 2]
    assert micro.target_positions.tolist() == [3, 4, 5, 4, 3]
    assert micro.row_lengths.tolist() == [6, 5, 4]
    assert micro.shares


def test_without_groups_every_row_is_a_trunk():
    tokens = [row(1, 2, 3), row(1, 2, 4, 5)]
    (micro,) = pack_micro_batches(tokens, [mask("001"), mask("0010")], micro_batch_tokens=100)
    assert micro.segment_trunks.tolist() == [-1, -1]
    assert micro.input_ids.tolist() == [1, 2, 1, 2]  # what comes after the last trained token does not enter
    assert not micro.shares


@pytest.mark.parametrize("budget", [1, 9, 30, 1000])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [False, True])
def test_every_trained_token_is_predicted_once_from_exactly_what_precedes_it(seed: int, budget: int, share: bool):
    tokens, masks, groups = random_batch(seed, groups=4, size=3)
    micros = pack_micro_batches(tokens, masks, micro_batch_tokens=budget, group_indices=groups if share else None)
    assert sum(len(micro.target_ids) for micro in micros) == sum(int(m.sum()) for m in masks)
    assert set().union(*(read_back(micro) for micro in micros)) == expected(tokens, masks)


@pytest.mark.parametrize("budget", [20, 64, 200])
def test_padded_to_the_longest_a_micro_batch_keeps_within_the_budget(budget: int):
    tokens, masks, groups = random_batch(7, groups=12, size=4)
    for group_indices in (None, groups):
        for micro in pack_micro_batches(tokens, masks, micro_batch_tokens=budget, group_indices=group_indices):
            trunks, branches = micro.segment_lengths[micro.segment_trunks < 0], micro.segment_lengths[micro.segment_trunks >= 0]
            padded = len(trunks) * trunks.max() + (len(branches) * branches.max() if len(branches) else 0)
            assert padded <= budget or len(micro.rows) == 1


def test_a_group_that_does_not_fit_is_split_and_repeats_its_prompt():
    tokens = [row(1, 2, 3, 4, 10 + n, 11 + n, 12 + n) for n in range(4)]
    masks = [mask("0000111")] * 4
    micros = pack_micro_batches(tokens, masks, micro_batch_tokens=8, group_indices=row(0, 0, 0, 0))
    assert [len(micro.input_ids) for micro in micros] == [8, 8]  # prompt 4, two branches of 2
    assert set().union(*(read_back(micro) for micro in micros)) == expected(tokens, masks)


def test_sharing_stops_before_the_first_trained_token_of_any_row():
    tokens = [row(1, 2, 3, 4), row(1, 2, 3, 5)]
    (micro,) = pack_micro_batches(tokens, [mask("0111"), mask("0001")], micro_batch_tokens=99, group_indices=row(0, 0))
    assert micro.segment_lengths.tolist() == [1, 2, 2]  # row 0 trains its second token


def test_rows_of_different_groups_share_nothing():
    tokens = [row(1, 2, 3), row(1, 2, 4)]
    (micro,) = pack_micro_batches(tokens, [mask("001")] * 2, micro_batch_tokens=99, group_indices=row(0, 1))
    assert not micro.shares


def test_rows_without_trained_tokens_and_skipped_rows_are_left_out():
    tokens = [row(1, 2), row(1, 3), row(1, 4)]
    masks = [mask("00"), mask("01"), mask("01")]
    (micro,) = pack_micro_batches(tokens, masks, micro_batch_tokens=99, skip_rows=np.asarray([False, True, False]))
    assert micro.rows.tolist() == [2]
    assert pack_micro_batches(tokens, masks, micro_batch_tokens=99, skip_rows=np.ones(3, bool)) == []


def test_a_trained_first_token_is_refused_by_its_row():
    with pytest.raises(ValueError, match=r"loss_masks\[1\]\[0\] is 1"):
        pack_micro_batches([row(1, 2), row(3, 4)], [mask("01"), mask("11")], micro_batch_tokens=99)


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="micro_batch_tokens=0"):
        pack_micro_batches([], [], micro_batch_tokens=0)


def test_the_common_prefix_of_rows():
    assert find_common_prefix([row(1, 2, 3), row(1, 2, 4)]) == 2
    assert find_common_prefix([row(1, 2, 3), row(1, 2)]) == 2
    assert find_common_prefix([row(1), row(2)]) == 0

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollouts.data.packing import MicroBatch, make_micro_batches, spread_to_rows


def row(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int64)


def mask(text: str) -> np.ndarray:
    return np.asarray([character == "1" for character in text])


def visible(micro: MicroBatch, line: int) -> np.ndarray:
    """[S, S]: the attention rule, written out; a causal micro-batch must not need anything else."""
    count = micro.input_ids.shape[1]
    sees = np.zeros((count, count), bool)
    for i, j in itertools.product(range(count), repeat=2):
        sees[i, j] = j <= i and (micro.causal or i < micro.subtree_end[line, j])
    return sees


def read_back(micro: MicroBatch) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """(row, position, target, what the predicting node sees in order of position) of every trained token."""
    sees = [visible(micro, line) for line in range(len(micro.input_ids))]
    found = []
    for token_row, position, pair in zip(
        micro.token_rows, micro.token_positions, micro.token_pairs, strict=True
    ):
        line, node = divmod(int(micro.predictors[pair]), micro.input_ids.shape[1])
        seen = np.flatnonzero(sees[line][node])
        assert micro.causal or micro.position_ids[line][seen].tolist() == list(range(len(seen)))
        found.append(
            (
                int(micro.rows[token_row]),
                int(position),
                int(micro.targets[pair]),
                tuple(micro.input_ids[line][seen].tolist()),
            )
        )
    return found


def expected(tokens, masks) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """The same from the rows themselves: a token at position t is predicted from tokens[:t]."""
    return sorted(
        (r, int(t), int(tokens[r][t]), tuple(tokens[r][:t].tolist()))
        for r in range(len(tokens))
        for t in np.flatnonzero(masks[r])
    )


def random_batch(seed: int, groups: int, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(groups):
        prompt = rng.integers(0, 5, rng.integers(1, 8))
        for _ in range(size):
            response = rng.integers(0, 3, rng.integers(1, 12))
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), rng.random(len(response)) < 0.8]))
    return tokens, masks


def test_a_shared_prompt_is_computed_once_and_every_response_sees_it_and_itself():
    tokens = [row(1, 2, 7, 8, 9), row(1, 2, 5, 6)]
    (micro,) = make_micro_batches(
        tokens, [mask("00111"), mask("0011")], micro_batch_tokens=99, share_prefix=True
    )
    assert micro.input_ids.tolist() == [[1, 2, 5, 7, 8]]  # the last trained token of a row is only a target
    assert micro.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert micro.subtree_end.tolist() == [[5, 5, 3, 5, 5]]
    assert not micro.causal
    assert micro.computed_tokens == 5
    assert sorted(read_back(micro)) == expected(tokens, [mask("00111"), mask("0011")])


def test_a_pair_of_node_and_target_that_rows_share_is_scored_once():
    tokens = [row(1, 2, 3), row(1, 2, 3), row(1, 2, 4)]
    (micro,) = make_micro_batches(tokens, [mask("001")] * 3, micro_batch_tokens=99, share_prefix=True)
    assert micro.input_ids.tolist() == [[1, 2]]
    assert micro.targets.tolist() == [3, 4]
    assert len(micro.token_pairs) == 3


@pytest.mark.parametrize("budget", [1, 9, 30, 1000])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("packed_length", [4, 512])
def test_every_trained_token_is_predicted_once_from_exactly_what_precedes_it(
    seed: int, budget: int, share: bool, packed_length: int
):
    tokens, masks = random_batch(seed, groups=4, size=3)
    micros = make_micro_batches(
        tokens,
        masks,
        micro_batch_tokens=budget,
        share_prefix=share,
        packed_length=packed_length,
        micro_batch_cost=seed,
    )
    assert sorted(found for micro in micros for found in read_back(micro)) == expected(tokens, masks)


def test_rows_without_trained_tokens_and_skipped_rows_are_left_out():
    tokens, masks = [row(1, 2), row(1, 3), row(1, 4)], [mask("00"), mask("01"), mask("01")]
    (micro,) = make_micro_batches(
        tokens, masks, micro_batch_tokens=99, share_prefix=False, skip_rows=np.asarray([False, True, False])
    )
    assert micro.rows.tolist() == [2]
    assert (
        make_micro_batches(
            tokens, masks, micro_batch_tokens=99, share_prefix=True, skip_rows=np.ones(3, bool)
        )
        == []
    )


def test_a_trained_first_token_is_refused_by_its_row():
    with pytest.raises(ValueError, match=r"loss_masks\[1\] trains the first token"):
        make_micro_batches(
            [row(1, 2), row(3, 4)], [mask("01"), mask("11")], micro_batch_tokens=99, share_prefix=True
        )


def test_values_of_pairs_come_back_in_their_rows():
    tokens = [row(1, 2, 3), row(5, 6), row(1, 2, 3, 9)]
    masks = [mask("001"), mask("00"), mask("0011")]
    micros = make_micro_batches(tokens, masks, micro_batch_tokens=3, share_prefix=True)
    values = [micro.targets.astype(np.float32) * 10 for micro in micros]
    rows = spread_to_rows(micros, values, tokens)
    assert [r.tolist() for r in rows] == [[0, 0, 30], [0, 0], [0, 0, 30, 90]]

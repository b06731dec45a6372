"""How a batch is divided among ranks, and how its results come back to their rows."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.backends.shares import Share, collect_token_arrays, compute_cost, deal_portions, make_portion
from rollouts.codec import decode, encode
from rollouts.testing.torch_contracts import make_batch as make_groups
from rollouts.types import LossSpec, RolloutBatch
from tests.support.text_tables import cases
from tests.unit import test_packing


def make_batch(lengths):
    """Rows of random tokens: two of a prompt, and an answer of the given length that trains."""
    rng = np.random.default_rng(0)
    masks = tuple(np.arange(2 + length) >= 2 for length in lengths)
    return RolloutBatch(
        tokens=tuple(rng.integers(0, 1000, 2 + length) for length in lengths),
        loss_masks=masks,
        advantages=tuple(rng.normal(size=len(mask)).astype(np.float32) for mask in masks),
    )


def pack(batch, ranks, budget, *, share=False, packed=False):
    options = {"share": share, "packed": packed, "ranks": ranks, "micro_batch_cost": 8}
    return test_packing.pack(batch.tokens, batch.loss_masks, budget, **options)


def deal(batch, micro_batches, ranks):
    return deal_portions([make_portion(one, batch) for one in micro_batches], ranks, micro_batch_cost=8)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(4, 200),
    st.booleans(),
    st.booleans(),
)
def test_every_row_is_computed_once_and_every_rank_has_as_many_rounds(lengths, ranks, budget, share, free):
    batch = make_batch(lengths)
    micro_batches = pack(batch, ranks, budget, share=share, packed=free)
    shares = deal(batch, micro_batches, ranks)
    assert [len(mine) for mine in shares] == [len(shares[0])] * ranks
    counted = [portion.micro_batch.rows for mine in shares for portion in mine if portion.counts]
    assert sorted(np.concatenate(counted)) == [*range(len(lengths))]
    assert max(one.computed_tokens for one in micro_batches) <= max(budget, *lengths) + 2


def test_a_micro_batch_costs_its_nodes_and_what_they_see():
    """A prompt of 2 and answers of 1 and 2 computed tokens: 5 nodes that see 1 2, 3, 3 4 nodes."""
    tokens = (np.asarray([1, 2, 5, 6]), np.asarray([1, 2, 7, 8, 9]))
    masks = tuple(np.arange(len(row)) >= 2 for row in tokens)
    (micro,) = test_packing.pack(tokens, masks)
    assert compute_cost(micro, micro_batch_cost=10, attention_cost=0.5) == 5 + 10 + 0.5 * (1 + 2 + 3 + 3 + 4)


def test_a_rank_without_work_gets_the_smallest_portion_without_weight():
    batch = make_batch([30, 4, 9])
    shares = deal(batch, pack(batch, 3, 1), 2)
    idle = [portion.micro_batch.rows for mine in shares for portion in mine if not portion.counts]
    np.testing.assert_array_equal(idle, [[1]])
    assert deal(batch, [], 3) == [[], [], []]  # without rows that train everybody gets nothing


def test_a_share_crosses_as_bytes():
    batch = make_batch([3, 20, 7])
    batch = replace(batch, extras={"low": tuple(row / 2 for row in batch.advantages)})
    portions = tuple(make_portion(micro_batch, batch) for micro_batch in pack(batch, 2, 20))
    spec = LossSpec("ppo_clip", {"clip_low": 0.1}, unit="constant", constant=7.0)
    share = Share(portions, temperature=0.7, spec=spec, denominator=7.0, expected_count=30.0)
    found = decode(encode(share), Share, max_axes=2)
    np.testing.assert_equal(found, share)
    for portion in found.portions:
        assert portion.micro_batch.input_ids.flags.writeable  # torch warns of others
        np.testing.assert_array_equal(2 * portion.extras["low"], portion.fields["advantages"])


# --- what the loss saw of each token --------------------------------------------------------------------


def trace_of(rows, positions):
    """[4, M] numbers that name the token: 100 times its row plus its position, and so much more for each
    kind.
    """
    return 100 * rows + positions + np.float32([[1], [10_001], [20_001], [30_001]])


@cases("ranks: 1 2 5")
@cases("share_prefix: no yes")
def test_each_token_comes_to_its_row_over_ranks_of_which_some_have_nothing(ranks: int, share_prefix: bool):
    batch = make_groups(groups=2)
    dealt = deal(batch, pack(batch, 1, 20, share=share_prefix, packed=share_prefix), ranks)
    traces = []
    for mine in dealt:
        counted = [portion.micro_batch for portion in mine if portion.counts]
        parts = [trace_of(one.rows[one.token_rows], one.token_positions) for one in counted]
        traces.append(np.concatenate([np.zeros((4, 0), np.float32), *parts], axis=1))
    assert ranks < 5 or any(not portion.counts for mine in dealt for portion in mine), (
        "a rank has a round without work of its own"
    )
    found = collect_token_arrays(dealt, traces, batch, LossSpec("a", {"kl_estimator": "exact"}))
    for row, mask in enumerate(batch.loss_masks):
        of_row = found.log_probs[row], found.slopes[row], found.weights[row], found.kls[row]
        np.testing.assert_array_equal(of_row, mask * trace_of(row, np.arange(len(mask))))

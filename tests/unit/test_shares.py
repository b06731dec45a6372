"""How a batch is divided among ranks, and how its results come back to their rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.backends.shares import (
    Share,
    collect_token_arrays,
    compute_cost,
    deal_portions,
    decode_share,
    encode_share,
    make_portion,
)
from rollouts.data.packing import MicroBatch
from rollouts.testing.torch_contracts import make_batch as make_groups
from rollouts.types import FloatArray, LossSpec, RolloutBatch, TokenArrays
from tests.support.text_tables import cases
from tests.unit import test_packing


def make_batch(lengths: list[int]) -> RolloutBatch:
    """Rows of random tokens: two of a prompt, and an answer of the given length that trains."""
    rng = np.random.default_rng(0)
    masks = tuple(np.arange(2 + length) >= 2 for length in lengths)
    return RolloutBatch(
        tokens=tuple(rng.integers(0, 1000, 2 + length) for length in lengths),
        loss_masks=masks,
        advantages=tuple(rng.normal(size=len(mask)).astype(np.float32) for mask in masks),
    )


def pack(batch: RolloutBatch, ranks: int, budget: int, *, share=False, packed=False) -> list[MicroBatch]:
    options = {"share": share, "packed": packed, "ranks": ranks, "micro_batch_cost": 8}
    return test_packing.pack(batch.tokens, batch.loss_masks, budget, **options)


def rows_of(micro_batches: list[MicroBatch]) -> list[int]:
    return sorted(row for micro_batch in micro_batches for row in micro_batch.rows.tolist())


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(4, 200),
    st.booleans(),
    st.booleans(),
)
def test_every_row_is_computed_once_and_every_rank_has_as_many_rounds(
    lengths: list[int], ranks: int, budget: int, share: bool, free: bool
):
    batch = make_batch(lengths)
    micro_batches = pack(batch, ranks, budget, share=share, packed=free)
    shares = deal_portions(
        [make_portion(micro_batch, batch) for micro_batch in micro_batches], ranks, micro_batch_cost=8
    )
    assert len(shares) == ranks
    assert len({len(mine) for mine in shares}) == 1
    assert rows_of([portion.micro_batch for mine in shares for portion in mine if portion.counts]) == list(
        range(len(lengths))
    )
    assert all(
        one.computed_tokens <= max(budget, *(length + 2 for length in lengths)) for one in micro_batches
    )


def test_a_micro_batch_costs_its_nodes_and_what_they_see():
    """A prompt of 2 and answers of 1 and 2 computed tokens: 5 nodes that see 1 2, 3, 3 4 nodes."""
    tokens = (np.asarray([1, 2, 5, 6]), np.asarray([1, 2, 7, 8, 9]))
    masks = tuple(np.arange(len(row)) >= 2 for row in tokens)
    (micro,) = test_packing.pack(tokens, masks)
    assert compute_cost(micro, micro_batch_cost=10, attention_cost=0.5) == 5 + 10 + 0.5 * (1 + 2 + 3 + 3 + 4)


def test_a_rank_without_work_gets_the_smallest_portion_without_weight():
    batch = make_batch([30, 4, 9])
    portions = [make_portion(micro_batch, batch) for micro_batch in pack(batch, 3, 1)]
    shares = deal_portions(portions, 2, micro_batch_cost=8)
    idle = [portion for mine in shares for portion in mine if not portion.counts]
    assert [portion.micro_batch.rows.tolist() for portion in idle] == [[1]]


def test_a_batch_without_rows_to_train_gives_everybody_nothing():
    assert deal_portions([], 3, micro_batch_cost=8) == [[], [], []]


def test_a_share_crosses_as_bytes():
    batch = make_batch([3, 20, 7])
    portions = tuple(make_portion(micro_batch, batch) for micro_batch in pack(batch, 2, 20))
    spec = LossSpec("ppo_clip", {"clip_low": 0.1}, unit="constant", constant=7.0)
    share = Share(portions, temperature=0.7, spec=spec, denominator=7.0, expected_count=30.0)
    message = encode_share(share)
    found = decode_share(message)
    assert (found.temperature, found.spec, found.denominator, found.expected_count) == (0.7, spec, 7.0, 30.0)
    for one, other in zip(found.portions, share.portions, strict=True):
        assert (one.width, one.counts, one.micro_batch.causal) == (
            other.width,
            other.counts,
            other.micro_batch.causal,
        )
        for name in ("rows", "input_ids", "predictors", "token_pairs"):
            values = getattr(one.micro_batch, name)
            np.testing.assert_array_equal(values, getattr(other.micro_batch, name))
            assert values.flags.writeable  # torch warns of others
        np.testing.assert_array_equal(one.fields["advantages"], other.fields["advantages"])


# --- what the loss saw of each token --------------------------------------------------------------------


def trace_of(rows: list[int], positions: list[int]) -> FloatArray:
    """[3, M] numbers that name the token: 100 times its row plus its position, and so much more for each
    kind.
    """
    names = 100.0 * np.asarray(rows) + np.asarray(positions)
    return np.stack([names + 1, names + 10_001, names + 20_001]).astype(np.float32)


def assert_named(arrays: TokenArrays, masks: tuple[np.ndarray, ...]):
    for kind, name in enumerate(("log_probs", "slopes", "weights")):
        for row, (values, mask) in enumerate(zip(getattr(arrays, name), masks, strict=True)):
            np.testing.assert_array_equal(
                values, np.where(mask, 100.0 * row + np.arange(len(mask)) + 1 + 10_000 * kind, 0.0)
            )


@cases("ranks: 1 2 5")
@cases("share_prefix: no yes")
def test_each_token_comes_to_its_row_over_ranks_of_which_some_have_nothing(ranks: int, share_prefix: bool):
    batch = make_groups(groups=2)
    micro_batches = pack(batch, 1, 20, share=share_prefix, packed=share_prefix)
    dealt = deal_portions([make_portion(one, batch) for one in micro_batches], ranks, micro_batch_cost=0)
    traces: list[FloatArray] = []
    for mine in dealt:
        counted = [portion.micro_batch for portion in mine if portion.counts]
        parts = [trace_of(one.rows[one.token_rows].tolist(), one.token_positions.tolist()) for one in counted]
        traces.append(np.concatenate([np.zeros((3, 0), np.float32), *parts], axis=1))
    assert ranks < 5 or any(not portion.counts for mine in dealt for portion in mine), (
        "a rank has a round without work of its own"
    )
    assert_named(collect_token_arrays(dealt, traces, batch), batch.loss_masks)

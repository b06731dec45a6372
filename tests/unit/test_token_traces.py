"""What losses saw of tokens, brought from micro-batches and ranks into the rows of the batch."""

from __future__ import annotations

import numpy as np
import pytest

from rollouts.backends.shares import deal_portions, make_portion
from rollouts.backends.token_traces import collect_token_arrays, make_token_arrays
from rollouts.data.packing import make_micro_batches
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import FloatArray, TokenArrays

KINDS = ("log_probs", "slopes", "weights")


def trace_of(rows: list[int], positions: list[int]) -> FloatArray:
    """[3, M] numbers that name the token: 100 times its row plus its position, and so much more for each
    kind.
    """
    names = 100.0 * np.asarray(rows) + np.asarray(positions)
    return np.stack([names + 1, names + 10_001, names + 20_001]).astype(np.float32)


def assert_named(arrays: TokenArrays, masks: tuple[np.ndarray, ...]) -> None:
    for kind, name in enumerate(KINDS):
        for row, (values, mask) in enumerate(zip(getattr(arrays, name), masks, strict=True)):
            np.testing.assert_array_equal(
                values, np.where(mask, 100.0 * row + np.arange(len(mask)) + 1 + 10_000 * kind, 0.0)
            )


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("share_prefix", [False, True])
def test_each_token_comes_to_its_row_over_ranks_of_which_some_have_nothing(ranks: int, share_prefix: bool):
    batch = make_batch(groups=2)
    micro_batches = make_micro_batches(
        batch.tokens,
        batch.loss_masks,
        micro_batch_tokens=20,
        share_prefix=share_prefix,
        padding_free=share_prefix,
    )
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


def test_rows_that_were_left_out_are_0():
    batch = make_batch(groups=1, size=3)
    skipped = np.array([False, True, False])
    micro_batches = make_micro_batches(
        batch.tokens, batch.loss_masks, micro_batch_tokens=8, share_prefix=False, skip_rows=skipped
    )
    traces = [
        trace_of(one.rows[one.token_rows].tolist(), one.token_positions.tolist()) for one in micro_batches
    ]
    arrays = make_token_arrays(micro_batches, traces, batch)
    assert_named(
        arrays, tuple(mask & ~left_out for mask, left_out in zip(batch.loss_masks, skipped, strict=True))
    )

"""Rows that predict other tokens than they go on with, and losses that read values of the batch's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollouts.losses import LossInputs
from rollouts.losses.inputs import clear_masked
from rollouts.models.forward_plan import ForwardPlan
from rollouts.testing.torch_contracts import SFT, make_batch
from rollouts.types import LossSpec, RolloutBatch
from tests.support.plain_backend import (
    assert_gradients_close,
    compute_plain_loss,
    open_backend,
    score_plainly,
    stack,
    take_gradients,
)
from tests.support.text_tables import cases
from tests.unit.test_pytorch_backend import make_model

LAYOUTS = {
    "packed": {},
    "packed, in parts": {"micro_batch_tokens": 24},
    "rows": {"plan": ForwardPlan(layout="rows"), "micro_batch_tokens": 40},
    "single": {"plan": ForwardPlan(layout="single")},
}
SPEC = LossSpec("tests.support.backend_checks:scaled_loss", unit="constant", constant=1.0, per_token=True)


def make_targeted():
    """Rows that share beginnings, some twice, with targets and scales at random; a value where nothing trains
    is NaN.
    """
    batch = make_batch(temperature=0.7)
    rng = np.random.default_rng(1)
    twice = [*range(len(batch)), 0, 4, 4]  # rows, some with the same tokens and other targets
    tokens, masks, advantages = (
        tuple(rows[row] for row in twice) for rows in (batch.tokens, batch.loss_masks, batch.advantages)
    )
    batch = RolloutBatch(tokens=tokens, loss_masks=masks, advantages=advantages, temperature=0.7)
    scale = tuple(np.where(mask, rng.normal(size=len(mask)), np.nan) for mask in batch.loss_masks)
    targets = tuple(rng.integers(0, 64, len(row)) for row in batch.tokens)
    return replace(batch, targets=targets, extras={"scale": as_floats(scale)})


def as_floats(rows):
    return tuple(row.astype(np.float32) for row in rows)


@cases("share: no yes")
@cases("layout", LAYOUTS)
async def test_targets_are_scored_in_place_of_the_tokens_in_every_layout(layout, share: bool):
    batch, plain = make_targeted(), make_model()
    # the plain loss multiplies what is outside the mask, too
    known = as_floats(np.nan_to_num(row) for row in batch.extras["scale"])
    loss, _ = compute_plain_loss(plain, replace(batch, extras={"scale": known}), SPEC)
    wanted, _ = score_plainly(plain, batch)
    tokens = int(batch.response_lengths.sum())  # what the plain loss divides by
    async with open_backend(make_model(), share_prefix=share, **LAYOUTS[layout]) as backend:
        for rows in (await backend.forward(batch), (await backend.forward_with_entropy(batch))[0]):
            torch.testing.assert_close(stack(rows), wanted.detach(), rtol=0, atol=1e-5)
        result = await backend.forward_backward(batch, SPEC)
        found = {name: one / tokens for name, one in take_gradients(backend.model).items()}
    assert result.loss == pytest.approx(loss * tokens, rel=1e-5)
    assert_gradients_close(found, take_gradients(plain))
    slopes = torch.where(stack(batch.loss_masks), -stack(known) * stack(batch.advantages), 0)
    torch.testing.assert_close(stack(result.per_token.slopes), slopes)
    torch.testing.assert_close(stack(result.per_token.log_probs), wanted.detach(), rtol=0, atol=1e-5)


async def test_several_targets_of_a_place_are_computed_once():
    row, targets = np.arange(9), [np.roll(np.arange(9), k) for k in range(5)]
    batch = RolloutBatch(tokens=(row,) * 5, loss_masks=(row > 0,) * 5, targets=tuple(targets))
    async with open_backend(make_model()) as backend:
        await backend.forward_backward(batch, SFT)
        assert backend.statistics()["computed_tokens"] == 8


def test_a_value_that_does_not_fit_the_tokens_is_named():
    batch = make_batch()
    short = tuple(row[:1] for row in batch.tokens)
    with pytest.raises(ValueError, match=r"RolloutBatch.targets\[0\] has 1 values for"):
        replace(batch, targets=short)
    for rows, message in ((short, r"\[0\] has 1 values for"), (short[:1], " has 1 rows; tokens has 9")):
        with pytest.raises(ValueError, match=rf"RolloutBatch.extras\['low'\]{message}"):
            replace(batch, extras={"low": as_floats(rows)})


def test_an_extra_of_another_shape_is_named_and_none_has_a_gradient():
    values = torch.zeros(1, 3, requires_grad=True)
    inputs = LossInputs(log_probs=values, mask=torch.ones(1, 3, dtype=torch.bool), extras={"low": values})
    assert not clear_masked(inputs).extras["low"].requires_grad
    with pytest.raises(ValueError, match=r"LossInputs.extras\['low'\] has shape \(1, 2\)"):
        clear_masked(replace(inputs, extras={"low": values[:, :2]}))

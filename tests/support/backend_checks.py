"""Checks of what our own backends promise beyond rollouts.testing.torch_contracts: values of every token,
and an end of steps that are not finite (`open_backend` opens with two in a row as the limit).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.errors import NonFiniteSteps
from rollouts.testing.torch_contracts import HERE, SFT, STEP, OpenBackend, make_batch, raised_by
from rollouts.types import LossSpec


async def check_slopes_and_weights_of_tokens(open_backend: OpenBackend):
    """Asked for, a step says of every token its log-prob, the loss's slope there and the correction's weight,
    as formulas have them; else nothing.

    Of ppo_clip with old log-probs and mu a token's term is −w·min(r·A, clip(r)·A), w = min(exp(old − mu), 2),
    whose slope is −w·r·A where the clip lets it through and 0 where not. The terms add up to the loss.
    """

    def join(rows: Sequence[Any] | None):
        return np.concatenate(rows or ()).astype(np.float64)

    batch, rng = make_batch(), np.random.default_rng(7)
    mask, advantages = np.concatenate(batch.loss_masks), join(batch.advantages)
    async with open_backend() as backend:
        own = await backend.forward(batch)
        noise = [rng.normal(0, 0.3, len(row)) * (row != 0) for row in own]
        old = tuple((row + more).astype(np.float32) for row, more in zip(own, noise, strict=True))
        both = replace(batch, old_log_probs=old)
        clipped = await backend.forward_backward(both, LossSpec("ppo_clip", per_token=True))
        silent = await backend.forward_backward(both, LossSpec("ppo_clip"))
        bad = await backend.forward_backward(both, LossSpec(f"{HERE}:nan_loss", per_token=True))
    assert silent.per_token is None and silent.loss == clipped.loss, "asking changes nothing"
    assert bad.skipped is not None and bad.per_token is None
    traced = clipped.per_token
    assert traced is not None and clipped.loss is not None
    for arrays in (traced.log_probs, traced.slopes, traced.weights):
        assert [(len(row), row.dtype) for row in arrays] == [(len(row), np.float32) for row in own]
        assert not join(arrays)[~mask].any(), "0.0 outside the mask"
    np.testing.assert_allclose(join(traced.log_probs), join(own), atol=2e-5)
    ratio = np.exp(join(traced.log_probs) - join(old))
    weights = np.minimum(np.exp(join(old) - join(batch.rollout_log_probs)), 2.0) * mask
    through = np.where(advantages >= 0, ratio < 1.2, ratio > 0.8) & mask
    slopes = -weights * ratio * advantages * through / mask.sum()
    np.testing.assert_allclose(join(traced.weights), weights, rtol=1e-4)
    np.testing.assert_allclose(join(traced.slopes), slopes, rtol=1e-4, atol=1e-9)
    terms = weights * np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert abs(-terms.sum() / mask.sum() - clipped.loss) < 1e-5, (terms, clipped.loss)
    assert (mask & ~through).any(), "the batch has tokens that the clip cuts"


async def check_entropies_come_with_log_probs(open_backend: OpenBackend):
    """forward_with_entropy gives what forward gives, and entropies of the tokens that train, whose mean a
    step reports too, unless the head is a scalar.
    """
    batch = make_batch()
    backend: Any
    async with open_backend() as backend:
        plain = await backend.forward(batch)
        log_probs, entropies = map(np.concatenate, await backend.forward_with_entropy(batch))
        metric = (await backend.forward_backward(batch, SFT)).metrics.get("entropy/mean")
    np.testing.assert_array_equal(log_probs, np.concatenate(plain))
    assert metric is None or abs(entropies.sum() / batch.response_lengths.sum() - metric.value) < 1e-5


async def check_too_many_non_finite_steps_raise(open_backend: OpenBackend):
    """The third in a row raises NonFiniteSteps; a good one in between starts the count again, and so does the
    error. A step that is given up does not stand between them.
    """
    batch, bad = make_batch(), LossSpec(f"{HERE}:nan_loss")
    async with open_backend() as backend:
        for spec in (bad, SFT, bad, bad):
            await backend.forward_backward(batch, spec)
            await backend.optim_step(STEP)
        await raised_by(backend.forward_backward(batch, LossSpec(f"{HERE}:raising_loss")))
        await backend.reset()
        await backend.forward_backward(batch, bad)
        await raised_by(backend.optim_step(STEP), NonFiniteSteps)
        await backend.reset()
        await backend.forward_backward(batch, bad)
        assert (await backend.optim_step(STEP)).skipped is not None

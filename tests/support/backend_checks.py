"""Checks of what our own backends promise beyond rollouts.testing.torch_contracts: values of every token,
and an end of steps that are not finite (`open_backend` opens with two in a row as the limit).
"""

from dataclasses import replace

import numpy as np

from rollouts.errors import BackendError, NonFiniteSteps
from rollouts.losses.inputs import clear_masked, sum_tokens
from rollouts.testing.torch_contracts import (
    HERE,
    SFT,
    STEP,
    assert_weights_equal,
    make_batch,
    raised_by,
    train,
)
from rollouts.types import LossSpec, OptimParams


async def check_slopes_and_weights_of_tokens(open_backend):
    """Asked for, a step says of every token its log-prob, the loss's slope there and the correction's weight,
    as formulas have them; else nothing.

    Of ppo_clip with old log-probs and mu a token's term is −w·min(r·A, clip(r)·A), w = min(exp(old − mu), 2),
    whose slope is −w·r·A where the clip lets it through and 0 where not. The terms add up to the loss.
    """

    def join(rows):
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
    assert silent.per_token is None and silent.loss == clipped.loss  # asking changes nothing
    assert bad.skipped is not None and bad.per_token is None
    traced = clipped.per_token
    for arrays in (traced.log_probs, traced.slopes, traced.weights):
        assert [(len(row), row.dtype) for row in arrays] == [(len(row), np.float32) for row in own]
        assert not join(arrays)[~mask].any()  # 0.0 outside the mask
    np.testing.assert_allclose(join(traced.log_probs), join(own), atol=2e-5)
    ratio = np.exp(join(traced.log_probs) - join(old))
    weights = np.minimum(np.exp(join(old) - join(batch.rollout_log_probs)), 2.0) * mask
    through = np.where(advantages >= 0, ratio < 1.2, ratio > 0.8) & mask
    slopes = -weights * ratio * advantages * through / mask.sum()
    np.testing.assert_allclose(join(traced.weights), weights, rtol=1e-4)
    np.testing.assert_allclose(join(traced.slopes), slopes, rtol=1e-4, atol=1e-9)
    terms = weights * np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert abs(-terms.sum() / mask.sum() - clipped.loss) < 1e-5, (terms, clipped.loss)
    assert (mask & ~through).any()  # the batch has tokens that the clip cuts


async def check_entropies_come_with_log_probs(open_backend):
    """forward_with_entropy gives what forward gives, and entropies of the tokens that train, whose mean a
    step reports too, unless the head is a scalar; asked for them, hidden states along 16 directions too.
    """
    batch = make_batch()
    async with open_backend() as backend:
        plain = await backend.forward(batch)
        log_probs, entropies = map(np.concatenate, await backend.forward_with_entropy(batch))
        metric = (await backend.forward_backward(batch, SFT)).metrics.get("entropy/mean")
        found = await backend.forward_with_entropy(batch, project=metric is not None)
    np.testing.assert_array_equal(log_probs, np.concatenate(plain))
    if metric is None:
        return
    rows, mask = np.asarray([*map(np.concatenate, found)]), np.concatenate(batch.loss_masks)
    np.testing.assert_array_equal(rows[:2], [log_probs, entropies])
    assert len(rows) == 18 and not rows[:, ~mask].any() and rows[2:, mask].all()
    assert abs(entropies.sum() / batch.response_lengths.sum() - metric.value) < 1e-5


async def check_too_many_non_finite_steps_raise(open_backend):
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


def scaled_loss(inputs, *, unit):
    """linear, its advantages times a value that the batch has for each token."""
    inputs = clear_masked(inputs)
    losses = -inputs.extras["scale"] * inputs.need("advantages") * inputs.log_probs
    return sum_tokens(losses, inputs, unit, {})


async def check_targets_and_values_of_the_batch_s_own(open_backend):
    """A last token that is to be predicted instead of the row's own is as if it were the row's own; and a
    loss that multiplies by a value is as one that is given the product.
    """
    batch, rng = make_batch(), np.random.default_rng(0)
    scale = tuple(rng.normal(size=len(row)).astype(np.float32) for row in batch.tokens)
    ends = tuple(np.append(row[:-1], 39 - row[-1]) for row in batch.tokens)
    products = tuple(one * other for one, other in zip(scale, batch.advantages or (), strict=True))
    ours = replace(batch, targets=ends, extras={"scale": scale})
    theirs = replace(batch, tokens=ends, advantages=products)
    pairs = (ours, LossSpec(f"{__name__}:scaled_loss")), (theirs, LossSpec("linear"))
    found = []
    async with open_backend() as backend:
        for rows, spec in pairs:
            result = await backend.forward_backward(rows, spec)
            step = await backend.optim_step(OptimParams(lr=0.0, max_grad_norm=None))
            found.append((np.concatenate(await backend.forward(rows)), result.loss, step.grad_norm))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


async def check_a_loss_without_gradient_leaves_nothing(open_backend):
    """compute_loss says what forward_backward says, with slopes of 0; what has accumulated stays as it is,
    also where the loss is not finite.
    """
    batch, spec = make_batch(), LossSpec("ppo_clip", per_token=True)
    async with open_backend() as backend:
        await train(backend, batch)
        undisturbed = await backend.get_weights()
    async with open_backend() as backend:
        said = await backend.compute_loss(batch, spec)
        assert isinstance(await raised_by(backend.optim_step(STEP)), BackendError)
        await backend.reset()
        await backend.forward_backward(batch, SFT)
        bad = await backend.compute_loss(batch, LossSpec(f"{HERE}:nan_loss"))
        await backend.compute_loss(make_batch(1), spec)
        assert (await backend.optim_step(STEP)).skipped is None
        assert_weights_equal(await backend.get_weights(), undisturbed)
    async with open_backend() as backend:
        wanted = await backend.forward_backward(batch, spec)
    assert bad.loss is None and bad.skipped == "the loss is nan"
    assert abs(said.loss - wanted.loss) < 1e-6 and said.metrics.keys() == wanted.metrics.keys()
    assert not any(row.any() for row in said.per_token.slopes)
    assert any(row.any() for row in wanted.per_token.slopes)
    for name in ("log_probs", "weights"):
        for one, other in zip(*(getattr(of.per_token, name) for of in (said, wanted)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


async def check_settings_of_a_step_are_of_that_step_alone(open_backend):
    """AdamW's betas, eps and decoupled decay, which is of matrices, as its formulas have them.

    With eps = lr = 1e6 a first step moves a weight by its gradient. The second is at the same weights.
    """
    batch, (old, new) = make_batch(), ((0.8, 0.9), (0.5, 0.7))
    async with open_backend() as backend:
        groups = backend.trainer.optimizer.param_groups
        own = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in groups]
        before = await backend.get_weights()
        await backend.forward_backward(batch, SFT)
        await backend.optim_step(
            OptimParams(lr=1e6, max_grad_norm=None, betas=old, eps=1e6, weight_decay=0.0)
        )
        moved = await backend.get_weights()
        await backend.load_weights(before)
        await backend.forward_backward(batch, SFT)
        await backend.optim_step(
            OptimParams(lr=1e-2, max_grad_norm=None, betas=new, eps=1e-3, weight_decay=0.5)
        )
        after = await backend.get_weights()
        assert [{name: group[name] for name in own[0]} for group in groups] == own
    for name, weight in before.items():
        start, gradient = weight.double(), weight.double() - moved[name].double()
        mean = (new[0] * (1 - old[0]) + 1 - new[0]) * gradient / (1 - new[0] ** 2)
        square = (new[1] * (1 - old[1]) + 1 - new[1]) * gradient**2 / (1 - new[1] ** 2)
        decay = 0.5 if weight.ndim > 1 else 0.0
        wanted = start * (1 - 1e-2 * decay) - 1e-2 * mean / (square.sqrt() + 1e-3)
        np.testing.assert_allclose(after[name].numpy(), wanted.numpy(), atol=2e-5, err_msg=name)

"""What every TrainingBackend promises, as functions that a test calls with a way to open one.

    async def test_steps(): await check_failed_step_stops_later_ones_until_reset(open_my_backend)

`open_backend()` is an async context manager of a backend in float32 with a fresh optimizer, equal weights
every time it is opened, a token vocabulary of at least 40, and two in a row as its limit of steps that are
not finite.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import trio
from torch import Tensor

from rollouts.errors import (
    BackendError,
    DenominatorMismatch,
    EarlierStepFailed,
    NonFiniteSteps,
    StepInterrupted,
)
from rollouts.losses import LossInputs, LossOutput
from rollouts.losses.reductions import reduce_loss
from rollouts.protocols import TrainingBackend
from rollouts.types import LossSpec, OptimParams, RolloutBatch

OpenBackend = Callable[[], AbstractAsyncContextManager[TrainingBackend]]
ErrorT = TypeVar("ErrorT", bound=Exception)
SFT = LossSpec("sft")
HERE = "rollouts.testing.torch_contracts"
STEP = OptimParams(lr=1e-2, max_grad_norm=None)


# --- losses that misbehave, named as module:function so that they cross ranks -------------------------------


def _make_loss(weigh: Callable[[Tensor], Tensor], *, miscount: int = 0) -> Callable[..., LossOutput]:
    """A loss whose value at each token is `weigh` of its log-prob; `miscount` is added to its count."""

    def loss(inputs: LossInputs, *, unit: str) -> LossOutput:
        total, count = reduce_loss(weigh(inputs.log_probs), inputs.mask, unit)
        return LossOutput(total, count + miscount, {})

    return loss


def _fail(*drawn: Tensor) -> Tensor:
    raise ZeroDivisionError("the loss failed on purpose")


nan_loss = _make_loss(lambda log_probs: log_probs * float("nan"))
# a loss of 0 whose gradient is infinite: the root of 0
infinite_gradient_loss = _make_loss(lambda log_probs: (log_probs - log_probs.detach()).abs().sqrt())
miscounting_loss = _make_loss(lambda log_probs: log_probs, miscount=1)
raising_loss = _make_loss(_fail)
# SFT whose tokens are weighted by numbers that torch draws; and one that fails after it has drawn
drawing_loss = _make_loss(lambda log_probs: -log_probs * torch.rand_like(log_probs))
drawing_and_raising_loss = _make_loss(lambda log_probs: _fail(torch.rand_like(log_probs)))


# --- batches and weights ------------------------------------------------------------------------------------


def make_batch(seed: int = 0, *, groups: int = 3, size: int = 3, temperature: float = 1.0) -> RolloutBatch:
    """Groups with a common prompt and answers of unlike length; advantages and mu are random."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[Any, Any, Any, Any]] = []
    for group in range(groups):
        prompt = rng.integers(0, 40, 3 + 2 * group)
        for _ in range(size):
            tokens = np.concatenate([prompt, rng.integers(0, 40, rng.integers(1, 9))])
            mask = np.arange(len(tokens)) >= len(prompt)
            log_probs = np.where(mask, rng.normal(-3.7, 0.1, len(tokens)), 0.0).astype(np.float32)
            rows.append((tokens, mask, log_probs, np.where(mask, rng.normal(), 0.0).astype(np.float32)))
    tokens, masks, log_probs, advantages = zip(*rows, strict=True)
    return RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rollout_log_probs=log_probs,
        advantages=advantages,
        group_indices=np.repeat(np.arange(groups), size),
        temperature=temperature,
    )


async def copy_weights(backend: TrainingBackend) -> dict[str, Tensor]:
    """The backend's weights, by name."""
    return await backend.get_weights()


def weights_differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of weights that are not equal bit for bit, or not in both."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def assert_weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit, and the same names."""
    assert not (names := weights_differ(one, other)), f"weights differ: {names}"


async def raised_by(future: Awaitable[object], kind: type[ErrorT] = Exception) -> ErrorT:
    """The error of this kind that awaiting the future raises."""
    try:
        await future
    except kind as error:
        return error
    raise AssertionError(f"the future raised no {kind.__name__}")


async def train(backend: TrainingBackend, batch: RolloutBatch, loss: LossSpec = SFT) -> None:
    """One good step."""
    await backend.forward_backward(batch, loss)
    assert (await backend.optim_step(STEP)).skipped is None


# --- steps --------------------------------------------------------------------------------------------------


async def check_steps_train(open_backend: OpenBackend) -> None:
    """Ten steps on one batch bring its loss down; forward() then agrees with the loss."""
    batch = make_batch()
    async with open_backend() as backend:
        losses: list[float] = []
        for step in range(10):
            forward, optim = backend.forward_backward(batch, SFT), backend.optim_step(STEP)
            result, done = await forward, await optim
            assert result.loss is not None and result.skipped is None
            assert (done.step, done.lr, done.clipped, done.skipped) == (step + 1, STEP.lr, False, None)
            losses.append(result.loss)
        assert losses[-1] < 0.7 * losses[0], losses
        rows = await backend.forward(batch)
        result = await backend.forward_backward(batch, SFT)
    log_probs, mask = np.concatenate(rows), np.concatenate(batch.loss_masks)
    assert result.denominator == mask.sum() and result.loss is not None
    assert abs(-log_probs.sum() / mask.sum() - result.loss) < 1e-4
    assert not log_probs[~mask].any()


async def check_accumulation_equals_one_batch(open_backend: OpenBackend) -> None:
    """Two halves under a constant denominator move the weights as the whole does, to 1e-5; every unit has its
    global denominator.
    """
    batch = make_batch()
    half = len(batch) // 2
    spec = LossSpec("reinforce", unit="constant", constant=50.0)
    norms: list[float] = []
    async with open_backend() as backend:
        before = await copy_weights(backend)
        for parts in ([range(len(batch))], [range(half), range(half, len(batch))]):
            await backend.load_weights(before)
            for part in parts:
                await backend.forward_backward(take_rows(batch, part), spec)
            step = await backend.optim_step(OptimParams(lr=1e-6, max_grad_norm=None))
            norms.append(step.grad_norm or 0.0)
        by_rows = await backend.forward_backward(batch, LossSpec("reinforce", unit="sequences"))
    assert abs(norms[0] - norms[1]) < 1e-5 * norms[0]
    assert by_rows.denominator == len(batch)


def take_rows(batch: RolloutBatch, rows: Sequence[int]) -> RolloutBatch:
    """Some rows of a batch, as far as a policy gradient needs them."""
    assert batch.advantages is not None
    return RolloutBatch(
        tokens=tuple(batch.tokens[row] for row in rows),
        loss_masks=tuple(batch.loss_masks[row] for row in rows),
        advantages=tuple(batch.advantages[row] for row in rows),
        temperature=batch.temperature,
    )


async def check_slopes_and_weights_of_tokens(open_backend: OpenBackend) -> None:
    """Asked for, a step says of every token its log-prob, the loss's slope there and the correction's weight,
    as formulas have them; else nothing.

    Of ppo_clip with old log-probs and mu a token's term is −w·min(r·A, clip(r)·A), w = min(exp(old − mu), 2),
    whose slope is −w·r·A where the clip lets it through and 0 where not. The terms add up to the loss.
    """

    def join(rows: Sequence[Any] | None) -> Any:
        return np.concatenate(rows or ()).astype(np.float64)

    batch, rng = make_batch(), np.random.default_rng(7)
    mask, advantages = np.concatenate(batch.loss_masks), join(batch.advantages)
    async with open_backend() as backend:
        own = await backend.forward(batch)
        noise = [rng.normal(0, 0.3, len(row)) * (row != 0) for row in own]
        old = tuple((row + more).astype(np.float32) for row, more in zip(own, noise, strict=True))
        both = replace(batch, old_log_probs=old)
        linear = await backend.forward_backward(
            batch, LossSpec("linear", unit="constant", constant=7.0, per_token=True)
        )
        clipped = await backend.forward_backward(both, LossSpec("ppo_clip", per_token=True))
        silent = await backend.forward_backward(both, LossSpec("ppo_clip"))
        bad = await backend.forward_backward(both, LossSpec(f"{HERE}:nan_loss", per_token=True))
    assert silent.per_token is None and silent.loss == clipped.loss, "asking changes nothing"
    assert bad.skipped is not None and bad.per_token is None
    plain, traced = linear.per_token, clipped.per_token
    assert plain is not None and traced is not None and clipped.loss is not None
    for arrays in (one for kind in (plain, traced) for one in (kind.log_probs, kind.slopes, kind.weights)):
        assert [(len(row), row.dtype) for row in arrays] == [(len(row), np.float32) for row in own]
        assert not join(arrays)[~mask].any(), "0.0 outside the mask"
    np.testing.assert_allclose(join(plain.log_probs), join(own), atol=2e-5)
    np.testing.assert_allclose(join(plain.slopes), -advantages / 7.0, rtol=1e-6)
    np.testing.assert_array_equal(join(plain.weights), mask)
    ratio = np.exp(join(traced.log_probs) - join(old))
    weights = np.minimum(np.exp(join(old) - join(batch.rollout_log_probs)), 2.0) * mask
    through = np.where(advantages >= 0, ratio < 1.2, ratio > 0.8) & mask
    slopes = -weights * ratio * advantages * through / mask.sum()
    np.testing.assert_allclose(join(traced.weights), weights, rtol=1e-4)
    np.testing.assert_allclose(join(traced.slopes), slopes, rtol=1e-4, atol=1e-9)
    terms = weights * np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert abs(-terms.sum() / mask.sum() - clipped.loss) < 1e-5, (terms, clipped.loss)
    assert (mask & ~through).any(), "the batch has tokens that the clip cuts"


async def check_clipping_bounds_the_gradient(open_backend: OpenBackend) -> None:
    """A gradient above max_grad_norm is scaled, and the result reports the norm before."""
    async with open_backend() as backend:
        for limit in (1e-3, 1e6):
            await backend.forward_backward(make_batch(), SFT)
            result = await backend.optim_step(OptimParams(lr=1e-3, max_grad_norm=limit))
            assert result.grad_norm is not None and result.clipped == (result.grad_norm > limit)
            assert result.clipped == (limit < 1)


# --- steps that are not finite ------------------------------------------------------------------------------


async def check_non_finite_steps_change_nothing(open_backend: OpenBackend) -> None:
    """After a skipped step weights and optimizer are bit-identical: the next step does what it would have
    done without it.
    """
    batch = make_batch()
    async with open_backend() as backend:
        await train(backend, batch)
        await train(backend, batch)
        undisturbed = await copy_weights(backend)
    for kind, where in (("nan", "loss"), ("infinite_gradient", "gradient")):
        async with open_backend() as backend:
            await train(backend, batch)
            before = await copy_weights(backend)
            await backend.forward_backward(batch, SFT)  # what was accumulated before is not used either
            bad = await backend.forward_backward(batch, LossSpec(f"{HERE}:{kind}_loss"))
            skipped = await backend.optim_step(STEP)
            assert (bad.skipped is not None and bad.loss is None) == (where == "loss"), bad
            assert skipped.skipped is not None and where in skipped.skipped and skipped.grad_norm is None
            assert_weights_equal(before, await copy_weights(backend))
            assert backend.statistics()["skipped_steps"] == 1
            await train(backend, batch)
            assert_weights_equal(undisturbed, await copy_weights(backend))


async def check_too_many_non_finite_steps_raise(open_backend: OpenBackend) -> None:
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


# --- failures -----------------------------------------------------------------------------------------------


async def check_failed_step_stops_later_ones_until_reset(open_backend: OpenBackend) -> None:
    """The failed step's future raises its own error, later ones EarlierStepFailed; after reset() the old
    gradients are gone.
    """
    batch = make_batch()
    async with open_backend() as backend:
        before = await copy_weights(backend)
        accumulated = backend.forward_backward(batch, SFT)
        failed = backend.forward_backward(batch, LossSpec(f"{HERE}:raising_loss"))
        later = [backend.optim_step(STEP), backend.forward(batch), backend.set_weight_version(9)]
        assert (await accumulated).skipped is None
        await raised_by(failed, ZeroDivisionError)
        for future in [*later, backend.get_weights()]:
            error = await raised_by(future, EarlierStepFailed)
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert backend.weight_version == 0, "the version that was queued behind the failure was never set"
        await backend.reset()
        assert_weights_equal(before, await copy_weights(backend))
        await raised_by(backend.optim_step(STEP), BackendError)  # the accumulated gradients are gone
        await backend.reset()
        await train(backend, batch)


async def check_an_interrupt_ends_what_is_queued_at_a_micro_batch(open_backend: OpenBackend) -> None:
    """What was queued fails with StepInterrupted and changes nothing; after reset() the backend trains as if
    the step had never begun.
    """
    batch, gate = make_batch(), threading.Event()
    async with open_backend() as backend:
        await train(backend, batch)
        before = await copy_weights(backend)
        held = backend.stream_weights(lambda bucket: _pass(gate))  # so that the step has not begun yet
        forward = backend.forward_backward(batch, SFT)
        later = [backend.optim_step(STEP), backend.set_weight_version(9)]
        backend.interrupt()
        gate.set()
        await held
        await raised_by(forward, StepInterrupted)
        for future in later:
            await raised_by(future, EarlierStepFailed)
        await backend.reset()
        assert backend.weight_version == 0
        assert_weights_equal(before, await copy_weights(backend))
        await train(backend, batch)
        found = await copy_weights(backend)
    async with open_backend() as undisturbed:  # one after the other: ranks have one backend at a time
        await train(undisturbed, batch)
        await train(undisturbed, batch)
        assert_weights_equal(await copy_weights(undisturbed), found)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(60), "nobody opened the gate"


async def check_a_miscounting_loss_is_refused(open_backend: OpenBackend) -> None:
    """DenominatorMismatch when the counts that the loss returned are not those of the masks."""
    async with open_backend() as backend:
        miscounting = LossSpec(f"{HERE}:miscounting_loss")
        await raised_by(backend.forward_backward(make_batch(), miscounting), DenominatorMismatch)


async def check_a_step_needs_a_gradient(open_backend: OpenBackend) -> None:
    """optim_step without forward_backward is a BackendError, and a batch without trained tokens too."""
    batch = make_batch()
    empty = replace(batch, loss_masks=tuple(np.zeros_like(mask) for mask in batch.loss_masks))
    async with open_backend() as backend:
        await raised_by(backend.optim_step(), BackendError)
        await backend.reset()
        await raised_by(backend.forward_backward(empty, SFT), BackendError)


# --- futures and versions -----------------------------------------------------------------------------------


async def check_futures(open_backend: OpenBackend) -> None:
    """They return at once, finish in submission order, may be awaited again, and outlive a cancelled
    waiter.
    """
    batch = make_batch()

    async def wait(number: int, future: Awaitable[object]) -> None:
        await future
        assert all(earlier.done() for earlier in futures[:number]), "a future overtook an earlier one"

    async with open_backend() as backend:
        futures = [
            backend.forward_backward(batch, SFT),
            optim := backend.optim_step(STEP),
            backend.forward(batch),
            backend.set_weight_version(1),
        ]
        assert not any(future.done() for future in futures)
        with trio.move_on_after(0):
            await futures[0]
        async with trio.open_nursery() as nursery:
            for number, future in enumerate(futures):
                nursery.start_soon(wait, number, future)
        assert all(future.done() for future in futures)
        assert await optim is await optim.result()


async def check_unheard_failure_is_raised_on_leaving(open_backend: OpenBackend) -> None:
    """A failure that nobody awaited is raised when the backend closes."""
    try:
        async with open_backend() as backend:
            backend.forward_backward(make_batch(), LossSpec(f"{HERE}:raising_loss"))
    except ZeroDivisionError:
        return
    raise AssertionError("leaving the backend hid a failure")


async def check_weight_version_counts_what_is_queued(open_backend: OpenBackend) -> None:
    """0 at first; set_weight_version shows at once and stays."""
    async with open_backend() as backend:
        assert backend.weight_version == 0
        future = backend.set_weight_version(3)
        assert backend.weight_version == 3
        await future
        assert backend.weight_version == 3


# --- weights ------------------------------------------------------------------------------------------------


async def check_weights_come_and_go(open_backend: OpenBackend) -> None:
    """stream_weights and get_weights agree; load_weights restores; a wrong name or shape is refused before
    anything is copied.
    """
    batch = make_batch()
    async with open_backend() as backend:
        before = await copy_weights(backend)
        streamed: dict[str, Tensor] = {}
        await backend.stream_weights(
            lambda bucket: streamed.update({name: tensor.cpu().clone() for name, tensor in bucket})
        )
        assert_weights_equal(before, streamed)
        await train(backend, batch)
        trained = await copy_weights(backend)
        assert weights_differ(before, trained)
        name = max(before)
        missing = {key: value for key, value in before.items() if key != name}
        misshapen = before | {name: torch.zeros(3, 5, 7)}
        unknown = before | {"no.such.weight": torch.zeros(1)}
        for wrong, named in ((missing, name), (misshapen, name), (unknown, "no.such.weight")):
            assert named in str(await raised_by(backend.load_weights(wrong), BackendError))
            await backend.reset()
            assert_weights_equal(trained, await copy_weights(backend))
        await backend.load_weights(before)
        assert_weights_equal(before, await copy_weights(backend))


async def check_resume_is_exact(open_backend: OpenBackend, folder: Path) -> None:
    """Two steps, save, two steps: a fresh backend that loads and does the last two has the same weights bit
    for bit.
    """
    batches = [make_batch(seed) for seed in range(4)]
    async with open_backend() as backend:
        for batch in batches[:2]:
            await train(backend, batch)
        await backend.set_weight_version(2)
        await backend.save(folder)
        saved = await copy_weights(backend)
        for batch in batches[2:]:
            await train(backend, batch)
        wanted = await copy_weights(backend)
    async with open_backend() as backend:
        await backend.load(folder)
        assert (backend.weight_version, backend.statistics()["steps"]) == (2, 2)
        assert_weights_equal(saved, await copy_weights(backend))
        for batch in batches[2:]:
            await train(backend, batch)
        assert_weights_equal(wanted, await copy_weights(backend))


async def check_a_step_that_is_given_up_draws_nothing(open_backend: OpenBackend, folder: Path) -> None:
    """A loss that draws from torch's generator draws the same when its step is repeated: at once, and after a
    save and a load.
    """
    batches, draws = [make_batch(seed) for seed in range(3)], LossSpec(f"{HERE}:drawing_loss")
    failing = LossSpec(f"{HERE}:drawing_and_raising_loss")
    async with open_backend() as backend:
        await train(backend, batches[0])
        await backend.save(folder / "before")
        for batch in batches[1:]:
            await train(backend, batch, draws)
        wanted = await copy_weights(backend)
    async with open_backend() as backend:
        await backend.load(folder / "before")
        for name, batch in (("first", batches[1]), ("second", batches[2])):
            await raised_by(backend.forward_backward(batch, failing), ZeroDivisionError)
            await backend.reset()
            await backend.save(folder / name)
            await train(backend, batch, draws)
        assert_weights_equal(wanted, await copy_weights(backend))
    async with open_backend() as backend:
        await backend.load(folder / "second")
        await train(backend, batches[2], draws)
        assert_weights_equal(wanted, await copy_weights(backend))

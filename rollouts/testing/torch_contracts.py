"""What every TrainingBackend promises, as functions that a test calls with a way to open one.

    async def test_steps(): await check_failed_step_stops_later_ones_until_reset(open_my_backend)

`open_backend()` is an async context manager of a backend in float32 with a fresh optimizer, equal weights
every time it is opened, a token vocabulary of at least 40, and two in a row as its limit of steps that are
not finite.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

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
SFT = LossSpec("sft")
HERE = "rollouts.testing.torch_contracts"
STEP = OptimParams(lr=1e-2, max_grad_norm=None)
TRACED = ("log_probs", "slopes", "weights")  # of TokenArrays


# --- losses that misbehave, named as module:function so that they cross ranks -------------------------------


def nan_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss that is not a number."""
    total, count = reduce_loss(inputs.log_probs * float("nan"), inputs.mask, unit)
    return LossOutput(total, count, {})


def infinite_gradient_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss of 0 whose gradient is infinite: the root of 0."""
    total, count = reduce_loss((inputs.log_probs - inputs.log_probs.detach()).abs().sqrt(), inputs.mask, unit)
    return LossOutput(total, count, {})


def miscounting_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss that counts one token too many."""
    total, count = reduce_loss(inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count + 1, {})


def raising_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss that fails."""
    raise ZeroDivisionError("the loss failed on purpose")


def drawing_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """SFT whose tokens are weighted by numbers that torch draws."""
    total, count = reduce_loss(-inputs.log_probs * torch.rand_like(inputs.log_probs), inputs.mask, unit)
    return LossOutput(total, count, {})


def drawing_and_raising_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss that fails after it has drawn."""
    drawing_loss(inputs, unit=unit)
    raise ZeroDivisionError("the loss failed on purpose")


# --- batches ------------------------------------------------------------------------------------------------


def make_batch(seed: int = 0, *, groups: int = 3, size: int = 3, temperature: float = 1.0) -> RolloutBatch:
    """Groups with a common prompt and answers of unlike length; advantages and mu are random."""
    rng = np.random.default_rng(seed)
    tokens, masks, log_probs, advantages, indices = [], [], [], [], []
    for group in range(groups):
        prompt = rng.integers(0, 40, 3 + 2 * group)
        for _ in range(size):
            answer = rng.integers(0, 40, rng.integers(1, 9))
            tokens.append(np.concatenate([prompt, answer]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
            log_probs.append(
                np.where(masks[-1], rng.normal(-3.7, 0.1, len(tokens[-1])), 0.0).astype(np.float32)
            )
            advantages.append(np.where(masks[-1], rng.normal(), 0.0).astype(np.float32))
            indices.append(group)
    return RolloutBatch(
        tokens=tuple(tokens),
        loss_masks=tuple(masks),
        rollout_log_probs=tuple(log_probs),
        advantages=tuple(advantages),
        group_indices=np.asarray(indices),
        temperature=temperature,
    )


async def copy_weights(backend: TrainingBackend) -> dict[str, Tensor]:
    """The backend's weights, by name."""
    return await backend.get_weights().result()


def assert_weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit, and the same names."""
    assert set(one) == set(other), set(one) ^ set(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"weights differ: {different}"


def weights_differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether any weight is another."""
    return any(not torch.equal(one[name], other[name]) for name in one)


async def raised_by(future: object) -> BaseException:
    """What awaiting the future raises."""
    try:
        await future  # pyright: ignore[reportGeneralTypeIssues]
    except Exception as error:
        return error
    raise AssertionError("the future did not raise")


# --- steps --------------------------------------------------------------------------------------------------


async def check_steps_train(open_backend: OpenBackend) -> None:
    """Ten steps on one batch bring its loss down; forward() then agrees with the loss."""
    batch = make_batch()
    async with open_backend() as backend:
        losses: list[float] = []
        for step in range(10):
            forward, optim = backend.forward_backward(batch, SFT), backend.optim_step(STEP)
            result, done = await forward.result(), await optim.result()
            assert result.loss is not None and result.skipped is None and done.skipped is None
            assert done.step == step + 1 and done.lr == STEP.lr and not done.clipped
            losses.append(result.loss)
        assert losses[-1] < 0.7 * losses[0], losses
        rows = await backend.forward(batch).result()
        result = await backend.forward_backward(batch, SFT).result()
    tokens = sum(int(mask.sum()) for mask in batch.loss_masks)
    assert result.denominator == tokens
    assert (
        result.loss is not None and abs(-sum(float(row.sum()) for row in rows) / tokens - result.loss) < 1e-4
    )
    assert all((row[~mask] == 0).all() for row, mask in zip(rows, batch.loss_masks, strict=True))


async def check_accumulation_equals_one_batch(open_backend: OpenBackend) -> None:
    """Two halves under a constant denominator move the weights as the whole does, to 1e-5; every unit has its
    global denominator.
    """
    batch = make_batch()
    spec = LossSpec("reinforce", unit="constant", constant=50.0)
    half = len(batch) // 2
    async with open_backend() as backend:
        before = await copy_weights(backend)
        await backend.forward_backward(batch, spec).result()
        whole = await backend.optim_step(OptimParams(lr=1e-6, max_grad_norm=None)).result()
        await backend.load_weights(before).result()
        await backend.forward_backward(take_rows(batch, range(half)), spec).result()
        await backend.forward_backward(take_rows(batch, range(half, len(batch))), spec).result()
        parts = await backend.optim_step(OptimParams(lr=1e-6, max_grad_norm=None)).result()
        by_rows = await backend.forward_backward(batch, LossSpec("reinforce", unit="sequences")).result()
    assert whole.grad_norm is not None and parts.grad_norm is not None
    assert abs(whole.grad_norm - parts.grad_norm) < 1e-5 * whole.grad_norm
    assert by_rows.denominator == len(batch)


def take_rows(batch: RolloutBatch, rows: Sequence[int]) -> RolloutBatch:
    """Some rows of a batch."""
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
    batch = make_batch()
    assert batch.advantages is not None and batch.rollout_log_probs is not None
    tokens = float(batch.response_lengths.sum())
    rng = np.random.default_rng(7)
    async with open_backend() as backend:
        own = await backend.forward(batch).result()
        old = tuple(
            (row + rng.normal(0, 0.3, len(row)) * mask).astype(np.float32)
            for row, mask in zip(own, batch.loss_masks, strict=True)
        )
        linear = await backend.forward_backward(
            batch, LossSpec("linear", unit="constant", constant=7.0, per_token=True)
        ).result()
        both = dataclasses.replace(batch, old_log_probs=old)
        clipped = await backend.forward_backward(both, LossSpec("ppo_clip", per_token=True)).result()
        silent = await backend.forward_backward(both, LossSpec("ppo_clip")).result()
        bad = await backend.forward_backward(both, LossSpec(f"{HERE}:nan_loss", per_token=True)).result()
    assert silent.per_token is None and silent.loss == clipped.loss, "asking changes nothing"
    assert bad.skipped is not None and bad.per_token is None
    seen, traced = linear.per_token, clipped.per_token
    assert seen is not None and traced is not None and clipped.loss is not None
    total, cut = 0.0, 0
    for row, mask in enumerate(batch.loss_masks):
        advantages, mu = (
            np.asarray(values[row], np.float64) for values in (batch.advantages, batch.rollout_log_probs)
        )
        for arrays in (getattr(one, name) for one in (seen, traced) for name in TRACED):
            assert (
                len(arrays[row]) == len(mask)
                and arrays[row].dtype == np.float32
                and not arrays[row][~mask].any()
            ), "0.0 outside the mask"
        np.testing.assert_allclose(seen.log_probs[row], own[row], atol=2e-5)
        np.testing.assert_allclose(seen.slopes[row], -advantages / 7.0 * mask, rtol=1e-6)
        np.testing.assert_array_equal(seen.weights[row], mask.astype(np.float32))
        ratio = np.exp(traced.log_probs[row].astype(np.float64) - old[row])
        weights = np.minimum(np.exp(old[row].astype(np.float64) - mu), 2.0)
        through = np.where(advantages >= 0, ratio < 1.2, ratio > 0.8) & mask
        np.testing.assert_allclose(traced.weights[row], weights * mask, rtol=1e-4)
        np.testing.assert_allclose(
            traced.slopes[row],
            np.where(through, -weights * ratio * advantages, 0.0) / tokens,
            rtol=1e-4,
            atol=1e-9,
        )
        total -= float(
            (weights * np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages))[mask].sum()
        )
        cut += int((mask & ~through).sum())
    assert cut > 0, "the batch has tokens that the clip cuts"
    assert abs(total / tokens - clipped.loss) < 1e-5, (total / tokens, clipped.loss)


async def check_clipping_bounds_the_gradient(open_backend: OpenBackend) -> None:
    """A gradient above max_grad_norm is scaled, and the result reports the norm before."""
    async with open_backend() as backend:
        await backend.forward_backward(make_batch(), SFT).result()
        result = await backend.optim_step(OptimParams(lr=1e-3, max_grad_norm=1e-3)).result()
        assert result.clipped and result.grad_norm is not None and result.grad_norm > 1e-3
        await backend.forward_backward(make_batch(), SFT).result()
        result = await backend.optim_step(OptimParams(lr=1e-3, max_grad_norm=1e6)).result()
        assert not result.clipped


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
    for name, where in ((f"{HERE}:nan_loss", "loss"), (f"{HERE}:infinite_gradient_loss", "gradient")):
        async with open_backend() as backend:
            await train(backend, batch)
            before = await copy_weights(backend)
            await backend.forward_backward(
                batch, SFT
            ).result()  # what was accumulated before is not used either
            bad = await backend.forward_backward(batch, LossSpec(name)).result()
            skipped = await backend.optim_step(STEP).result()
            assert (bad.skipped is not None and bad.loss is None) == (where == "loss"), bad
            assert skipped.skipped is not None and where in skipped.skipped and skipped.grad_norm is None
            assert_weights_equal(before, await copy_weights(backend))
            assert backend.statistics()["skipped_steps"] == 1
            await train(backend, batch)
            assert_weights_equal(undisturbed, await copy_weights(backend))


async def check_too_many_non_finite_steps_raise(open_backend: OpenBackend) -> None:
    """The third in a row raises NonFiniteSteps; a good one in between starts the count again."""
    batch, bad = make_batch(), LossSpec(f"{HERE}:nan_loss")
    async with open_backend() as backend:
        for spec in (bad, SFT, bad, bad):
            await backend.forward_backward(batch, spec).result()
            await backend.optim_step(STEP).result()
        await raised_by(backend.forward_backward(batch, LossSpec(f"{HERE}:raising_loss")))
        await backend.reset().result()  # a step that is given up is none: it does not stand between them
        await backend.forward_backward(batch, bad).result()
        assert isinstance(await raised_by(backend.optim_step(STEP)), NonFiniteSteps)
        await backend.reset().result()
        await backend.forward_backward(batch, bad).result()
        assert (await backend.optim_step(STEP).result()).skipped is not None, (
            "after the error the count begins anew"
        )


async def train(backend: TrainingBackend, batch: RolloutBatch, loss: LossSpec = SFT) -> None:
    """One good step."""
    await backend.forward_backward(batch, loss).result()
    result = await backend.optim_step(STEP).result()
    assert result.skipped is None


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
        assert (await accumulated.result()).skipped is None
        assert isinstance(await raised_by(failed), ZeroDivisionError)
        for future in later:
            error = await raised_by(future)
            assert isinstance(error, EarlierStepFailed) and isinstance(error.__cause__, ZeroDivisionError)
        assert isinstance(await raised_by(backend.get_weights()), EarlierStepFailed), (
            "a failure lasts until reset()"
        )
        assert backend.weight_version == 0, "the version that was queued behind the failure was never set"
        await backend.reset().result()
        assert_weights_equal(before, await copy_weights(backend))
        assert isinstance(await raised_by(backend.optim_step(STEP)), BackendError), (
            "accumulated gradients survived the failure"
        )
        await backend.reset().result()
        await train(backend, batch)


async def check_an_interrupt_ends_what_is_queued_at_a_micro_batch(open_backend: OpenBackend) -> None:
    """What was queued fails with StepInterrupted and changes nothing; after reset() the backend trains as if
    the step had never begun.
    """
    batch, gate = make_batch(), threading.Event()
    async with open_backend() as backend:
        await train(backend, batch)
        before = await copy_weights(backend)
        held = backend.stream_weights(
            lambda bucket: assert_passes(gate)
        )  # else the step might be through before it is interrupted
        forward, optim, version = (
            backend.forward_backward(batch, SFT),
            backend.optim_step(STEP),
            backend.set_weight_version(9),
        )
        backend.interrupt()
        gate.set()
        await held.result()
        assert isinstance(await raised_by(forward), StepInterrupted)
        assert isinstance(await raised_by(optim), EarlierStepFailed) and isinstance(
            await raised_by(version), EarlierStepFailed
        )
        await backend.reset().result()
        assert backend.weight_version == 0
        assert_weights_equal(before, await copy_weights(backend))
        await train(backend, batch)
        found = await copy_weights(backend)
    async with open_backend() as undisturbed:  # one after the other: ranks have one backend at a time
        await train(undisturbed, batch)
        await train(undisturbed, batch)
        assert_weights_equal(await copy_weights(undisturbed), found)


def assert_passes(gate: threading.Event) -> None:
    """Blocks the device thread until somebody opens the gate."""
    assert gate.wait(60), "nobody opened the gate"


async def check_a_miscounting_loss_is_refused(open_backend: OpenBackend) -> None:
    """DenominatorMismatch when the counts that the loss returned are not those of the masks."""
    async with open_backend() as backend:
        assert isinstance(
            await raised_by(backend.forward_backward(make_batch(), LossSpec(f"{HERE}:miscounting_loss"))),
            DenominatorMismatch,
        )


async def check_a_step_needs_a_gradient(open_backend: OpenBackend) -> None:
    """optim_step without forward_backward is a BackendError, and a batch without trained tokens too."""
    batch = make_batch()
    empty = RolloutBatch(
        tokens=batch.tokens, loss_masks=tuple(np.zeros_like(mask) for mask in batch.loss_masks)
    )
    async with open_backend() as backend:
        assert isinstance(await raised_by(backend.optim_step()), BackendError)
        await backend.reset().result()
        assert isinstance(await raised_by(backend.forward_backward(empty, SFT)), BackendError)


# --- futures and versions -----------------------------------------------------------------------------------


async def check_futures(open_backend: OpenBackend) -> None:
    """They return at once, finish in submission order, may be awaited again, and outlive a cancelled
    waiter.
    """
    batch = make_batch()
    finished: list[int] = []

    async def note(number: int, future: object) -> None:
        await future  # pyright: ignore[reportGeneralTypeIssues]
        assert all(earlier.done() for earlier in futures[:number]), (
            "a future finished before one that was submitted earlier"
        )
        finished.append(number)

    async with open_backend() as backend:
        futures = [
            backend.forward_backward(batch, SFT),
            backend.optim_step(STEP),
            backend.forward(batch),
            backend.set_weight_version(1),
        ]
        assert not any(future.done() for future in futures)
        with trio.move_on_after(0):
            await futures[0].result()
        async with trio.open_nursery() as nursery:
            for number, future in enumerate(futures):
                nursery.start_soon(note, number, future)
        assert sorted(finished) == [0, 1, 2, 3]  # trio wakes tasks of one moment in any order
        assert all(future.done() for future in futures)
        assert await futures[1] is await futures[1].result()


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
        await future.result()
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
        ).result()
        assert_weights_equal(before, streamed)
        await train(backend, batch)
        trained = await copy_weights(backend)
        assert weights_differ(before, trained)
        name = max(before)
        missing = {key: value for key, value in before.items() if key != name}
        misshapen = before | {name: torch.zeros(3, 5, 7)}
        unknown = before | {"no.such.weight": torch.zeros(1)}
        for wrong, named in ((missing, name), (misshapen, name), (unknown, "no.such.weight")):
            error = await raised_by(backend.load_weights(wrong))
            assert isinstance(error, BackendError) and named in str(error), error
            await backend.reset().result()
            assert_weights_equal(trained, await copy_weights(backend))
        await backend.load_weights(before).result()
        assert_weights_equal(before, await copy_weights(backend))


async def check_resume_is_exact(open_backend: OpenBackend, folder: Path) -> None:
    """Two steps, save, two steps: a fresh backend that loads and does the last two has the same weights bit
    for bit.
    """
    batches = [make_batch(seed) for seed in range(4)]
    async with open_backend() as backend:
        for batch in batches[:2]:
            await train(backend, batch)
        await backend.set_weight_version(2).result()
        await backend.save(folder).result()
        saved = await copy_weights(backend)
        for batch in batches[2:]:
            await train(backend, batch)
        wanted = await copy_weights(backend)
    async with open_backend() as backend:
        await backend.load(folder).result()
        assert backend.weight_version == 2
        assert backend.statistics()["steps"] == 2
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
        await backend.save(folder / "before").result()
        for batch in batches[1:]:
            await train(backend, batch, draws)
        wanted = await copy_weights(backend)
    async with open_backend() as backend:
        await backend.load(folder / "before").result()
        for name, batch in (("first", batches[1]), ("second", batches[2])):
            assert isinstance(await raised_by(backend.forward_backward(batch, failing)), ZeroDivisionError), (
                name
            )
            await backend.reset().result()
            await backend.save(folder / name).result()
            await train(backend, batch, draws)
        assert_weights_equal(wanted, await copy_weights(backend))
    async with open_backend() as backend:
        await backend.load(folder / "second").result()
        await train(backend, batches[2], draws)
        assert_weights_equal(wanted, await copy_weights(backend))

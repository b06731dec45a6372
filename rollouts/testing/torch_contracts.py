"""What every TrainingBackend promises, as functions that a test calls with a way to open one.

    async def test_steps(): await check_failed_step_stops_later_ones_until_reset(open_my_backend)

`open_backend()` is an async context manager of a backend in float32 with a fresh optimizer, equal weights
every time it is opened, and a token vocabulary of at least 40.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import torch
import trio
from numpy.testing import assert_raises
from torch import Tensor

from rollouts.errors import (
    BackendError,
    DenominatorMismatch,
    EarlierStepFailed,
    StepInterrupted,
    UserFunctionError,
)
from rollouts.losses import LossInputs, LossOutput
from rollouts.losses.inputs import reduce_loss
from rollouts.protocols import TrainingBackend
from rollouts.types import LossSpec, OptimParams, RolloutBatch

OpenBackend = Callable[[], AbstractAsyncContextManager[TrainingBackend]]
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


nan_loss = _make_loss(lambda log_probs: log_probs * torch.nan)
# a loss of 0 whose gradient is infinite: the root of 0
infinite_gradient_loss = _make_loss(lambda log_probs: (log_probs - log_probs.detach()).abs().sqrt())
miscounting_loss = _make_loss(lambda log_probs: log_probs, miscount=1)
raising_loss = _make_loss(lambda log_probs: log_probs / (1 // 0))
# SFT whose tokens are weighted by numbers that torch draws; and one that fails after it has drawn
drawing_loss = _make_loss(lambda log_probs: -log_probs * torch.rand_like(log_probs))
drawing_and_raising_loss = _make_loss(lambda log_probs: torch.rand_like(log_probs) / (1 // 0))


# --- batches and weights ------------------------------------------------------------------------------------


def make_batch(seed: int = 0, *, groups: int = 3, size: int = 3, temperature: float = 1.0) -> RolloutBatch:
    """Groups with a common prompt and answers of unlike length; advantages and mu are random."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = rng.integers(0, 40, 3 + 2 * group)
        for _ in range(size):
            tokens = np.concatenate([prompt, rng.integers(0, 40, rng.integers(1, 9))])
            mask = np.arange(len(tokens)) >= len(prompt)
            values = rng.normal(-3.7, 0.1, len(tokens)), rng.normal()
            rows.append((tokens, mask, *(np.where(mask, each, 0.0).astype(np.float32) for each in values)))
    tokens, masks, log_probs, advantages = zip(*rows, strict=True)
    return RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rollout_log_probs=log_probs,
        advantages=advantages,
        group_indices=np.repeat(np.arange(groups), size),
        temperature=temperature,
    )


BATCH = make_batch()


def assert_weights_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Bit for bit, and the same names."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


async def raised_by(future: Awaitable[object], kind: type[Exception] = Exception) -> Exception:
    """The error of this kind that awaiting the future raises."""
    with assert_raises(kind) as caught:
        await future
    return caught.exception


async def train(backend: TrainingBackend, batch: RolloutBatch = BATCH, loss: LossSpec = SFT) -> None:
    """One good step."""
    await backend.forward_backward(batch, loss)
    assert (await backend.optim_step(STEP)).skipped is None


@asynccontextmanager
async def leaving_no_trace(open_backend: OpenBackend, steps: int = 1) -> AsyncIterator[TrainingBackend]:
    """A backend after so many steps, 0 to 2. What the block does to it changes no bit of the weights, and the
    next steps, up to two in all, do what they would have done without it.
    """
    async with open_backend() as backend:
        for _ in range(2):
            await train(backend)
        undisturbed = await backend.get_weights()
    async with open_backend() as backend:
        for _ in range(steps):
            await train(backend)
        before = await backend.get_weights()
        yield backend
        assert_weights_equal(before, await backend.get_weights())
        for _ in range(steps, 2):
            await train(backend)
        assert_weights_equal(undisturbed, await backend.get_weights())


# --- steps --------------------------------------------------------------------------------------------------


async def check_steps_train(open_backend: OpenBackend) -> None:
    """Ten steps on one batch bring its loss down; forward() then agrees with the loss. A gradient above
    max_grad_norm is scaled, and the result reports the norm before.
    """
    async with open_backend() as backend:
        losses = []
        for step in range(10):
            forward, optim = backend.forward_backward(BATCH, SFT), backend.optim_step(STEP)
            result, done = await forward, await optim
            assert result.loss is not None and result.skipped is None
            assert (done.step, done.lr, done.clipped, done.skipped) == (step + 1, STEP.lr, False, None)
            losses.append(result.loss)
        assert losses[-1] < 0.7 * losses[0], losses
        rows = await backend.forward(BATCH)
        result = await backend.forward_backward(BATCH, SFT)
        for limit in (1e-3, 1e6):
            clipped = await backend.optim_step(OptimParams(lr=1e-3, max_grad_norm=limit))
            assert clipped.grad_norm is not None
            assert clipped.clipped == (clipped.grad_norm > limit) == (limit < 1)
            await backend.forward_backward(BATCH, SFT)
    log_probs, mask = np.concatenate(rows), np.concatenate(BATCH.loss_masks)
    assert result.denominator == mask.sum() and result.loss is not None
    assert abs(-log_probs.sum() / mask.sum() - result.loss) < 1e-4
    assert not log_probs[~mask].any()


async def check_accumulation_equals_one_batch(open_backend: OpenBackend) -> None:
    """Two halves under a constant denominator move the weights as the whole does, to 1e-5; every unit has its
    global denominator.
    """
    spec = LossSpec("reinforce", unit="constant", constant=50.0)
    norms = []
    async with open_backend() as backend:
        before = await backend.get_weights()
        for parts in ([slice(None)], [slice(4), slice(4, None)]):
            await backend.load_weights(before)
            for part in parts:
                names = ("tokens", "loss_masks", "advantages")
                rows = RolloutBatch(**{name: getattr(BATCH, name)[part] for name in names})
                await backend.forward_backward(rows, spec)
            step = await backend.optim_step(OptimParams(lr=1e-6, max_grad_norm=None))
            norms.append(step.grad_norm or 0.0)
        by_rows = await backend.forward_backward(BATCH, LossSpec("reinforce", unit="sequences"))
    assert abs(norms[0] - norms[1]) < 1e-5 * norms[0]
    assert by_rows.denominator == len(BATCH)


# --- steps that are not finite ------------------------------------------------------------------------------


async def check_non_finite_steps_change_nothing(open_backend: OpenBackend) -> None:
    """After a skipped step weights and optimizer are bit-identical: the next step does what it would have
    done without it.
    """
    for kind, where in (("nan", "loss"), ("infinite_gradient", "gradient")):
        async with leaving_no_trace(open_backend) as backend:
            await backend.forward_backward(BATCH, SFT)  # what was accumulated before is not used either
            bad = await backend.forward_backward(BATCH, LossSpec(f"{HERE}:{kind}_loss"))
            skipped = await backend.optim_step(STEP)
            assert (bad.skipped is not None and bad.loss is None) == (where == "loss"), bad
            assert skipped.skipped is not None and where in skipped.skipped and skipped.grad_norm is None
            assert backend.statistics()["skipped_steps"] == 1


async def check_an_undone_update_leaves_no_trace(open_backend: OpenBackend) -> None:
    """revert() puts weights and moments back bit for bit, before any step too, and the next steps do what
    they would have done without what was undone. A second one is a BackendError.
    """
    for steps in (0, 1):
        async with leaving_no_trace(open_backend, steps) as backend:
            await backend.hold()
            await train(backend, make_batch(1))
            await backend.forward_backward(BATCH, SFT)  # its gradient is discarded
            await backend.revert()
            await raised_by(backend.revert(), BackendError)
            await backend.reset()
            assert backend.statistics()["steps"] == steps + 1, "the schedule goes on"


# --- failures -----------------------------------------------------------------------------------------------


async def check_failed_step_stops_later_ones_until_reset(open_backend: OpenBackend) -> None:
    """The future of a step whose loss raises has UserFunctionError, of an interrupted one StepInterrupted;
    later ones EarlierStepFailed. After reset() the backend trains as if none of them had begun. A failure
    that nobody awaited is raised when the backend closes.
    """
    for loss, kind in ((LossSpec(f"{HERE}:raising_loss"), UserFunctionError), (SFT, StepInterrupted)):
        gate = Event()
        async with leaving_no_trace(open_backend) as backend:
            await backend.forward_backward(BATCH, SFT)  # its gradient is discarded
            held = backend.stream_weights(lambda bucket, gate=gate: _pass(gate))  # the step has not begun yet
            failed = backend.forward_backward(BATCH, loss)
            later = [backend.optim_step(STEP), backend.set_weight_version(9), backend.get_weights()]
            if kind is StepInterrupted:
                backend.interrupt()
            gate.set()
            await held
            await raised_by(failed, kind)
            for future in later:
                error = await raised_by(future, EarlierStepFailed)
                assert isinstance(error.__cause__, kind)
            assert backend.weight_version == 0, "the version queued behind the failure was never set"
            await backend.reset()
            await raised_by(backend.optim_step(STEP), BackendError)
            await backend.reset()
    with assert_raises(UserFunctionError):
        async with open_backend() as backend:
            backend.forward_backward(BATCH, LossSpec(f"{HERE}:raising_loss"))


def _pass(gate: Event) -> None:
    assert gate.wait(60), "nobody opened the gate"


async def check_wrong_steps_are_refused(open_backend: OpenBackend) -> None:
    """optim_step without forward_backward is a BackendError, and a batch without trained tokens too; a loss
    whose counts are not those of the masks is a DenominatorMismatch.
    """
    empty = replace(BATCH, loss_masks=tuple(np.zeros_like(mask) for mask in BATCH.loss_masks))
    async with open_backend() as backend:
        await raised_by(backend.optim_step(), BackendError)
        await backend.reset()
        await raised_by(backend.forward_backward(empty, SFT), BackendError)
        await backend.reset()
        miscounting = LossSpec(f"{HERE}:miscounting_loss")
        await raised_by(backend.forward_backward(BATCH, miscounting), DenominatorMismatch)


# --- futures and versions -----------------------------------------------------------------------------------


async def check_futures(open_backend: OpenBackend) -> None:
    """They return at once, finish in submission order, may be awaited again, and outlive a cancelled waiter;
    the weight version counts what is queued.
    """

    async def wait(number: int, future: Awaitable[object]) -> None:
        await future
        assert all(earlier.done() for earlier in futures[:number]), "a future overtook an earlier one"

    async with open_backend() as backend:
        assert backend.weight_version == 0
        futures = [
            backend.forward_backward(BATCH, SFT),
            optim := backend.optim_step(STEP),
            backend.forward(BATCH),
            backend.set_weight_version(3),
        ]
        assert not any(future.done() for future in futures)
        assert backend.weight_version == 3
        with trio.move_on_after(0):
            await futures[0]
        async with trio.open_nursery() as nursery:
            for number, future in enumerate(futures):
                nursery.start_soon(wait, number, future)
        assert all(future.done() for future in futures)
        assert await optim is await optim.result()


# --- weights ------------------------------------------------------------------------------------------------


async def check_weights_come_and_go(open_backend: OpenBackend) -> None:
    """stream_weights and get_weights agree; load_weights restores; a wrong name or shape is refused before
    anything is copied.
    """
    async with open_backend() as backend:
        before = await backend.get_weights()
        streamed = {}
        await backend.stream_weights(
            lambda bucket: streamed.update({name: tensor.cpu().clone() for name, tensor in bucket})
        )
        assert_weights_equal(before, streamed)
        await train(backend)
        trained = await backend.get_weights()
        assert any(not torch.equal(before[name], trained[name]) for name in before)
        name = max(before)
        missing = {key: value for key, value in before.items() if key != name}
        misshapen = before | {name: torch.zeros(3, 5, 7)}
        unknown = before | {"no.such.weight": torch.zeros(1)}
        for wrong, named in ((missing, name), (misshapen, name), (unknown, "no.such.weight")):
            assert named in str(await raised_by(backend.load_weights(wrong), BackendError))
            await backend.reset()
            assert_weights_equal(trained, await backend.get_weights())
        await backend.load_weights(before)
        assert_weights_equal(before, await backend.get_weights())


async def check_resume_is_exact(open_backend: OpenBackend, folder: Path) -> None:
    """Two steps, save, two steps: a fresh backend that loads and does the last two has the same weights bit
    for bit, also where the loss draws from torch's generator and a step is given up and repeated.
    """
    batches, draws = [make_batch(seed) for seed in range(4)], LossSpec(f"{HERE}:drawing_loss")
    async with open_backend() as backend:
        for batch in batches[:2]:
            await train(backend, batch, draws)
        await backend.set_weight_version(2)
        await backend.save(folder)
        saved = await backend.get_weights()
        for batch in batches[2:]:
            await train(backend, batch, draws)
        wanted = await backend.get_weights()
    async with open_backend() as backend:
        await backend.load(folder)
        assert (backend.weight_version, backend.statistics()["steps"]) == (2, 2)
        given_up = backend.forward_backward(batches[2], LossSpec(f"{HERE}:drawing_and_raising_loss"))
        await raised_by(given_up, UserFunctionError)
        await backend.reset()
        assert_weights_equal(saved, await backend.get_weights())
        for batch in batches[2:]:
            await train(backend, batch, draws)
        assert_weights_equal(wanted, await backend.get_weights())

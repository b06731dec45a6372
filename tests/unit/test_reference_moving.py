"""A moving reference is the closed form of its rule, scores as a model of those weights does, and survives a
resume bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import DeviceThread, open_device_thread
from rollouts.errors import BackendError, CheckpointError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.load import load_hf_model
from rollouts.models.tiny import make_tiny
from rollouts.reference.moving import (
    STATE_FILE,
    UpdateRule,
    compute_update,
    open_moving_reference,
)
from rollouts.reference.score import score_batch
from rollouts.testing.torch_contracts import make_batch

BATCH = make_batch(temperature=0.8)


def ema(decay: float) -> UpdateRule:
    return UpdateRule(1.0 - decay, decay, 1)


class Policy:
    """Streams given weights on the reference's thread, as a backend does."""

    def __init__(self, thread: DeviceThread, weights: dict[str, Tensor]) -> None:
        self.thread, self.weights, self.fails = thread, weights, False

    def stream_weights(self, sink):
        def work() -> None:
            if self.fails:
                raise BackendError("an earlier step failed")
            for name, weight in self.weights.items():
                sink([(name, weight)])

        return self.thread.submit(work)


def random_weights(path: Path, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = load_hf_model(path).named_parameters()
    return {
        name: parameter.detach() + 0.05 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in weights
    }


# --- rules --------------------------------------------------------------------------------------------------


def test_known_values_of_the_rules():
    one, two = torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    assert compute_update(one, two, ema(0.99)).item() == pytest.approx(1.01, abs=1e-15)
    assert compute_update(one, two, UpdateRule(0.6, 0.4)).item() == pytest.approx(1.6, abs=1e-15)
    assert compute_update(one, two, UpdateRule(1.0, 0.0, 3)).item() == 2.0


# --- the scorer ---------------------------------------------------------------------------------------------


async def test_scores_are_those_of_a_model_with_the_mixed_weights(tmp_path: Path):
    path = make_tiny("llama", 0, tmp_path)
    policy = random_weights(path, 1)
    async with (
        open_device_thread(name="moving", torch_threads=1) as thread,
        open_moving_reference(path, rule=UpdateRule(0.25, 0.75, 2), device_thread=thread) as reference,
    ):
        backend = Policy(thread, policy)
        before = await reference.score(BATCH)
        assert not await reference.update(backend, step=1)  # pyright: ignore[reportArgumentType]
        assert await reference.update(backend, step=2)  # pyright: ignore[reportArgumentType]
        assert not await reference.update(backend, step=2), "a step moves it once"  # pyright: ignore[reportArgumentType]
        assert reference.metrics == {"reference/updates": 1.0}
        scores = await reference.score(BATCH)
    model = load_hf_model(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.75 * parameter + 0.25 * policy[name])
    expected = score_batch(model, BATCH, plan=plan_forward(model), micro_batch_tokens=8192)
    for row in range(len(BATCH)):
        np.testing.assert_allclose(scores[row], expected[row], atol=1e-5)
        assert (scores[row][~BATCH.loss_masks[row]] == 0).all()
    assert max(np.abs(one - two).max() for one, two in zip(before, scores, strict=True)) > 1e-2


async def test_small_steps_do_not_vanish_in_a_bfloat16_model(tmp_path: Path):
    """A decay of 0.999 towards weights 1 % larger: each step is 1e-5 of a weight, and bfloat16 numbers are
    4e-3 apart.
    """
    path = make_tiny("llama", 0, tmp_path)
    start = dict(load_hf_model(path).named_parameters())
    policy = {name: weight.detach() * 1.01 for name, weight in start.items()}
    rule = ema(0.999)
    options: dict[str, Any] = {"rule": rule, "dtype": torch.bfloat16}
    async with (
        open_device_thread(name="moving", torch_threads=1) as thread,
        open_moving_reference(path, device_thread=thread, **options) as reference,
    ):
        for step in range(1, 701):
            await reference.update(Policy(thread, policy), step=step)  # pyright: ignore[reportArgumentType]
        await reference.save(tmp_path / "saved")
        shown = dict(reference._model.named_parameters())
        assert all(weight.dtype == torch.bfloat16 for weight in shown.values())
    saved = dict(load_hf_model(tmp_path / "saved").named_parameters())
    for name, weight in start.items():
        if weight.ndim > 1:
            expected = weight.double() * (1 + 0.01 * (1 - 0.999**700))
            torch.testing.assert_close(saved[name].double(), expected, rtol=2e-6, atol=1e-9)
            assert torch.equal(shown[name], saved[name].to(torch.bfloat16))


@pytest.mark.parametrize("accumulator_dtype", [torch.float32, torch.float64])
async def test_a_resumed_reference_goes_on_bit_for_bit(tmp_path: Path, accumulator_dtype: torch.dtype):
    path = make_tiny("qwen3", 0, tmp_path)
    options: dict[str, Any] = {"rule": ema(0.9), "accumulator_dtype": accumulator_dtype}
    policies = [random_weights(path, seed) for seed in range(4)]
    async with open_device_thread(name="moving", torch_threads=1) as thread:

        async def move(reference, steps: range) -> None:
            for step in steps:
                await reference.update(Policy(thread, policies[step - 1]), step=step)

        async with open_moving_reference(path, device_thread=thread, **options) as reference:
            await move(reference, range(1, 3))
            await reference.save(tmp_path / "saved")
            await move(reference, range(3, 5))
            whole, scores = (
                {name: weight.clone() for name, weight in reference._accumulators.items()},
                await reference.score(BATCH),
            )
            await reference.load(tmp_path / "saved")
            assert reference.metrics == {"reference/updates": 2.0}
            await move(reference, range(3, 5))
            again = {name: weight.clone() for name, weight in reference._accumulators.items()}
        async with open_moving_reference(tmp_path / "saved", device_thread=thread, **options) as reference:
            assert reference.metrics == {"reference/updates": 2.0}
            await move(reference, range(2, 5))  # step 2 was counted before the save
            resumed, resumed_scores = dict(reference._accumulators), await reference.score(BATCH)
    assert all(
        torch.equal(whole[name], again[name]) and torch.equal(whole[name], resumed[name]) for name in whole
    )
    assert all(weight.dtype == accumulator_dtype for weight in resumed.values())
    assert all(np.array_equal(one, two) for one, two in zip(scores, resumed_scores, strict=True))


async def test_the_backends_own_weights_arrive(tmp_path: Path):
    path = make_tiny("byte", 0, tmp_path)
    async with (
        open_pytorch_backend(
            path, optim=OptimConfig(lr=1e-2), total_steps=4, threads=1, autocast="off"
        ) as backend,
        open_moving_reference(
            path, rule=UpdateRule(1.0, 0.0, 1), device_thread=backend.device_thread
        ) as reference,
    ):
        from rollouts.types import LossSpec

        await backend.forward_backward(BATCH, LossSpec("sft")).result()
        await backend.optim_step().result()
        assert await reference.update(backend, step=1)
        policy, scores = await backend.forward(BATCH).result(), await reference.score(BATCH)
    for one, two in zip(policy, scores, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


async def test_an_update_that_breaks_off_leaves_no_silent_mixture(tmp_path: Path):
    path = make_tiny("byte", 0, tmp_path)
    policy = random_weights(path, 1)
    async with (
        open_device_thread(name="moving", torch_threads=1) as thread,
        open_moving_reference(path, rule=ema(0.5), device_thread=thread) as reference,
    ):
        await reference.save(tmp_path / "saved")
        before = await reference.score(BATCH)
        backend = Policy(thread, policy)
        backend.fails = True
        with pytest.raises(BackendError, match="an earlier step failed"):
            await reference.update(backend, step=1)  # pyright: ignore[reportArgumentType]
        assert all(
            np.array_equal(one, two) for one, two in zip(before, await reference.score(BATCH), strict=True)
        ), "nothing had come"
        first, *_ = policy
        for weights, message in (
            ({first: policy[first]}, "never came"),
            ({**policy, [*policy][-1]: policy[first]}, "is .*the reference's"),
        ):
            with pytest.raises(BackendError, match=message):
                await reference.update(Policy(thread, weights), step=1)  # pyright: ignore[reportArgumentType]
            with pytest.raises(BackendError, match="load\\(\\) a saved one"):
                await reference.score(BATCH)
            with pytest.raises(BackendError, match="load\\(\\) a saved one"):
                await reference.update(backend, step=1)  # pyright: ignore[reportArgumentType]
            await reference.load(tmp_path / "saved")
        with pytest.raises(BackendError, match="never came"):
            await reference.update(Policy(thread, {first: policy[first]}), step=1)  # pyright: ignore[reportArgumentType]
        with pytest.raises(BackendError, match="load\\(\\) a saved one"):
            await reference.save(tmp_path / "broken")
        await reference.load(tmp_path / "saved")
        assert all(
            np.array_equal(one, two) for one, two in zip(before, await reference.score(BATCH), strict=True)
        )


async def test_what_is_no_saved_reference_is_refused_and_changes_nothing(tmp_path: Path):
    path = make_tiny("byte", 0, tmp_path)
    async with (
        open_device_thread(name="moving", torch_threads=1) as thread,
        open_moving_reference(path, rule=ema(0.5), device_thread=thread) as reference,
    ):
        with pytest.raises(CheckpointError, match=STATE_FILE):
            await reference.load(path)
        await reference.save(tmp_path / "saved")
        (tmp_path / "saved" / STATE_FILE).write_text('{"format": 99, "updates": 1, "step": 1}')
        with pytest.raises(CheckpointError, match="99"):
            await reference.load(tmp_path / "saved")
        (tmp_path / "saved" / STATE_FILE).write_text("{")
        with pytest.raises(CheckpointError, match="cannot be read"):
            await reference.load(tmp_path / "saved")
        assert len(await reference.score(BATCH)) == len(BATCH)

"""A moving reference is the closed form of its rule, scores as a model of those weights does, and survives a
resume bit for bit.
"""

from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.engines.local import open_local_engine
from rollouts.errors import BackendError, CheckpointError, WeightSyncError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.reference.moving import STATE_FILE, UpdateRule, open_moving_reference
from rollouts.reference.score import score_batch
from rollouts.testing.torch_contracts import assert_weights_equal, make_batch
from rollouts.types import LossSpec
from rollouts.weight_sync.snapshots import export_snapshot
from rollouts.weight_sync.sync import WeightSync
from rollouts.weight_sync.update import make_probe
from tests.support.text_tables import cases

BATCH = make_batch(temperature=0.8)


class Policy:
    """Streams given weights on the reference's thread, as a backend does."""

    def __init__(self, thread):
        self.thread, self.fails = thread, False
        self.weights = {}

    def stream_weights(self, sink):
        def work():
            if self.fails:
                raise BackendError("an earlier step failed")
            for name, weight in self.weights.items():
                sink([(name, weight)])

        return self.thread.submit(work)


@asynccontextmanager
async def open_moving(path, **options):
    """(the reference, a policy that it can follow)."""
    async with (
        open_device_thread(name="moving", torch_threads=1) as thread,
        open_moving_reference(path, device_thread=thread, **options) as reference,
    ):
        yield reference, Policy(thread)


def random_weights(path, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() + 0.05 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in load_hf_model(path).named_parameters()
    }


async def test_scores_are_those_of_a_model_with_the_mixed_weights():
    path = resolve_model("tiny:llama")
    async with open_moving(path, rule=UpdateRule(0.25, every=2)) as (reference, policy):
        policy.weights = random_weights(path, 1)
        before = await reference.score(BATCH)
        moved = [await reference.update(policy, step=step) for step in (1, 2, 2)]
        assert moved == [False, True, False]  # every second step, and a step moves it once
        assert reference.metrics == {"reference/updates": 1.0}
        scores = await reference.score(BATCH)
    model = load_hf_model(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.75 * parameter + 0.25 * policy.weights[name])
    expected = score_batch(model, BATCH, plan=plan_forward(model), micro_batch_tokens=8192)
    before, scores, expected, mask = map(np.concatenate, (before, scores, expected, BATCH.loss_masks))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert not scores[~mask].any() and np.abs(before - scores).max() > 1e-2


async def test_small_steps_do_not_vanish_in_a_bfloat16_model(tmp_path):
    """A decay of 0.999 towards weights 1 % larger: each step is 1e-5 of a weight, and bfloat16 numbers are
    4e-3 apart.
    """
    path = resolve_model("tiny:llama")
    start = dict(load_hf_model(path).named_parameters())
    async with open_moving(path, rule=UpdateRule(0.001), dtype=torch.bfloat16) as (reference, policy):
        policy.weights = {name: weight.detach() * 1.01 for name, weight in start.items()}
        for step in range(1, 701):
            await reference.update(policy, step=step)
        await (await reference.hold())(tmp_path / "saved")
        shown = dict(reference._model.named_parameters())
    saved = dict(load_hf_model(tmp_path / "saved").named_parameters())
    for name, weight in start.items():
        if weight.ndim > 1:
            expected = weight.double() * (1 + 0.01 * (1 - 0.999**700))
            torch.testing.assert_close(saved[name].double(), expected, rtol=2e-6, atol=1e-9)
            assert torch.equal(shown[name], saved[name].to(torch.bfloat16))


async def test_a_resumed_reference_goes_on_bit_for_bit(tmp_path):
    path = resolve_model("tiny:qwen3")

    async def move(reference, policy, steps):
        for step in steps:
            policy.weights = random_weights(path, step)
            await reference.update(policy, step=step)
        weights = {name: weight.clone() for name, weight in reference._averaged.named_parameters()}
        return weights, await reference.score(BATCH)

    async with open_moving(path, rule=UpdateRule(0.1)) as (reference, policy):
        await move(reference, policy, range(1, 3))
        await (await reference.hold())(tmp_path / "saved")
        whole, scores = await move(reference, policy, range(3, 5))
    async with open_moving(tmp_path / "saved", rule=UpdateRule(0.1)) as (reference, policy):
        assert reference.metrics == {"reference/updates": 2.0}
        resumed, resumed_scores = await move(reference, policy, range(2, 5))  # step 2 was counted before
    assert_weights_equal(whole, resumed)
    assert {weight.dtype for weight in whole.values()} == {torch.float32}
    np.testing.assert_equal(scores, resumed_scores)


async def test_a_reference_that_follows_has_the_backends_own_weights():
    path = resolve_model("tiny:byte")
    options = {"optim": OptimConfig(lr=1e-2), "total_steps": 4, "autocast": "off"}
    async with (
        open_pytorch_backend(path, threads=1, **options) as backend,
        open_moving_reference(path, rule=UpdateRule(1.0), device_thread=backend.device_thread) as reference,
    ):
        reference.follow(backend, lambda: 1)
        await backend.forward_backward(BATCH, LossSpec("sft"))
        await backend.optim_step()
        policy, scores = await backend.forward(BATCH), await reference.score(BATCH)
    np.testing.assert_allclose(np.concatenate(policy), np.concatenate(scores), atol=1e-6)


# --- as a source of weights ---------------------------------------------------------------------------------


async def test_a_snapshot_has_the_average_of_all_that_the_policy_was(tmp_path):
    """With d = 1 − 0.25: dⁿ·start + Σ 0.25·dⁿ⁻ᵏ·policy_k. The model that scores is bfloat16; the snapshot is
    not.
    """
    path, steps = resolve_model("tiny:llama"), 5
    async with open_moving(path, rule=UpdateRule(0.25), dtype=torch.bfloat16) as (reference, policy):
        for step in range(1, steps):
            policy.weights = random_weights(path, step)
            await reference.update(policy, step=step)
        policy.weights = random_weights(path, steps)
        reference.follow(policy, lambda: steps)  # the last update is made when the weights are asked for
        await export_snapshot(reference, tmp_path / "v1", shard_bytes=1 << 16)
    found = dict(load_hf_model(tmp_path / "v1").named_parameters())
    start = dict(load_hf_model(path).named_parameters())
    policies = [random_weights(path, step) for step in range(1, steps + 1)]
    for name, weight in start.items():
        expected = 0.75**steps * weight.double()
        for step, policy in enumerate(policies, 1):
            expected += 0.25 * 0.75 ** (steps - step) * policy[name].double()
        assert found.pop(name).double().sub(expected).abs().max() < 1e-6
        assert expected.sub(weight).abs().max() > 1e-3
    assert not found


async def test_an_engine_that_serves_the_average_is_proven_and_one_with_the_policys_weights_is_not():
    path = resolve_model("tiny:llama")
    async with (
        open_moving(path, rule=UpdateRule(0.25)) as (reference, policy),
        open_device_thread(name="engine", torch_threads=1) as thread,
        open_local_engine(load_hf_model(path), device_thread=thread, mode="copied", max_rows=2) as engine,
    ):
        sync = WeightSync(make_probe(engine.features.vocab_size, tolerance=1e-4))
        for step in (1, 2):
            policy.weights = random_weights(path, step)
            await reference.update(policy, step=step)
            metrics = await sync(reference, [engine], step)
            assert metrics["weight_sync/probe_difference/max"] < 1e-5
        assert_weights_equal(await engine.copy_weights(), dict(reference.trained.named_parameters()))
        mistaken = SimpleNamespace(forward=reference.forward, stream_weights=policy.stream_weights)
        with pytest.raises(WeightSyncError, match="differs from the trainer by"):
            await sync(mistaken, [engine], 3)


@cases("""
message
never came
fit none
""")
async def test_an_update_that_breaks_off_leaves_no_silent_mixture(message):
    path = resolve_model("tiny:byte")
    async with open_moving(path, rule=UpdateRule(0.5)) as (reference, policy):
        before, update = await reference.score(BATCH), partial(reference.update, policy, step=1)
        policy.fails = True
        with pytest.raises(BackendError, match="an earlier step failed"):
            await update()
        np.testing.assert_equal(before, await reference.score(BATCH))  # nothing had come
        policy.fails = False
        weights = random_weights(path, 1)
        first, *_, last = weights
        missing, misfit = {first: weights[first]}, weights | {last: weights[first]}
        policy.weights = missing if message == "never came" else misfit
        with pytest.raises(BackendError, match=message):
            await update()
        stream = partial(reference.stream_weights, lambda bucket: None)
        for use in (partial(reference.score, BATCH), update, reference.hold, stream):
            with pytest.raises(BackendError, match="go on from a saved one"):
                await use()


@cases("""
text
{"format": 99, "updates": 1, "step": 1}
{
""")
async def test_what_is_no_saved_reference_is_refused(tmp_path, text):
    path = resolve_model("tiny:byte", cache_dir=tmp_path)
    (path / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        async with open_moving(path, rule=UpdateRule(0.5)):
            pass

"""The backend on one process: losses, gradients and log-probs of plain forwards, optimizer steps, files."""

import dataclasses
import inspect
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts.backends.open import choose_autocast_dtype
from rollouts.config.tables import OptimConfig
from rollouts.errors import BackendError
from rollouts.losses import LossInputs, LossOutput
from rollouts.losses.reductions import reduce_loss
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import SFT, make_batch
from rollouts.types import LossSpec, Mean, OptimParams, RolloutBatch
from tests.support import backend_checks, plain_backend

torch.set_num_threads(1)
SEEN: list[LossInputs] = []


def make_model(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # so that log-probs differ by nats, and errors show
    )
    return LlamaForCausalLM(config).eval()


def open_backend(**options: Any) -> AbstractAsyncContextManager[Any]:
    return plain_backend.open_backend(make_model(), **options)


def slow_log_probs(model: Any, batch: RolloutBatch) -> list[Tensor]:
    """[T_i - 1] of every row by itself: the plain forward pass."""
    rows = []
    for tokens in batch.tokens:
        ids = torch.from_numpy(tokens)
        log_probs = (model(input_ids=ids[None]).logits[0] / batch.temperature).log_softmax(-1)
        rows.append(log_probs[:-1].gather(-1, ids[1:, None]).squeeze(-1))
    return rows


def slow_gradients(
    batch: RolloutBatch, *, per_row: bool, advantages: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of SFT or REINFORCE, row by row, over the whole batch."""
    model = make_model()
    total: Any = 0.0
    count = 0
    for row, log_probs in enumerate(slow_log_probs(model, batch)):
        mask = torch.from_numpy(np.asarray(batch.loss_masks[row][1:]))
        weights = (
            torch.from_numpy(batch.advantages[row][1:])
            if advantages and batch.advantages is not None
            else torch.ones(len(mask))
        )
        losses = (-log_probs * weights)[mask]
        total = total + (losses.mean() if per_row else losses.sum())
        count += 1 if per_row else int(mask.sum())
    (total / count).backward()
    return float(total.detach() / count), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(
            one[name],
            other[name],
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def gradients(backend: Any) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in backend.model.named_parameters()
        if parameter.grad is not None
    }


FORMS = {
    "one padded micro-batch": {"share_prefix": False, "micro_batch_tokens": 10_000},
    "a micro-batch per row": {"share_prefix": False, "micro_batch_tokens": 1},
    "some micro-batches": {"share_prefix": False, "micro_batch_tokens": 30},
    "shared prefix": {"share_prefix": True, "micro_batch_tokens": 10_000},
    "shared prefix in micro-batches": {"share_prefix": True, "micro_batch_tokens": 24},
}


@pytest.mark.parametrize("unit", ["tokens", "sequences"])
@pytest.mark.parametrize("form", FORMS)
async def test_loss_and_gradients_are_those_of_a_plain_forward_of_each_row(form: str, unit: Any):
    batch = make_batch(temperature=0.7)
    wanted_loss, wanted = slow_gradients(batch, per_row=unit == "sequences", advantages=True)
    async with open_backend(**FORMS[form]) as backend:
        result = await backend.forward_backward(batch, LossSpec("reinforce", unit=unit))
        found = gradients(backend)
    assert result.loss == pytest.approx(wanted_loss, abs=1e-5)
    assert_close(found, wanted)


@pytest.mark.parametrize("form", FORMS)
async def test_forward_gives_the_log_probs_of_a_plain_forward_of_each_row(form: str):
    batch = make_batch(temperature=1.3)
    with torch.no_grad():
        wanted = slow_log_probs(make_model(), batch)
    async with open_backend(**FORMS[form]) as backend:
        rows = await backend.forward(batch)
    for row, found in enumerate(rows):
        mask = batch.loss_masks[row]
        assert found.dtype == np.float32
        assert (found[~mask] == 0).all()
        np.testing.assert_allclose(found[mask], wanted[row].numpy()[mask[1:]], atol=1e-5)


def watching_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """Keeps what it was given."""
    SEEN.append(inputs)
    total, count = reduce_loss(-inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count, {"rows": Mean(float(len(inputs.mask)), 1.0)})


@pytest.mark.parametrize("share", [False, True])
async def test_a_loss_sees_right_padded_rows_whatever_the_packing(share: bool):
    SEEN.clear()
    batch = make_batch()
    assert batch.advantages is not None
    assert batch.rollout_log_probs is not None
    async with open_backend(share_prefix=share) as backend:
        result = await backend.forward_backward(batch, LossSpec(f"{__name__}:watching_loss"))
    (inputs,) = SEEN
    assert inputs.old_log_probs is None
    assert inputs.ref_log_probs is None
    shapes = {
        tuple(value.shape)
        for value in (
            inputs.log_probs,
            inputs.mask,
            inputs.entropy,
            inputs.advantages,
            inputs.rollout_log_probs,
        )
    }
    assert shapes == {(9, max(len(row) for row in batch.tokens))}
    masks = {
        tuple(row[: len(mask)])
        for row in inputs.mask.tolist()
        for mask in batch.loss_masks
        if sum(row) == mask.sum()
    }
    assert {tuple(mask.tolist()) for mask in batch.loss_masks} <= masks
    found = sorted(round(float(value), 5) for value in inputs.advantages[inputs.mask])
    assert found == sorted(
        round(float(a), 5)
        for row, mask in zip(batch.advantages, batch.loss_masks, strict=True)
        for a in row[mask]
    )
    assert result.metrics["rows"] == Mean(9.0, 1.0)


@pytest.mark.parametrize("form", FORMS)
async def test_an_entropy_bonus_has_the_gradient_of_the_entropy(form: str):
    batch = make_batch(temperature=0.7)
    model = make_model()
    total: Any = 0.0
    for tokens, mask, advantages in zip(batch.tokens, batch.loss_masks, batch.advantages or (), strict=True):
        log_probs = (model(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        own = log_probs.gather(-1, torch.from_numpy(tokens)[1:, None]).squeeze(-1)
        losses = -own * torch.from_numpy(advantages[1:]) + 0.5 * (log_probs.exp() * log_probs).sum(
            -1
        )  # minus 0.5 times the entropy
        total = total + losses[torch.from_numpy(mask[1:])].sum()
    (total / len(batch)).backward()
    wanted = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    async with open_backend(**FORMS[form]) as backend:
        result = await backend.forward_backward(
            batch, LossSpec("reinforce", {"entropy_coef": 0.5}, unit="sequence_sums")
        )
        found = gradients(backend)
    assert (result.loss, result.denominator) == (
        pytest.approx(float(total.detach()) / len(batch), abs=1e-4),
        len(batch),
    )
    assert_close(found, wanted, tolerance=3e-5)


async def test_a_constant_unit_divides_by_its_constant():
    batch = make_batch()
    tokens = sum(int(mask.sum()) for mask in batch.loss_masks)
    async with open_backend() as backend:
        by_tokens = await backend.forward_backward(batch, SFT)
        constant = await backend.forward_backward(batch, LossSpec("sft", unit="constant", constant=7.0))
        assert constant.denominator == 7.0
        assert constant.loss == pytest.approx(by_tokens.loss * tokens / 7.0, rel=1e-5)
        with pytest.raises(BackendError, match="constant=None"):
            await backend.forward_backward(batch, LossSpec("sft", unit="constant"))


async def test_the_schedule_sets_the_learning_rate_unless_it_is_given():
    optim = OptimConfig(lr=1e-2, schedule="linear", warmup_steps=2)
    batch = make_batch()
    async with open_backend(optim=optim, total_steps=4) as backend:
        rates = []
        for params in (None, None, None, OptimParams(lr=0.5), None):
            await backend.forward_backward(batch, SFT)
            rates.append((await backend.optim_step(params)).lr)
    # warm-up to the peak at the second step, then a line to 0 at the fourth
    assert rates == pytest.approx([5e-3, 1e-2, 5e-3, 0.5, 0.0])


async def test_bfloat16_autocast_stays_close_to_float32():
    batch = make_batch()
    found = []
    for dtype in (None, torch.bfloat16):
        async with open_backend(autocast_dtype=dtype) as backend:
            rows = await backend.forward(batch)
            result = await backend.forward_backward(batch, SFT)
            found.append((rows, result.loss))
            assert all(parameter.grad.dtype == torch.float32 for parameter in backend.model.parameters())
    assert found[0][1] == pytest.approx(found[1][1], abs=0.05)
    assert max(np.abs(one - other).max() for one, other in zip(found[0][0], found[1][0], strict=True)) < 0.3
    assert choose_autocast_dtype("off", "cpu") is None
    assert choose_autocast_dtype("bfloat16", "cpu") == torch.bfloat16


async def test_a_tied_weight_may_be_loaded_under_both_names():
    async with open_backend() as backend:
        weights = await backend.get_weights()
        await backend.load_weights(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


async def test_a_checkpoint_is_a_hugging_face_directory_and_safetensors(tmp_path: Path):
    async with open_backend() as backend:
        await backend.forward_backward(make_batch(), SFT)
        await backend.optim_step()
        await backend.save(tmp_path)
        weights = await backend.get_weights()
    loaded = LlamaForCausalLM.from_pretrained(str(tmp_path))
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    state = load_file(tmp_path / "state" / "optimizer.safetensors")
    assert {key.partition("/")[0] for key in state} == {"rng", "step", "exp_avg", "exp_avg_sq"}
    assert json.loads((tmp_path / "state" / "backend.json").read_text())["steps"] == 1


async def test_a_checkpoint_before_the_first_step_can_be_loaded(tmp_path: Path):
    async with open_backend() as backend:
        await backend.save(tmp_path)
    async with open_backend() as backend:
        await backend.forward_backward(make_batch(), SFT)
        await backend.load(tmp_path)
        with pytest.raises(BackendError, match="no gradient"):
            await backend.optim_step()


CONTRACT = {
    name: check
    for name, check in {**vars(contract), **vars(backend_checks)}.items()
    if name.startswith("check_")
}


@pytest.mark.parametrize("promise", CONTRACT.values(), ids=CONTRACT)
async def test_contract(promise: Any, tmp_path: Path):
    await promise(open_backend, *([tmp_path] if "folder" in inspect.signature(promise).parameters else []))


# --- what users saw -----------------------------------------------------------------------------------------


async def test_a_token_outside_the_vocabulary_is_named_by_its_row():
    batch = make_batch()
    wrong = dataclasses.replace(batch, tokens=(*batch.tokens[:-1], np.full_like(batch.tokens[-1], 64)))
    async with open_backend() as backend:
        with pytest.raises(
            BackendError, match=r"batch\.tokens\[8\] has the id 64; the model's ids are 0 to 63"
        ):
            await backend.forward_backward(wrong, SFT)


def detached_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """A loss that forgot its gradient."""
    total, count = reduce_loss(inputs.log_probs.detach(), inputs.mask, unit)
    return LossOutput(total, count, {})


async def test_a_loss_without_gradient_is_named():
    async with open_backend() as backend:
        with pytest.raises(BackendError, match="detached_loss' returned a sum without gradient"):
            await backend.forward_backward(make_batch(), LossSpec(f"{__name__}:detached_loss"))

"""Adapters that train in a backend: the promises of every backend, and of adapters that share a base."""

import inspect
from contextlib import AsyncExitStack
from operator import attrgetter

import numpy as np
import torch
from numpy.testing import assert_array_equal
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.model import LoraConfig
from rollouts.config.tables import OptimConfig
from rollouts.models.export import save_hf_model
from rollouts.models.load import load_hf_model
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import SFT, assert_weights_equal, make_batch, train
from tests.distributed.train_program import SPECS, find_model, make_rollouts
from tests.support import backend_checks
from tests.support.plain_backend import compute_difference
from tests.support.text_tables import cases

GIVEN = {"optim": OptimConfig(lr=1e-2), "total_steps": 10, "autocast": "off", "threads": 1}


def open_backend(model="gpt2", *, lora=None, **options):
    """An adapter of a model (see find_model); `lora`: what differs in its config.

    Logits of the tiny models are near 0, and their frozen heads keep them there: gpt2's are not.
    """
    path = find_model(model) if isinstance(model, str) else model
    config = LoraConfig(**({"rank": 4, "alpha": 8.0} | (lora or {})))
    return open_pytorch_backend(path, lora=config.model_dump(), **(GIVEN | options))


CONTRACT = {
    name: check
    for name, check in {**vars(contract), **vars(backend_checks)}.items()
    if name.startswith("check_")
}


@cases("promise", CONTRACT.values(), ids=CONTRACT)
async def test_contract(promise, tmp_path):
    await promise(open_backend, *([tmp_path] if "folder" in inspect.signature(promise).parameters else []))


TASKS = {
    "sft": {},
    "grpo": {"seed": 1, "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}},
    "value": {"seed": 2, "head": "scalar", "optim": OptimConfig(lr=1e-3)},
}


async def train_in_turns(names, folder):
    """Losses of each task's three steps, its weights and moments, where its adapter shares a base with the
    others'; one more comes and goes after each step.
    """
    folder.mkdir()
    losses = [[] for _ in names]
    async with AsyncExitStack() as stack:
        backends = []
        for name in names:
            beside = {"beside": backends[0]} if backends else {}
            opened = open_backend("tiny:byte", deterministic=True, **TASKS[name], **beside)
            backends.append(await stack.enter_async_context(opened))
        for step in range(3):
            for number, name in enumerate(names):
                rollouts = make_rollouts(10 * list(TASKS).index(name) + step)
                losses[number].append((await backends[number].forward_backward(rollouts, SPECS[name])).loss)
                if len(names) > 1:
                    async with open_backend("tiny:byte", beside=backends[0]) as other:
                        await train(other, make_batch(step))
                await backends[number].optim_step()
        for name, backend in zip(names, backends, strict=True):
            await backend.save(folder / name)
    found = []
    for name, mine in zip(names, losses, strict=True):
        weights = load_file(folder / name / "adapter_model.safetensors")
        moments = load_file(folder / name / "state/optimizer.safetensors")
        kept = {key: one for key, one in moments.items() if not key.startswith("rng/")}
        found.append((mine, weights | kept))
    return found


async def test_adapters_of_one_base_train_in_turns_to_the_bits_that_each_gives_alone(tmp_path):
    together = await train_in_turns([*TASKS], tmp_path / "together")
    for name, (losses, tensors) in zip(TASKS, together, strict=True):
        ((alone, wanted),) = await train_in_turns([name], tmp_path / name)
        assert losses == alone and len(set(losses)) == 3
        assert_weights_equal(tensors, wanted)
        assert any(key.endswith("lora_B.weight") and one.any() for key, one in tensors.items())


async def test_forward_start_is_of_what_the_adapter_began_with(tmp_path):
    """The base, or the adapter of init_from; also when a checkpoint was loaded, or an update undone."""

    async def check_start(backend, wanted):
        for undo in (backend.revert, lambda: backend.load(tmp_path)):
            await backend.hold()
            await train(backend, batch)
            await undo()
            assert_array_equal(np.concatenate(await backend.forward_start(batch)), wanted)

    batch = make_batch()
    async with open_pytorch_backend(find_model("gpt2"), **GIVEN) as plain:
        base = np.concatenate(await plain.forward(batch))
    async with open_backend() as backend:
        await train(backend, batch)
        await backend.save(tmp_path)
        await check_start(backend, base)
        trained = np.concatenate(await backend.forward(batch))
    assert np.abs(trained - base).max() > 0.01
    async with open_backend(lora={"init_from": str(tmp_path)}) as backend:
        assert_array_equal(np.concatenate(await backend.forward(batch)), trained)
        await check_start(backend, trained)


@cases("""
model      | base     | dtype
tiny:qwen3 | bfloat16 | int16
tiny:qwen3 | 8bit     | int8
tiny:qwen3 | 4bit     | uint8
tiny:moe   | 8bit     | int8
""")
async def test_a_packed_base_gives_the_gradients_of_the_same_weights_in_float32_and_does_not_move(
    model, base, dtype, tmp_path
):
    batch, found = make_batch(), []
    draws = torch.Generator().manual_seed(0)
    async with open_backend(model, lora={"base": base}) as backend:
        codes = {name: one.clone() for name, one in backend.model.named_parameters()}
        weights = await backend.get_weights()
        weights = {name: torch.randn(one.shape, generator=draws) / 8 for name, one in weights.items()}
        unpacked = load_hf_model(find_model(model))
        with torch.no_grad():
            for name, weight in unpacked.named_parameters():
                weight.copy_(attrgetter(name)(backend.model))
        save_hf_model(unpacked, tmp_path)
        async with open_backend(tmp_path) as plain:
            for one in (backend, plain):
                await one.load_weights(weights)
                await one.forward_backward(batch, SFT)
                found.append({name: weight.grad for name, weight in one.trained.weights.items()})
        assert compute_difference(*found) < 1e-5 and all(one.any() for one in found[0].values())
        await backend.optim_step()
        assert_weights_equal(dict(backend.model.named_parameters()), codes)
    assert sum(one.dtype == getattr(torch, dtype) for one in codes.values()) > len(codes) / 4

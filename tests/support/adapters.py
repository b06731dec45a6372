"""Adapters with random matrices, beside small models, and the same in `peft`."""

import copy
from contextlib import asynccontextmanager

import torch

from rollouts.backends.open import open_pytorch_backend
from rollouts.config.model import LoraConfig
from rollouts.models.export import write_description, write_safetensors
from rollouts.models.lora import (
    ADAPTERS,
    WEIGHTS_FILE,
    make_adapter,
    prepare_places,
    route_all,
    use_adapters,
)
from tests.support.plain_backend import OPTIM, open_engine_of

IDS = torch.tensor([[5, 1, 7, 7, 3, 9, 2, 8]])


def randomize(adapter, seed):
    """The adapter, with no matrix of 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter.weights.values():
            weight.normal_(0.0, 0.2, generator=generator)
    return adapter


def make_random(model, base, *, seed=0, scalar=False, **config):
    """An adapter of the model, which is the one in `base`, of rank 4 unless `config` says another."""
    if not hasattr(model, ADAPTERS):
        prepare_places(model.requires_grad_(False), base)
    config = {"rank": 4, "alpha": 6.0, **config}
    return randomize(make_adapter(model, LoraConfig(**config), scalar=scalar), seed)


def save_random(model, base, folder, **options):
    """make_random, written to a directory."""
    adapter = make_random(model, base, **options)
    write_description(adapter, folder)
    write_safetensors(folder / WEIGHTS_FILE, adapter.weights)
    return adapter


def run(model, adapter=None):
    """The logits of a few tokens."""
    with use_adapters(model, route_all(adapter)):
        return model(input_ids=IDS, use_cache=False).logits


def wrap(model, **options):
    """A copy of a model with a new adapter of `peft`."""
    import peft

    options = {"r": 4, "lora_alpha": 6, **options}
    return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()


def fill(wrapped, weights):
    """Gives a model of `peft` these matrices, which are all that it has."""
    import peft

    assert peft.get_peft_model_state_dict(wrapped).keys() == weights.keys()
    peft.set_peft_model_state_dict(wrapped, {name: one.detach() for name, one in weights.items()})


def open_trained(path, *, lora=None, **options):
    """A backend that trains an adapter of the model in a directory."""
    config = LoraConfig(**{"rank": 4, **(lora or {})}).model_dump()
    return open_pytorch_backend(
        path, lora=config, **{"optim": OPTIM, "total_steps": 10, "threads": 1, "autocast": "off"} | options
    )


@asynccontextmanager
async def open_both(path, mode="shared"):
    """A backend of an adapter, which is not 0, and an engine that generates with it."""
    async with open_trained(path) as backend:
        randomize(backend.trainer.adapter, seed=0)
        options = {"adapter": backend.trainer.adapter, "max_rows": 8, "max_context": 160}
        async with open_engine_of(backend, mode, **options) as engine:
            yield backend, engine

"""A backend of one process for a given model, and gradients held against those of a plain forward."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.device_thread import open_device_thread
from rollouts.models.optim import create_adamw_optimizer

OPTIM = OptimConfig(lr=1e-2)


@asynccontextmanager
async def open_backend(
    model: Any, *, optim: OptimConfig = OPTIM, total_steps: int = 10, **options: Any
) -> AsyncIterator[Any]:
    async with open_device_thread(name="trainer", torch_threads=1) as device_thread:
        optimizer = create_adamw_optimizer(model, optim)
        options |= {"optim": optim, "total_steps": total_steps}
        yield PyTorchTrainingBackend(model, optimizer, device_thread, **options)


def take_gradients(model: Any) -> dict[str, Tensor]:
    """Zeros where no row reached a parameter."""
    every = model.named_parameters()
    return {name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in every}


def assert_gradients_close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """To `tolerance` of the norm of all gradients."""
    assert found.keys() == wanted.keys()
    squares = [
        ((found[name] - one).double().square().sum(), one.double().square().sum())
        for name, one in wanted.items()
    ]
    apart, size = torch.tensor(squares).sum(0).sqrt().tolist()
    assert apart <= tolerance * size, (apart, size)

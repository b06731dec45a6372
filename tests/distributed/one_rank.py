"""One rank in this process, without a launcher, and three steps of a backend: what the tests on a GPU
compare.
"""

from contextlib import asynccontextmanager
from typing import NamedTuple

from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (documented there)

from rollouts.device_thread import open_device_thread
from rollouts.models.sharded import get_local
from rollouts.ranks.launch import Launch
from rollouts.ranks.meet import close_group, init_group
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import LossSpec

GRPO = LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})


@asynccontextmanager
async def open_one_rank(device):
    """The process group of a job of one process: gloo, and NCCL for "cuda"."""
    place = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", restart=0)
    async with open_device_thread(name="ranks", torch_threads=1) as thread:
        yield await thread.submit(lambda: init_group(place, HashStore(), device=device))
        await thread.submit(close_group)


class Trained(NamedTuple):
    """What three steps gave."""

    losses: list[float]
    norms: list[float]
    gradient: dict[str, Tensor]  # of the first step, before clipping
    weights: dict[str, Tensor]  # after the last


async def train(backend):
    losses, norms, gradient = [], [], {}
    for step in range(3):
        losses.append((await backend.forward_backward(make_batch(step), GRPO)).loss)
        if step == 0:
            gradient = {
                name: get_local(parameter.grad).cpu().clone()
                for name, parameter in backend.model.named_parameters()
            }
        norms.append((await backend.optim_step()).grad_norm)
    return Trained(losses, norms, gradient, await backend.get_weights())

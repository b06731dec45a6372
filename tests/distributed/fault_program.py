"""One of two ranks that open a backend, started without a launcher; on rank 1 the third forward of the probe
finds no memory.

RANK=… WORLD_SIZE=2 … python -m tests.distributed.fault_program
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import trio

from rollouts.backends import sharded_model
from rollouts.backends.fsdp import open_fsdp_backend, serve_fsdp_rank
from rollouts.backends.ranks import open_ranks
from rollouts.config.schema import OptimConfig
from rollouts.distributed.launch import read_launch
from rollouts.models.forward_plan import plan_forward
from rollouts.models.load import resolve_model

FORWARD = (
    3  # of those that a model may fail at, which then does without a shortcut: the first two must succeed
)


def plan_without_memory(model: Any, **options: Any) -> Any:
    """plan_forward of a model of which one layer fails in the middle of a forward."""
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == FORWARD:
            print("out of memory", flush=True)
            raise torch.OutOfMemoryError("no memory for 8 bytes")

    sharded_model.find_layers(model)[1].register_forward_pre_hook(fail)
    return plan_forward(model, **options)


async def main() -> None:
    launch = read_launch(os.environ)
    if launch.rank == 1:
        sharded_model.plan_forward = plan_without_memory
    path = await trio.to_thread.run_sync(partial(resolve_model, "tiny:byte", seed=0))
    async with open_ranks(launch) as opened:
        if launch.rank:
            await serve_fsdp_rank(opened.link, opened.ranks)
            return
        optim = OptimConfig(lr=1e-2)
        async with open_fsdp_backend(
            path, hub=opened.hub, ranks=opened.ranks, optim=optim, total_steps=1, autocast="off", threads=1
        ):
            print("it opened", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trio.run(main)

"""An update that releases the trainer, on ranks, for tests.distributed.test_greedy_ranks: what it says
beforehand, and the copy of its weights.

torchrun … -m tests.distributed.greedy_program MODEL FOLDER OUT    snapshots go to FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from rollouts.config.schema import OptimConfig
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import LossSpec
from rollouts.weight_sync.disk import export_snapshot, hold_weights
from rollouts.weight_sync.probe import make_probe_prompt
from tests.distributed.job import main

OPTIM = OptimConfig(lr=1e-2)
PROMPT = make_probe_prompt(250)
COUNT = 6


async def take_step(backend: Any, seed: int) -> None:
    backend.forward_backward(make_batch(seed), LossSpec("sft"))
    await backend.optim_step().result()


async def drive(hub: Any, ranks: Any) -> dict[str, Any]:
    """Answers before and after a step, and the digests of snapshots: of the backend, of a copy once it has
    stepped on, and of it after that.
    """
    from rollouts.backends.fsdp import open_fsdp_backend

    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    async with open_fsdp_backend(
        path, hub=hub, ranks=ranks, optim=OPTIM, total_steps=10, autocast="off", threads=1
    ) as backend:
        before = await backend.complete_greedily(PROMPT, COUNT).result()
        await take_step(backend, 0)
        after = await backend.complete_greedily(PROMPT, COUNT).result()
        snapshots = [await export_snapshot(backend, folder / "a/v1", dtype=torch.bfloat16)]
        held = await hold_weights(backend, dtype=torch.bfloat16)
        await take_step(backend, 1)
        assert held is not None
        snapshots += [await export_snapshot(held, folder / "b/v1", dtype=torch.bfloat16)]
        snapshots += [await export_snapshot(backend, folder / "c/v1", dtype=torch.bfloat16)]
    return {"before": before.tolist(), "after": after.tolist(), "digests": [one.digest for one in snapshots]}


if __name__ == "__main__":
    main(drive)

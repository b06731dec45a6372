"""Adapters that share a base train in turns, on ranks or in this process, for tests.distributed.test_lora.

torchrun … -m tests.distributed.lora_program CASES OUT        weights: OUT.<case>.safetensors
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import trio
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rollouts.backends.fsdp import open_fsdp_backend
from rollouts.config.model import LoraConfig
from rollouts.config.tables import OptimConfig
from rollouts.models.sharded import get_local
from rollouts.testing.torch_contracts import make_batch, train
from tests.distributed.train_program import SPECS, find_model, make_rollouts

OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
STEPS, HALF = 4, 2


class Case(NamedTuple):
    """What is trained, and how."""

    model: str  # a directory, or as of find_model
    base: str = "float32"
    options: dict[str, Any] = {}  # of the backend; never changed
    saves: str = ""  # the directory of checkpoints after step HALF
    loads: str = ""  # that of some from which it goes on


async def train_adapters(open_backend, case):
    """Losses and norms of a policy and a critic beside it, and the weights of both. A third adapter comes and
    goes between their steps; nobody moves the base by a bit.
    """
    path = Path(case.model)
    if not path.is_dir():
        path = await trio.to_thread.run_sync(find_model, case.model)
    adapter = LoraConfig(rank=4, alpha=8.0, base=case.base).model_dump()  # pyright: ignore[reportArgumentType]
    settings = {"optim": OPTIM, "total_steps": STEPS, "micro_batch_tokens": 160, "lora": adapter}
    settings |= {"autocast": "off", "threads": 1, **case.options}
    said = []
    async with (
        open_backend(path, **settings) as policy,
        open_backend(path, beside=policy, **(settings | {"head": "scalar"})) as critic,
    ):
        own = "value" if "head" in case.options else "grpo"
        both = {"policy": (policy, SPECS[own]), "critic": (critic, SPECS["value"])}
        sharded = all(isinstance(one, DTensor) for one in policy.model.parameters())
        assert sharded or policy.ranks.world_size == 1
        frozen = [get_local(one).clone() for one in policy.model.parameters()]
        start = np.concatenate(await policy.forward(make_batch()))  # every rank's shards have a part in it
        for name, (backend, _) in both.items():
            if case.loads:
                await backend.load(Path(case.loads, name))
        for step in range(HALF if case.loads else 0, STEPS):
            for name, (backend, spec) in both.items():
                result = await backend.forward_backward(make_rollouts(step), spec)
                async with open_backend(path, beside=policy, **settings) as other:
                    await train(other, make_batch(step))
                said.append([result.loss, (await backend.optim_step()).grad_norm])
                if case.saves and step == HALF - 1:
                    await backend.save(Path(case.saves, name))
        np.testing.assert_array_equal(np.concatenate(await policy.forward_start(make_batch())), start)
        for one, before in zip(policy.model.parameters(), frozen, strict=True):
            assert torch.equal(get_local(one), before)
        found = {
            f"{name}/{key}": weight
            for name, (backend, _) in both.items()
            for key, weight in (await backend.get_weights()).items()
        }
    return said, found


async def drive(channel, ranks):
    def open_backend(path, **settings):
        return open_fsdp_backend(path, channel=channel, ranks=ranks, **settings)

    found = []
    for number, fields in enumerate(json.loads(sys.argv[1])):
        said, weights = await train_adapters(open_backend, Case(*fields))
        save_file(weights, f"{sys.argv[-1]}.{number}.safetensors")
        found.append(said)
    return found


if __name__ == "__main__":
    from tests.distributed.job import main

    torch.set_num_threads(1)
    main(drive)

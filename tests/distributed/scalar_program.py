"""A critic on ranks, for tests.distributed.test_scalar_ranks: a few steps for every case, and the contract of
every backend.

torchrun … -m tests.distributed.scalar_program cases CASES OUT            weights: OUT.<case>.safetensors
torchrun … -m tests.distributed.scalar_program contract MODEL BROKEN OUT  BROKEN: a directory to be refused
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import trio
from safetensors.torch import save_file
from torch import Tensor

from rollouts.config.tables import OptimConfig
from rollouts.data.scores import make_score_batch, read_scores
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.testing import torch_contracts as contract
from rollouts.types import LossSpec, RolloutBatch
from tests.distributed import contract_program
from tests.distributed.train_program import find_model, make_rollouts

OPTIM = OptimConfig(lr=1e-3, warmup_steps=1, weight_decay=0.01, max_grad_norm=1.0)
CONTRACT_OPTIM = OptimConfig(lr=1e-2, max_nonfinite_steps=2)
SPECS = {"value": LossSpec("value", {"clip": 0.5}), "linear": LossSpec("linear", unit="sequence_sums")}
STEPS = 4


class Case(NamedTuple):
    """What is trained, and how."""

    model: str
    dtype: Literal["float32", "float64"]
    loss: Literal["value", "linear"]
    options: dict[str, Any] = {}  # of the sharded backend alone; never changed
    path: str = ""  # of a directory, where `model` is none of find_model's
    loads: str = ""  # a checkpoint of half the steps, from which it goes on
    steps: int = STEPS


def make_critic_rollouts(step: int) -> RolloutBatch:
    """make_rollouts with returns and old values."""
    batch, rng = make_rollouts(step), np.random.default_rng(step + 100)
    returns, old = (
        tuple(rng.normal(size=len(row)).astype(np.float32) for row in batch.tokens) for _ in range(2)
    )
    return dataclasses.replace(batch, returns=returns, old_values=old)


async def train(backend: Any, case: Case, saves: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What every step said, values and scores of the first rollouts afterwards, and the weights; after two
    steps it is saved in `saves`.
    """
    losses, norms, metrics = [], [], {}
    if case.loads:
        await backend.load(Path(case.loads)).result()
    for step in range(STEPS // 2 if case.loads else 0, case.steps):
        result = await backend.forward_backward(make_critic_rollouts(step), SPECS[case.loss]).result()
        losses.append(result.loss)
        norms.append((await backend.optim_step().result()).grad_norm)
        metrics = {name: metric.value for name, metric in result.metrics.items()}
        if step == STEPS // 2 - 1:
            await backend.save(saves).result()
    rows = await backend.forward(make_critic_rollouts(0)).result()
    scored = make_score_batch(make_critic_rollouts(0).tokens)
    scores = read_scores(await backend.forward(scored).result(), scored)
    found = {
        "losses": losses,
        "norms": norms,
        "metrics": metrics,
        "rows": [row.tolist() for row in rows],
        "scores": scores.tolist(),
    }
    return found, await backend.get_weights().result()


def list_checks() -> dict[str, Callable[..., Awaitable[None]]]:
    """The contract's checks by name, and that of a copy written beside steps."""
    contract_checks = {
        name: check for name, check in sorted(vars(contract).items()) if name.startswith("check_")
    }
    return contract_checks | {
        name: getattr(contract_program, name)
        for name in vars(contract_program)
        if name.startswith("check_a_copy_is")
    }


async def run_contract(channel: Any, ranks: Any, path: Path) -> dict[str, str]:
    """Each check: "ok", or how it failed."""
    from rollouts.backends.fsdp import open_fsdp_backend

    @asynccontextmanager
    async def open_backend() -> AsyncIterator[Any]:
        settings: dict[str, Any] = {
            "optim": CONTRACT_OPTIM,
            "total_steps": 10,
            "autocast": "off",
            "threads": 1,
            "head": "scalar",
        }
        async with open_fsdp_backend(path, channel=channel, ranks=ranks, **settings) as backend:
            yield backend

    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, check in list_checks().items():
            arguments = [Path(folder, name)] if "folder" in inspect.signature(check).parameters else []
            try:
                with trio.fail_after(60):
                    await check(open_backend, *arguments)
                results[name] = "ok"
            except Exception:  # reported by name; what comes next is tried too
                results[name] = traceback.format_exc()
    return results


async def run_cases(channel: Any, ranks: Any, cases: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    from rollouts.backends.fsdp import open_fsdp_backend

    found: list[dict[str, Any]] = []
    for number, fields in enumerate(cases):
        case = Case(*fields)
        path = Path(case.path) if case.path else await trio.to_thread.run_sync(find_model, case.model)
        options: dict[str, Any] = {
            "optim": OPTIM,
            "total_steps": STEPS,
            "micro_batch_tokens": 160,
            "autocast": "off",
            "threads": 1,
            **case.options,
        }
        async with open_fsdp_backend(
            path,
            channel=channel,
            ranks=ranks,
            dtype=case.dtype,
            head="scalar",
            tokenizer=make_byte_tokenizer(),
            **options,
        ) as backend:
            said, weights = await train(backend, case, Path(f"{sys.argv[-1]}.{number}.saved"))
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            f"{sys.argv[-1]}.{number}.safetensors",
        )
        found.append(said)
    return found


async def open_refused(channel: Any, ranks: Any, path: Path) -> str:
    """What opening a model raises."""
    from rollouts.backends.fsdp import open_fsdp_backend
    from rollouts.errors import RolloutsError

    try:
        async with open_fsdp_backend(
            path, channel=channel, ranks=ranks, optim=OPTIM, total_steps=1, head="scalar"
        ):
            return ""
    except RolloutsError as error:
        return f"{type(error).__name__}: {error}"


async def drive(channel: Any, ranks: Any) -> Any:
    if sys.argv[1] == "cases":
        return await run_cases(channel, ranks, json.loads(sys.argv[2]))
    results = await run_contract(channel, ranks, Path(sys.argv[2]))
    return results | {"refused": await open_refused(channel, ranks, Path(sys.argv[3]))}


if __name__ == "__main__":
    from tests.distributed.job import main

    torch.set_num_threads(1)
    main(drive)

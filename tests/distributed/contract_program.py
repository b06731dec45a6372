"""Every check of rollouts.testing.torch_contracts, and of what only ranks can do wrong, on one backend over ranks; rank 0 reports by name.

    torchrun … -m tests.distributed.contract_program SHARD_SIZE OUT
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from rollouts.config.schema import OptimConfig
from rollouts.losses import LossInputs, LossOutput
from rollouts.losses.reductions import reduce_loss
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import SFT, STEP, make_batch, raised_by, train
from rollouts.types import LossSpec

OPTIM = OptimConfig(lr=1e-2, max_nonfinite_steps=2)
HERE = "tests.distributed.contract_program"
CALLS: list[int] = []


# --- losses of ranks ---------------------------------------------------------------------------------------------------------------------


def last_rank_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """Fails on the last rank alone."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise ZeroDivisionError("the loss failed on one rank")
    total, count = reduce_loss(-inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count, {})


def last_rank_nan_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """Is not a number on the last rank alone."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    total, count = reduce_loss(inputs.log_probs * (float("nan") if last else -1.0), inputs.mask, unit)
    return LossOutput(total, count, {})


def second_call_loss(inputs: LossInputs, *, unit: str) -> LossOutput:
    """Fails at a rank's second micro-batch, when the gradient of the first is held and not yet summed over the ranks."""
    CALLS.append(1)
    if len(CALLS) % 2 == 0:
        raise ZeroDivisionError("the second micro-batch failed")
    total, count = reduce_loss(-inputs.log_probs, inputs.mask, unit)
    return LossOutput(total, count, {})


# --- checks of ranks ---------------------------------------------------------------------------------------------------------------------


async def check_a_failure_of_one_rank_is_named_and_forgotten_by_reset(open_backend: Any) -> None:
    """All ranks are in step afterwards, and the next step is that of a backend on which nothing failed."""
    batch = make_batch()
    async with open_backend() as backend:
        await train(backend, batch)
        undisturbed = await contract.copy_weights(backend)
    for name in ("last_rank_loss", "second_call_loss"):
        async with open_backend(micro_batch_tokens=8, share_prefix=False) as backend:
            await backend.forward_backward(make_batch(1), SFT).result()
            error = await raised_by(backend.forward_backward(batch, LossSpec(f"{HERE}:{name}")))
            assert "ZeroDivisionError" in repr(error) or "rank" in str(error), error
            if name == "last_rank_loss":
                assert f"rank {backend.ranks.world_size - 1} failed: ZeroDivisionError: the loss failed on one rank" in str(error), error
            await backend.reset().result()
            assert "no gradient" in str(await raised_by(backend.optim_step(STEP)))
            await backend.reset().result()
            await train(backend, batch)
            found = await contract.copy_weights(backend)
        worst = max(float((found[key] - undisturbed[key]).abs().max()) for key in found)
        assert worst < 1e-3, f"{name} left {worst} behind"


async def check_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(open_backend: Any) -> None:
    """Nothing moves, and the ranks agree afterwards."""
    batch = make_batch()
    async with open_backend() as backend:
        before = await contract.copy_weights(backend)
        result = await backend.forward_backward(batch, LossSpec(f"{HERE}:last_rank_nan_loss")).result()
        assert result.skipped == "the loss is nan"
        assert (await backend.optim_step(STEP).result()).skipped is not None
        contract.assert_weights_equal(before, await contract.copy_weights(backend))
        await train(backend, batch)


async def check_a_sink_that_raises_leaves_the_ranks_in_step(open_backend: Any) -> None:
    """The stream is a failed step; after reset() everything works."""
    async with open_backend() as backend:
        buckets: list[int] = []

        def sink(bucket: Any) -> None:
            buckets.append(len(bucket))
            raise OSError("the sink failed")

        error = await raised_by(backend.stream_weights(sink))
        assert isinstance(error, OSError) and buckets == [len(dict(backend.model.named_parameters()))], (error, buckets)
        await backend.reset().result()
        await train(backend, make_batch())
        names = [name for name, _ in backend.model.named_parameters()]
        assert "lm_head.weight" not in names  # tied, so it comes once


async def check_no_parameter_is_whole_on_a_rank(open_backend: Any) -> None:
    """Between steps a rank has its rows of every parameter, gradient and moment, and the root's too."""
    from torch.distributed.tensor import DTensor

    async with open_backend() as backend:
        await backend.forward_backward(make_batch(), SFT).result()
        await backend.forward(make_batch()).result()
        for name, parameter in backend.model.named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
            rows = -(-parameter.shape[0] // backend.ranks.num_shards)
            assert len(parameter.to_local()) == len(parameter.grad.to_local()) <= rows, name


async def check_a_bad_batch_is_refused_on_all_ranks(open_backend: Any) -> None:
    """What rank 0 finds while it packs: an id outside the vocabulary, a loss that does not exist."""
    import dataclasses

    batch = make_batch()
    wrong = dataclasses.replace(batch, tokens=(*batch.tokens[:-1], batch.tokens[-1] + 10_000))
    async with open_backend() as backend:
        for bad, spec in ((wrong, SFT), (batch, LossSpec("no_such_loss"))):
            error = await raised_by(backend.forward_backward(bad, spec))
            assert "outside" in str(error) or "ids are 0 to" in str(error) or "no_such_loss" in str(error), error
            await backend.reset().result()
        await train(backend, batch)


async def check_a_saved_model_loads_in_one_process(open_backend: Any, folder: Path) -> None:
    """The directory is a Hugging Face model with the trained weights, and the state is that of every rank."""
    async with open_backend() as backend:
        await train(backend, make_batch())
        await backend.save(folder).result()
        weights = await contract.copy_weights(backend)
        ranks = backend.ranks.world_size
    loaded = load_hf_model(folder)
    assert all(torch.equal(parameter.detach(), weights[name]) for name, parameter in loaded.named_parameters())
    files = sorted(path.name for path in (folder / "state").iterdir())
    assert files == sorted(["backend.json", *(f"optimizer-{rank}-of-{ranks}.safetensors" for rank in range(ranks))]), files


async def check_a_damaged_checkpoint_changes_nothing(open_backend: Any, folder: Path) -> None:
    """A file that only one rank reads is gone: all refuse it, and the backend goes on with what it had."""
    from rollouts.errors import CheckpointError

    async with open_backend() as backend:
        await train(backend, make_batch())
        await backend.save(folder).result()
        await train(backend, make_batch(1))
        before = await contract.copy_weights(backend)
        next((folder / "state").glob("optimizer-*")).write_bytes(b"12345678")
        assert isinstance(await raised_by(backend.load(folder)), CheckpointError)
        await backend.reset().result()
        contract.assert_weights_equal(before, await contract.copy_weights(backend))
        await train(backend, make_batch(2))


# --- running them ------------------------------------------------------------------------------------------------------------------------


def list_checks() -> dict[str, Callable[..., Awaitable[None]]]:
    """The contract's checks and those above, by name."""
    found = {**vars(contract), **globals()}
    return {name: check for name, check in sorted(found.items()) if name.startswith("check_")}


async def drive(hub: Any, ranks: Any) -> dict[str, str]:
    from rollouts.backends.fsdp import open_fsdp_backend

    path = await trio.to_thread.run_sync(partial(resolve_model, "tiny:byte", seed=0))

    @asynccontextmanager
    async def open_backend(**options: Any) -> AsyncIterator[Any]:
        settings = {"optim": OPTIM, "total_steps": 10, "autocast": "off", "threads": 1, **options}
        async with open_fsdp_backend(path, hub=hub, ranks=ranks, **settings) as backend:  # type: ignore[arg-type]
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


if __name__ == "__main__":
    from tests.distributed.job import main

    torch.set_num_threads(1)
    main(drive, shard_size=int(sys.argv[1]))

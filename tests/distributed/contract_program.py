"""Every check of rollouts.testing.torch_contracts, and of what only ranks can do wrong, on one backend over
ranks, in which a model or an adapter trains; rank 0 reports by name.

torchrun … -m tests.distributed.contract_program TRAINED OUT
"""

import dataclasses
import errno
import inspect
import os
import resource
import sys
import tempfile
import traceback
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import trio

from rollouts.backends import captures
from rollouts.checkpoints import load as checkpoints
from rollouts.checkpoints.save import save_checkpoint
from rollouts.checkpoints.writer import Keep, open_checkpoint_writer
from rollouts.config.model import LoraConfig
from rollouts.config.tables import OptimConfig
from rollouts.errors import RunDirError, StorageError
from rollouts.losses import LossOutput
from rollouts.losses.inputs import reduce_loss
from rollouts.models.lora import Adapter, list_trained
from rollouts.run_dir import RunDir
from rollouts.testing import torch_contracts as contract
from rollouts.testing.torch_contracts import SFT, STEP, make_batch, raised_by, train
from rollouts.types import LossSpec
from tests.distributed.train_program import find_model
from tests.support import backend_checks

OPTIM = OptimConfig(lr=1e-2)
HERE = "tests.distributed.contract_program"
CALLS: list[int] = []


# --- losses of ranks ----------------------------------------------------------------------------------------


def is_rank(rank):
    """Whether this process is that rank; −1: the last."""
    return int(os.environ["RANK"]) == rank % int(os.environ["WORLD_SIZE"])


def sft_after(act):
    """SFT before which each rank does this; on the inputs that it gives, if any."""

    def loss(inputs, *, unit):
        inputs = act(inputs) or inputs
        total, count = reduce_loss(-inputs.log_probs, inputs.mask, unit)
        return LossOutput(total, count, {})

    return loss


@sft_after
def last_rank_loss(inputs):
    """Fails on the last rank alone."""
    if is_rank(-1):
        raise ZeroDivisionError("the loss failed on one rank")


@sft_after
def last_rank_nan_loss(inputs):
    """Is not a number on the last rank alone."""
    factor = float("nan") if is_rank(-1) else 1.0
    return dataclasses.replace(inputs, log_probs=inputs.log_probs * factor)


@sft_after
def second_call_loss(inputs):
    """Fails at a rank's second micro-batch, when the gradient of the first is held and not yet summed over
    the ranks.
    """
    CALLS.append(1)
    if len(CALLS) % 2 == 0:
        raise ZeroDivisionError("the second micro-batch failed")


@sft_after
def last_rank_without_disk_loss(inputs):
    """From here on the system lets no file of the last rank's process grow, as a full disk would."""
    limit_files(0, rank=-1)


@sft_after
def last_rank_with_disk_loss(inputs):
    """The last rank may write again."""
    limit_files(resource.RLIM_INFINITY, rank=-1)


def limit_files(size, *, rank):
    """How large a file may get that this process writes, where it is that rank."""
    if is_rank(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@sft_after
def scarce_memory_loss(inputs):
    """Leaves the last rank's machine without memory for a copy, as that rank sees it from now on; every other
    sees plenty.
    """
    captures.read_free_memory = lambda: 1000 if is_rank(-1) else 1 << 40


@sft_after
def plenty_memory_loss(inputs):
    """Gives it back."""
    captures.read_free_memory = lambda: 1 << 40


# --- checks of ranks ----------------------------------------------------------------------------------------


async def check_a_failure_of_one_rank_is_named_and_forgotten_by_reset(open_backend):
    """All ranks are in step afterwards, and the next step is that of a backend on which nothing failed."""
    batch = make_batch()
    async with open_backend() as backend:
        await train(backend, batch)
        undisturbed = await backend.get_weights()
    for name in ("last_rank_loss", "second_call_loss"):
        async with open_backend(micro_batch_tokens=8, share_prefix=False) as backend:
            await backend.forward_backward(make_batch(1), SFT)
            error = await raised_by(backend.forward_backward(batch, LossSpec(f"{HERE}:{name}")))
            assert "ZeroDivisionError" in repr(error) or "rank" in str(error), error
            if name == "last_rank_loss":
                begins, ends = (
                    f"rank {backend.ranks.world_size - 1} failed: ",
                    "ZeroDivisionError: the loss failed",
                )
                assert begins in str(error) and ends in str(error), error
            await backend.reset()
            assert "no gradient" in str(await raised_by(backend.optim_step(STEP)))
            await backend.reset()
            await train(backend, batch)
            found = await backend.get_weights()
        worst = max(float((found[key] - undisturbed[key]).abs().max()) for key in found)
        assert worst < 1e-3, f"{name} left {worst} behind"


async def check_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(open_backend):
    """Nothing moves, and the ranks agree afterwards."""
    batch = make_batch()
    async with open_backend() as backend:
        before = await backend.get_weights()
        result = await backend.forward_backward(batch, LossSpec(f"{HERE}:last_rank_nan_loss"))
        assert result.skipped == "the loss is nan"
        assert (await backend.optim_step(STEP)).skipped is not None
        contract.assert_weights_equal(before, await backend.get_weights())
        await train(backend, batch)


async def check_a_sink_that_raises_leaves_the_ranks_in_step(open_backend):
    """The stream is a failed step; after reset() everything works."""
    async with open_backend() as backend:
        buckets = []

        def sink(bucket):
            buckets.append(len(bucket))
            raise OSError("the sink failed")

        await raised_by(backend.stream_weights(sink), OSError)
        assert buckets == [len(list_trained(backend.trained))]
        await backend.reset()
        await train(backend, make_batch())
        names = [name for name, _ in backend.model.named_parameters()]
        assert "lm_head.weight" not in names  # tied, so it comes once


async def check_no_parameter_is_whole_on_a_rank(open_backend):
    """Between steps a rank has its rows of every parameter, gradient and moment, and the root's too."""
    from torch.distributed.tensor import DTensor

    async with open_backend() as backend:
        await backend.forward_backward(make_batch(), SFT)
        await backend.forward(make_batch())
        for name, parameter in backend.model.named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
            rows = -(-parameter.shape[0] // backend.ranks.num_shards)
            assert len(parameter.to_local()) == len(parameter.grad.to_local()) <= rows, name


async def check_a_full_disk_on_one_rank_costs_the_checkpoint_only(open_backend, folder):
    """All ranks fail the save alike, the one before loads, training goes on, and the next save is whole: on
    the last rank, then on rank 0.
    """
    batch = make_batch()

    async def save(backend, step):
        async def write(path):
            await backend.save(path)

        await save_checkpoint(folder / f"step_{step}", write_model=write, state={}, stage="sft", step=step)

    async def save_refused(backend, rank):
        said = str(await raised_by(save(backend, 2), StorageError))
        assert f"{folder}/step_2 cannot be written (" in said and "File too large" in said, said
        assert rank == 0 or f"rank {rank} failed" in said, said
        assert [path.name for path in folder.iterdir()] == ["step_1"]
        await backend.reset()

    async with open_backend(micro_batch_tokens=16) as backend:
        await train(backend, batch)
        await save(backend, 1)
        saved = await backend.get_weights()
        await train(backend, batch, LossSpec(f"{HERE}:last_rank_without_disk_loss"))
        await save_refused(backend, backend.ranks.world_size - 1)
        await train(backend, batch, LossSpec(f"{HERE}:last_rank_with_disk_loss"))
        limit_files(0, rank=0)
        await save_refused(backend, 0)
        limit_files(resource.RLIM_INFINITY, rank=0)
        trained = await backend.get_weights()
        await save(backend, 2)
        for step, weights in ((1, saved), (2, trained)):
            checkpoints.check_checkpoint(folder / f"step_{step}", hashes=True)
            await backend.load(folder / f"step_{step}")
            contract.assert_weights_equal(weights, await backend.get_weights())


def read_files(folder):
    """Every file below, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def check_a_copy_is_written_beside_steps_and_is_what_a_save_writes(open_backend, folder):
    """Bit for bit, whatever is trained between the copy and the writing; and CheckpointWriter saves so."""
    async with open_backend() as backend:
        await train(backend, make_batch(), LossSpec(f"{HERE}:plenty_memory_loss"))
        saved, beside = folder / "saved", folder / "beside"
        await backend.save(saved)
        write = await backend.capture()
        beside.mkdir()
        steps = [
            backend.forward_backward(make_batch(1), SFT),
            backend.optim_step(STEP),
            backend.forward_backward(make_batch(2), SFT),
        ]
        await write(beside)
        for step in steps:
            await step
        expected, found = read_files(saved), read_files(beside)
        weights = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)} | {
            "model.safetensors.index.json",
            "config.json",
        }
        if isinstance(backend.trained, Adapter):
            weights = {"adapter_model.safetensors", "adapter_config.json", "base.json"}
        assert {*weights, "state/backend.json", "state/optimizer-1-of-2.safetensors"} <= set(found), (
            found.keys()
        )
        assert (
            found.keys() == expected.keys()
            and [name for name in expected if found[name] != expected[name]] == []
        )
        await backend.reset()
        run_dir, warnings = RunDir(folder / "run"), list[str]()
        async with open_checkpoint_writer(
            {"": backend}, run_dir, "sft", keep=Keep(), warn=warnings.append
        ) as writer:
            await writer.save(1, {})
            await train(backend, make_batch(3))
            await writer.wait_written()
            assert warnings == []
        await backend.load(run_dir.checkpoint("sft", 1))


async def check_where_one_rank_has_no_room_for_a_copy_none_copies(open_backend, folder):
    """Training waits for the save then, and everything works afterwards."""
    async with open_backend() as backend:
        await train(backend, make_batch(), LossSpec(f"{HERE}:scarce_memory_loss"))
        assert await backend.capture() is None
        async with open_checkpoint_writer(
            {"": backend}, RunDir(folder), "sft", keep=Keep(), warn=print
        ) as writer:
            await writer.save(1, {})
            assert checkpoints.is_complete(RunDir(folder).checkpoint("sft", 1))  # training waited for it
        await train(backend, make_batch(), LossSpec(f"{HERE}:plenty_memory_loss"))
        assert await backend.capture() is not None  # never written: the next backend opens all the same


async def check_a_disk_that_refuses_one_rank_beside_steps_costs_that_checkpoint(open_backend, folder):
    """Rank 0 raises the other rank's error after all have ended; steps are not disturbed, and the next copy
    is written.
    """
    async with open_backend() as backend:
        await train(backend, make_batch())
        refused = {
            "state/optimizer-1-of-2.safetensors": 1,
            "model-of-rank-0-00001.safetensors": 0,
            "model-of-rank-1-00001.safetensors": 1,
        }
        if isinstance(backend.trained, Adapter):
            del refused["model-of-rank-1-00001.safetensors"]  # rank 0 writes all of it
        for name, rank in refused.items():
            path = folder / name.replace("/", "-")
            (path / name).mkdir(parents=True)
            write = await backend.capture()
            step = backend.forward_backward(make_batch(1), SFT)
            error = await raised_by(write(path))
            assert isinstance(error, OSError) and error.errno == errno.EISDIR, error
            assert ("rank 1 failed" in str(error)) == bool(rank), error
            await step
            await backend.optim_step(STEP)
        write = await backend.capture()
        (folder / "good").mkdir()
        await write(folder / "good")
        weights = await backend.get_weights()
        await train(backend, make_batch(2))
        await backend.load(folder / "good")
        contract.assert_weights_equal(weights, await backend.get_weights())
        write = await backend.capture()
        assert "rank 0" in str(await raised_by(write(folder / "nowhere"), RunDirError))


# --- running them -------------------------------------------------------------------------------------------


# what trains, the settings that make it so, and the base: an adapter's frozen head must tell tokens apart
TRAINED = {
    "model": ("tiny:byte", {}),
    "adapter": ("gpt2", {"lora": LoraConfig(rank=4, alpha=8.0).model_dump()}),
}


def list_checks(trained):
    """The contract's checks and those above, by name."""
    found = {**vars(contract), **vars(backend_checks), **globals()}
    if trained == "adapter":  # every rank has all of it
        del found["check_no_parameter_is_whole_on_a_rank"]
    return {name: check for name, check in sorted(found.items()) if name.startswith("check_")}


async def drive(channel, ranks):
    from rollouts.backends.fsdp import open_fsdp_backend

    name, trained = TRAINED[sys.argv[1]]
    path = await trio.to_thread.run_sync(find_model, name)

    @asynccontextmanager
    async def open_backend(**options):
        settings = {"optim": OPTIM, "total_steps": 10, "autocast": "off", "threads": 1, **trained, **options}
        async with open_fsdp_backend(path, channel=channel, ranks=ranks, **settings) as backend:
            yield backend

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, check in list_checks(sys.argv[1]).items():
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
    main(drive)

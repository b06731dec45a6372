# %% [markdown]
# # Pipelined futures
#
# A training backend answers every call at once with a TrainFuture; the work is done in submission order on a
# thread of its own. Whoever submits ahead keeps that thread busy, and has the event loop free for the next
# batch meanwhile. A tiny random model on a CPU shows it in seconds.

# %%
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import trio

from rollouts.backends.open import open_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.config.tables import OptimConfig
from rollouts.errors import ConfigError, EarlierStepFailed
from rollouts.futures import FutureGroup, ImmediateTrainFuture
from rollouts.models.load import load_tokenizer, resolve_model
from rollouts.types import ForwardBackwardResult, LossSpec, RolloutBatch

DIRECTORY = resolve_model("tiny:byte")
TOKENIZER = load_tokenizer(DIRECTORY)
TEXTS = [f"{number} and {number + 1} are {2 * number + 1}." for number in range(64)]
STEPS, SFT = 12, LossSpec("sft")


def open_backend():
    return open_pytorch_backend(DIRECTORY, optim=OptimConfig(lr=1e-2), total_steps=STEPS, threads=1)


def make_batch(step: int) -> RolloutBatch:
    """Eight texts; every token but the first trains."""
    rows = [np.asarray(TOKENIZER.encode(TEXTS[(8 * step + row) % len(TEXTS)])) for row in range(8)]
    return RolloutBatch(tokens=tuple(rows), loss_masks=tuple(np.arange(len(row)) > 0 for row in rows))


# %% [markdown]
# ## One at a time
#
# Submit, wait, go on: the thread has nothing to do while a batch is made, and nobody makes a batch while it
# computes.


# %%
async def train_in_turns() -> list[float | None]:
    """The loss of each step."""
    losses = []
    async with open_backend() as backend:
        for step in range(STEPS):
            forward = await backend.forward_backward(make_batch(step), SFT)
            await backend.optim_step()
            losses.append(forward.loss)
    return losses


# %% [markdown]
# ## Ahead
#
# The same steps, each submitted as soon as its batch is made. Nothing is awaited in the loop but a moment of
# the event loop's. A FutureGroup then waits for all; it is a TrainFuture itself.


# %%
class Ahead(NamedTuple):
    """What training ahead gave."""

    losses: list[float | None]
    queued: list[int]  # before each submission: forward_backwards that were not done yet


async def train_ahead() -> Ahead:
    queued = []
    async with open_backend() as backend:
        forwards, optims = [], []
        for step in range(STEPS):
            batch = make_batch(step)  # while the thread computes the steps before
            queued.append(sum(not future.done() for future in forwards))
            forwards.append(backend.forward_backward(batch, SFT))
            optims.append(backend.optim_step())
            await trio.lowlevel.checkpoint()
        results: list[ForwardBackwardResult] = await FutureGroup(forwards)
        await FutureGroup(optims)
    return Ahead([result.loss for result in results], queued)


in_turns = trio.run(train_in_turns)
ahead = trio.run(train_ahead)
assert ahead.losses == in_turns, "submitting ahead must change no bit"
assert max(ahead.queued) > 0, "no step was submitted while another was computed"
print(f"overlap: up to {max(ahead.queued)} steps were queued while the next batch was made")
print("the same losses, bit for bit, from the first to the last: {0:.3f}, {11:.3f}".format(*ahead.losses))


# %% [markdown]
# ## As they are done
#
# Two backends, each with a thread of its own: whichever is done first is heard first. Futures of one backend
# come in the order in which they were submitted.


# %%
async def watch_two() -> list[str]:
    """The names of what was done, in that order."""
    names = ["a: step 1", "a: step 2", "b: step 1", "b: step 2", "nothing to do"]
    async with open_backend() as one, open_backend() as other:
        futures = [backend.forward_backward(make_batch(0), SFT) for backend in (one, one, other, other)]
        seen = []
        async with FutureGroup([*futures, ImmediateTrainFuture(None)]).open_completed() as completed:
            async for index, future in completed:
                await future
                seen.append(names[index])
    return seen


seen = trio.run(watch_two)
assert seen.index("a: step 1") < seen.index("a: step 2") and seen.index("b: step 1") < seen.index("b: step 2")
print("done in the order: " + ", ".join(seen))


# %% [markdown]
# ## When one fails
#
# The first failure is raised, with a note that says which future it was. What was queued behind it did not
# run, and the backend goes on after reset().


# %%
async def fail_in_the_middle() -> Sequence[str]:
    """The notes of the error."""
    notes: Sequence[str] = ()
    async with open_backend() as backend:
        needs_advantages = LossSpec("ppo_clip")
        losses = [SFT, needs_advantages, SFT]
        futures = [backend.forward_backward(make_batch(0), loss) for loss in losses]
        try:
            await FutureGroup(futures)
        except ConfigError as error:
            notes = error.__notes__
        await expect_skipped(backend, futures[2])
    return notes


async def expect_skipped(backend: PyTorchTrainingBackend, future) -> None:
    try:
        await future
    except EarlierStepFailed:
        await backend.reset()
        await backend.forward_backward(make_batch(0), SFT)
    else:
        raise AssertionError("a step ran behind one that failed")


print("failed: " + trio.run(fail_in_the_middle)[0])

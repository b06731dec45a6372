"""What a loop may be handed besides its objects: functions that evaluate, save, and say when to stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollouts.types import Sample


async def do_nothing(step: int) -> None:
    """The hook that is not there."""


def prepare_nothing(step: int) -> None:
    """The preparation that is not needed."""


def learn_nothing(step: int, samples: Sequence[Sample]) -> None:
    """The statistics that nobody keeps."""


def never() -> bool:
    """The stop request that never comes."""
    return False


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """Called between steps, when the backend and the engines are idle. `step` counts completed steps, save for the two about a batch."""

    evaluate: Callable[[int], Awaitable[None]] = do_nothing  # every `eval_every` steps, not after the last
    save_checkpoint: Callable[[int], Awaitable[None]] = do_nothing  # every `checkpoint_every` steps, and after the last
    stop_requested: Callable[[], bool] = never  # asked after every step; True ends the loop after a checkpoint
    checkpoint_every: int = 0  # 0: only after the last step
    before_batch: Callable[[int], None] = prepare_nothing  # before the prompts of that step are drawn; RL only
    after_batch: Callable[[int, Sequence[Sample]], None] = learn_nothing  # with the samples that the step trains on; RL only

    def saves_after(self, step: int) -> bool:
        """Whether a step that is not the last is followed by a checkpoint."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0


async def run_hooks(hooks: LoopHooks, step: int, *, last_step: int, eval_every: int, stop_every: int = 1) -> bool:
    """True if the loop must end after this step. Saves before it evaluates, so that a slow evaluation cannot lose a step.

    A stop waits for a multiple of `stop_every`, the steps after which engines have the weights that a checkpoint holds.
    """
    stopping = hooks.stop_requested() and step % stop_every == 0
    last = stopping or step == last_step
    if last or hooks.saves_after(step):
        await hooks.save_checkpoint(step)
    if not last and eval_every and step % eval_every == 0:
        await hooks.evaluate(step)
    return stopping

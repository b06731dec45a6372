"""What a loop may be handed besides its objects: functions that evaluate, save, and say when to stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollouts.errors import StepInterrupted
from rollouts.loops.stopping import LAST_COUNTS, StopControl
from rollouts.metrics.spans import Span
from rollouts.protocols import TrainingBackend
from rollouts.types import Sample


async def do_nothing(step: int) -> None:
    """The hook that is not there."""


def prepare_nothing(step: int) -> None:
    """The preparation that is not needed."""


def learn_nothing(step: int, samples: Sequence[Sample]) -> None:
    """The statistics that nobody keeps."""


async def believe(step: int) -> bool:
    """Saves do not fail where nobody can tell."""
    return True


def never() -> bool:
    """The stop request that never comes."""
    return False


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """Called between steps, when the backend is idle, and, unless generation runs ahead, the engines are.

    `step` counts completed steps, save for the two about a batch.
    """

    evaluate: Callable[[int], Awaitable[None]] = do_nothing  # every `eval_every` steps, not after the last
    save_checkpoint: Callable[[int], Awaitable[None]] = (
        do_nothing  # every `checkpoint_every` steps, and after the last
    )
    stop_requested: Callable[[], bool] = (
        never  # asked after every step; True ends the loop after a checkpoint
    )
    checkpoint_every: int = 0  # 0: only after the last step
    before_batch: Callable[[int], None] = (
        prepare_nothing  # before the prompts of that step are drawn; RL only
    )
    after_batch: Callable[[int, Sequence[Sample]], None] = (
        learn_nothing  # with the samples that the step trains on; RL only
    )
    stop: StopControl = field(default_factory=StopControl)  # what a stop cuts inside a step
    save_before_batch: Callable[[int], Awaitable[None]] | None = (
        None  # for a step after which another was begun and cut; None: save_checkpoint
    )
    take_metrics: Callable[[], Mapping[str, float]] = (
        dict  # of what goes on beside the loop, for the row that is about to be written
    )
    is_saved: Callable[[int], Awaitable[bool]] = (
        believe  # whether a save that was due is in place: a disk may have refused it
    )
    prepare_end: Callable[[int], Awaitable[None]] = do_nothing  # before the save that ends the loop
    take_spans: Callable[[], Sequence[Span]] = (
        list  # what was done beside the loop, and when, since the last row
    )

    def saves_after(self, step: int) -> bool:
        """Whether a step that is not the last is followed by a checkpoint."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0


async def run_hooks(
    hooks: LoopHooks, step: int, *, last_step: int, eval_every: int, stop_every: int = 1
) -> bool:
    """True if the loop must end after this step. Saves before it evaluates, so that a slow evaluation cannot
    lose a step.

    A stop waits for a multiple of `stop_every`, the steps after which engines have the weights that a
    checkpoint holds. One that comes during the evaluation cuts it, if it does not fit, and the loop ends; a
    resumed run evaluates again.
    """
    may_stop = step % stop_every == 0
    stopping = hooks.stop_requested() and may_stop
    last = stopping or step == last_step
    saved = last or hooks.saves_after(step)
    if last:
        await hooks.prepare_end(step)
    if saved:
        await hooks.save_checkpoint(step)
    if not last and eval_every and step % eval_every == 0:
        with hooks.stop.phase("evaluate"):
            await hooks.evaluate(step)
    if not stopping and may_stop and hooks.stop.is_requested():
        stopping = True
        if not (saved and await hooks.is_saved(step)):
            await hooks.prepare_end(step)
            await hooks.save_checkpoint(step)
    return stopping


async def save_after_cut(
    hooks: LoopHooks, backend: TrainingBackend, cut: StepInterrupted, step: int, *, saved: bool
) -> None:
    """The step after `step` was cut: saves `step` as soon as the backend's weights are its own again, unless
    a save of it was due (`saved`) and is in place.

    Nothing is saved, and the newest complete checkpoint counts, when the running micro-batch does not leave
    the time, or when the weights are between two updates of the step that was cut.
    """
    reset = backend.reset()  # behind what runs
    if saved and await hooks.is_saved(step):
        return
    if cut.updates_done:
        hooks.stop.say(
            f"stopping: step {step + 1} was cut after {cut.updates_done} of its updates, so nothing is saved;"
            f" {LAST_COUNTS}"
        )
        return
    with hooks.stop.until_save() as scope:
        await reset.result()
    if scope.cancelled_caught:
        hooks.stop.say(
            f"stopping: a micro-batch (measured: {read_piece_s(backend):.1f} s) leaves no time to save step"
            f" {step}; {LAST_COUNTS}"
        )
        return
    await (hooks.save_before_batch or hooks.save_checkpoint)(step)


def read_piece_s(backend: TrainingBackend) -> float:
    """Seconds that the backend goes on after an interrupt, by its last micro-batches."""
    return backend.statistics().get("longest_piece_s", 0.0)

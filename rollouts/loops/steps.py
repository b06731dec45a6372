"""What surrounds the steps of every loop: saving, evaluating, stopping. A loop's body does not know them.

async with surround_steps(hooks, config, backend, completed=k) as steps:
    for step in range(k + 1, config.steps + 1):
        …                                    a stop cuts this part, and nothing of the step is kept
        async with steps.completing(step):   the weights are the step's: a stop waits for the end of the block
            …                                at its end the step is complete; save and evaluate where due
a stop, or an error that training did not cause ──► the last complete step is saved as it was

Training on batches of a dataset, one update each; also on losses that need several rows at once: a pass
without gradient, the loss's slope for every row, a step with these slopes.

    prepare(step) ──► forward ──► RowLoss ──► advantages ──► forward_backward("linear"), optim_step

A loss of sums of log-probs has one slope per row, at every token of it. So rows may be in any micro-batch and
on any rank, and the gradient is that of the loss of the whole batch; what it costs is the forward pass.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import trio
from numpy.typing import NDArray

from rollouts.advantages import broadcast_advantages
from rollouts.config.schema import StageConfig
from rollouts.errors import (
    ConfigError,
    FleetDown,
    LearningStopped,
    NotEnoughSamples,
    RecordLost,
    UserFunctionError,
    WeightSyncError,
)
from rollouts.loops.stopping import LAST_COUNTS, Stop
from rollouts.loops.updates import UpdateResult, record_updates, step_metrics, train, work_metrics
from rollouts.metrics.spans import PhaseTimer
from rollouts.protocols import MetricsLogger, TrainingBackend
from rollouts.types import FloatArray, JSONObject, LossSpec, Numbers, RolloutBatch, T, live, record

if TYPE_CHECKING:
    from rollouts.losses.row_losses import LinearisedRows


# --- batches of a dataset -----------------------------------------------------------------------------------


HELD_STEPS = 1000  # whose metrics a loop gives back
AsyncRowLoss = Callable[..., Awaitable["LinearisedRows"]]
"""A RowLoss of rollouts.losses.row_losses, run where torch may run; see `on_thread`."""


def on_thread(
    submit: Callable[[Callable[[], T]], Awaitable[T]], function: Callable[..., T]
) -> Callable[..., Awaitable[T]]:
    """`function`, run by `submit`: `on_thread(backend.device_thread.submit, make_pair_loss("dpo", {}))` is
    what a loop takes as its loss.
    """
    return lambda *args, **kwargs: submit(lambda: function(*args, **kwargs))


class PreparedStep(NamedTuple):
    """What a step trains on."""

    batch: RolloutBatch
    loss: LossSpec
    found: "LinearisedRows | None" = None  # the true loss of the rows, where `loss` is its linear surrogate


def prepare_linear_step(rows: RolloutBatch, found: "LinearisedRows") -> PreparedStep:
    """A step whose gradient is that of the true loss, `found` of these rows."""
    batch = replace(rows, advantages=broadcast_advantages(found.advantages, rows.loss_masks))
    return PreparedStep(batch, LossSpec("linear", unit="constant", constant=found.total), found)


async def train_prepared(backend: TrainingBackend, step: PreparedStep) -> UpdateResult:
    """The result of its update. Where the loss is linearised, `loss` and the loss's own metrics are those of
    the true loss.
    """
    [(forward, optim)] = await train(backend, [step[:2]])
    if step.found is not None and forward.loss is not None:
        metrics = {**forward.metrics, **step.found.metrics}
        forward = replace(forward, loss=step.found.loss, metrics=metrics)
    return forward, optim


async def run_batch_steps(
    backend: TrainingBackend,
    prepare: Callable[[int, PhaseTimer], Awaitable[PreparedStep]],
    metrics_logger: MetricsLogger,
    stage: str,
    config: StageConfig,
    completed_steps: int,
    hooks: "StepHooks | None",
) -> list[Numbers]:
    """The metrics of the newest HELD_STEPS of the steps that ran, `completed_steps` + 1 to config.steps: one
    update on one batch each, as train_prepared makes it. `prepare` is called with the step, counted from 1.
    """
    history = deque[Numbers](maxlen=HELD_STEPS)
    async with surround_steps(hooks or StepHooks(), config, backend, completed=completed_steps) as steps:
        for step in range(completed_steps + 1, config.steps + 1):
            timer = PhaseTimer()
            prepared = await prepare(step, timer)
            with timer.phase("train"):
                result = await train_prepared(backend, prepared)
            async with steps.completing(step):
                metrics = step_metrics(*result) | timer.metrics() | work_metrics([result])
                trained_tokens = float(prepared.batch.response_lengths.sum())
                metrics["perf/trained_tokens_per_s"] = trained_tokens / timer.seconds("train")
                await metrics_logger.log_step(
                    stage,
                    step,
                    step - 1,
                    metrics,
                    updates=record_updates(f"{stage} step {step}", [prepared.batch], [result]),
                    spans=timer.spans(),
                )
                history.append(metrics)
    return list(history)


def sum_rows(values: Sequence[FloatArray]) -> NDArray[np.float64]:
    """[B] float64 sums of values [T_i] that are 0 where the loss mask is 0: log-probs of whole responses, in
    nats.
    """
    return np.asarray([row.sum(dtype=np.float64) for row in values])


EncodeState = Callable[[], JSONObject]
"""Turns a held state into JSON; called only if it is saved."""


# --- around the steps ---------------------------------------------------------------------------------------


async def do_nothing(*of_a_step: object) -> bool:
    """True: nothing is left to do."""
    return True


@record
class StepHooks:
    """What a loop is handed to save and evaluate with. `step` counts completed steps."""

    stop: Stop = field(default_factory=Stop)
    hold_state: Callable[[], EncodeState] = lambda: dict  # called after every step; what a checkpoint holds
    save: Callable[[int, EncodeState], Awaitable[object]] = do_nothing
    is_saved: Callable[[int], Awaitable[bool]] = do_nothing  # whether a save that was begun is in place
    checkpoint_every: int = 0  # steps; 0: only after the last
    check: Callable[[], None] = lambda: None  # after every step; raises what ends the loop, which is saved
    evaluate: Callable[[int], Awaitable[object]] = do_nothing  # not called after the last step


@live
class Steps:
    """Made by surround_steps."""

    hooks: StepHooks
    config: StageConfig
    backends: tuple[TrainingBackend, ...]
    completed: int

    def __post_init__(self) -> None:
        self._saved = self.completed  # the newest step whose save was begun
        self._note(self.completed)

    @asynccontextmanager
    async def completing(
        self, step: int, *, before_evaluating: Callable[[], Awaitable[object]] = do_nothing
    ) -> AsyncIterator[None]:
        """After the block `step` is complete, and saved and evaluated where that is due. It is saved first,
        so that a slow evaluation cannot lose a step; a stop cuts the evaluation.
        """
        with self.hooks.stop.completing():
            yield
            self._note(step)
            every = self.hooks.checkpoint_every
            if step == self.config.steps or (every > 0 and step % every == 0):
                await self._save()
        self.hooks.check()
        await trio.lowlevel.checkpoint()  # where a requested stop ends the loop
        eval_every = self.config.eval_every
        if step != self.config.steps and eval_every > 0 and step % eval_every == 0:
            await before_evaluating()
            await self.hooks.evaluate(step)

    async def save_completed(self) -> None:
        """Saves the last complete step, unless that is done or updates of the next one have been applied."""
        if self._saved == self.completed and await self.hooks.is_saved(self.completed):
            return
        for reset in [backend.reset() for backend in self.backends]:
            await reset
        if self._count_updates() == self._updates:
            await self._save()
            return
        self.hooks.stop.say(
            f"step {self.completed} is not saved, because updates of step {self.completed + 1} have been"
            f" applied already; {LAST_COUNTS}"
        )

    async def _save(self) -> None:
        self._saved = self.completed
        await self.hooks.save(self.completed, self._state)

    def _note(self, completed: int) -> None:
        """The state as of the last complete step, and how many updates there were then."""
        self.completed = completed
        self._state = self.hooks.hold_state()
        self._updates = self._count_updates()

    def _count_updates(self) -> float:
        return sum(backend.statistics().get("steps", 0.0) for backend in self.backends)


@asynccontextmanager
async def surround_steps(
    hooks: StepHooks, config: StageConfig, *backends: TrainingBackend | None, completed: int
) -> AsyncIterator[Steps]:
    """Steps `completed` + 1 to config.steps on the backends that are not None. A stop ends the block without
    an exception. Raises ConfigError for a config that has epochs instead.
    """
    if not config.steps:
        raise ConfigError("steps=0: nobody has counted the epochs; give the loop a config with steps")
    trained = tuple(filter(None, backends))
    steps = Steps(hooks, config, trained, completed)
    with hooks.stop.completing():
        try:
            with hooks.stop.scope() as scope:
                yield steps
        except (
            LearningStopped,
            NotEnoughSamples,
            RecordLost,
            UserFunctionError,
            WeightSyncError,
            FleetDown,
        ):
            await steps.save_completed()
            raise
        if scope.cancelled_caught:
            for backend in trained:
                backend.interrupt()
            await steps.save_completed()

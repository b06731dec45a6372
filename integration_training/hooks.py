"""What a stage hands to its loop: hooks that save and evaluate, and the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.config.modes import stage_config
from rollouts.config.schema import RLTrainingConfig
from rollouts.crash_points import reach
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.spans import Span
from rollouts.protocols import LogProbScorer
from rollouts.run_dir import parse_step

if TYPE_CHECKING:
    from integration_training.opening import Run, Saved, Stage


def completed_steps(checkpoint: Path | None) -> int:
    """The steps that a checkpoint holds; 0 for none."""
    return (parse_step(checkpoint.name) or 0) if checkpoint else 0


async def restore(backend: Saved, checkpoint: Path) -> None:
    """Loads the weights and the optimizer of a verified checkpoint. Raises CheckpointError if it is another
    model's.
    """
    reach("resume.verified")
    await backend.load(checkpoint).result()
    reach("resume.restored")


def make_hooks(
    run: Run,
    opened: Stage,
    stage: str,
    evaluate: Callable[[int], Awaitable[None]],
    *,
    hold_state: Callable[[], EncodeState] = lambda: dict,
    reference: LogProbScorer | None = None,
) -> StepHooks:
    """Hooks that save the stage's backends, with the state of `hold_state`, a reference that moves and,
    between two updates of the engine, its weights. The last save ends before the loop does, others beside
    training.
    """
    from rollouts.checkpoints.writer import write_in_turn
    from rollouts.reference.moving import REFERENCE, MovingReference
    from rollouts.weight_sync.engine_weights import hold_engine_weights

    section = stage_config(run.config, stage)

    async def save(step: int, encode: EncodeState) -> None:
        write_more = None
        if isinstance(section, RLTrainingConfig) and step % section.sync_every != 0:
            assert opened.engine is not None
            write_more = await hold_engine_weights(opened.engine, step)
        if isinstance(reference, MovingReference):
            write_reference = await reference.hold()

            async def write(path: Path) -> None:
                await write_reference(path / REFERENCE)

            write_more = write_in_turn(write, write_more)
        last = step == section.steps or run.stop.is_requested()
        await opened.checkpoints.save(step, encode(), last=last, write_more=write_more)

    return StepHooks(
        stop=run.stop,
        hold_state=hold_state,
        save=save,
        is_saved=opened.checkpoints.is_saved,
        checkpoint_every=run.config.output.checkpoint_every,
        evaluate=evaluate,
    )


class StageLogger:
    """The run's record. The row of a step also has the metrics of `take_metrics` and the spans of what went
    on beside the loop.
    """

    def __init__(self, run: Run, take_metrics: Callable[[], Mapping[str, float]]) -> None:
        self._run = run
        self._take_metrics = take_metrics
        self.log_samples = run.logger.log_samples
        self.log_evaluation = run.logger.log_evaluation
        self.log_spans = run.logger.log_spans

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        await self._run.logger.log_step(
            stage,
            step,
            policy_version,
            {**metrics, **self._take_metrics()},
            updates=updates,
            spans=[*spans, *self._run.spans.take()],
        )

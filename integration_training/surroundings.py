"""What every stage hands to its loop: the record, and hooks that save and evaluate."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from integration_training.opening import Run, Stage
from integration_training.reports import evaluate_once
from rollouts.checkpoints.writer import write_into
from rollouts.loops.steps import EncodeState, StepHooks
from rollouts.protocols import LogProbScorer
from rollouts.reference.moving import REFERENCE, MovingReference
from rollouts.weight_sync.engine_weights import hold_engine_weights


def surround(
    run: Run,
    opened: Stage,
    *,
    evaluate: Callable[[int], Awaitable[None]] | None = None,
    hold_state: Callable[[], EncodeState] = lambda: dict,
    reference: LogProbScorer | None = None,
) -> dict[str, Any]:
    """The arguments that all loops share. The hooks save the stage's backends with the state of `hold_state`,
    a reference that moves and, between two updates of the engine, its weights; the last save ends before the
    loop does, others beside training.
    """

    async def save(step: int, encode: EncodeState) -> None:
        write_more: list[Callable[[Path], Awaitable[None]]] = []
        if opened.name == "rl" and step % opened.section.sync_every != 0:
            assert opened.engine is not None
            write_engine = await hold_engine_weights(opened.engine, step)
            write_more += [write_engine] if write_engine else []
        if isinstance(reference, MovingReference):
            write_more.append(write_into(REFERENCE, await reference.hold()))
        last = step == opened.section.steps or run.stop.is_requested()
        await opened.checkpoints.save(step, encode(), last=last, write_more=write_more)

    return {
        "metrics_logger": StageLogger(run, opened, reference),
        "seed": run.config.seed,
        "completed_steps": opened.completed,
        "hooks": StepHooks(
            stop=run.stop,
            hold_state=hold_state,
            save=save,
            is_saved=opened.checkpoints.is_saved,
            checkpoint_every=run.config.output.checkpoint_every,
            evaluate=evaluate or partial(evaluate_once, run, opened, opened.name),
        ),
    }


@dataclass
class StageLogger:
    """The run's record. The row of a step also has the metrics of saves and of a reference that moves, and
    the spans of what went on beside the loop.
    """

    run: Run
    opened: Stage
    reference: LogProbScorer | None

    def __post_init__(self) -> None:
        self.log_samples = self.run.logger.log_samples
        self.log_evaluation = self.run.logger.log_evaluation
        self.log_spans = self.run.logger.log_spans

    async def log_step(
        self, stage: str, step: int, policy_version: int, metrics: Mapping[str, float], **more: Any
    ) -> None:
        """The run's log_step, with what is known beside the loop."""
        beside = {**self.opened.checkpoints.take_metrics(), **getattr(self.reference, "metrics", {})}
        more["spans"] = [*more.get("spans", ()), *self.run.spans.take()]
        await self.run.logger.log_step(stage, step, policy_version, {**metrics, **beside}, **more)

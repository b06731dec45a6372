"""Checkpoints of a stage, from the side of what trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.config.modes import stage_config
from rollouts.config.schema import RLTrainingConfig
from rollouts.crash_points import reach
from rollouts.protocols import LogProbScorer
from rollouts.run_dir import parse_step

if TYPE_CHECKING:
    from integration_training.opening import Run, Saved, Stage


def completed_steps(checkpoint: Path | None) -> int:
    """The steps that a checkpoint holds; 0 for none."""
    return (parse_step(checkpoint.name) or 0) if checkpoint else 0


async def restore(backend: Saved, checkpoint: Path) -> None:
    """Puts the weights and the optimizer of `checkpoint`, which was read through, into `backend`. Raises
    CheckpointError if it is another model's.
    """
    reach("resume.verified")
    await backend.load(checkpoint).result()
    reach("resume.restored")


async def save_step(
    run: Run,
    opened: Stage,
    stage: str,
    step: int,
    state: dict[str, Any],
    *,
    reference: LogProbScorer | None = None,
) -> float:
    """Saves step `step` of `stage`: the last one before this returns, others while training goes on. A
    reference that moves is saved with it.

    Returns the seconds that a save takes.
    """
    from rollouts.checkpoints.writer import write_in_turn
    from rollouts.reference.moving import REFERENCE, FollowingReference
    from rollouts.weight_sync.engine_weights import hold_engine_weights

    section = stage_config(run.config, stage)
    last = step == section.steps or run.stop.is_requested()
    between = (
        isinstance(section, RLTrainingConfig) and step % section.sync_every != 0
    )  # two updates of the engine
    engine_weights = await hold_engine_weights(opened.engine, step) if between else None
    write_more = engine_weights
    if isinstance(reference, FollowingReference):
        write_reference = await reference.hold()

        async def write(path: Path) -> None:
            await write_reference(path / REFERENCE)

        write_more = write_in_turn(write, engine_weights)
    await opened.checkpoints.save(step, state, last=last, write_more=write_more)
    return opened.checkpoints.expected_save_s()

"""Which checkpoint a run goes on from, after whatever ended it. Blocking: run it in a thread."""

import os
import uuid
from pathlib import Path

from rollouts.checkpoints.load import Report, find_newest_checkpoint, list_named
from rollouts.checkpoints.manifest import read_manifest
from rollouts.checkpoints.retention import remove_incomplete
from rollouts.crash_points import reach
from rollouts.errors import CheckpointError
from rollouts.run_dir import checkpoint_manifest, parse_step

DAMAGED_PREFIX = "damaged-"


def choose_checkpoint(stage_dir: Path, *, config_hash: str | None, report: Report) -> Path | None:
    """The newest checkpoint of a stage that reads as it was written, every byte of it; None if there is none.

    What unfinished saves left is removed. A newer one that is torn or damaged is reported and loses its name,
    so that its steps, which are trained again, can be saved again; nothing of it is deleted. Raises
    CheckpointError, and changes nothing, if the one that is found was made with other settings, if one that
    may be whole cannot be read, or if there are checkpoints and all of them are damaged: to train all over is
    for a person to decide. OSError if something cannot be renamed or removed. Only when nobody is saving into
    `stage_dir`.
    """
    problems: list[str] = []

    def note(line: str) -> None:
        problems.append(line)
        report(line)

    newest = find_newest_checkpoint(stage_dir, hashes=True, report=note)
    if newest is None:
        # a manifest is written last: what has one was complete once
        lost = [path.name for _, path in list_named(stage_dir) if os.path.lexists(checkpoint_manifest(path))]
        if lost:
            lines = "\n".join(f"  {line}" for line in problems)
            raise CheckpointError(
                f"no checkpoint in {stage_dir} is as it was written, and training does not start over by"
                f" itself; restore one of {', '.join(lost)} from a copy, or remove all of them to train this"
                f" stage from its beginning:\n{lines}"
            )
    elif config_hash and (made_with := read_manifest(newest).config_hash) not in (None, config_hash):
        raise CheckpointError(
            f"{newest} was made with other settings than config.toml has (config_hash {made_with:.12}, here"
            f" {config_hash:.12}): it is another run's; remove it, or name another directory with"
            " --output.dir DIR"
        )
    remove_incomplete(stage_dir)
    if newest is not None:
        reach("resume.found")
    set_aside_after(stage_dir, newest, report)
    return newest


def set_aside_after(stage_dir: Path, newest: Path | None, report: Report) -> None:
    """Takes its name off everything that is called a checkpoint of a later step than `newest`."""
    completed = (parse_step(newest.name) or 0) if newest else -1
    for step, path in reversed(list_named(stage_dir)):
        if step <= completed:
            continue
        aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        report(
            f"{path} is now called {aside.name}, and training goes on after step {max(completed, 0)}; remove"
            " it when nobody wants to look at it"
        )

"""Which checkpoints go, the removal of what was never finished, and which checkpoint a run goes on from after
whatever ended it. Blocking: run it in a thread.
"""

import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree

from rollouts.checkpoints.load import (
    find_newest_checkpoint,
    list_checkpoints,
    list_named,
    read_manifest,
)
from rollouts.checkpoints.save import TEMPORARY_PREFIX, move_aside
from rollouts.crash_points import reach
from rollouts.errors import CheckpointError
from rollouts.metrics.jsonl import drop_outdated, has_place, newest_attempts, read_rows
from rollouts.protocols import Say
from rollouts.run_dir import RunDir, checkpoint_manifest, parse_step


def apply_retention(stage_dir: Path, keep_last: int, scores: Mapping[int, float] = {}) -> list[int]:
    """Steps of the complete checkpoints that were removed: all but the `keep_last` newest, 1 or more, and the
    one with the highest score, of equal scores the later. Incomplete ones neither count nor go.

    Each is renamed out of sight before a file is deleted: a crash midway leaves no half checkpoint under a
    checkpoint's name.
    """
    paths = dict(list_checkpoints(stage_dir))
    best = max(paths.keys() & scores.keys(), key=lambda step: (scores[step], step), default=None)
    steps = [step for step in [*paths][:-keep_last] if step != best]
    for step in steps:
        hidden = move_aside(paths[step])
        reach("checkpoint.retention_hidden")
        rmtree(hidden)
    reach("checkpoint.retention_done")
    return steps


def read_scores(run_dir: RunDir, stage: str, metric: str, report: Say) -> dict[int, float]:
    """The metric by step, from the newest evaluation of each step of the stage, unless that step was trained
    again since.

    A row whose step, attempt or metric is no finite number gives none, and `report` gets a line. Raises
    RunDirError if a file is damaged.
    """
    scored = [row for row in read_rows(run_dir.evaluations) if row.get("stage") == stage and metric in row]
    for row in scored:
        if not has_place(row):
            report(
                f"{run_dir.evaluations}: step={row.get('step')!r}, attempt={row.get('attempt')!r} must be"
                " whole numbers; no best by this row"
            )
    scores = {}
    for row in newest_attempts(drop_outdated(scored, read_rows(run_dir.metrics))):
        value = row[metric]
        if type(value) in (int, float) and math.isfinite(value):
            scores[row["step"]] = float(value)
        else:
            report(
                f"{run_dir.evaluations}: {metric} of {stage} step {row['step']} is {value!r}, not a number;"
                " that checkpoint is not the best"
            )
    return scores


def remove_incomplete(stage_dir: Path) -> list[Path]:
    """The temporary directories of saves and removals that never finished, now deleted. Only when nobody is
    saving into `stage_dir`.
    """
    leftovers = sorted(stage_dir.glob(f"{TEMPORARY_PREFIX}*"))
    for leftover in leftovers:
        rmtree(leftover)
    return leftovers


# --- where a run goes on ------------------------------------------------------------------------------------


def choose_checkpoint(stage_dir: Path, *, config_hash: str | None, report: Say) -> Path | None:
    """The newest checkpoint of a stage that reads as it was written, every byte of it; None if there is none.

    What unfinished saves left is removed. A newer one that is torn or damaged is reported and loses its name,
    so that its steps, which are trained again, can be saved again; nothing of it is deleted. Raises
    CheckpointError, and changes nothing, if the one that is found was made with other settings, if one that
    may be whole cannot be read, or if there are checkpoints and all of them are damaged: to train all over is
    for a person to decide. OSError if something cannot be renamed or removed. Only when nobody is saving into
    `stage_dir`.
    """
    problems = []

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
    completed = (parse_step(newest.name) or 0) if newest else -1
    for step, path in reversed(list_named(stage_dir)):
        if step <= completed:
            continue
        aside = path.with_name(f"damaged-{path.name}-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        report(
            f"{path} is now called {aside.name}, and training goes on after step {max(completed, 0)}; remove"
            " it when nobody wants to look at it"
        )
    return newest

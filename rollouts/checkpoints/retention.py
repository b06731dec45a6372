"""Which checkpoints go, and the removal of what was never finished. Blocking: run it in a thread."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from rollouts.checkpoints.load import Report, list_checkpoints
from rollouts.checkpoints.save import TEMPORARY_PREFIX, move_aside
from rollouts.crash_points import reach
from rollouts.metrics.jsonl import drop_outdated, has_place, newest_attempts, read_rows
from rollouts.run_dir import RunDir


def apply_retention(stage_dir: Path, keep_last: int, scores: Mapping[int, float] | None = None) -> list[int]:
    """Steps of the complete checkpoints that were removed: all but the `keep_last` newest, 1 or more, and the
    one with the highest score, of equal scores the later. Incomplete ones neither count nor go.

    Each is renamed out of sight before a file is deleted: a crash midway leaves no half checkpoint under a
    checkpoint's name.
    """
    paths, scores = dict(list_checkpoints(stage_dir)), scores or {}
    best = max(paths.keys() & scores.keys(), key=lambda step: (scores[step], step), default=None)
    steps = [step for step in [*paths][:-keep_last] if step != best]
    for step in steps:
        hidden = move_aside(paths[step])
        reach("checkpoint.retention_hidden")
        shutil.rmtree(hidden)
    reach("checkpoint.retention_done")
    return steps


def read_scores(
    run_dir: RunDir, stage: str, metric: str, report: Report = lambda line: None
) -> dict[int, float]:
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
    scores: dict[int, float] = {}
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
    leftovers = sorted(stage_dir.glob(f"{TEMPORARY_PREFIX}*")) if stage_dir.is_dir() else []
    for leftover in leftovers:
        shutil.rmtree(leftover)
    return leftovers

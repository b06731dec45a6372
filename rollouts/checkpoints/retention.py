"""Which checkpoints go, and the removal of what was never finished. Blocking: run it in a thread."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollouts.checkpoints.load import Report, list_checkpoints, report_nothing
from rollouts.checkpoints.save import TEMPORARY_PREFIX, move_aside
from rollouts.crash_points import reach
from rollouts.metrics.jsonl import drop_outdated, has_place, newest_attempts, read_rows
from rollouts.run_dir import RunDir


def checkpoints_to_remove(
    steps: Iterable[int], keep_last: int, scores: Mapping[int, float] | None = None
) -> list[int]:
    """All of `steps` but the `keep_last` highest and the one with the highest score, ascending; of equal
    scores the later step stays.

    Raises ValueError if keep_last is below 1: the newest always stays.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1; the newest checkpoint always stays")
    present = sorted(set(steps))
    scored = [step for step in present if scores and step in scores]
    best = max(scored, key=lambda step: ((scores or {})[step], step), default=None)
    return [step for step in present[:-keep_last] if step != best]


def apply_retention(stage_dir: Path, keep_last: int, scores: Mapping[int, float] | None = None) -> list[int]:
    """Steps of the complete checkpoints that were removed, so that `keep_last` and the best stay. Incomplete
    ones neither count nor go.

    Each is renamed out of sight before a file is deleted: a crash midway leaves no half checkpoint under a
    checkpoint's name.
    """
    paths = dict(list_checkpoints(stage_dir))
    steps = checkpoints_to_remove(paths, keep_last, scores)
    for step in steps:
        hidden = move_aside(paths[step])
        reach("checkpoint.retention_hidden")
        shutil.rmtree(hidden)
    reach("checkpoint.retention_done")
    return steps


def read_scores(
    run_dir: RunDir, stage: str, metric: str, report: Report = report_nothing
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

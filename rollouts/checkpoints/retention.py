"""Which checkpoints go, and the removal of what was never finished. Blocking: run it in a thread."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from rollouts.checkpoints.load import list_checkpoints
from rollouts.checkpoints.save import TEMPORARY_PREFIX, move_aside


def checkpoints_to_remove(steps: Iterable[int], keep_last: int) -> list[int]:
    """All but the `keep_last` highest of `steps`, ascending. Raises ValueError if keep_last is below 1: the newest always stays."""
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1; the newest checkpoint always stays")
    return sorted(set(steps))[:-keep_last]


def apply_retention(stage_dir: Path, keep_last: int) -> list[int]:
    """Steps of the complete checkpoints that were removed, so that `keep_last` stay. Incomplete ones neither count nor go.

    Each is renamed out of sight before a file is deleted: a crash midway leaves no half checkpoint under a checkpoint's name.
    """
    paths = dict(list_checkpoints(stage_dir))
    steps = checkpoints_to_remove(paths, keep_last)
    for step in steps:
        shutil.rmtree(move_aside(paths[step]))
    return steps


def remove_incomplete(stage_dir: Path) -> list[Path]:
    """The temporary directories of saves and removals that never finished, now deleted. Only when nobody is saving into `stage_dir`."""
    leftovers = sorted(stage_dir.glob(f"{TEMPORARY_PREFIX}*")) if stage_dir.is_dir() else []
    for leftover in leftovers:
        shutil.rmtree(leftover)
    return leftovers

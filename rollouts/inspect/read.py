"""What the files of a run directory say, without anything that trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import Row, newest_attempts, read_rows
from rollouts.run_dir import RunDir, checkpoint_manifest, parse_step


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The rows of a run, of the newest attempt at each step, sorted by stage (in order of appearance) and step."""

    root: Path
    metrics: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    samples: tuple[Row, ...]
    summary: dict[str, Any] | None  # None: not finished
    attempts: int  # how often the run was started, as far as rows tell
    checkpoints: tuple[tuple[str, int], ...]  # complete ones: stage, step

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages with steps, in order of appearance."""
        return tuple(dict.fromkeys(row["stage"] for row in self.metrics))

    def stage_rows(self, stage: str) -> tuple[Row, ...]:
        return tuple(row for row in self.metrics if row["stage"] == stage)


def read_run(root: Path, *, with_samples: bool = False) -> RunRecord:
    """The record of the run at `root`; `samples` is empty unless asked for, because its file is the large one.

    Raises RunDirError if `root` is not a run directory, or a file in it is damaged.
    """
    run_dir = RunDir(root)
    if not root.is_dir():
        raise RunDirError(f"{root} is not a directory; name a run directory, for example one in runs/")
    if not any(path.exists() for path in (run_dir.config, run_dir.metrics, run_dir.evaluations, run_dir.summary)):
        raise RunDirError(f"{root} has none of config.toml, metrics.jsonl, evaluations.jsonl and summary.json: it is not a run directory")
    metrics, evaluations = read_checked(run_dir.metrics), read_checked(run_dir.evaluations)
    return RunRecord(
        root=root,
        metrics=sort_rows(newest_attempts(metrics)),
        evaluations=sort_rows(newest_attempts(evaluations)),
        samples=tuple(newest_attempts(read_checked(run_dir.samples))) if with_samples else (),
        summary=read_summary(run_dir.summary),
        attempts=max((row["attempt"] for row in [*metrics, *evaluations]), default=0),
        checkpoints=find_checkpoints(run_dir),
    )


def read_checked(path: Path) -> list[Row]:
    """The rows of a file. Raises RunDirError naming the row that lacks what every row has."""
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("stage"), str) or not isinstance(row.get("step"), int) or not isinstance(row.get("attempt"), int):
            raise RunDirError(f"{path}:{number} has no text 'stage' and whole 'step' and 'attempt'; rollouts did not write it")
    return rows


def sort_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows by stage, in order of first appearance, then by step; rows of the same step keep their order."""
    order = {stage: place for place, stage in enumerate(dict.fromkeys(row["stage"] for row in rows))}
    return tuple(sorted(rows, key=lambda row: (order[row["stage"]], row["step"])))


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None if there is none yet. Raises RunDirError if it is not a JSON object."""
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirError(f"{path} is not JSON ({error}); delete it and run again with --resume to have it written anew") from error
    if not isinstance(summary, dict):
        raise RunDirError(f"{path} holds a {type(summary).__name__}, not an object; delete it and run again with --resume")
    return summary


def find_checkpoints(run_dir: RunDir) -> tuple[tuple[str, int], ...]:
    """(stage, step) of every checkpoint whose manifest is there, by stage name and step."""
    found: list[tuple[str, int]] = []
    for path in run_dir.checkpoints.glob("*/*"):
        step = parse_step(path.name)
        if step is not None and checkpoint_manifest(path).exists():
            found.append((path.parent.name, step))
    return tuple(sorted(found))


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, of the rows that have it."""
    held = [row for row in rows if isinstance(row.get(name), int | float)]
    return [row["step"] for row in held], [float(row[name]) for row in held]


def sum_by_name(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    """Each metric below `prefix` (`fail/`, `groups/dropped/`) summed over the rows, those that are not 0, by its name after the prefix."""
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and isinstance(value, int | float):
                sums[name.removeprefix(prefix)] = sums.get(name.removeprefix(prefix), 0.0) + value
    return {name: total for name, total in sums.items() if total}

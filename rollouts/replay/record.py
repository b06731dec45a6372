"""What the record of a step has, read without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import RecordError, RunDirError
from rollouts.metrics.jsonl import newest_attempts, parse_row
from rollouts.run_dir import RunDir, list_parts

Row = dict[str, Any]


class StepRecord(NamedTuple):
    """A step as its files tell it."""

    metrics: Mapping[str, Any]  # its row of metrics.jsonl
    updates: Sequence[Sequence[Row]]  # the contribution rows of each update, in the order of its batch


def read_step(run_dir: RunDir, stage: str, step: int) -> StepRecord:
    """The newest complete attempt at a step. Raises RunDirError where there is no run, RecordError where the
    record lacks rows of the step.
    """
    if not run_dir.metrics.exists():
        raise RunDirError(f"{run_dir.root} has no metrics.jsonl; name a run directory, for example runs/demo")
    steps = newest_attempts(find_rows(run_dir, run_dir.metrics, stage, step))
    if not steps:
        raise RecordError(
            f"{run_dir.root} has no row of {stage} step {step}; it was not trained, or is not complete"
        )
    metrics = steps[-1]
    attempt = metrics["attempt"]
    by_update: dict[int, list[Row]] = {}
    for row in find_rows(run_dir, run_dir.contributions, stage, step):
        if row.get("attempt") == attempt:
            by_update.setdefault(int(row["update"]), []).append(row)
    if not by_update:
        raise RecordError(
            f"{run_dir.contributions} has no row of {stage} step {step}, attempt {attempt}: only samples that"
            " RL trains on have any, and only in runs of a version that writes them"
        )
    if sorted(by_update) != list(range(len(by_update))):
        raise RecordError(
            f"{stage} step {step} has rows of the updates {sorted(by_update)}; some are missing"
        )
    updates = [sorted(by_update[number], key=lambda row: row["row"]) for number in sorted(by_update)]
    for number, rows in enumerate(updates):
        if [row["row"] for row in rows] != list(range(len(rows))):
            raise RecordError(
                f"{stage} step {step}, update {number}: rows are missing or stand twice in"
                " contributions.jsonl"
            )
    return StepRecord(metrics, updates)


def find_rows(run_dir: RunDir, path: Path, stage: str, step: int) -> list[Row]:
    """The rows of a step of every attempt, in the order of the file; torn lines are left out.

    Lines are told apart before they are parsed, for a long run has millions.
    """
    of_step = re.compile(rb'"step":\s*%d[,}]' % step)
    found: list[Row] = []
    for part in list_parts(path):
        with part.open("rb") as file:
            for line in file:
                row = parse_row(line) if of_step.search(line) else None
                if row is not None and row.get("step") == step and row.get("stage") == stage:
                    found.append(row)
    return found

"""What the record of a step has, read without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.errors import RecordError, RunDirError
from rollouts.metrics.jsonl import newest_attempts, parse_row
from rollouts.run_dir import RunDir

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """The contribution rows of one update, in the order of its batch."""

    update: int
    rows: Sequence[Row]

    @property
    def loss(self) -> float | None:
        """As it was logged; None where it was not finite."""
        return self.rows[0].get("loss")

    @property
    def is_skipped(self) -> bool:
        """Whether it changed nothing, for its loss or its gradient was not finite. Its shares are 0 then."""
        return "skipped" in self.rows[0]

    @property
    def denominator(self) -> float:
        """As it was logged."""
        return float(self.rows[0]["denominator"])


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as its files tell it."""

    metrics: Mapping[str, Any]  # its row of metrics.jsonl
    updates: Sequence[UpdateRows]


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
    found = find_rows(run_dir, run_dir.contributions, stage, step)
    by_update: dict[int, list[Row]] = {}
    for row in found:
        if row.get("attempt") == attempt:
            by_update.setdefault(int(row["update"]), []).append(row)
    if not by_update:
        raise RecordError(
            f"{run_dir.contributions} has no row of {stage} step {step}, attempt {attempt}: only samples that"
            " RL trains on have any, and only in runs of a version that writes them"
        )
    updates = [
        UpdateRows(update, sorted(rows, key=lambda row: row["row"])) for update, rows in by_update.items()
    ]
    updates.sort(key=lambda one: one.update)
    numbers = [one.update for one in updates]
    if numbers != list(range(len(updates))):
        raise RecordError(f"{stage} step {step} has rows of the updates {numbers}; some are missing")
    for one in updates:
        if [row["row"] for row in one.rows] != list(range(len(one.rows))):
            raise RecordError(
                f"{stage} step {step}, update {one.update}: rows are missing or stand twice in"
                " contributions.jsonl"
            )
    return StepRecord(metrics, updates)


def find_rows(run_dir: RunDir, path: Path, stage: str, step: int) -> list[Row]:
    """The rows of a step of every attempt, in the order of the file; torn lines are left out.

    Lines are told apart before they are parsed, for a long run has millions.
    """
    of_step = re.compile(rb'"step":\s*%d[,}]' % step)
    found: list[Row] = []
    for part in run_dir.parts(path):
        with part.open("rb") as file:
            for line in file:
                row = parse_row(line) if of_step.search(line) else None
                if row is not None and row.get("step") == step and row.get("stage") == stage:
                    found.append(row)
    return found

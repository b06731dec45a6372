"""What the files of a run directory say, without anything that trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from rollouts.errors import RunDirError
from rollouts.inspect.column_rows import is_number
from rollouts.inspect.columns import Columns, open_columns
from rollouts.metrics.jsonl import Row, newest_attempts, read_rows
from rollouts.run_dir import RunDir, checkpoint_manifest, parse_step

NUMBERS = frozenset(
    {"time_unix", "start_unix", "duration_s", "tokens"}
)  # fields that are numbers, beside the metrics


class ColumnRows(Sequence[Row]):
    """Rows of a file, by their numbers in its columns: a row is read when it is asked for, a series of one
    metric without reading any.
    """

    def __init__(self, columns: Columns, indices: np.ndarray) -> None:
        self.columns = columns
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, place: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(place, slice):
            return tuple(self.columns.read_rows(self.indices[place]))
        return self.columns.read_rows([self.indices[place]])[0]

    def __iter__(self) -> Iterator[Row]:
        return self.columns.iterate_rows(self.indices)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, of the rows that have it."""
        if name not in self.columns.metrics:
            return np.empty(0, dtype=np.int64), np.empty(0)
        values = self.columns.column(name)[self.indices]
        held = np.isfinite(values)
        return self.columns.column("step")[self.indices][held], values[held]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The rows of a run, of the newest attempt at each step, sorted by stage (in order of appearance) and
    step.
    """

    root: Path
    metrics: Sequence[Row]
    evaluations: tuple[Row, ...]
    samples: Sequence[Row]  # in the order of the file
    summary: dict[str, Any] | None  # None: not finished
    attempts: int  # how often the run was started, as far as rows tell
    checkpoints: tuple[tuple[str, int], ...]  # complete ones: stage, step
    columns: Columns  # of metrics.jsonl, all attempts
    notes: tuple[str, ...]  # what a person should know of the files: a torn line

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages with steps, in order of appearance."""
        codes = self.columns.column("stage")[self.columns.newest()]
        _, first = np.unique(codes, return_index=True)
        return tuple(self.columns.texts("stage")[codes[index]] for index in sorted(first))

    def stage_rows(self, stage: str) -> Sequence[Row]:
        """The rows of a stage by step."""
        return ColumnRows(self.columns, find_stage_rows(self.columns, stage))

    def series(self, stage: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric of a stage; empty where no step has it."""
        return ColumnRows(self.columns, find_stage_rows(self.columns, stage)).series(name)


def find_stage_rows(columns: Columns, stage: str) -> np.ndarray:
    """Numbers of a stage's rows, of the newest attempt at each step, by step."""
    rows = np.flatnonzero(columns.newest() & columns.match_text("stage", stage))
    return rows[np.argsort(columns.column("step")[rows], kind="stable")]


def read_run(root: Path, *, with_samples: bool = False) -> RunRecord:
    """The record of the run at `root`; `samples` is empty unless asked for, because its file is the large
    one.

    Raises RunDirError if `root` is not a run directory, or a file in it is damaged.
    """
    run_dir = open_run_dir(root)
    columns = open_columns(run_dir, "metrics")
    notes = list(columns.notes)
    evaluations = read_checked(run_dir.evaluations, report=notes.append)
    samples: Sequence[Row] = ()
    if with_samples:
        sample_columns = open_columns(run_dir, "samples")
        notes += sample_columns.notes
        samples = (
            ColumnRows(sample_columns, np.flatnonzero(sample_columns.newest())) if sample_columns.rows else ()
        )
    record = RunRecord(
        root=root,
        metrics=(),
        evaluations=sort_rows([keep_numbers(row) for row in newest_attempts(evaluations)]),
        samples=samples,
        summary=read_summary(run_dir.summary),
        attempts=max(
            [int(columns.column("attempt").max(initial=0)), *(row["attempt"] for row in evaluations)]
        ),
        checkpoints=find_checkpoints(run_dir),
        columns=columns,
        notes=tuple(notes),
    )
    return record if not columns.rows else replace(record, metrics=ColumnRows(columns, order_rows(record)))


def order_rows(record: RunRecord) -> np.ndarray:
    """Numbers of the newest rows of all stages, by stage and step."""
    return np.concatenate([find_stage_rows(record.columns, stage) for stage in record.stages])


def open_run_dir(root: Path) -> RunDir:
    """The paths of the run at `root`. Raises RunDirError if it is not a run directory."""
    run_dir = RunDir(root)
    if not root.is_dir():
        raise RunDirError(f"{root} is not a directory; name a run directory, for example one in runs/")
    if not any(
        path.exists() for path in (run_dir.config, run_dir.metrics, run_dir.evaluations, run_dir.summary)
    ):
        raise RunDirError(
            f"{root} has none of config.toml, metrics.jsonl, evaluations.jsonl and summary.json: it is not a"
            " run directory"
        )
    return run_dir


def read_checked(path: Path, *, report: Callable[[str], None] | None = None) -> list[Row]:
    """The rows of a file. `report` is told of a torn last line. Raises RunDirError naming the row that lacks
    what every row has.
    """
    rows = read_rows(path, report=report)
    for number, row in enumerate(rows, 1):
        if (
            not isinstance(row.get("stage"), str)
            or not isinstance(row.get("step"), int)
            or not isinstance(row.get("attempt"), int)
        ):
            raise RunDirError(
                f"{path}:{number} has no text 'stage' and whole 'step' and 'attempt'; rollouts did not"
                " write it"
            )
    return rows


def keep_numbers(row: Row) -> Row:
    """The row without what should be a number and is none: metrics and times that are texts or not finite, as
    other writers may leave them.
    """
    return {
        name: value
        for name, value in row.items()
        if is_number(value) or ("/" not in name and name not in NUMBERS)
    }


def sort_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows by stage, in order of first appearance, then by step; rows of the same step keep their order."""
    order = {stage: place for place, stage in enumerate(dict.fromkeys(row["stage"] for row in rows))}
    return tuple(sorted(rows, key=lambda row: (order[row["stage"]], row["step"])))


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None if there is none yet. Raises RunDirError if it is not a JSON
    object.
    """
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirError(
            f"{path} is not JSON ({error}); delete it and run again with --resume to have it written anew"
        ) from error
    if not isinstance(summary, dict):
        raise RunDirError(
            f"{path} holds a {type(summary).__name__}, not an object; delete it and run again with --resume"
        )
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
    if isinstance(rows, ColumnRows):
        steps, values = rows.series(name)
        return steps.tolist(), values.tolist()
    held = [row for row in rows if isinstance(row.get(name), int | float)]
    return [row["step"] for row in held], [float(row[name]) for row in held]


def sum_by_name(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    """Each metric below `prefix` (`fail/`, `groups/dropped/`) summed over the rows, those that are not 0, by
    its name after the prefix.
    """
    if isinstance(rows, ColumnRows):
        names = [name for name in rows.columns.metrics if name.startswith(prefix)]
        totals = {name.removeprefix(prefix): float(rows.series(name)[1].sum()) for name in names}
        return {name: total for name, total in totals.items() if total}
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and isinstance(value, int | float):
                sums[name.removeprefix(prefix)] = sums.get(name.removeprefix(prefix), 0.0) + value
    return {name: total for name, total in sums.items() if total}

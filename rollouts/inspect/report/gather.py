"""What a report says of a run, read from its directory, as values that JSON takes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollouts.errors import RunDirError
from rollouts.inspect.columns import Columns, open_columns
from rollouts.inspect.read import RunRecord, find_stage_rows, read_run
from rollouts.inspect.report.choose import choose_samples, encode_page_json, shorten_row
from rollouts.inspect.report.curves import make_curves, make_phases
from rollouts.inspect.report.failures import DROPPED, FAILED, make_failures
from rollouts.inspect.report.headline import make_facts, make_tiles
from rollouts.inspect.report.settings import flatten_settings
from rollouts.inspect.report.spreads import make_spreads
from rollouts.inspect.report.token_view import ARRAY_BYTES, add_token_values
from rollouts.inspect.report.updates import read_updates
from rollouts.run_dir import Activity, RunDir, describe_activity, find_activity

POINTS = 2000  # of a curve, at most
POINTS_AT_LEAST = 100
CURVE_VALUES = 1_200_000  # numbers of all curves of a report together
PAUSE_S = 3600.0  # between two rows of one attempt; a longer one is not counted as work


class RunReport(NamedTuple):
    """A run for the page: what is said of it, and its samples as JSON texts."""

    facts: dict[str, Any]
    samples: list[str]


def gather_run(root: Path, *, points: int = POINTS, sample_bytes: int) -> RunReport:
    """Everything of a run that the page shows. Raises RunDirError for a directory that is no run or is
    damaged.
    """
    record = read_run(root)
    run_dir = RunDir(root)
    metrics, samples = record.columns, open_columns(run_dir, "samples")
    rows = {stage: find_stage_rows(metrics, stage) for stage in record.stages}
    every = np.concatenate([np.empty(0, np.int64), *rows.values()]).astype(np.int64)
    begin = find_begin(metrics)
    points = max(POINTS_AT_LEAST, min(points, CURVE_VALUES // (3 * max(1, len(metrics.metrics)))))
    sample_rows = np.flatnonzero(samples.newest()) if samples.rows else np.empty(0, np.int64)
    failures = make_failures(metrics, every, samples, sample_rows)
    shown, how, remark = gather_samples(
        record, samples, sample_rows, sample_bytes, [message.pop("row") for message in failures["messages"]]
    )
    seconds = {stage: sum_seconds(metrics, found) for stage, found in rows.items()}
    activity = find_activity(run_dir)
    facts = {
        "name": root.resolve().name,
        "state": activity.state,
        "tiles": make_tiles(
            record, sum(len(found) for found in rows.values()), sum(seconds.values()), failures
        ),
        "facts": make_facts(record, describe_state(activity, metrics), sum(seconds.values()), begin),
        "notes": [note for note in (*record.notes, *samples.notes, remark) if note],
        "stages": [describe_stage(record, stage, found, seconds[stage]) for stage, found in rows.items()],
        "curves": {
            stage: make_curves(metrics, found, points=points, begin_unix=begin)
            for stage, found in rows.items()
        },
        "phases": {
            stage: phases
            for stage, found in rows.items()
            if (phases := make_phases(metrics, found, points=points))
        },
        "spreads": make_spreads(samples, sample_rows) if len(sample_rows) else {},
        "failures": failures,
        "evaluations": describe_evaluations(record),
        "updates": read_updates(run_dir),
        "config": list(flatten_settings(read_config(run_dir)).items()),
        "samples": {"total": len(sample_rows), "shown": len(shown), "how": how},
    }
    return RunReport(facts, shown)


def find_begin(metrics: Columns) -> float:
    """When the first row was written, less the step that it is of; 0 of an empty run."""
    times = metrics.column("time_unix")
    if not metrics.rows or np.isnan(times).all():
        return 0.0
    first = int(np.nanargmin(times))
    step = float(metrics.column("time/step")[first]) if "time/step" in metrics.metrics else 0.0
    return float(times[first]) - (step if step == step else 0.0)


def sum_seconds(metrics: Columns, rows: np.ndarray[Any, Any]) -> float:
    """How long a stage's steps took: the time between their rows, pauses between attempts left out, and the
    first step of each attempt.
    """
    times, attempts = metrics.column("time_unix")[rows], metrics.column("attempt")[rows]
    gaps = np.diff(times)
    together = (np.diff(attempts) == 0) & (gaps >= 0) & (gaps < PAUSE_S)
    begins = np.concatenate([[True], ~together])[: len(rows)]
    first = np.nansum(metrics.column("time/step")[rows][begins]) if "time/step" in metrics.metrics else 0.0
    return float(np.nansum(gaps[together]) + first)


def describe_state(activity: Activity, metrics: Columns) -> str:
    """Whether the run is at work; where that is not certain, also when its last row was written."""
    times = metrics.column("time_unix")
    if activity.certain or not metrics.rows or np.isnan(times).all():
        return describe_activity(activity)
    return (
        f"{describe_activity(activity)}; last row"
        f" {datetime.fromtimestamp(float(np.nanmax(times)), UTC):%Y-%m-%d %H:%M UTC}"
    )


def describe_stage(
    record: RunRecord, stage: str, rows: np.ndarray[Any, Any], seconds: float
) -> dict[str, Any]:
    columns = record.columns

    def count(prefix: str) -> int:
        return round(
            sum(
                float(np.nansum(columns.column(name)[rows]))
                for name in columns.metrics
                if name.startswith(prefix)
            )
        )

    return {
        "name": stage,
        "last": int(columns.column("step")[rows[-1]]),
        "seconds": seconds,
        "reward": find_ends(record, stage, "reward/mean"),
        "loss": find_ends(record, stage, "loss/total"),
        "failed": count(FAILED),
        "dropped": count(DROPPED),
    }


def find_ends(record: RunRecord, stage: str, name: str) -> list[float] | None:
    """The first and the last value of a metric, None where it has none."""
    _, values = record.series(stage, name)
    return [float(values[0]), float(values[-1])] if len(values) else None


def describe_evaluations(record: RunRecord) -> list[dict[str, Any]]:
    """The evaluations in the order of the run, each with its numbers."""
    rows = sorted(record.evaluations, key=lambda row: row.get("time_unix", 0.0))
    return [
        {
            "stage": row["stage"],
            "step": row["step"],
            "version": row.get("policy_version"),
            "name": str(row.get("name", "")),
            "metrics": {
                name: float(value)
                for name, value in row.items()
                if "/" in name and isinstance(value, int | float)
            },
        }
        for row in rows
    ]


def gather_samples(
    record: RunRecord, columns: Columns, rows: np.ndarray[Any, Any], limit_bytes: int, first: list[int]
) -> tuple[list[str], str, str]:
    """Samples as JSON texts, by stage, step and place in the file, in words how they were chosen, and a
    remark on their tokens.
    """
    if not len(rows):
        return [], "", ""
    for_tokens = min(ARRAY_BYTES, limit_bytes // 3) if RunDir(record.root).contributions.exists() else 0
    room = limit_bytes - for_tokens
    choice = choose_samples(columns, rows, room, first=first)
    held: list[tuple[int, dict[str, Any]]] = []
    left = room
    for index, row in zip(choice.rows.tolist(), columns.iterate_rows(choice.rows), strict=True):
        short = shorten_row(row)
        size = len(encode_page_json(short).encode(errors="replace"))
        if size <= left:
            held.append((index, short))
            left -= size
    stage, step = columns.column("stage"), columns.column("step")
    held.sort(key=lambda found: (int(stage[found[0]]), int(step[found[0]]), found[0]))
    shown = [row for _, row in held]
    remark = add_token_values(RunDir(record.root), shown, limit_bytes=for_tokens)
    how = choice.how if len(shown) == len(choice.rows) else choice.how or "as many as fit"
    return [encode_page_json(row) for row in shown], how, remark


def read_config(run_dir: RunDir) -> Mapping[str, Any]:
    """The run's settings, none if the file is missing. Raises RunDirError for one that is not TOML."""
    try:
        return tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDirError(
            f"{run_dir.config} is not TOML ({error}); restore it from the configuration that the run was"
            " started with"
        ) from error

"""What a report says of a run, as values that JSON takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollouts.inspect.facts import (
    REST,
    SAMPLE_FACTS,
    count_of,
    describe_stage,
    find_accuracies,
    find_failures,
    format_duration,
    read_settings,
    split_phases,
)
from rollouts.inspect.record import Record, Stage, find_checkpoints, open_record
from rollouts.inspect.report.samples import gather_samples, round_numbers
from rollouts.inspect.terminal import format_number
from rollouts.run_dir import RunDir, describe_activity, find_activity

POINTS = 2000  # of a curve, at most
CURVE_VALUES = 1_200_000  # numbers of all curves of a report together
MESSAGES = 100  # distinct ones that are listed
FIRST_LINES, NEWEST_LINES = 200, 2000  # of updates.log that are shown
REPORT_FACTS = f"""{SAMPLE_FACTS}, id, reward, response_length::DOUBLE AS length,
    400 + least(coalesce(strlen(prompt), 0) + coalesce(strlen(response), 0), 40000)
    + coalesce(strlen(metadata), 0) AS bytes"""
# Of each stage and each of reward, length and lag: counts by range of steps (at most 24) and bin, and means.
# Bins are whole numbers for lag (the last takes all from 11 on) and short lengths, else 20 of equal width;
# what is longer than 99.5 % of the responses is in the last.
SPREADS = """
    WITH held AS (
        UNPIVOT (SELECT stage, step, reward, length, lag::DOUBLE AS lag FROM samples_held)
        ON reward, length, lag INTO NAME name VALUE value),
    tops AS (
        SELECT stage, name, max(value) AS most, min(value) AS least,
            CASE name WHEN 'length' THEN greatest(1, quantile_cont(value, 0.995)) ELSE most END AS top,
            name = 'lag' OR (name = 'length' AND top <= 20) AS whole,
            (CASE WHEN whole THEN least(floor(top), if(name = 'lag', 11, 20)) + 1 ELSE 20 END)::INT AS bins,
            CASE WHEN whole THEN -0.5 WHEN name = 'length' THEN 0 WHEN least = most THEN least - 0.5
                ELSE least END AS low,
            CASE WHEN whole THEN 1 WHEN least = most AND name = 'reward' THEN 1 / bins
                ELSE (top - low) / bins END AS width
        FROM held GROUP BY stage, name),
    ranges AS (
        SELECT stage, name, step, ntile(24) OVER (PARTITION BY stage, name ORDER BY step) AS range
        FROM (SELECT DISTINCT stage, name, step FROM held)),
    counted AS (
        SELECT stage, name, range, min(step) AS first, max(step) AS last, avg(value) AS mean,
            any_value(bins) AS bins,
            histogram(least(bins - 1, greatest(0, floor((value - low) / width)))::INT) AS counts
        FROM held JOIN tops USING (stage, name) JOIN ranges USING (stage, name, step)
        GROUP BY stage, name, range)
    SELECT stage, name, list([first, last] ORDER BY range) AS steps, list(mean ORDER BY range) AS means,
        list([coalesce(counts[bin], 0) FOR bin IN range(counted.bins)] ORDER BY range) AS counts,
        any_value([low + bin * width FOR bin IN range(tops.bins + 1)]) AS edges,
        any_value(if(name = 'lag', most > 11, most > top)) AS more
    FROM counted JOIN tops USING (stage, name)
    WHERE NOT (name = 'lag' AND starts_with(stage, 'eval-')) GROUP BY stage, name"""
UPDATE = re.compile(
    r"(?P<time>\S+)\s+attempt\s+(?P<attempt>\d+)\s+(?P<stage>\S+)\s+step\s+(?P<step>\d+)"
    r"\s+update\s+(?P<update>\d+)\s+version\s+(?P<version>\d+)\s+loss\s+(?P<loss>\S+)\s+kl\s+(?P<KL>\S+)"
    r"\s+beta\s+(?P<β>\S+)\s+grad_norm\s+(?P<gradient_norm>\S+)\s+(?P<clipped>\S+)"
    r"\s+lr\s+(?P<learning_rate>\S+)\s+samples\s+(?P<samples>\d+)"
    r"\s+zero_advantage\s+(?P<of_these_zero_advantage>\d+)\s+tokens\s+(?P<tokens>\d+)"
    r"(\s+(?P<note>skipped: .*))?"
)


class RunReport(NamedTuple):
    """A run for the page: what is said of it, and its samples as JSON texts."""

    facts: dict[str, Any]
    samples: list[str]


def gather_run(root: Path, *, points: int = POINTS, sample_bytes: int) -> RunReport:
    """Everything of a run that the page shows. Raises RunDirError for a directory that is no run."""
    with open_record(root) as record:
        stages = record.stages
        record.load("samples", REPORT_FACTS)
        names = max((len(stage.metrics) for stage in stages.values()), default=1)
        points = max(100, min(points, CURVE_VALUES // (3 * max(1, names))))
        times = [stage.columns["time_unix"] for stage in stages.values()]
        begin = min((float(np.nanmin(of)) for of in times if np.isfinite(of).any()), default=0.0)
        failures = find_failures(record)
        messages = failures["messages"][:MESSAGES]
        samples = gather_samples(record, sample_bytes, [message.pop("place") for message in messages])
        activity = find_activity(record.run_dir)
        state = describe_activity(activity)
        if times and not activity.certain:
            newest = max(float(np.nanmax(of)) for of in times)
            state += f"; last row {format_time(newest)}"
        spreads: dict[str, Any] = {}
        for row in record.rows(SPREADS):
            row["means"] = round_numbers(row["means"])
            spreads.setdefault(row.pop("stage"), {})[row.pop("name")] = row
        described = [describe_stage(stage) for stage in stages.values()]
        phases = {name: make_phases(stage, points=points) for name, stage in stages.items()}
        facts = {
            "name": root.resolve().name,
            "state": activity.state,
            "tiles": make_tiles(record, described, failures),
            "facts": make_facts(record, state, described, begin),
            "notes": [*record.notes, *([samples.remark] if samples.remark else [])],
            "stages": described,
            "curves": {
                name: make_curves(stage, points=points, begin_unix=begin) for name, stage in stages.items()
            },
            "phases": {name: found for name, found in phases.items() if found},
            "spreads": spreads,
            "failures": failures | {"messages": messages, "more": len(failures["messages"]) - len(messages)},
            "evaluations": [
                {
                    "stage": row["stage"],
                    "step": row["step"],
                    "version": row.get("policy_version"),
                    "name": row.get("name", ""),
                    "metrics": {name: value for name, value in row.items() if "/" in name},
                }
                for row in record.evaluations
            ],
            "updates": read_updates(record.run_dir),
            "config": list(read_settings(record.run_dir).items()),
            "samples": {"total": samples.total, "shown": len(samples.texts), "how": samples.how},
        }
    return RunReport(facts, samples.texts)


def format_time(time_unix: float) -> str:
    """To the minute."""
    return f"{datetime.fromtimestamp(time_unix, UTC):%Y-%m-%d %H:%M UTC}"


def split_buckets(values: np.ndarray, points: int) -> np.ndarray:
    """[at most points, size] the values, consecutive ones in a row, filled up with NaN."""
    size = max(1, -(-len(values) // points))
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, size)


def make_curves(stage: Stage, *, points: int, begin_unix: float) -> dict[str, Any]:
    """The curves of a stage: of each metric mean, least and greatest of so many consecutive steps as a point
    takes.
    """
    size = split_buckets(stage.columns["step"], points).shape[1]
    metrics: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without values is NaN
        for name in stage.metrics:
            table = split_buckets(stage.columns[name], points)
            metrics[name] = {"mean": round_numbers(np.nanmean(table, axis=1)), "low": None, "high": None}
            if size > 1:
                metrics[name]["low"] = round_numbers(np.nanmin(table, axis=1))
                metrics[name]["high"] = round_numbers(np.nanmax(table, axis=1))
    resumed = np.flatnonzero(np.diff(stage.columns["attempt"]) > 0) + 1
    return {
        "rows": len(stage),
        "step": stage.columns["step"][::size].tolist(),
        "time": round_numbers(stage.columns["time_unix"][::size] - begin_unix, 7),
        "resumed": np.unique(resumed // size).tolist(),
        "metrics": metrics,
    }


def make_phases(stage: Stage, *, points: int) -> dict[str, Any] | None:
    """Seconds of each phase per step, the longest first and the rest of the step last; None if none."""
    phases = split_phases(stage)
    rest = phases.get(REST, np.zeros(1))
    if rest.sum() <= 0:
        phases.pop(REST, None)
    seconds = {
        name: round_numbers(np.nanmean(split_buckets(np.maximum(0.0, values), points), axis=1))
        for name, values in phases.items()
    }
    return (
        {
            "names": list(phases),
            "seconds": seconds,
            "total": {name: float(values.sum()) for name, values in phases.items()},
            "rows": len(stage),
            "ahead": bool(rest.sum() < -0.02 * stage.filled("time/step").sum()),
        }
        if phases
        else None
    )


def make_tiles(
    record: Record, stages: list[dict[str, Any]], failures: Mapping[str, Any]
) -> list[dict[str, str]]:
    """The numbers that people look for first, those that the run has."""
    tiles: list[dict[str, str]] = []

    def add(name: str, value: str, note: str) -> None:
        tiles.append({"name": name, "value": value, "note": note})

    for name, values in list(find_accuracies(record).items())[:1]:
        title = name[:1].upper() + name[1:]
        add(title, f"{100 * values[-1]:.1f} %", f"at first {100 * values[0]:.1f} %")
    main = record.stages.get("rl") or next(reversed(record.stages.values()), None)
    titles = {"reward/mean": "Reward", "rewards/accuracies": "Pairs ranked right", "loss/total": "Loss"}
    for name, title in (titles | {"truncated/frac": "Cut at the limit"}).items():
        values = main.series(name)[1] if main else np.empty(0)
        if main and len(values):  # means of the first and of the last tenth
            count = max(1, len(values) // 10)
            last, first = format_number(values[-count:].mean()), format_number(values[:count].mean())
            add(f"{title}, {main.name}", last, f"at first {first}")
    steps, seconds = sum(stage["last"] for stage in stages), sum(stage["seconds"] for stage in stages)
    add("Steps", f"{steps:,}", ", ".join(f"{stage['name']} {stage['last']:,}" for stage in stages))
    pace = f"{format_duration(seconds / steps)} a step" if steps else ""
    add("Time in steps", format_duration(seconds), pace)
    kinds = failures["classes"]
    note = ", ".join(f"{kind['name']} {kind['total']:,}" for kind in kinds[:3])
    add("Samples failed", f"{sum(kind['total'] for kind in kinds):,}", note)
    lag = main.series("off_policy/max")[1] if main else np.empty(0)
    if main and len(lag):
        mean = main.filled("off_policy/mean").mean()
        add("Greatest staleness", f"{lag.max():.0f}", f"versions; mean {format_number(mean)}")
    return tiles


def make_facts(
    record: Record, state: str, stages: list[dict[str, Any]], begin_unix: float
) -> list[tuple[str, str]]:
    """What the run is: names and texts, those that are known."""
    summary = record.summary
    accuracy = {name: value for name, value in (summary.get("accuracy") or {}).items() if value is not None}
    checkpoints = sorted(find_checkpoints(record.run_dir))
    facts = {
        "directory": str(record.root),
        "state": f"{state}, {count_of(record.attempts, 'attempt')}",
        "begun": format_time(begin_unix) if begin_unix else "",
        "time in steps": format_duration(sum(stage["seconds"] for stage in stages)),
        "stages": str(summary.get("mode") or " → ".join(record.stages)),
        "accuracy": " → ".join(f"{name} {100 * value:.1f} %" for name, value in accuracy.items()),
        "device": str(summary.get("device", "")),
        "seed": str(summary.get("seed", "")),
        "greatest memory": f"{summary['peak_rss_gib']} GiB" if "peak_rss_gib" in summary else "",
        "checkpoints": ", ".join(f"{stage}/step_{step}" for stage, step in checkpoints),
        "versions": ", ".join(f"{name} {of}" for name, of in (summary.get("versions") or {}).items()),
    }
    return [(name, text) for name, text in facts.items() if text]


def read_updates(run_dir: RunDir) -> dict[str, Any]:
    """The first and the newest lines of updates.log in columns, how many there are, and how many cannot be
    read.
    """
    text = run_dir.updates_log.read_text("utf-8", "replace") if run_dir.updates_log.exists() else ""
    *lines, torn = text.split("\n")
    shown = (
        lines if len(lines) <= FIRST_LINES + NEWEST_LINES else [*lines[:FIRST_LINES], *lines[-NEWEST_LINES:]]
    )
    rows = [match.groupdict() for line in shown if (match := UPDATE.fullmatch(line.rstrip()))]
    names = [name for name in UPDATE.groupindex if any((row[name] or "-") != "-" for row in rows)]
    unread = len(shown) - len(rows)
    return {
        "columns": [name.replace("_", " ") for name in names],
        "lines": [[row[name] or "" for name in names] for row in rows],
        "total": len(lines) - unread,
        "unread": unread + bool(torn),
    }

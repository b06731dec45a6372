"""What a report says of a run, as values that JSON takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollouts.inspect.overview import ACCURACY, DROPPED, FAILED, TROUBLE, read_settings
from rollouts.inspect.record import Record, Stage, open_record
from rollouts.inspect.report.numbers import make_curves, make_phases, make_spreads
from rollouts.inspect.report.samples import gather_samples
from rollouts.inspect.terminal import format_number
from rollouts.run_dir import RunDir, describe_activity, find_activity

POINTS = 2000  # of a curve, at most
CURVE_VALUES = 1_200_000  # numbers of all curves of a report together
PAUSE_S = 3600.0  # between two rows of one attempt; a longer one is not counted as work
PARTS = 20  # of the run's steps, for the small bars of failures
MESSAGES = 100  # distinct ones that are listed
FIRST_LINES, NEWEST_LINES = 200, 2000  # of updates.log that are shown
HEADINGS = {
    "version": "version",
    "kl": "KL",
    "beta": "β",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
HEADINGS["zero_advantage"] = "of these zero advantage"
SAMPLE_FACTS = (
    "stage, step, attempt, status, reward, response_length AS length,"
    " policy_version - weight_version_min AS lag,"
    " 400 + least(coalesce(strlen(prompt), 0) + coalesce(strlen(response), 0), 40000)"
    " + coalesce(strlen(metadata), 0) AS bytes, id,"
    " CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure"
)
# messages that differ only in numbers are one, shown as the first was
MESSAGES_SQL = r"""
    SELECT coalesce(failure->>'$.class', 'unknown') AS class,
        coalesce(failure->>'$.function', '') AS function,
        coalesce(nullif(trim(left(failure->>'$.message', 400)), ''), '(no message)') AS text,
        regexp_replace(text, '0x[0-9a-f]+|\d+(\.\d+)?', '#', 'gi') AS kind,
        count(*) AS count, min(step) AS first, max(step) AS last, min(place) AS place
    FROM samples_held WHERE status = 'failed' GROUP BY ALL"""
MERGED_SQL = f"""
    SELECT class, function, arg_min(text, place) AS text, sum(count)::BIGINT AS count, min(first) AS first,
        max(last) AS last, min(place) AS place FROM ({MESSAGES_SQL}) GROUP BY class, function, kind
    ORDER BY count DESC, place"""


class RunReport(NamedTuple):
    """A run for the page: what is said of it, and its samples as JSON texts."""

    facts: dict[str, Any]
    samples: list[str]


def gather_run(root: Path, *, points: int = POINTS, sample_bytes: int) -> RunReport:
    """Everything of a run that the page shows. Raises RunDirError for a directory that is no run."""
    with open_record(root) as record:
        stages = record.stages
        record.load("samples", SAMPLE_FACTS)
        names = max((len(stage.metrics) for stage in stages.values()), default=1)
        points = max(100, min(points, CURVE_VALUES // (3 * max(1, names))))
        seconds = {name: sum_seconds(stage) for name, stage in stages.items()}
        begin = find_begin(record)
        failures = make_failures(record)
        places = [message.pop("place") for message in failures["messages"]]
        samples = gather_samples(record, sample_bytes, places)
        facts = record.columns("SELECT stage, step, reward, length, lag FROM samples_held")
        activity = find_activity(record.run_dir)
        state = describe_activity(activity)
        if stages and not activity.certain:
            newest = max(float(np.nanmax(stage.columns["time_unix"])) for stage in stages.values())
            state += f"; last row {datetime.fromtimestamp(newest, UTC):%Y-%m-%d %H:%M UTC}"
        phases = {name: make_phases(stage, points=points) for name, stage in stages.items()}
        shown = {"total": len(facts["step"]), "shown": len(samples.texts), "how": samples.how}
        said = {
            "name": root.resolve().name,
            "state": activity.state,
            "tiles": make_tiles(record, sum(seconds.values()), failures),
            "facts": make_facts(record, state, sum(seconds.values()), begin),
            "notes": [*record.notes, *([samples.remark] if samples.remark else [])],
            "stages": [describe_stage(stage, seconds[name]) for name, stage in stages.items()],
            "curves": {
                name: make_curves(stage, points=points, begin_unix=begin) for name, stage in stages.items()
            },
            "phases": {name: found for name, found in phases.items() if found},
            "spreads": make_spreads(facts),
            "failures": failures,
            "evaluations": describe_evaluations(record),
            "updates": read_updates(record.run_dir),
            "config": list(read_settings(record.run_dir).items()),
            "samples": shown,
        }
    return RunReport(said, samples.texts)


def find_begin(record: Record) -> float:
    """When the first step began, in Unix time; 0 of an empty run."""
    begins = [
        float(
            np.nanmin(
                stage.columns["time_unix"]
                - np.nan_to_num(stage.columns.get("time/step", np.zeros(len(stage))))
            )
        )
        for stage in record.stages.values()
        if np.isfinite(stage.columns["time_unix"]).any()
    ]
    return min(begins, default=0.0)


def sum_seconds(stage: Stage) -> float:
    """How long a stage's steps took: the time between rows of one attempt, and the first step of each."""
    gaps = np.diff(stage.columns["time_unix"])
    together = (np.diff(stage.columns["attempt"]) == 0) & (gaps >= 0) & (gaps < PAUSE_S)
    begins = np.append(True, ~together)
    first = np.nansum(stage.columns["time/step"][begins]) if "time/step" in stage.columns else 0.0
    return float(np.nansum(gaps[together]) + first)


def describe_stage(stage: Stage, seconds: float) -> dict[str, Any]:
    """A row of the table of stages."""

    def find_ends(name: str) -> list[float] | None:
        _, values = stage.series(name)
        return [float(values[0]), float(values[-1])] if len(values) else None

    return {
        "name": stage.name,
        "last": int(stage.columns["step"][-1]),
        "seconds": seconds,
        "reward": find_ends("reward/mean"),
        "loss": find_ends("loss/total"),
        "failed": round(sum(stage.sum_below(FAILED).values())),
        "dropped": round(sum(stage.sum_below(DROPPED).values())),
    }


def describe_evaluations(record: Record) -> list[dict[str, Any]]:
    """The evaluations in the order of the run, each with its numbers."""
    return [
        {
            "stage": row["stage"],
            "step": row["step"],
            "version": row.get("policy_version"),
            "name": row.get("name", ""),
            "metrics": {name: value for name, value in row.items() if "/" in name},
        }
        for row in record.evaluations
    ]


def make_failures(record: Record) -> dict[str, Any]:
    """Samples that failed, by class and message, dropped groups, and steps that changed nothing."""
    stages = list(record.stages.values())
    steps = np.concatenate([np.empty(0, np.int64), *(stage.columns["step"] for stage in stages)])
    sums: dict[str, float] = {}
    for stage in stages:
        for prefix in (FAILED, DROPPED, *TROUBLE):
            for name, total in stage.sum_below(prefix).items():
                sums[prefix + name] = sums.get(prefix + name, 0.0) + total
    classes: list[dict[str, Any]] = []
    for name in [name for name in sums if name.startswith(FAILED)]:
        absent = [np.nan_to_num(stage.columns.get(name, np.zeros(len(stage)))) for stage in stages]
        counts = np.concatenate(absent)
        places = np.flatnonzero(counts)
        spread = np.bincount(places * PARTS // len(counts), weights=counts[places], minlength=PARTS)
        classes.append(
            {
                "name": name.removeprefix(FAILED),
                "total": round(sums[name]),
                "steps": len(places),
                "first": int(steps[places].min()),
                "last": int(steps[places].max()),
                "spread": [int(value) for value in spread],
            }
        )
    messages = record.rows(MERGED_SQL)
    examples = record.columns("SELECT place, id, stage, step FROM samples_held WHERE status = 'failed'")
    by_place = {place: index for index, place in enumerate(examples["place"].tolist())}
    for message in messages[:MESSAGES]:
        index = by_place[message["place"]]
        message |= {"sample": examples["id"][index], "stage": examples["stage"][index]}
        message["step"] = int(examples["step"][index])
    dropped = [
        [name.removeprefix(DROPPED), total] for name, total in sums.items() if name.startswith(DROPPED)
    ]
    return {
        "classes": classes,
        "messages": messages[:MESSAGES],
        "more": max(0, len(messages) - MESSAGES),
        "dropped": sorted(dropped, key=lambda pair: -pair[1]),
        "trouble": [[what, sums[name]] for name, what in TROUBLE.items() if name in sums],
    }


def make_tiles(record: Record, seconds: float, failures: Mapping[str, Any]) -> list[dict[str, str]]:
    """The numbers that people look for first, those that the run has."""
    tiles: list[dict[str, str]] = []

    def add(name: str, value: str, note: str = "") -> None:
        tiles.append({"name": name, "value": value, "note": note})

    stages = record.stages
    main = "rl" if "rl" in stages else list(stages)[-1] if stages else ""
    found = [
        (match, value)
        for row in record.evaluations
        for name, value in row.items()
        if (match := ACCURACY.fullmatch(name))
    ]
    if found:
        title = f"{found[0][0]['name']} {found[0][0]['stat']}"
        own = [value for match, value in found if match[0] == found[0][0][0]]
        add(title[:1].upper() + title[1:], f"{100 * own[-1]:.1f} %", f"at first {100 * own[0]:.1f} %")
    for name, title in (
        ("reward/mean", "Reward"),
        ("rewards/accuracies", "Pairs ranked right"),
        ("loss/total", "Loss"),
    ):
        values = stages[main].series(name)[1] if main else np.empty(0)
        if len(values):
            first, last = mean_ends(values)
            add(f"{title}, {main}", format_number(last), f"at first {format_number(first)}")
    steps = sum(map(len, stages.values()))
    add("Steps", f"{steps:,}", ", ".join(f"{name} {len(stage):,}" for name, stage in stages.items()))
    add(
        "Time in steps", format_seconds(seconds), f"{format_seconds(seconds / steps)} a step" if steps else ""
    )
    failed = sum(found["total"] for found in failures["classes"])
    add(
        "Samples failed",
        f"{failed:,}",
        ", ".join(f"{kind['name']} {kind['total']:,}" for kind in failures["classes"][:3]),
    )
    lag = stages[main].series("off_policy/max")[1] if main else np.empty(0)
    if len(lag):
        mean = stages[main].series("off_policy/mean")[1]
        note = f"versions; mean {format_number(float(mean.mean()))}" if len(mean) else "versions"
        add("Greatest staleness", f"{lag.max():.0f}", note)
    cut = stages[main].series("truncated/frac")[1] if main else np.empty(0)
    if len(cut):
        first, last = mean_ends(cut)
        add("Cut at the limit", f"{100 * last:.1f} %", f"at first {100 * first:.1f} %")
    return tiles


def mean_ends(values: np.ndarray) -> tuple[float, float]:
    """The means of the first and of the last tenth of the values."""
    count = max(1, len(values) // 10)
    return float(values[:count].mean()), float(values[-count:].mean())


def make_facts(record: Record, state: str, seconds: float, begin_unix: float) -> list[tuple[str, str]]:
    """What the run is: names and texts, those that are known."""
    summary = record.summary
    accuracy = {name: value for name, value in (summary.get("accuracy") or {}).items() if value is not None}
    facts = {
        "directory": str(record.root),
        "state": f"{state}, {record.attempts} attempt{'' if record.attempts == 1 else 's'}",
        "begun": f"{datetime.fromtimestamp(begin_unix, UTC):%Y-%m-%d %H:%M UTC}" if begin_unix else "",
        "time in steps": format_seconds(seconds),
        "stages": str(summary.get("mode") or " → ".join(record.stages)),
        "accuracy": " → ".join(f"{name} {100 * value:.1f} %" for name, value in accuracy.items()),
        "device": str(summary.get("device", "")),
        "seed": str(summary.get("seed", "")),
        "greatest memory": f"{summary['peak_rss_gib']} GiB" if "peak_rss_gib" in summary else "",
        "checkpoints": ", ".join(f"{stage}/step_{step}" for stage, step in sorted(record.checkpoints)),
        "versions": ", ".join(
            f"{name} {version}" for name, version in (summary.get("versions") or {}).items()
        ),
    }
    return [(name, text) for name, text in facts.items() if text]


def format_seconds(seconds: float) -> str:
    """In the unit that reads best."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def read_updates(run_dir: RunDir) -> dict[str, Any]:
    """The first and the newest lines of updates.log in columns, how many there are, and how many cannot be
    read.
    """
    if not run_dir.updates_log.exists():
        return {"columns": [], "lines": [], "total": 0, "unread": 0}
    *lines, torn = run_dir.updates_log.read_text(encoding="utf-8", errors="replace").split("\n")
    shown = (
        lines if len(lines) <= FIRST_LINES + NEWEST_LINES else [*lines[:FIRST_LINES], *lines[-NEWEST_LINES:]]
    )
    rows = [fields for line in shown if (fields := parse_update(line))]
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name, "-") not in ("", "-") for row in rows)
    ]
    if not rows:  # as a later version may write them
        return {
            "columns": [],
            "lines": [[line] for line in shown],
            "total": len(lines),
            "unread": int(bool(torn)),
        }
    unread = len(shown) - len(rows)
    return {
        "columns": [HEADINGS.get(name, name) for name in names],
        "lines": [[row.get(name, "") for name in names] for row in rows],
        "total": len(lines) - unread,
        "unread": unread + bool(torn),
    }


def parse_update(line: str) -> dict[str, str]:
    """The fields of a line: its time, `attempt N`, its stage, then names and values; empty for others."""
    body, skipped, reason = line.partition("  skipped: ")
    match = re.fullmatch(
        r"(\S+)\s+attempt\s+(\d+)\s+(\S+)((?:\s+[a-z_]+\s+[-+.\w]+(?:\s+(?:clipped|whole)\b)?)*)\s*", body
    )
    if match is None:
        return {}
    fields = {"time, UTC": match[1].replace("T", " ").rstrip("Z"), "stage": match[3], "attempt": match[2]}
    for name, value, clipped in re.findall(r"([a-z_]+)\s+([-+.\w]+)(?:\s+(clipped|whole)\b)?", match[4]):
        fields[name] = value
        if clipped:
            fields["clipped"] = "yes" if clipped == "clipped" else "no"
    return fields | {"note": f"skipped: {reason}" if skipped else ""}

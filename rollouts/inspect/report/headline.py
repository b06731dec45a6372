"""The numbers at the top of a report, and what a run is in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rollouts.inspect.read import RunRecord

Tile = dict[str, str]
SECOND_SHARE = 0.1  # of the steps: what "at first" and "at last" are means of, at least one


def make_tiles(record: RunRecord, steps: int, seconds: float, failures: Mapping[str, Any]) -> list[Tile]:
    """The numbers that people look for first, those that the run has."""
    main = "rl" if "rl" in record.stages else record.stages[-1] if record.stages else ""
    tiles = [*make_accuracy(record)]
    for name, title in (
        ("reward/mean", "Reward"),
        ("rewards/accuracies", "Pairs ranked right"),
        ("loss/total", "Loss"),
    ):
        if tile := make_change(record, main, name, title):
            tiles.append(tile)
    tiles.append(
        {
            "name": "Steps",
            "value": f"{steps:,}",
            "note": ", ".join(f"{stage} {len(record.stage_rows(stage)):,}" for stage in record.stages),
        }
    )
    tiles.append(
        {
            "name": "Time in steps",
            "value": format_seconds(seconds),
            "note": f"{format_seconds(seconds / steps)} a step" if steps else "",
        }
    )
    failed = sum(found["total"] for found in failures["classes"])
    kinds = ", ".join(f"{found['name']} {found['total']:,}" for found in failures["classes"][:3])
    tiles.append({"name": "Samples failed", "value": f"{failed:,}", "note": kinds})
    _, lag = record.series(main, "off_policy/max")
    if len(lag):
        mean = record.series(main, "off_policy/mean")[1]
        note = f"versions; mean {format_number(float(mean.mean()))}" if len(mean) else "versions"
        tiles.append({"name": "Greatest staleness", "value": f"{lag.max():.0f}", "note": note})
    _, cut = record.series(main, "truncated/frac")
    if len(cut):
        tiles.append(
            {
                "name": "Cut at the limit",
                "value": f"{100 * tail_mean(cut):.1f} %",
                "note": f"at first {100 * head_mean(cut):.1f} %",
            }
        )
    return tiles


def make_accuracy(record: RunRecord) -> list[Tile]:
    """The first and last held-out accuracy of the first evaluation that has one."""
    found = [
        (str(row.get("name", "")), name, float(row[name]))
        for row in record.evaluations
        for name in row
        if is_accuracy(name)
    ]
    if not found:
        return []
    evaluation, first, _ = found[0]
    own = [value for name, metric, value in found if (name, metric) == (evaluation, first)]
    title = f"{evaluation} {first.rsplit('/', 1)[-1]}".strip()
    return [
        {
            "name": title[:1].upper() + title[1:],
            "value": f"{100 * own[-1]:.1f} %",
            "note": f"at first {100 * own[0]:.1f} %",
        }
    ]


def is_accuracy(name: str) -> bool:
    return name.startswith("eval/") and (
        name.rsplit("/", 1)[-1].startswith("avg@") or name.endswith("/accuracy")
    )


def make_change(record: RunRecord, stage: str, name: str, title: str) -> Tile | None:
    """How a metric of a stage changed, from the mean of its first steps to that of its last; None where there
    is none.
    """
    _, values = record.series(stage, name)
    if not len(values):
        return None
    return {
        "name": f"{title}, {stage}",
        "value": format_number(tail_mean(values)),
        "note": f"at first {format_number(head_mean(values))}",
    }


def head_mean(values: np.ndarray[Any, Any]) -> float:
    return float(values[: max(1, int(len(values) * SECOND_SHARE))].mean())


def tail_mean(values: np.ndarray[Any, Any]) -> float:
    return float(values[-max(1, int(len(values) * SECOND_SHARE)) :].mean())


def make_facts(record: RunRecord, state: str, seconds: float, begin_unix: float) -> list[tuple[str, str]]:
    """What the run is: names and texts, those that are known."""
    summary = record.summary or {}
    versions = summary.get("versions")
    accuracy = summary.get("accuracy")
    facts = {
        "directory": str(record.root),
        "state": f"{state}, {record.attempts} attempt{'' if record.attempts == 1 else 's'}",
        "begun": datetime.fromtimestamp(begin_unix, UTC).strftime("%Y-%m-%d %H:%M UTC") if begin_unix else "",
        "time in steps": format_seconds(seconds),
        "stages": str(summary.get("mode") or " → ".join(record.stages)),
        "accuracy": format_accuracy(accuracy) if isinstance(accuracy, Mapping) else "",
        "device": str(summary.get("device", "")),
        "seed": str(summary.get("seed", "")),
        "greatest memory": f"{summary['peak_rss_gib']} GiB" if "peak_rss_gib" in summary else "",
        "checkpoints": ", ".join(f"{stage}/step_{step}" for stage, step in record.checkpoints),
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items())
        if isinstance(versions, Mapping)
        else "",
    }
    return [(name, text) for name, text in facts.items() if text]


def format_accuracy(accuracy: Mapping[str, Any]) -> str:
    """`base 0.0 % → rl 41.0 %`, of the stages that were evaluated."""
    return " → ".join(
        f"{stage} {100 * value:.1f} %" for stage, value in accuracy.items() if isinstance(value, int | float)
    )


def format_number(value: float) -> str:
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """In the unit that reads best."""
    for limit, size, unit in ((1.0, 1.0, "s"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.1f} h"

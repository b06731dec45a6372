"""What went wrong in a run: samples that failed, by class and message, dropped groups, steps that changed
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.inspect.columns import Columns
from rollouts.metrics.jsonl import Row

FAILED = "fail/"
DROPPED = "groups/dropped/"
TROUBLE = {
    "optim/skipped_steps": "optimizer steps that changed nothing: the loss or the gradient was not finite",
    "checkpoint/failed": "checkpoints that could not be saved",
    "weight_sync/engines_failed": "weight updates that an engine did not prove",
}
PARTS = 20  # of the run's steps, for the small bars
MESSAGES = 100  # distinct ones that are listed
READ = 20_000  # failed samples that are read for their messages
TEXT_CHARS = 400  # of a message
VARYING = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?", re.IGNORECASE)  # what differs between messages of one kind


def make_failures(
    metrics: Columns, rows: NDArray[np.int64], samples: Columns, sample_rows: NDArray[np.int64]
) -> dict[str, Any]:
    """The failures for the page. `rows`, `sample_rows`: numbers of the newest attempts' rows, by stage and
    step.
    """
    sums = {
        name: float(np.nansum(metrics.column(name)[rows]))
        for name in metrics.metrics
        if name.startswith(DROPPED) or name in TROUBLE
    }
    dropped = [
        [name.removeprefix(DROPPED), total]
        for name, total in sums.items()
        if name.startswith(DROPPED) and total
    ]
    messages = collect_messages(samples, sample_rows)
    return {
        "classes": [
            found
            for name in metrics.metrics
            if name.startswith(FAILED) and (found := describe_class(metrics, rows, name))
        ],
        "messages": messages[:MESSAGES],
        "more": max(0, len(messages) - MESSAGES),
        "dropped": sorted(dropped, key=lambda pair: -pair[1]),
        "trouble": [[TROUBLE[name], total] for name, total in sums.items() if name in TROUBLE and total],
    }


def describe_class(metrics: Columns, rows: NDArray[np.int64], name: str) -> dict[str, Any] | None:
    """Of the metric of a failure's class: how often, in which steps, and how often in each part of the run;
    None if never.
    """
    counts = np.nan_to_num(metrics.column(name)[rows])
    places = np.flatnonzero(counts)
    if not len(places):
        return None
    steps = metrics.column("step")[rows][places]
    spread = np.bincount(places * PARTS // len(rows), weights=counts[places], minlength=PARTS)
    return {
        "name": name.removeprefix(FAILED),
        "total": round(counts.sum()),
        "steps": len(places),
        "first": int(steps.min()),
        "last": int(steps.max()),
        "spread": [int(value) for value in spread],
    }


def collect_messages(samples: Columns, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Messages of failed samples, the most frequent first; those that differ only in numbers are one, shown
    as the first was.

    Of more than READ failed samples that many are read, evenly over the run, and the counts are scaled to
    all.
    """
    failed = rows[samples.match_text("status", "failed")[rows]] if samples.rows else rows
    read = failed[np.arange(READ) * len(failed) // READ] if len(failed) > READ else failed
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for index, row in zip(read.tolist(), samples.iterate_rows(read), strict=True):
        kind, function, text = describe_failure(row)
        key = (kind, function, VARYING.sub("#", text))
        example = {"sample": row.get("id"), "stage": row["stage"], "step": row["step"], "row": index}
        message = found.setdefault(
            key,
            {"class": kind, "function": function, "text": text, "count": 0, "first": row["step"], **example},
        )
        message["count"] += 1
        message["first"], message["last"] = (
            min(message["first"], row["step"]),
            max(message.get("last", 0), row["step"]),
        )
    for message in found.values():
        message["count"] = round(message["count"] * len(failed) / len(read))
    return sorted(found.values(), key=lambda message: -message["count"])


def describe_failure(row: Row) -> tuple[str, str, str]:
    """Class, function and message of a failed sample, as far as its row tells."""
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, Mapping) else None
    if not isinstance(failure, Mapping):
        return "unknown", "", "(no message)"
    text = str(failure.get("message", "")).strip() or "(no message)"
    return (
        str(failure.get("class", "unknown")),
        str(failure.get("function", "")),
        text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}…",
    )

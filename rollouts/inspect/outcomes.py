"""What became of samples and groups that did not train, and how old the weights were that made those that
did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from rollouts.inspect.columns import Columns
from rollouts.inspect.read import RunRecord, sum_by_name
from rollouts.inspect.table import DROPPED, FAILED, make_plain_table
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import Row

EVALUATION = "eval-"  # stage of the samples of an evaluation
NARROW = 80  # columns of a terminal below which an example takes several lines
LAGS = 8  # rows of the table of lags; what is further behind is one row
OTHER_TROUBLE = (  # metric, what its sum counts
    ("optim/skipped_steps", "optimizer steps changed nothing, for loss or gradient was not finite"),
    ("checkpoint/failed", "checkpoints could not be saved"),
    ("weight_sync/engines_failed", "updates of an engine failed"),
)


class Failure(NamedTuple):
    """A class of failed samples."""

    kind: str
    samples: int  # over all steps
    last: str  # stage and step of the last one
    example: str  # message of the newest that was logged, "" if none was


def collect_failures(record: RunRecord, samples: Columns) -> list[Failure]:
    """Failed samples by class, the most frequent first."""
    counts: dict[str, float] = {}
    last: dict[str, str] = {}
    for stage in record.stages:
        for kind, count in sum_by_name(record.stage_rows(stage), FAILED).items():
            counts[kind] = counts.get(kind, 0) + count
            steps, values = record.series(stage, FAILED + kind)
            last[kind] = f"{stage} {steps[values > 0][-1]}"
    ordered = sorted(counts, key=lambda kind: -counts[kind])
    return [Failure(kind, round(counts[kind]), last[kind], find_example(samples, kind)) for kind in ordered]


def find_example(samples: Columns, kind: str) -> str:
    """The message of the newest logged sample that failed so, on one line; "" if there is none."""
    found = np.flatnonzero(samples.match_text("failure", kind))
    return describe_failure(samples.read_rows(found[-1:])[0]) if len(found) else ""


def describe_failure(row: Row) -> str:
    """`function: message` of a failed sample on one line, "" for one that has none."""
    metadata = row.get("metadata")
    failure = metadata.get("failure") if isinstance(metadata, dict) else None
    if not isinstance(failure, dict):
        return ""
    words = [str(failure[name]) for name in ("function", "message") if failure.get(name)]
    return make_safe(" ".join(": ".join(words).split()), one_line=True)


def make_failure_table(failures: Sequence[Failure], *, width: int) -> Table | None:
    """Samples that failed, by class, with an example; None if none did."""
    if not failures:
        return None
    table = make_plain_table("samples that failed")
    table.add_column("class", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("last at step", no_wrap=True)
    narrow = width < NARROW
    table.add_column(
        "for example",
        no_wrap=not narrow,
        overflow="fold" if narrow else "ellipsis",
        max_width=max(20, width - 50),
    )
    for failure in failures:
        example = failure.example or "none was logged"
        table.add_row(
            failure.kind, f"{failure.samples}", failure.last, example[:width] if narrow else example
        )
    return table


def make_dropped_table(record: RunRecord) -> Table | None:
    """Groups that were drawn and not trained, by reason, with their share of all that were drawn; None if
    there are none.
    """
    table = make_plain_table("groups that were not trained")
    table.add_column("stage", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    for heading in ("groups", "of those drawn"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in record.stages:
        drawn = float(record.series(stage, "groups/drawn")[1].sum())
        dropped = sum_by_name(record.stage_rows(stage), DROPPED)
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
            table.add_row(stage, reason, f"{count:.0f}", f"{100 * count / drawn:.1f} %" if drawn else "")
    return table if table.row_count else None


def list_trouble(record: RunRecord) -> list[str]:
    """A line for each other kind of trouble that the metrics count."""
    lines: list[str] = []
    for name, what in OTHER_TROUBLE:
        total = sum(float(record.series(stage, name)[1].sum()) for stage in record.stages)
        if total:
            lines.append(f"{total:.0f} {what} ({name})")
    return lines


class Lags(NamedTuple):
    """How far behind the trainer the oldest token of the logged samples of training was, in weight versions."""

    counts: np.ndarray  # samples by lag, from 0; the one at LAGS is of all that were as far or further behind
    mixed: int  # samples with tokens of more than one version


def count_lags(samples: Columns) -> Lags:
    """Lags of the logged samples of training whose versions are known."""
    if not samples.rows:
        return Lags(np.zeros(0, dtype=np.int64), 0)
    oldest, newest = samples.column("weight_version_min"), samples.column("weight_version_max")
    training = np.array([not text.startswith(EVALUATION) for text in samples.texts("stage")])
    held = samples.newest() & (oldest >= 0) & training[samples.column("stage")]
    lag = samples.column("policy_version")[held] - oldest[held]
    return Lags(
        np.bincount(np.clip(lag, 0, LAGS)) if len(lag) else np.zeros(0, dtype=np.int64),
        int((newest[held] > oldest[held]).sum()),
    )


def describe_lags(lags: Lags, *, width: int) -> Table | str | None:
    """A table of lags; one line where all samples were of the newest weights; None where nothing is known."""
    total = int(lags.counts.sum())
    if not total:
        return None
    if len(lags.counts) == 1:
        return f"staleness: all {total} logged samples were made by the newest weights"
    title, mixed = (
        f"staleness of {total} logged samples",
        f"{100 * lags.mixed / total:.1f} % have tokens of more than one version",
    )
    table = make_plain_table(title)
    table.caption, table.caption_justify = mixed, "left"
    table.add_column("versions behind", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="cyan")
    room = max(4, min(50, width - 46))
    for lag, count in enumerate(lags.counts.tolist()):
        table.add_row(
            f"{LAGS} or more" if lag == LAGS else str(lag),
            str(count),
            f"{100 * count / total:.1f} %",
            "█" * round(count / total * room),
        )
    return table

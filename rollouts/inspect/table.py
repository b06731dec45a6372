"""Tables of a run for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from rollouts.inspect.column_rows import is_number
from rollouts.inspect.read import RunRecord, series, sum_by_name
from rollouts.metrics.jsonl import Row

COLUMNS = (  # heading, metrics of which the first present is shown, format
    ("reward", ("reward/mean",), "{:.3f}"),
    ("loss", ("loss/total",), "{:.4g}"),
    ("grad norm", ("optim/grad_norm",), "{:.3g}"),
    ("lr", ("optim/lr",), "{:.2e}"),
    ("entropy", ("entropy/mean",), "{:.3f}"),
    ("margin", ("rewards/margins",), "{:.3f}"),
    ("ranked right", ("rewards/accuracies", "accuracy"), "{:.2f}"),
    ("value", ("value/mean",), "{:.3f}"),
    ("explained", ("value/explained_variance",), "{:.2f}"),
    ("clipped", ("clip_ratio",), "{:.3f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("cut", ("truncated/frac",), "{:.2f}"),
    ("lag", ("off_policy/max",), "{:.0f}"),
    ("tok/s", ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s"), "{:.0f}"),
    ("s/step", ("time/step",), "{:.2f}"),
)
ACCURACY = re.compile(r"eval/(?P<name>.+)/(?P<stat>(?:avg|pass)@\d+|accuracy)")
RANKED_RIGHT = "accuracy"  # the statistic of held-out pairs: the share that is ranked right
MARGIN = "rewards/margins"  # of held-out preferences
STAGE_HEADINGS = (
    "stage",
    "steps",
    "reward first → last",
    "loss first → last",
    "minutes",
    "groups dropped",
    "failed",
)
DROPPED = "groups/dropped/"
FAILED = "fail/"


def make_stage_table(record: RunRecord, *, width: int = 160) -> Table | str:
    """One row per stage: how far, how the reward and the loss moved, how long, what was dropped and what
    failed. Lines where a table does not fit.
    """
    rows = [describe_stage(record, stage) for stage in record.stages]
    lines = [STAGE_HEADINGS, *rows]
    if count_fitting(lines, width) < len(STAGE_HEADINGS):
        return "\n".join(
            ", ".join(f"{name} {cell}" for name, cell in zip(STAGE_HEADINGS, row, strict=True) if cell)
            for row in rows
        )
    table = Table()
    for heading in STAGE_HEADINGS:
        table.add_column(
            heading, justify="left" if heading in ("stage", "groups dropped", "failed") else "right"
        )
    for row in rows:
        table.add_row(*row)
    return table


def describe_stage(record: RunRecord, stage: str) -> tuple[str, ...]:
    """A cell for each of STAGE_HEADINGS, empty where there is nothing to say."""
    rows = record.stage_rows(stage)
    minutes = sum(series(rows, "time/step")[1]) / 60
    return (
        stage,
        str(rows[-1]["step"]),
        format_first_last(rows, "reward/mean", "{:.3f}"),
        format_first_last(rows, "loss/total", "{:.4g}"),
        f"{minutes:.1f}",
        format_counts(sum_by_name(rows, DROPPED)),
        format_counts(sum_by_name(rows, FAILED)),
    )


def describe_state(record: RunRecord) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    state = "not finished" if record.summary is None else "finished"
    attempts = f"{record.attempts} attempt{'' if record.attempts == 1 else 's'}"
    newest = (
        f"checkpoint {'/step_'.join(map(str, find_newest_checkpoint(record)))}"
        if record.checkpoints
        else "no checkpoint"
    )
    return f"{state}, {attempts}, {newest}"


def find_newest_checkpoint(record: RunRecord) -> tuple[str, int]:
    """(stage, step) of the last checkpoint of the last stage that has one."""
    order = {stage: place for place, stage in enumerate(record.stages)}
    return max(record.checkpoints, key=lambda found: (order.get(found[0], -1), found[1]))


def make_evaluation_table(record: RunRecord) -> Table | None:
    """Accuracy (avg@k, pass@k, and of pairs those ranked right; in percent) per evaluation, in order; None if
    there was none.

    Where preferences were evaluated, the margin of their rewards too, as it is.
    """
    if not record.evaluations:
        return None
    found = [
        (row, match, row[name])
        for row in record.evaluations
        for name in row
        if (match := ACCURACY.fullmatch(name))
    ]
    stats = sorted(
        dict.fromkeys(match["stat"] for _, match, _ in found), key=lambda stat: stat == RANKED_RIGHT
    )
    margins = [row.get(f"eval/{row.get('name')}/{MARGIN}") for row in record.evaluations]
    more = ["margin"] if any(margin is not None for margin in margins) else []
    title = f"evaluations, %{', and margins of rewards' if more else ''}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("stage", "step", "version", "name", *stats, *more, "failed"):
        table.add_column(heading, justify="left" if heading in ("stage", "name") else "right")
    for row, margin in zip(record.evaluations, margins, strict=True):
        values = {match["stat"]: 100 * value for other, match, value in found if other is row}
        failed = sum(
            value for name, value in row.items() if name.startswith("eval/") and name.endswith("/failed")
        )
        cells = [f"{values[stat]:.1f}" if stat in values else "" for stat in stats]
        cells += ["" if margin is None else f"{margin:.3f}"] if more else []
        table.add_row(
            row["stage"],
            str(row["step"]),
            str(row.get("policy_version", "")),
            str(row.get("name", "")),
            *cells,
            f"{failed:.0f}",
        )
    return table


def make_step_table(record: RunRecord, *, last: int, width: int = 160) -> Table | None:
    """The last steps of the run, without columns that none of them has and those on the right that do not
    fit; None if there are no steps.
    """
    rows = record.metrics[-last:] if last > 0 else ()
    if not rows:
        return None
    columns = [column for column in COLUMNS if any(find_value(row, column[1]) is not None for row in rows)]
    lines = [
        [
            row["stage"],
            str(row["step"]),
            *(format_value(find_value(row, names), form) for _, names, form in columns),
        ]
        for row in rows
    ]
    headings = ["stage", "step", *(heading for heading, _, _ in columns)]
    kept = count_fitting([headings, *lines], width)
    left = len(headings) - kept
    title = ("last step" if len(rows) == 1 else f"last {len(rows)} steps") + (
        f" ({left} more columns in a wider terminal)" if left else ""
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings[:kept]:
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for line in lines:
        table.add_row(*line[:kept])
    return table


def make_plain_table(title: str) -> Table:
    """A table without lines."""
    return Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold"
    )


def count_fitting(lines: Sequence[Sequence[str]], width: int) -> int:
    """How many columns of a table fit into `width`, at least two: each takes its longest cell and three more,
    and the border one.
    """
    used = 1
    for column in range(len(lines[0])):
        used += max(len(line[column]) for line in lines) + 3
        if used > width and column >= 2:
            return column
    return len(lines[0])


def format_value(value: float | None, form: str) -> str:
    """The value in its form, empty for none."""
    return "" if value is None else form.format(value)


def find_value(row: Row, names: Sequence[str]) -> float | None:
    """The first of the metrics that the row has."""
    return next((row[name] for name in names if is_number(row.get(name))), None)


def format_first_last(rows: Sequence[Row], name: str, form: str) -> str:
    """`first → last` of a metric; empty if no row has it."""
    _, values = series(rows, name)
    return f"{form.format(values[0])} → {form.format(values[-1])}" if values else ""


def format_counts(counts: dict[str, float]) -> str:
    """`zero_std 12, surplus 3`, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:.0f}" for name, count in ordered)


def make_summary_lines(record: RunRecord) -> list[str]:
    """What summary.json says beyond the tables: mode, accuracies by stage, wall time, memory, seed, versions.
    Empty until the run is finished.
    """
    summary = record.summary or {}
    lines: list[str] = []
    if facts := [
        f"{name} {format_fact(summary[name])}"
        for name in ("mode", "seed", "wall_s", "peak_rss_gib")
        if name in summary
    ]:
        lines.append(", ".join(facts))
    accuracy = summary.get("accuracy")
    if isinstance(accuracy, dict) and (
        known := {stage: value for stage, value in accuracy.items() if isinstance(value, int | float)}
    ):
        lines.append(
            "accuracy: " + " → ".join(f"{stage} {100 * value:.1f} %" for stage, value in known.items())
        )
    pairs = summary.get("pair_accuracy")
    if isinstance(pairs, dict) and (
        ranked := {stage: value for stage, value in pairs.items() if isinstance(value, int | float)}
    ):
        lines.append(
            "pairs ranked right: "
            + ", ".join(f"{stage} {100 * value:.1f} %" for stage, value in ranked.items())
        )
    if isinstance(versions := summary.get("versions"), dict):
        lines.append(
            "versions: " + ", ".join(f"{package} {version}" for package, version in versions.items())
        )
    return lines


def format_fact(value: Any) -> str:
    """A number with at most two decimals, anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

"""What `inspect` prints: of one run everything at a glance, of several what differs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from rollouts.errors import RunDirError
from rollouts.inspect.chart import Curve, draw_chart, draw_sparkline
from rollouts.inspect.record import Record, Stage
from rollouts.inspect.terminal import format_number, make_table
from rollouts.run_dir import RunDir

CHARTS = {"reward/mean": "reward", "loss/total": "loss"}  # drawn of each stage
STEP_COLUMNS = {  # heading: metrics of which the first present is shown, format
    "reward": (("reward/mean",), ".3f"),
    "loss": (("loss/total",), ".4g"),
    "grad norm": (("optim/grad_norm",), ".3g"),
    "lr": (("optim/lr",), ".2e"),
    "entropy": (("entropy/mean",), ".3f"),
    "margin": (("rewards/margins",), ".3f"),
    "ranked right": (("rewards/accuracies", "accuracy"), ".2f"),
    "value": (("value/mean",), ".3f"),
    "explained": (("value/explained_variance",), ".2f"),
    "clipped": (("clip_ratio",), ".3f"),
    "length": (("response_length/mean",), ".1f"),
    "cut": (("truncated/frac",), ".2f"),
    "lag": (("off_policy/max",), ".0f"),
    "tok/s": (("perf/generated_tokens_per_s", "perf/trained_tokens_per_s"), ".0f"),
    "s/step": (("time/step",), ".2f"),
}
TELLING = (  # the first SHOWN that a stage has and that are not 0 throughout
    *("reward/mean", "loss/total", "rewards/accuracies", "rewards/margins", "loss/nll", "entropy/mean"),
    *(
        "response_length/mean",
        "truncated/frac",
        "optim/grad_norm",
        "kl/ref",
        "mismatch_kl/mean",
        "clip_ratio",
    ),
    *("off_policy/mean", "groups/zero_std_frac", "value/explained_variance", "importance_weight/ess"),
    *("perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "time/step", "optim/lr"),
)
SHOWN = 12
PICTURES = (  # panels of the PNG
    *("reward/mean", "loss/total", "response_length/mean", "entropy/mean", "rewards/margins"),
    *("value/explained_variance", "optim/grad_norm", "time/step"),
)
ACCURACY = re.compile(r"eval/(?P<name>.+)/(?P<stat>(?:avg|pass)@\d+|accuracy)")
TROUBLE = {
    "optim/skipped_steps": "optimizer steps changed nothing: loss or gradient was not finite",
    "checkpoint/failed": "checkpoints could not be saved",
    "weight_sync/engines_failed": "weight updates of an engine failed",
}
SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|key|token|secret|password|passwd|pass|credentials?|auth|authorization|dsn|headers)$",
    re.IGNORECASE,
)
URL_LOGIN = re.compile(r"(?<=://)[^/\s\"]+@")  # to the last @: a password may hold one
DROPPED, FAILED = "groups/dropped/", "fail/"
PHASE_PARTS = {"weight_sync_pause": "weight_sync"}  # a phase that lies within another
LAGS = 8  # versions; samples further behind count as these
LEAST_WIDTH = 100  # of a terminal that shows stages as a table, and four numbers of each course
SAMPLE_FACTS = (
    "stage, step, attempt, status, policy_version, weight_version_min, weight_version_max,"
    " CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure"
)


def print_run(console: Console, record: Record, *, last: int) -> None:
    """Prints everything about a run, the state and the outcome last. Parts that it has nothing for are left
    out.
    """
    record.load("samples", SAMPLE_FACTS)
    stages = record.stages.values()
    for part in iterate_parts(record, last=last, width=console.width):
        console.print(part, soft_wrap=not isinstance(part, Table))
        console.print()
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    names = ("steps", "reward first → last", "loss first → last", "minutes", "groups dropped", "failed")
    table = make_table("", "stage", *(f">{name}" for name in names), lines=True)
    for stage in stages:
        facts = describe_stage(stage)
        table.add_row(stage.name, *(facts.get(name, "") for name in names))
        if console.width < LEAST_WIDTH:
            line = ", ".join(f"{name} {text}" for name, text in facts.items())
            console.print(f"stage {stage.name}, {line}", soft_wrap=True)
    if stages and console.width >= LEAST_WIDTH:
        console.print(table)
    for line in [*list_summary(record), *record.notes]:
        console.print(line, soft_wrap=True)


def iterate_parts(record: Record, *, last: int, width: int) -> Iterator[RenderableType]:
    """The parts of a run's page that have something to say."""
    stages = record.stages.values()
    for stage in stages:
        for name, title in CHARTS.items():
            curve = Curve("", stage.name, name, *stage.series(name))
            if len(curve.values) > 1:
                size = max(20, min(72, width - 14))
                yield draw_chart([curve], width=size, height=8, title=f"{stage.name} {title}")
    tables = [
        *(make_course_table(stage, width=width) for stage in stages),
        make_step_table(record, last=last, width=width),
        make_evaluation_table(record),
        *(make_phase_table(stage, width=width) for stage in stages),
        describe_lags(record, width=width),
        make_dropped_table(record),
        make_failure_table(record),
    ]
    yield from (table for table in tables if table and (isinstance(table, str) or table.row_count))
    for name, what in TROUBLE.items():
        if total := sum(float(stage.series(name)[1].sum()) for stage in stages):
            yield f"{total:.0f} {what} ({name})"


def make_course_table(stage: Stage, *, width: int) -> Table:
    """The telling metrics of a stage: course, first, last, lowest and highest value; empty for one step."""
    shown = [(name, *stage.series(name)) for name in TELLING]
    shown = [found for found in shown if len(found[1]) > 1 and found[2].any()][:SHOWN]
    headings = ("first", "last", "min", "max") if width >= LEAST_WIDTH else ("last",)
    begin, end = int(stage.columns["step"][0]), int(stage.columns["step"][-1])
    table = make_table(
        f"{stage.name}, steps {begin} to {end}", "metric", "course", *(f">{name}" for name in headings)
    )
    table.columns[1].style = "cyan"
    room = max(4, min(60, width - 32 - 12 * len(headings)))
    for name, steps, values in shown:
        numbers = {"first": values[0], "last": values[-1], "min": values.min(), "max": values.max()}
        course = draw_sparkline(steps, values, first=begin, last=end, width=room)
        table.add_row(name, course, *(format_number(float(numbers[heading])) for heading in headings))
    return table


def make_step_table(record: Record, *, last: int, width: int) -> Table:
    """The last steps of the run, without columns that none of them has and those that do not fit."""
    rows = [
        (stage, place)
        for stage in record.stages.values()
        for place in range(max(0, len(stage) - last), len(stage))
    ][-last:]
    columns: dict[str, list[str]] = {
        "stage": [stage.name for stage, _ in rows],
        "step": [str(stage.columns["step"][place]) for stage, place in rows],
    }
    for heading, (names, form) in STEP_COLUMNS.items():
        cells: list[str] = []
        for stage, place in rows:
            held = [stage.columns[name][place] for name in names if name in stage.columns]
            cells.append(next((format(value, form) for value in held if np.isfinite(value)), ""))
        if any(cells):
            columns[heading] = cells
    used, kept = 1, 0
    for heading, cells in columns.items():
        used += max(map(len, [heading, *cells])) + 3
        kept += used <= width or kept < 2
    left = len(columns) - kept
    title = ("last step" if len(rows) == 1 else f"last {len(rows)} steps") + (
        f" ({left} more columns in a wider terminal)" if left else ""
    )
    headings = [name if name == "stage" else f">{name}" for name in list(columns)[:kept]]
    table = make_table(title, *headings, lines=True)
    for line in zip(*list(columns.values())[:kept], strict=True):
        table.add_row(*line)
    return table


def make_evaluation_table(record: Record) -> Table:
    """Accuracy of each evaluation in percent, and where preferences were evaluated the margin of their
    rewards.
    """
    rows = record.evaluations
    stats = dict.fromkeys(
        match["stat"] for row in rows for name in row if (match := ACCURACY.fullmatch(name))
    )
    ordered = sorted(stats, key=lambda stat: stat == "accuracy")
    margins = ["margin"] if any(f"eval/{row.get('name')}/rewards/margins" in row for row in rows) else []
    title = f"evaluations, %{', and margins of rewards' if margins else ''}"
    headings = (
        "stage",
        ">step",
        ">version",
        "name",
        *(f">{name}" for name in (*ordered, *margins, "failed")),
    )
    table = make_table(title, *headings, lines=True)
    for row in rows:
        prefix = f"eval/{row.get('name')}/"
        values = [row.get(prefix + stat) for stat in ordered]
        cells = ["" if value is None else f"{100 * value:.1f}" for value in values]
        if margins:
            margin = row.get(f"{prefix}rewards/margins")
            cells.append("" if margin is None else f"{margin:.3f}")
        place = (row["stage"], str(row["step"]), str(row.get("policy_version", "")), row.get("name", ""))
        table.add_row(*place, *cells, f"{row.get(f'{prefix}failed', 0):.0f}")
    return table


def make_phase_table(stage: Stage, *, width: int) -> Table | None:
    """Seconds per step, share of the time and a bar for each phase; None where the stage has no time/step."""
    steps = len(stage.series("time/step")[1])
    seconds = stage.sum_below("time/")
    total = seconds.pop("step", 0.0)
    if not total:
        return None
    wholes = sorted((name for name in seconds if name not in PHASE_PARTS), key=lambda name: -seconds[name])
    rest = total - sum(seconds[name] for name in wholes)
    title = f"{stage.name}, time by phase"
    if rest < -0.005 * total:
        title += " (phases overlap: together they are more than the step)"
    table = make_table(title, "phase", ">s/step", ">share", "")
    table.columns[-1].style = "cyan"
    rows = [(name, seconds[name]) for name in wholes]
    for part, whole in PHASE_PARTS.items():
        if part in seconds and whole in wholes:
            label = f"  of it {part.removeprefix(f'{whole}_')}"
            rows.insert(wholes.index(whole) + 1, (label, seconds[part]))
    rows += [("other", rest)] if rest >= 0.005 * total else []
    for name, held in rows:
        bar = "█" * round(min(1.0, held / total) * max(4, min(50, width - 46)))
        table.add_row(name, f"{held / steps:.3g}", f"{100 * held / total:.1f} %", bar)
    return table


def describe_lags(record: Record, *, width: int) -> Table | str:
    """How many weight versions behind the logged samples of training were; "" where nothing is known."""
    found = record.connection.execute(
        f"SELECT least(policy_version - weight_version_min, {LAGS}) AS lag, count(*),"
        " count(*) FILTER (weight_version_max > weight_version_min) FROM samples_held"
        " WHERE NOT starts_with(stage, 'eval-') AND weight_version_min >= 0 GROUP BY lag ORDER BY lag"
    ).fetchall()
    total = sum(count for _, count, _ in found)
    if not found or found[-1][0] == 0:
        return f"staleness: all {total} logged samples were made by the newest weights" if found else ""
    table = make_table(f"staleness of {total} logged samples", ">versions behind", ">samples", ">share", "")
    table.caption = (
        f"{100 * sum(mixed for *_, mixed in found) / total:.1f} % have tokens of more than one version"
    )
    table.caption_justify = "left"
    table.columns[-1].style = "cyan"
    for lag, count, _ in found:
        bar = "█" * round(count / total * max(4, min(50, width - 46)))
        label = f"{lag} or more" if lag == LAGS else str(lag)
        table.add_row(label, str(count), f"{100 * count / total:.1f} %", bar)
    return table


def make_dropped_table(record: Record) -> Table:
    """Groups that were drawn and not trained, by reason, with their share of all that were drawn."""
    table = make_table("groups that were not trained", "stage", "reason", ">groups", ">of those drawn")
    for stage in record.stages.values():
        drawn = float(stage.series("groups/drawn")[1].sum())
        for reason, count in sorted(stage.sum_below(DROPPED).items(), key=lambda item: -item[1]):
            share = f"{100 * count / drawn:.1f} %" if drawn else ""
            table.add_row(stage.name, reason, f"{count:.0f}", share)
    return table


def make_failure_table(record: Record) -> Table:
    """Samples that failed, by class, the most frequent first, with the newest logged message."""
    table = make_table("samples that failed", "class", ">samples", "last at step", "for example")
    examples = {
        row["kind"]: describe_failure(row["failure"])
        for row in record.rows(
            "SELECT failure->>'$.class' AS kind, last(failure ORDER BY place) AS failure FROM samples_held"
            " WHERE failure->>'$.class' IS NOT NULL GROUP BY ALL"
        )
    }
    counts: dict[str, float] = {}
    last: dict[str, str] = {}
    for stage in record.stages.values():
        for kind, count in stage.sum_below(FAILED).items():
            counts[kind] = counts.get(kind, 0) + count
            steps, values = stage.series(FAILED + kind)
            last[kind] = f"{stage.name} {steps[values > 0][-1]}"
    for kind in sorted(counts, key=lambda kind: -counts[kind]):
        table.add_row(kind, f"{counts[kind]:.0f}", last[kind], examples.get(kind) or "none was logged")
    return table


def describe_failure(failure: Any) -> str:
    """`function: message` of a failed sample on one line."""
    known = failure if isinstance(failure, dict) else {}
    return " ".join(
        ": ".join(str(known[name]) for name in ("function", "message") if known.get(name)).split()
    )


def describe_state(record: Record) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    attempts = f"{record.attempts} attempt{'' if record.attempts == 1 else 's'}"
    newest = (
        "checkpoint {}/step_{}".format(*record.checkpoints[-1]) if record.checkpoints else "no checkpoint"
    )
    return f"{'finished' if record.summary else 'not finished'}, {attempts}, {newest}"


def describe_stage(stage: Stage) -> dict[str, str]:
    """What a stage came to, by name; what it does not have is left out."""
    facts = {"steps": str(stage.columns["step"][-1])}
    for name, label in CHARTS.items():
        _, values = stage.series(name)
        if len(values):
            facts[f"{label} first → last"] = f"{format_number(values[0])} → {format_number(values[-1])}"
    _, seconds = stage.series("time/step")
    facts["minutes"] = f"{seconds.sum() / 60:.1f}"
    for prefix, label in ((DROPPED, "groups dropped"), (FAILED, "failed")):
        counts = sorted(stage.sum_below(prefix).items(), key=lambda item: -item[1])
        if counts:
            facts[label] = ", ".join(f"{name} {count:.0f}" for name, count in counts)
    return facts


def list_summary(record: Record) -> list[str]:
    """What summary.json says beyond the tables. Empty until the run is finished."""
    summary = record.summary
    facts = {name: summary[name] for name in ("mode", "seed", "wall_s", "peak_rss_gib") if name in summary}
    lines = [", ".join(f"{name} {value}" for name, value in facts.items())] if facts else []
    for key, label, joint in (("accuracy", "accuracy", " → "), ("pair_accuracy", "pairs ranked right", ", ")):
        held = summary.get(key) if isinstance(summary.get(key), dict) else {}
        known = [f"{stage} {100 * value:.1f} %" for stage, value in (held or {}).items() if value is not None]
        lines += [f"{label}: {joint.join(known)}"] if known else []
    versions = summary.get("versions") or {}
    return lines + (
        ["versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())] * bool(versions)
    )


# --- several runs -------------------------------------------------------------------------------------------


def name_runs(roots: Sequence[Path]) -> list[str]:
    """A short name for each run: its directory's, with as many directories above it as tell them apart."""
    parts = [root.resolve().parts for root in roots]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [str(root) for root in roots]


def print_comparison(console: Console, records: Mapping[str, Record]) -> None:
    """Prints runs side by side: metrics at equal steps, settings that differ, and what each came to."""
    stages = list(dict.fromkeys(name for record in records.values() for name in record.stages))
    tables = [make_metric_table(records, stage) for stage in stages]
    settings = make_table("settings that differ", "", *(f">{name}" for name in records), lines=True)
    known = [read_settings(record.run_dir) for record in records.values()]
    for key in sorted({key for held in known for key in held} - {"output.dir"}):
        values = [held.get(key, "—") for held in known]
        if len(set(values)) > 1:
            settings.add_row(key, *values)
    facts = make_table("", "", *(f">{name}" for name in records), lines=True)
    facts.add_row("state", *(describe_state(record) for record in records.values()))
    for stage in stages:
        found = [
            describe_stage(record.stages[stage]) | find_accuracies(record, stage)
            if stage in record.stages
            else {}
            for record in records.values()
        ]
        for name in dict.fromkeys(name for held in found for name in held):
            facts.add_row(f"{stage}: {name}", *(held.get(name, "—") for held in found))
    for table in (*tables, settings, facts):
        if table.row_count:
            console.print(table)
            console.print()
    for record in records.values():
        for note in record.notes:
            console.print(note, soft_wrap=True)


def make_metric_table(records: Mapping[str, Record], stage: str) -> Table:
    """The telling metrics of a stage, and how far each run is above (+) or below the first.

    They are means over the last tenth of the steps that all runs with this stage have reached.
    """
    held = {name: record.stages[stage] for name, record in records.items() if stage in record.stages}
    end = min(int(found.columns["step"][-1]) for found in held.values())
    begin = end - max(1, end // 10) + 1
    span = f"step {end}" if begin == end else f"mean of steps {begin} to {end}"
    table = make_table(f"{stage}, {span}", "", *(f">{name}" for name in held), lines=True)
    for name in TELLING if len(held) > 1 else ():
        means: list[float | None] = []
        for found in held.values():
            steps, values = found.series(name)
            chosen = values[(steps >= begin) & (steps <= end)]
            means.append(float(chosen.mean()) if len(chosen) else None)
        if sum(mean is not None for mean in means) < 2 or not any(means):
            continue
        cells = ["—" if mean is None else format_number(mean) for mean in means]
        for place, mean in enumerate(means[1:], 1):
            if mean is not None and means[0] is not None:
                difference = mean - means[0]
                cells[place] += f" ({'+' if difference >= 0 else '−'}{format_number(abs(difference), 3)})"
        table.add_row(name, *cells)
    return table


def find_accuracies(record: Record, stage: str) -> dict[str, str]:
    """Of the last evaluation of each name in a stage, each statistic in percent."""
    return {
        f"{match['name']} {match['stat']}": f"{100 * value:.1f} %"
        for row in record.evaluations
        if row["stage"] == stage
        for name, value in row.items()
        if (match := ACCURACY.fullmatch(name))
    }


def read_settings(run_dir: RunDir) -> dict[str, str]:
    """Each setting of config.toml as text by its dotted key, secrets hidden; none if it is missing.

    Raises RunDirError for what is no TOML.
    """
    try:
        table = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDirError(f"{run_dir.config} is not TOML ({error}); restore the file") from error

    def flatten(key: str, value: Any) -> Iterator[tuple[str, str]]:
        tables = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        if isinstance(value, dict) or tables:
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from flatten(f"{key}.{name}" if key else str(name), inner)
        elif isinstance(value, str) and value and SECRET_NAME.search(key):
            yield key, "(hidden)"
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield key, URL_LOGIN.sub("", text) or '""'

    return dict(flatten("", table))

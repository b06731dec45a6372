"""What `inspect` prints: of one run everything at a glance, of several what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby

import numpy as np
from rich.console import Console
from rich.table import Table

from rollouts.config.secrets import flatten
from rollouts.inspect.chart import draw_chart, draw_sparkline
from rollouts.inspect.facts import (
    ACCURACY,
    DROPPED,
    OUTCOMES,
    STEP_FACTS,
    count_of,
    describe_step,
    find_differences,
    find_trouble,
    load_facts,
    read_settings,
)
from rollouts.inspect.record import Record, find_checkpoints
from rollouts.inspect.terminal import format_number, tabulate
from rollouts.metrics.jsonl import Row

TELLING = (  # in this order, where a stage has them and they are not 0 throughout
    *("reward/mean", "loss/total", "rewards/accuracies", "rewards/margins", "loss/nll", "entropy/mean"),
    *("response_length/mean", "truncated/frac", "optim/grad_norm", "kl/ref", "mismatch_kl/mean"),
    *("clip_ratio", "off_policy/mean", "groups/zero_std_frac", "value/explained_variance"),
    *("importance_weight/ess", "perf/generated_tokens_per_s", "perf/trained_tokens_per_s"),
    *("time/step", "optim/lr"),
)
LEAST_WIDTH = 100  # of a terminal that shows four numbers of each course
CHARTS = """
    SELECT stage, name FROM totals JOIN stages USING (stage)
    WHERE rows > 1 AND name IN ('reward/mean', 'loss/total') ORDER BY stages.rowid, name DESC"""
# the first twelve telling metrics of each stage: means over equal ranges of its steps, and numbers
COURSES = """
    WITH ranges AS (
        SELECT *, rowid AS place, last - first + 1 AS steps, least(?, steps) AS ranges
        FROM stages WHERE rows > 1),
    means AS (
        SELECT stage, name, (step - first) * ranges // steps AS range, avg(value) AS mean
        FROM points JOIN ranges USING (stage) WHERE list_contains(?, name) GROUP BY ALL),
    courses AS (SELECT stage, name, map_from_entries(list((range, mean))) AS course FROM means GROUP BY ALL)
    SELECT format('{}, steps {} to {}', stage, ranges.first, ranges.last) AS title, name AS metric,
        [course[range] FOR range IN range(ranges.ranges)] AS "|course", totals.first AS ">first",
        totals.last AS ">last", low AS ">min", high AS ">max"
    FROM ranges JOIN courses USING (stage) JOIN totals USING (stage, name) WHERE low != 0 OR high != 0
    QUALIFY row_number() OVER (PARTITION BY stage ORDER BY list_position(?, name)) <= 12
    ORDER BY ranges.place, list_position(?, name)"""
# A row for each phase of each stage: the six longest, the pause of the weight sync, the rest of the step,
# which is below 0 where phases overlap: the title says so.
PHASES = """
    WITH times AS (
        SELECT stage, name[6:] AS phase, total AS seconds, total / rows AS each
        FROM totals JOIN stages USING (stage) WHERE name LIKE 'time/%' AND total > 0),
    phases AS (
        SELECT *, row_number() OVER (PARTITION BY stage ORDER BY seconds DESC) AS place FROM times
        WHERE phase NOT IN ('step', 'weight_sync_pause') QUALIFY place <= 6),
    whole AS (
        SELECT stage, any_value(step.seconds) AS seconds,
            any_value(step.each) - sum(phases.each) AS rest_each,
            any_value(step.seconds) - sum(phases.seconds) AS rest
        FROM phases JOIN (FROM times WHERE phase = 'step') AS step USING (stage) GROUP BY ALL)
    SELECT stage || ', time by phase' || if(rest < -0.005 * whole.seconds,
            ' (phases overlap: together they are more than the step)', '') AS title,
        shown.phase, shown.each AS ">s/step", percent(shown.seconds, whole.seconds) AS ">share",
        block(shown.seconds / whole.seconds) AS "|"
    FROM (FROM phases UNION ALL
        SELECT stage, '  of it pause', times.seconds, times.each, place + 0.5
        FROM times JOIN (FROM phases WHERE phase = 'weight_sync') AS whole USING (stage)
        WHERE times.phase = 'weight_sync_pause' UNION ALL
        SELECT stage, 'rest of the step', rest, rest_each, 7 FROM whole
        WHERE rest >= 0.005 * seconds) AS shown
    JOIN whole USING (stage) JOIN stages USING (stage) ORDER BY stages.rowid, place"""
# samples of training by how many weight versions they are behind; 8 and more count as one
LAGS = """
    SELECT format('staleness of {} logged samples, {} with tokens of more than one version',
            sum(samples) OVER (), percent(sum(mixed) OVER (), sum(samples) OVER ())) AS title,
        behind || if(behind = 8, ' or more', '') AS ">versions behind", samples AS ">samples",
        percent(samples, sum(samples) OVER ()) AS ">share", block(samples / sum(samples) OVER ()) AS "|"
    FROM (SELECT least(lag, 8) AS behind, count(*) AS samples, count(*) FILTER (mixed) AS mixed
        FROM samples_held WHERE NOT starts_with(stage, 'eval-') AND lag IS NOT NULL GROUP BY behind)
    ORDER BY behind"""
FAILED = r"""
    SELECT 'samples that failed' AS title, name[6:] AS class, sum(total)::BIGINT AS ">samples",
        max(last_step) AS ">last at step",
        coalesce((SELECT regexp_replace(concat_ws(': ', nullif(function, ''), text), '\s+', ' ', 'g')
            FROM messages WHERE messages.class = name[6:] LIMIT 1), 'none was logged') AS "for example"
    FROM totals WHERE name LIKE 'fail/%' GROUP BY name HAVING sum(total) > 0 ORDER BY sum(total) DESC"""


PARTS = (PHASES, LAGS, DROPPED, FAILED)


def print_run(console: Console, record: Record, *, last: int) -> None:
    """Prints everything about a run, the state and the outcome last. Parts that it has nothing for are left
    out.
    """
    load_facts(record)
    width, telling = console.width, list(TELLING)
    room = max(4, min(50, width - 46))
    record.connection.execute(
        f"CREATE MACRO block(share) AS repeat('█', round(least(1, greatest(0, share)) * {room})::INT)"
    )
    for row in record.rows(CHARTS):
        chart = draw_chart([record.read_curve(**row)], width=max(20, min(72, width - 14)), height=8)
        console.print(chart, end="\n\n", soft_wrap=True)
    ranges = max(4, min(60, width - (80 if width >= LEAST_WIDTH else 58)))
    courses = make_tables(record, COURSES, [ranges, telling, telling, telling], width=width)
    steps, evaluations = make_step_table(record, last=last, width=width), make_evaluation_table(record)
    parts = [make_tables(record, statement, lines=statement in (DROPPED, FAILED)) for statement in PARTS]
    print_tables(console, [*courses, steps, evaluations, *chain(*parts)])
    for what, total in find_trouble(record):
        console.print(f"{total:.0f} {what}\n", soft_wrap=True)
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    print_tables(console, make_tables(record, OUTCOMES, lines=True))
    for line in [*list_summary(record), *record.notes]:
        console.print(line, soft_wrap=True)


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Prints tables that have rows, with a line after each."""
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()


def make_tables(
    record: Record, sql: str, parameters: Sequence[object] = (), *, width: int = 0, lines: bool = False
) -> Iterator[Table]:
    """A table for each title among the rows of a statement."""
    for title, rows in groupby(record.rows(sql, parameters), key=lambda row: row.pop("title", "")):
        yield tabulate(title, [show_row(row) for row in rows], lines=lines, width=width)


def show_row(row: Row) -> dict[str, str]:
    """A row of a statement as cells of a table: numbers shortly, and lists as a course."""
    forms = {float: format_number, list: lambda means: draw_sparkline(np.array(means, np.float64))}
    return {name: forms.get(type(value), str)(value) for name, value in row.items()}


def make_step_table(record: Record, *, last: int, width: int) -> Table:
    """The last steps of the run, without columns that none of them has and those that do not fit."""
    rows = record.rows(
        f"FROM (SELECT *, rowid AS place FROM metrics_held ORDER BY rowid DESC LIMIT {last}) ORDER BY place"
    )
    headings = {f">{heading}": "" for heading, _ in STEP_FACTS.values()}
    cells = [
        {"stage": row["stage"], ">step": str(row["step"])}
        | headings
        | {f">{heading}": text for heading, text in describe_step(row).items()}
        for row in rows
    ]
    return tabulate(f"last {count_of(len(rows), 'step')}", cells, width=width)


def make_evaluation_table(record: Record) -> Table:
    """Accuracy of each evaluation in percent, and where preferences were evaluated the margin of their
    rewards.
    """
    rows: list[dict[str, str]] = []
    for row in record.rows("FROM evaluations_held ORDER BY rowid"):
        cells = {
            "stage": row["stage"],
            ">step": str(row["step"]),
            ">version": str(row.get("policy_version", "")),
        }
        cells["name"] = row.get("name", "")
        for name, value in row.items():
            stat = name.rpartition("/")[2]
            if ACCURACY.fullmatch(name):
                cells[f">{stat}"] = f"{100 * value:.1f} %"
            elif name.startswith("eval/") and stat in ("margins", "failed"):
                cells[f">{stat}"] = format_number(value)
        rows.append(cells)
    return tabulate("evaluations", rows)


def describe_state(record: Record) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    checkpoints = [f"checkpoint {stage}/step_{step}" for stage, step in find_checkpoints(record.run_dir)]
    state = "finished" if record.summary else "not finished"
    return ", ".join([state, count_of(record.attempts, "attempt"), (checkpoints or ["no checkpoint"])[-1]])


def list_summary(record: Record) -> list[str]:
    """What summary.json says beyond the tables. Empty until the run is finished."""
    known = {name: value for name, value in flatten(record.summary).items() if value is not None}
    shares = {name: value for name, value in known.items() if "accuracy." in name}
    facts = ", ".join(f"{name} {value}" for name, value in known.items() if name not in shares)
    accuracy = " → ".join(f"{name.partition('.')[2]} {100 * value:.1f} %" for name, value in shares.items())
    return list(filter(None, [facts, accuracy and f"accuracy: {accuracy}"]))


# --- several runs -------------------------------------------------------------------------------------------


def print_comparison(console: Console, records: Mapping[str, Record]) -> None:
    """Prints runs side by side: metrics at equal steps, settings that differ, and what each came to."""
    stages = dict.fromkeys(stage["stage"] for record in records.values() for stage in record.stages)
    tables = [make_metric_table(records, stage) for stage in stages]
    differing = find_differences([read_settings(record.run_dir) for record in records.values()])
    settings = [
        {"setting": name} | {f">{run}": value or "" for run, value in zip(records, values, strict=True)}
        for name, values in sorted(differing.items())
    ]
    facts: dict[str, dict[str, str]] = {}

    for run, record in records.items():
        load_facts(record)
        found = {"state": describe_state(record)}
        for row in record.rows(OUTCOMES):
            stage = row.pop("stage")
            found |= {f"{stage}: {name[1:]}": text for name, text in show_row(row).items()}
        for row in record.rows("FROM points WHERE starts_with(name, 'eval/') ORDER BY place"):
            if match := ACCURACY.fullmatch(row["name"]):
                found[f"{row['stage']}: {match['name']} {match['stat']}"] = f"{100 * row['value']:.1f} %"
        for label, text in found.items():
            facts.setdefault(label, {"": label})[f">{run}"] = text
    tables += [tabulate("settings that differ", settings, absent="—")]
    print_tables(console, [*tables, tabulate("", list(facts.values()), absent="—")])
    for note in (note for record in records.values() for note in record.notes):
        console.print(note, soft_wrap=True)


def make_metric_table(records: Mapping[str, Record], stage: str) -> Table:
    """The telling metrics of a stage, and how far each run is above (+) or below the first.

    They are means over the last tenth of the steps that all runs with this stage have reached.
    """
    held = {
        run: row["last"] for run, record in records.items() for row in record.stages if row["stage"] == stage
    }
    end = min(held.values())
    begin = end - max(1, end // 10) + 1
    means = (
        "SELECT name, avg(value) AS mean FROM points WHERE stage = ? AND step BETWEEN ? AND ? GROUP BY name"
    )
    found = {
        run: {row["name"]: row["mean"] for row in records[run].rows(means, [stage, begin, end])}
        for run in held
    }
    rows: list[dict[str, str]] = []
    for name in TELLING:
        first, cells = None, {"": name}
        for run, mean in ((run, found[run][name]) for run in held if name in found[run]):
            more = (
                ""
                if first is None
                else f" ({'+' if mean >= first else '−'}{format_number(abs(mean - first), 3)})"
            )
            first = mean if first is None else first
            cells[f">{run}"] = format_number(mean) + more
        rows += [cells] if len(cells) > 2 else []
    span = f"step {end}" if begin == end else f"mean of steps {begin} to {end}"
    return tabulate(f"{stage}, {span}", rows, absent="—")

"""What `inspect` prints: of one run everything at a glance, of several what differs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from rich.console import Console
from rich.table import Table

from rollouts.config.secrets import flatten
from rollouts.inspect.chart import draw_chart
from rollouts.inspect.record import (
    ACCURACY,
    DROPPED,
    OUTCOMES,
    TROUBLE,
    Record,
    count_of,
    find_checkpoints,
    load_facts,
    read_settings,
)
from rollouts.inspect.terminal import format_number, tabulate

MEASURES = "low|high|margins|failed|perplexity|entropy|kl|self_bleu"
CHARTS = """
    SELECT stage, name FROM totals JOIN stages USING (stage)
    WHERE rows > 1 AND name IN ('reward/mean', 'loss/total') ORDER BY stages.rowid, name DESC"""
# how wide bars and courses are, and how many steps are listed; from 100 columns on a course has four numbers
# beside it
VIEW = """
    SET VARIABLE room = greatest(4, least(50, {width} - 46));
    SET VARIABLE ranges = greatest(4, least(60, {width} - if({width} >= 100, 80, 58)));
    SET VARIABLE last = {last}"""
# The values of the map `facts` are further cells, by their headings.
# The first twelve telling metrics of each stage: means over equal ranges of its steps, and numbers
COURSES = """
    WITH ranges AS (
        SELECT *, rowid AS place, last - first + 1 AS steps, least(getvariable('ranges'), steps) AS ranges
        FROM stages WHERE rows > 1),
    means AS (
        SELECT stage, name, (step - first) * ranges // steps AS range, avg(value) AS mean
        FROM points JOIN ranges USING (stage) WHERE list_contains(telling(), name) GROUP BY ALL),
    courses AS (SELECT stage, name, map_from_entries(list((range, mean))) AS course FROM means GROUP BY ALL)
    SELECT format('{}, steps {} to {}', stage, ranges.first, ranges.last) AS title, name AS metric,
        sparkline([course[range] FOR range IN range(ranges.ranges)]) AS "|course",
        brief(totals.first) AS ">first", brief(totals.last) AS ">last", brief(low) AS ">min",
        brief(high) AS ">max"
    FROM ranges JOIN courses USING (stage) JOIN totals USING (stage, name) WHERE low != 0 OR high != 0
    QUALIFY row_number() OVER (PARTITION BY stage ORDER BY list_position(telling(), name)) <= 12
    ORDER BY ranges.place, list_position(telling(), name)"""
STEPS = """
    SELECT format('last {} step{}', count(*) OVER (), if(count(*) OVER () = 1, '', 's')) AS title, stage,
        step AS ">step", facts
    FROM (SELECT rowid AS place, stage, step, describe_step(to_json(metrics_held)) AS facts FROM metrics_held
        ORDER BY place DESC LIMIT getvariable('last')) ORDER BY place"""
# accuracies in percent, bounds of the mean reward, measures of the policy, and of preferences the margin
EVALUATIONS = rf"""
    WITH known AS (SELECT rowid AS place, to_json(evaluations_held) AS row, * FROM evaluations_held)
    SELECT 'evaluations' AS title, stage, step AS ">step", policy_version AS ">version", name, (
            SELECT map_from_entries(list((split(key, '/')[-1], if(regexp_matches(key, '{ACCURACY}'),
                percent(value::DOUBLE, 1), brief(value::DOUBLE))) ORDER BY id))
            FROM json_each(known.row) WHERE isfinite(TRY_CAST(value AS DOUBLE))
                AND regexp_matches(key, '{ACCURACY}|^eval/.*/({MEASURES})$')) AS facts
    FROM known ORDER BY place"""
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
        shown.phase, brief(shown.each) AS ">s/step", percent(shown.seconds, whole.seconds) AS ">share",
        bar(shown.seconds / whole.seconds) AS "|"
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
        percent(samples, sum(samples) OVER ()) AS ">share", bar(samples / sum(samples) OVER ()) AS "|"
    FROM (SELECT least(lag, 8) AS behind, count(*) AS samples,
            count(*) FILTER (weight_version_max > weight_version_min) AS mixed
        FROM samples_held WHERE NOT starts_with(stage, 'eval-') AND lag IS NOT NULL GROUP BY behind)
    ORDER BY behind"""
FAILED = r"""
    SELECT 'samples that failed' AS title, name[6:] AS class, sum(total)::BIGINT AS ">samples",
        max(last_step) AS ">last at step",
        coalesce((SELECT regexp_replace(concat_ws(': ', nullif(function, ''), text), '\s+', ' ', 'g')
            FROM messages WHERE messages.class = name[6:] LIMIT 1), 'none was logged') AS "for example"
    FROM totals WHERE name LIKE 'fail/%' GROUP BY name HAVING sum(total) > 0 ORDER BY sum(total) DESC"""
TOOLS = """
    SELECT 'tool calls' AS title, split(name, '/')[2] AS tool, sum(total)::BIGINT AS ">calls",
        map_from_entries(list((coalesce(split(name, '/')[3], 'no such tool'), total::BIGINT)
            ORDER BY total DESC)) AS facts
    FROM totals WHERE name LIKE 'tools/%' GROUP BY tool ORDER BY sum(total) DESC"""
ENDED = """
    SELECT 'trajectories' AS title, 'ended: ' || split(name, '/')[3] AS what, sum(total)::BIGINT AS ">number",
        percent(sum(total), sum(sum(total)) OVER ()) AS ">share"
    FROM totals WHERE name LIKE 'trajectories/ended/%' GROUP BY what ORDER BY sum(total) DESC"""


PARTS = (COURSES, STEPS, EVALUATIONS, PHASES, LAGS, ENDED, TOOLS, DROPPED, FAILED)
WITHOUT_LINES = (COURSES, PHASES, LAGS, ENDED)


def print_run(console: Console, record: Record, *, last: int) -> None:
    """Prints everything about a run, the state and the outcome last. Parts that it has nothing for are left
    out.
    """
    load_facts(record)
    width = console.width
    record.connection.execute(VIEW.format(width=width, last=last))
    for row in record.rows(CHARTS):
        chart = draw_chart([record.read_curve(**row)], width=max(20, min(72, width - 14)), height=8)
        console.print(chart, end="\n\n")
    for sql in PARTS:
        tables = make_tables(record, sql, lines=sql not in WITHOUT_LINES)
        print_tables(console, tables, fit=sql in (COURSES, STEPS, EVALUATIONS))
    for row in record.rows(TROUBLE):
        console.print(f"{row['total']:.0f} {row['what']}\n")
    console.print(f"{record.root}: {describe_state(record)}")
    print_tables(console, make_tables(record, OUTCOMES))
    facts = [
        f"{name} {round(value, 4) if isinstance(value, float) else value}"
        for name, value in flatten(record.summary).items()
        if value is not None
    ]
    console.print(", ".join(facts), *record.notes, sep="\n")


def print_tables(console: Console, tables: Iterable[Table], *, fit: bool = False) -> None:
    """Prints tables that have rows, with a line after each. `fit`: columns that do not fit are left out."""
    for table in (table for table in tables if table.row_count):
        wide, left_out = console.options.update(width=9999), 0
        while fit and len(table.columns) > 2 and console.measure(table, options=wide).minimum > console.width:
            table.columns.pop()
            left_out += 1
        if left_out:
            table.title = f"{table.title} ({left_out} more columns in a wider terminal)"
        console.print(table, "", soft_wrap=False)


def make_tables(record: Record, sql: str, *, lines: bool = True) -> Iterator[Table]:
    """A table for each title among the rows of a statement."""
    for title, rows in groupby(record.rows(sql), key=lambda row: row.pop("title", "")):
        cells = [row | {f">{name}": of for name, of in row.pop("facts", {}).items()} for row in rows]
        yield tabulate(title, cells, lines=lines)


def describe_state(record: Record) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    found = (f"checkpoint {stage}/step_{step}" for stage, step in find_checkpoints(record.run_dir))
    *_, newest = ("no checkpoint", *found)
    state = "finished" if record.summary else "not finished"
    return f"{state}, {count_of(record.attempts, 'attempt')}, {newest}"


# --- several runs -------------------------------------------------------------------------------------------

MEANS = """
    SELECT name, avg(value) AS mean FROM points
    WHERE stage = ? AND step BETWEEN ? AND ? AND list_contains(telling(), name)
    GROUP BY name ORDER BY list_position(telling(), name)"""
# the last accuracies of each stage; then everything that the last evaluation of each name says
ACCURACIES = f"""
    WITH evaluated AS (SELECT *, split(name, '/') AS parts FROM points WHERE name LIKE 'eval/%'),
    newest AS (FROM evaluated QUALIFY place = max(place) OVER (PARTITION BY parts[2]))
    SELECT label, text FROM (
        SELECT 1 AS part, min(place) AS spot, format('{{}}: {{}} {{}}', stage, parts[2], parts[-1]) AS label,
            percent(arg_max(value, place), 1) AS text
        FROM evaluated WHERE regexp_matches(name, '{ACCURACY}') GROUP BY stage, name, parts
        UNION ALL SELECT DISTINCT 2, place, 'last ' || parts[2], format('{{}} step {{}}', stage, step)
        FROM newest
        UNION ALL SELECT 2, place + 0.5, format('last {{}}: {{}}', parts[2], array_to_string(parts[3:], '/')),
            if(regexp_matches(name, '{ACCURACY}'), percent(value, 1), brief(value))
        FROM newest)
    ORDER BY part, spot, label"""


def print_comparison(console: Console, records: Mapping[str, Record]) -> None:
    """Prints runs side by side: metrics at equal steps, settings that differ, and what each came to."""
    stages = dict.fromkeys(stage["stage"] for record in records.values() for stage in record.stages)
    settings = {run: read_settings(record.run_dir) | {"output.dir": ""} for run, record in records.items()}
    outcomes: dict[str, dict[str, object]] = {}
    for run, record in records.items():
        load_facts(record)
        outcomes[run] = {"state": describe_state(record)}
        for row in record.rows(OUTCOMES):
            stage = row.pop("stage")
            outcomes[run] |= {f"{stage}: {name[1:]}": text for name, text in row.items()}
        outcomes[run] |= {row["label"]: row["text"] for row in record.rows(ACCURACIES)}
    tables = [compare_metrics(records, stage) for stage in stages]
    tables += [compare("settings that differ", settings, differ=True), compare("", outcomes)]
    print_tables(console, tables)
    for record in records.values():
        for note in record.notes:
            console.print(note)


def compare_metrics(records: Mapping[str, Record], stage: str) -> Table:
    """The telling metrics of a stage, and how far each run is above (+) or below the first of them.

    They are means over the last tenth of the steps that all runs with this stage have reached.
    """
    held = {run: row["last"] for run, of in records.items() for row in of.stages if row["stage"] == stage}
    end = min(held.values())
    begin = end - max(1, end // 10) + 1
    said: dict[str, dict[str, object]] = {}
    first: dict[str, float] = {}
    for run in held:
        means = {row["name"]: row["mean"] for row in records[run].rows(MEANS, [stage, begin, end])}
        said[run] = {name: format_number(mean) for name, mean in means.items()}
        for name in said[run].keys() & first.keys():
            said[run][name] = f"{said[run][name]} ({format_number(means[name] - first[name], 3, sign='+')})"
        first = first or means
    span = f"step {end}" if begin == end else f"mean of steps {begin} to {end}"
    return compare(f"{stage}, {span}", said)


def compare(title: str, runs: Mapping[str, Mapping[str, object]], *, differ: bool = False) -> Table:
    """A column for each run of what it says, a row for each label. `differ`: only what is not the same in
    all.
    """
    labels = list(dict.fromkeys(label for said in runs.values() for label in said))
    if differ:
        labels = [label for label in labels if len({said.get(label) for said in runs.values()}) > 1]
    rows = [{"": label} | {f">{run}": said.get(label) for run, said in runs.items()} for label in labels]
    return tabulate(title, rows, absent="—")

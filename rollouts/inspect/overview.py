"""What `inspect` prints: of one run everything at a glance, of several what differs; and curves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.config.secrets import flatten
from rollouts.config.spelling import nearest_names
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.guardrails import GUARDRAILS, HAPPENED, MATTERED, load_guardrails, read_log
from rollouts.inspect.record import (
    ACCURACY,
    DROPPED,
    OUTCOMES,
    TROUBLE,
    Curve,
    Record,
    count_of,
    find_checkpoints,
    load_facts,
    read_settings,
)
from rollouts.inspect.terminal import make_safe

MEASURES = "low|high|margins|failed|perplexity|entropy|kl|self_bleu"
CHARTS = """
    SELECT stage, name FROM totals JOIN stages USING (stage)
    WHERE rows > 1 AND name IN ('reward/mean', 'loss/total') ORDER BY stages.rowid, name DESC"""
# how wide bars and courses are, and how many steps are listed; from 100 columns on a course has four numbers
# beside it
VIEW = """
    SET VARIABLE room = greatest(4, least(50, {width} - 46));
    SET VARIABLE ranges = greatest(4, least(60, {width} - if({width} >= 100, 80, 58)));
    SET VARIABLE course = greatest(8, least(24, {width} - 125));
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


PARTS = (
    *(COURSES, STEPS, EVALUATIONS, GUARDRAILS, HAPPENED, MATTERED),
    *(PHASES, LAGS, ENDED, TOOLS, DROPPED, FAILED),
)
WITHOUT_LINES = (COURSES, GUARDRAILS, HAPPENED, PHASES, LAGS, ENDED)
FIT = (COURSES, STEPS, EVALUATIONS, GUARDRAILS, MATTERED)


def print_run(console: Console, record: Record, *, last: int) -> None:
    """Prints everything about a run, the state and the outcome last. Parts that it has nothing for are left
    out.
    """
    load_facts(record)
    load_guardrails(record, read_log(record))
    width = console.width
    record.execute(VIEW.format(width=width, last=last))
    for row in record.rows(CHARTS):
        chart = draw_chart([record.read_curve(**row)], width=max(20, min(72, width - 14)), height=8)
        console.print(chart, end="\n\n")
    for sql in PARTS:
        tables = make_tables(record, sql, lines=sql not in WITHOUT_LINES)
        print_tables(console, tables, fit=sql in FIT)
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


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, lines: bool = True
) -> Table:
    """A table. A heading that begins with ">" is aligned to the right, one with "|" is of a drawing."""
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=lines)
    if not lines:
        table.box, table.padding = None, (0, 2, 0, 0)
    for name in headings:
        style, justify = "cyan" * name.startswith("|"), "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">|"), justify=justify, style=style, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def tabulate(
    title: str, rows: Sequence[Mapping[str, object]], *, lines: bool = True, absent: str = ""
) -> Table:
    """A table with a row for each mapping, and a column for each heading that has a text in some row."""
    texts = [{name: str(of) for name, of in row.items() if of is not None} for row in rows]
    known = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in known if any(row.get(name) for row in texts)]
    return make_table(
        title, names, ([row.get(name) or absent for name in names] for row in texts), lines=lines
    )


def describe_state(record: Record) -> str:
    """Whether the run is finished, how often it was started, and its newest checkpoint."""
    found = [f"checkpoint {stage}/step_{step}" for stage, step in find_checkpoints(record.run_dir)]
    return (
        f"{'' if record.summary else 'not '}finished, {count_of(record.attempts, 'attempt')},"
        f" {found[-1] if found else 'no checkpoint'}"
    )


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
    stages = dict.fromkeys(
        stage["stage"] for record in records.values() for stage in record.rows("FROM stages")
    )
    settings = {run: read_settings(record.run_dir) | {"output.dir": ""} for run, record in records.items()}
    outcomes = {}
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
    held = {
        run: row["last"]
        for run, of in records.items()
        for row in of.rows("SELECT last FROM stages WHERE stage = ?", [stage])
    }
    end = min(held.values())
    begin = end - max(1, end // 10) + 1
    said = {}
    first = {}
    for run in held:
        means = {row["name"]: row["mean"] for row in records[run].rows(MEANS, [stage, begin, end])}
        said[run] = {
            name: f"{format_number(mean)}"
            f"{f' ({format_number(mean - first[name], 3, signed=True)})' if name in first else ''}"
            for name, mean in means.items()
        }
        first = first or means
    return compare(f"{stage}, {f'step {end}' if begin == end else f'mean of steps {begin} to {end}'}", said)


def compare(title: str, runs: Mapping[str, Mapping[str, object]], *, differ: bool = False) -> Table:
    """A column for each run of what it says, a row for each label. `differ`: only what is not the same in
    all.
    """
    labels = list(dict.fromkeys(label for said in runs.values() for label in said))
    if differ:
        labels = [label for label in labels if len({said.get(label) for said in runs.values()}) > 1]
    return tabulate(
        title,
        [{"": label} | {f">{run}": said.get(label) for run, said in runs.items()} for label in labels],
        absent="—",
    )


# --- curves: in braille dots for a terminal, and as a PNG ---------------------------------------------------


DOT_BITS = np.frombuffer(b"\x01\x08\x02\x10\x04\x20\x40\x80", np.uint8).reshape(4, 2)  # Unicode braille
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")  # of the runs, in turn
SHOWN_NAMES = 8  # of metrics that an error lists
# metrics and evaluations of a stage, or of all, those of stages that have steps first
NAMES = """
    SELECT stage, name FROM totals LEFT JOIN stages USING (stage)
    WHERE name GLOB ? AND stage = ifnull(?, stage)
    ORDER BY stages.rowid, name"""


def collect_panels(
    records: dict[str, Record],
    patterns: Sequence[str],
    *,
    stage: str | None = None,
    smooth: int = 1,
    log: bool = False,
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern: its curve of each run that has it, as
    read_curve makes it.

    Raises ConfigError for a pattern that no metric of the stage matches.
    """
    panels = {}
    for pattern in patterns:
        found = [
            (run, *row.values()) for run, of in records.items() for row in of.rows(NAMES, [pattern, stage])
        ]
        if not found:
            rows = [row for record in records.values() for row in record.rows(NAMES, ["*", None])]
            stages, names = (list(dict.fromkeys(row[part] for row in rows)) for part in ("stage", "name"))
            near = (nearest_names(pattern, names, count=SHOWN_NAMES) or names)[:SHOWN_NAMES]
            raise ConfigError(
                f"{pattern}: no metric that was logged is called so{f' in stage {stage}' if stage else ''};"
                f" near are {', '.join(near) or 'none'}; the stages are {', '.join(stages) or 'none yet'}"
            )
        for run, of, name in found:
            curve = records[run].read_curve(of, name, run, smooth=smooth, log=log)
            panels.setdefault((of, name), {})[run] = curve
    return [list(curves.values()) for curves in panels.values()]


def draw_chart(panel: Sequence[Curve], *, width: int, height: int = 10, log: bool = False) -> Text:
    """The curves over each other in braille, with highest and lowest value and the range of steps."""
    title = f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if log else ''}"
    steps, values = (np.concatenate([curve[field] for curve in panel]) for field in (2, 3))
    if not len(values):
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    low, high, first, last = values.min(), values.max(), steps.min(), steps.max()
    scale = np.log if log else np.asarray
    cells, owners = np.zeros((2, height, width), np.int64)
    for number, curve in enumerate(panel):
        if not len(curve.values):
            continue
        columns = np.rint((curve.steps - first) * (2 * width - 1) / max(1, last - first)).astype(np.int64)
        held, places = np.unique(columns, return_inverse=True)
        means = np.bincount(places, curve.values) / np.bincount(places)
        # straight from mean to mean, by more points than there are dots: a line has no gaps
        fine = np.linspace(held[0], held[-1], 16 * width * height)
        heights = np.interp(fine, held, scale(means)) - scale(low)
        shares = heights / (scale(high) - scale(low)) if high > low else heights + 0.5
        down, right = np.rint([(1 - shares) * (4 * height - 1), fine]).astype(int)
        np.bitwise_or.at(cells, (down // 4, right // 2), DOT_BITS[down % 4, right % 2])
        owners[down // 4, right // 2] = number
    labels = [format_number(high), *[""] * (height - 2), format_number(low)]
    margin = max(map(len, labels))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(panel))]
    text = Text(f"{'':>{margin}}  {title}\n")
    for label, row, owner in zip(labels, cells.tolist(), owners.tolist(), strict=True):
        text.append(f"{label:>{margin}} ┤")
        for cell, number in zip(row, owner, strict=True):
            text.append(chr(0x2800 + cell), colours[number])
        text.append("\n")
    text.append(f"{'':>{margin}}  {first}{f'step {last}':>{width - len(str(first))}}")
    for curve, colour in zip(panel if len(panel) > 1 else (), colours, strict=False):
        text.append(f"\n  ━ {curve.run}", colour)
    return text


def format_number(value: float, digits: int = 4, *, signed: bool = False) -> str:
    """A number with so many significant digits: 12.35, 0.0012, 12346 where the whole part is longer."""
    sign = "+" if signed else "-"
    return f"{value:{sign}.0f}" if 10**digits <= abs(value) < 10**7 else f"{value:{sign}.{digits}g}"


def save_png(panels: Sequence[Sequence[Curve]], path: Path, *, log: bool = False) -> None:
    """Writes the panels as a PNG, a column for each stage.

    Raises RunDirError if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError(
            "a picture needs matplotlib; install it: pip install 'rollouts-rl[plot]'"
        ) from error
    stages = {}
    for panel in panels:
        stages.setdefault(panel[0].stage, []).append(f"{panel[0].stage}: {panel[0].name}")
    grid: Any = [list(row) for row in zip_longest(*stages.values(), fillvalue=".")]
    figure = Figure(figsize=(max(7.5, 5.5 * len(stages)), 2.2 * len(grid) + 0.6), layout="constrained")
    places = figure.subplot_mosaic(grid)
    for panel in panels:
        title = f"{panel[0].stage}: {panel[0].name}"
        axes = places[title]
        axes.set_title(make_safe(title), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        for curve in panel:
            marker = "." if len(curve.steps) < 30 else None
            axes.plot(curve.steps, curve.values, linewidth=1.4, marker=marker, label=make_safe(curve.run))
        axes.set_yscale("log" if log else "linear")
        if len(panel) > 1:
            axes.legend(fontsize=8)
    try:
        with rc_context({"agg.path.chunksize": 10_000}):  # of long lines
            figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error}; name another file with --png FILE") from error

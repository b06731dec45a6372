"""The command `tail`: a run while it goes on, on one screen.

    files ──► read_lines ──► the newest rows of each kind, in tables ──► SCREEN, or LINES: one a step

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

import time
from contextlib import nullcontext
from pathlib import Path

import duckdb
import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollouts.inspect.record import DESCRIBING, SHOWING, read_settings
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import Place, read_lines
from rollouts.run_dir import RunDir, describe_activity, find_activity, list_parts, open_run_dir

START_BYTES = 8 << 20  # of the end of each kind of file that is read at first
HELD_ROWS = {"metrics": 2000, "evaluations": 1, "samples": 5, "spans": 20_000}  # the newest of each kind
OPENING = f"""
    SET threads = 1;
    {SHOWING};
    {DESCRIBING};
    CREATE MACRO lasting(s) AS CASE WHEN s < 100 THEN format('{{:.3g}} s', if(s < 0, 0, s))
        WHEN s < 6000 THEN format('{{:.3g}} min', s / 60) ELSE format('{{:.1f}} h', s / 3600) END;
    CREATE SEQUENCE places;
    CREATE TABLE asked (stage VARCHAR, total BIGINT);
    CREATE TABLE numbers (place BIGINT, name VARCHAR, value DOUBLE)"""
# the steps that the config asks of each stage
ASKED = r"""
    INSERT INTO asked SELECT left(name, -6), total
    FROM (SELECT unnest(?::VARCHAR[]) AS name, unnest(?::VARCHAR[]) AS total)
    WHERE name LIKE '%.steps' AND regexp_full_match(total, '\d+')"""
TABLE = (
    "CREATE TABLE {} (place BIGINT, stage VARCHAR, step BIGINT, attempt BIGINT, time_unix DOUBLE, row JSON)"
)
# lines that are no rows, and rows that do not say of which stage, step and attempt they are, are left out; of
# spans all but requests
TAKE = """
    CREATE OR REPLACE TABLE {0} AS FROM (
        FROM {0} UNION ALL
        SELECT nextval('places') AS place, row->>'stage' AS stage, TRY_CAST(row->>'step' AS BIGINT) AS step,
            TRY_CAST(row->>'attempt' AS BIGINT) AS attempt, TRY_CAST(row->>'time_unix' AS DOUBLE), row
        FROM (SELECT TRY_CAST(unnest(?::VARCHAR[]) AS JSON) AS row)
        WHERE row->>'stage' IS NOT NULL AND TRY_CAST(row->>'step' AS BIGINT) IS NOT NULL
            AND TRY_CAST(row->>'attempt' AS BIGINT) IS NOT NULL
            AND ('{0}' != 'spans' OR row->>'name' = 'generate'))
    QUALIFY row_number() OVER (ORDER BY place DESC) <= {1}"""
# those that the screen needs of all steps
NUMBERS = """
    INSERT INTO numbers
    SELECT place, key, TRY_CAST(value AS DOUBLE) AS number
    FROM (FROM metrics ANTI JOIN numbers USING (place)) AS fresh, json_each(fresh.row)
    WHERE (key IN (SELECT name FROM troubles) OR key LIKE 'fail/%'
        OR key IN ('reward/mean', 'rewards/accuracies', 'loss/total')) AND isfinite(number)"""
# `steps`: the rows of metrics without those after the step from which a later attempt went on
STEPS = """
    CREATE VIEW begun AS
    SELECT stage, attempt, min(step) AS first, min(place) AS place FROM metrics GROUP BY ALL;
    CREATE VIEW steps AS
    SELECT metrics.*, total, format('{} step {}', stage, step) || coalesce(' of ' || total, '') AS title
    FROM metrics LEFT JOIN asked USING (stage) WHERE NOT EXISTS (FROM begun WHERE begun.stage = metrics.stage
        AND begun.attempt > metrics.attempt AND begun.first <= metrics.step);
    CREATE MACRO join_facts(row, separator) AS array_to_string(
        [fact.key || ' ' || fact.value FOR fact IN map_entries(describe_step(row)) IF fact.value IS NOT NULL],
        separator)"""
# of the newest rows, each step a line; the first look finds the whole run
LINES = """
    SELECT title || '  ' || join_facts(row, '  ')
    FROM (FROM steps WHERE place > coalesce(getvariable('printed'), 0) ORDER BY place DESC LIMIT 20)
    ORDER BY place"""
PRINTED = "SET VARIABLE printed = (SELECT max(place) FROM steps)"
# where the run is and what its newest row says; the course of the first of three metrics that the stage has;
# then what engines, evaluations and samples say, and the last four warnings
SCREEN = """
    WITH newest AS (FROM steps ORDER BY place DESC LIMIT 1),
    own AS (FROM steps SEMI JOIN newest USING (stage)),
    pace AS (SELECT median(seconds) AS seconds FROM (
        SELECT time_unix - lag(time_unix) OVER (ORDER BY place) AS seconds
        FROM (FROM own SEMI JOIN newest USING (attempt) ORDER BY place DESC LIMIT 20))),
    courses AS (
        SELECT *, list_position(['loss/total', 'rewards/accuracies', 'reward/mean'], name) AS rank
        FROM own JOIN numbers USING (place) WHERE rank IS NOT NULL),
    drawn AS (
        SELECT *, min(step) OVER () AS low, max(step) OVER () - low + 1 AS span,
            least(span, greatest(10, least(60, $width - len(name) - 30)))::INT AS columns FROM courses
        WHERE rank = (SELECT rank FROM courses GROUP BY rank HAVING count(*) > 1 ORDER BY 1 DESC LIMIT 1)),
    course AS (
        SELECT map_from_entries(list((place, mean))) AS means
        FROM (SELECT (step - low) * columns // span AS place, avg(value) AS mean FROM drawn GROUP BY ALL)),
    warnings AS (
        SELECT 1 AS part, place, format('{}: attempt {} goes on from step {}',
            stage, attempt, first) AS text
        FROM begun WHERE EXISTS (FROM metrics WHERE metrics.stage = begun.stage
            AND metrics.attempt < begun.attempt AND metrics.step >= begun.first)
        UNION ALL
        SELECT 1, place, format('{} step {}: {:g} {}', stage, step, value, what)
        FROM steps JOIN numbers USING (place) JOIN troubles USING (name) WHERE value > 0
        UNION ALL
        SELECT 2, place, format('{} step {}: {}: {}', stage, step, coalesce(row->>'id', ''), regexp_replace(
            concat_ws(': ', row->>'$.metadata.failure.function', row->>'$.metadata.failure.message'),
            '\\s+', ' ', 'g')) FROM samples WHERE row->>'status' = 'failed')
    SELECT line FROM (
        SELECT 0 AS part, 0 AS place, $state AS line UNION ALL
        SELECT 1, 0, 'no step has ended yet' WHERE NOT EXISTS (FROM steps)
        UNION ALL
        SELECT 1, 0, title || format(', attempt {}', attempt)
            || coalesce(format(', {} ago', lasting($now - time_unix)), '')
            || coalesce(if($goes_on, format(', {} left', lasting(pace.seconds * (total - step))),
                NULL), '') FROM newest, pace
        UNION ALL
        SELECT 2, 0, format('{} {} {} {}', any_value(name), brief(arg_min(drawn.value, drawn.place)),
            sparkline([any_value(means)[place] FOR place IN range(any_value(columns))]),
            brief(arg_max(drawn.value, drawn.place))) FROM drawn, course HAVING count(*) > 0
        UNION ALL
        SELECT 3, 0, nullif(join_facts(row, '   '), '') FROM newest
        UNION ALL
        SELECT 4, 0, 'phases    ' || string_agg(
            format('{} {:.2f} s', key[6:], seconds), '  ' ORDER BY seconds DESC)
        FROM (SELECT key, TRY_CAST(value AS DOUBLE) AS seconds FROM newest, json_each(newest.row))
        WHERE key LIKE 'time/%' AND key NOT IN ('time/step', 'time/weight_sync_pause') AND seconds IS NOT NULL
        UNION ALL
        SELECT 5, min(place), format('engine    {}: {} requests, {} tokens in step {}', row->>'track',
            count(*), sum(TRY_CAST(row->>'tokens' AS BIGINT)), step)
        FROM spans SEMI JOIN (FROM spans ORDER BY place DESC LIMIT 1) AS one USING (stage, step)
        GROUP BY row->>'track', step
        UNION ALL
        SELECT 6, 0, format('evaluated {} step {}: ', any_value(stage), any_value(step)) || array_to_string(
            list(key || ' ' || brief(TRY_CAST(value AS DOUBLE)) ORDER BY id)[:4], ', ')
        FROM evaluations, json_each(evaluations.row)
        WHERE contains(key, '/') AND TRY_CAST(value AS DOUBLE) IS NOT NULL HAVING count(*) > 0
        UNION ALL
        SELECT 7, 0, 'failed    ' || string_agg(
            format('{} {:.0f}', name[6:], total), ', ' ORDER BY total DESC)
        FROM (SELECT name, sum(value) AS total FROM steps JOIN numbers USING (place)
            WHERE name LIKE 'fail/%' GROUP BY name HAVING total > 0)
        UNION ALL
        SELECT 8, place, format('sample    {} {} {} {} reward {}: {}', stage, step, coalesce(row->>'id', ''),
            coalesce(row->>'status', ''), coalesce(printf('%.3g', number_of(row, 'reward')), 'none'),
            coalesce(left(row->>'response', 2 * $width), '')) FROM samples
        UNION ALL
        SELECT 8 + part, place, 'warning   ' || text
        FROM (FROM warnings ORDER BY part DESC, place DESC LIMIT 4))
    WHERE line IS NOT NULL ORDER BY part, place"""


def find_start(path: Path) -> Place:
    """The place START_BYTES before the end of a file, over its parts."""
    room = START_BYTES
    for number, part in reversed(list(enumerate(list_parts(path)))):
        room -= part.stat().st_size
        if room < 0:
            return Place(number, -room)
    return Place()


async def follow(root: Path, console: Console, every_s: float, once: bool) -> None:
    """Follows a run on a terminal, or where there is none with one line for each step.

    Ends after a look that began when the run was not at work, so that no row is missed. Raises RunDirError
    for a directory that is no run.
    """
    settings = read_settings(open_run_dir(root))
    connection, shown = duckdb.connect(":memory:"), ""
    connection.execute(";".join([OPENING, *map(TABLE.format, HELD_ROWS), STEPS]))
    connection.execute(ASKED, [list(settings), list(settings.values())])
    places = {kind: find_start(root / f"{kind}.jsonl") for kind in HELD_ROWS}
    lively = console.is_terminal and not once
    with connection, Live(console=console, auto_refresh=False) if lively else nullcontext() as live:
        while True:
            activity = find_activity(RunDir(root))
            state, over = f"{root}: {describe_activity(activity)}", once or not activity.may_go_on
            found = False
            for kind, held in HELD_ROWS.items():
                if lines := list(read_lines(root / f"{kind}.jsonl", places[kind])):
                    found, places[kind] = True, lines[-1][1]
                    texts = [line.decode(errors="replace") for line, _ in lines]
                    connection.execute(TAKE.format(kind, held), [texts])
                    connection.execute(NUMBERS)
            if found or state != shown:
                shown = state
                values = {
                    "state": state,
                    "width": console.width,
                    "now": time.time(),
                    "goes_on": activity.may_go_on,
                }
                said = connection.execute(SCREEN, values) if lively or over else connection.execute(LINES)
                lines = [make_safe(line, one_line=True) for (line,) in said.fetchall()]
                connection.execute(PRINTED)
                text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
                if live is not None:
                    live.update(text, refresh=True)
                elif lines:
                    console.print(text, soft_wrap=False)
            if over:
                return
            await trio.sleep(every_s)

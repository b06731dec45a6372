"""What the commands that look at runs do; their options are in commands.toml."""

import csv
import io
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.overview import (
    collect_panels,
    draw_chart,
    make_table,
    print_comparison,
    print_run,
    save_png,
)
from rollouts.inspect.record import ACCURACY, COLUMNS, Record, count_of, find_parts, open_record, open_records
from rollouts.inspect.samples import find_samples, print_samples
from rollouts.inspect.terminal import make_safe, write_lines
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import replace_file
from rollouts.types import Fields

# panels of the PNG
PICTURES = f"""
    SELECT name FROM totals, (SELECT ['reward/mean', 'loss/total', 'response_length/mean', 'entropy/mean',
        'rewards/margins', 'value/explained_variance', 'optim/grad_norm', 'time/step'] AS wanted)
    WHERE list_contains(wanted, name) OR regexp_matches(name, '{ACCURACY}')
    GROUP BY name, wanted ORDER BY list_position(wanted, name), name"""
PLAIN_WIDTH = 160  # columns where the output is no terminal
SHOWN_ROWS = 200  # of the table of a query
SHOWN_CHARACTERS = 200  # of a cell of it


def make_console() -> Console:
    """The terminal, or PLAIN_WIDTH columns where there is none; all that it prints is made safe, and lines
    are broken only where `soft_wrap=False` says so.
    """

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(make_safe(segment.text), segment.style)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without braille gets question marks
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return SafeConsole(width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def run_inspect(arguments: Namespace) -> int:
    """Prints what the files of one run say, or what differs between several. Raises RolloutsError."""
    console = make_console()
    with open_records(arguments.run_dirs) as records:
        if len(records) > 1:
            if arguments.png is not None:
                raise ConfigError("--png is for one run; name one, or leave it out")
            print_comparison(console, records)
            return 0
        (record,) = records.values()
        print_run(console, record, last=arguments.last)
        print_picture(console, record, arguments.png)
    return 0


def print_picture(console: Console, record: Record, png: Path | None) -> None:
    """Draws the curves that every run has, and accuracies, and says where. A RUN/curves.png that is newer
    than its rows is left alone.
    """
    path = png or record.root / "curves.png"
    times = [
        part.stat().st_mtime
        for kind in ("metrics", "evaluations")
        for part in find_parts(record.run_dir, kind)
    ]
    names = [row["name"] for row in record.rows(PICTURES)]
    said = f"wrote {path}"
    try:
        if not names:
            said = f"no picture: {record.root} has no steps and no evaluations yet"
        elif png is None and path.exists() and path.stat().st_mtime > max(times):
            said = f"{path} is up to date"
        else:
            save_png(collect_panels({"": record}, names), path)
    except RunDirError as error:
        if png is not None:
            raise
        said = f"no picture: {error}"
    console.print(said)


def run_samples(arguments: Namespace) -> int:
    """Prints samples. Raises RunDirError; ConfigError for a value out of range."""
    with open_record(arguments.run_dir) as record:
        found = find_samples(record, vars(arguments))
        if arguments.json:
            write_lines(msgspec.json.Encoder().encode_lines(record.read_samples(found["places"])).decode())
        else:
            print_samples(make_console(), record, found, color=arguments.color)
    return 0


def run_plot(arguments: Namespace) -> int:
    """Draws curves. Raises ConfigError for a metric or stage that is none, RunDirError for what is no run."""
    if arguments.smooth < 1:
        raise ConfigError(f"--smooth {arguments.smooth}: at least 1")
    further = [Path(name) for name in arguments.names if Path(name).is_dir()]
    metrics = [name for name in arguments.names if not Path(name).is_dir()]
    if not metrics:
        raise ConfigError(
            "name at least one metric, for example reward/mean, or a pattern such as 'reward/*'"
        )
    console = make_console()
    with open_records([arguments.run_dir, *further]) as records:
        log, smooth = arguments.log, arguments.smooth
        panels = collect_panels(records, metrics, stage=arguments.stage, smooth=smooth, log=log)
    if arguments.png is not None:
        save_png(panels, arguments.png, log=log)
        console.print(f"wrote {arguments.png}")
        return 0
    # runs lie over each other, or below each other where there are no colours
    overlaid = console.color_system and not console.no_color
    for panel in panels:
        for curves in [panel] if overlaid else [[curve] for curve in panel]:
            if len(panel) > len(curves):
                console.print(curves[0].run)
            console.print(draw_chart(curves, width=max(20, min(100, console.width - 14)), log=log))
            console.print()
    return 0


def run_tail(arguments: Namespace) -> int:
    """0 when the run is over, 130 for Ctrl-C. Raises RunDirError for a directory that is no run."""
    import trio

    from rollouts.inspect.tail import follow

    if not arguments.every > 0:
        raise ConfigError(f"--every {arguments.every:g}: more than 0 seconds")
    try:
        trio.run(follow, arguments.run_dir, make_console(), arguments.every, arguments.once)
    except KeyboardInterrupt:
        return 130
    return 0


def run_query(arguments: Namespace) -> int:
    """Prints what the statement answers. Raises ConfigError for SQL that cannot be run, RunDirError."""
    with open_record(arguments.run_dir) as record:
        columns, rows = run_sql(record, arguments.sql)
    for note in record.notes:
        print(note, file=sys.stderr)
    if arguments.csv:
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([columns, *rows])
        write_lines(lines.getvalue())
    elif arguments.json:
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        write_lines(msgspec.json.Encoder(enc_hook=str).encode_lines(named).decode())
    else:
        headings = [
            ">" * isinstance(of, int | float) + format_cell(name)
            for name, of in zip(columns, rows[0] if rows else columns, strict=True)
        ]
        table = make_table("", headings, (list(map(format_cell, row)) for row in rows[:SHOWN_ROWS]))
        table.caption_justify, table.caption = "left", count_of(len(rows), "row")
        if len(rows) > SHOWN_ROWS:
            table.caption += f", the first {SHOWN_ROWS} are shown: --csv and --json print all"
        make_console().print(table, soft_wrap=False)
    return 0


def run_sql(record: Record, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a statement. Raises ConfigError for SQL that is wrong or does more than read."""
    try:
        statements = record.connection.extract_statements(sql)
        # no EXPLAIN: with ANALYZE it runs what it explains, and that may be a COPY onto the record
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise ConfigError("SQL: give one statement that reads, for example SELECT … FROM metrics")
        for kind in COLUMNS:
            if kind in sql.lower():
                record.add_views(kind)
                record.note_damage(kind, f"{kind}_lines")
        result = record.execute(sql)
        return [str(column[0]) for column in result.description or ()], result.fetchall()
    except duckdb.Error as error:
        text = " ".join(str(error).partition("\n\nLINE")[0].split())
        raise ConfigError(
            f"SQL: {text}; the views are {', '.join(COLUMNS)}, each with _all for every attempt, and a name"
            ' with a slash stands in double quotes: "reward/mean"'
        ) from error


def format_cell(value: Any) -> str:
    """A value on one line; what would steer a terminal is written out."""
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = make_safe(text[:SHOWN_CHARACTERS], one_line=True)
    return f"{shown}…" if len(text) > SHOWN_CHARACTERS else shown


def run_report(arguments: Namespace) -> int:
    """Writes the report. Raises RunDirError for what is no run, StorageError where the file cannot be
    written.
    """
    from rollouts.inspect.report.page import write_report

    path = arguments.output or arguments.run_dirs[0] / "report.html"
    size = write_report(arguments.run_dirs, path)
    print(f"wrote {path}, {size / 1e6:.1f} MB: open it in a browser")
    return 0


# --- traces -------------------------------------------------------------------------------------------------


# spans.jsonl as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open: the run
# is a process, each track a thread. The events of a thread must nest, so a track has lanes: one for its own
# work, and further ones for requests that it answers at once.
FIRST_TRACKS = ("trainer", "checkpoints", "rewards")  # engines come below them
CLOCK_SLIP_US = 100  # what a part may seem to outlast its whole by, as clocks were read one after the other
# `shown`: the spans of the steps that are exported; times in events are µs since the first of them
SHOWN = """
    CREATE TABLE shown AS SELECT *, rowid AS place FROM spans_held
    WHERE start_unix IS NOT NULL AND duration_s IS NOT NULL AND step BETWEEN ? AND ?"""
EVENTS = """
    SELECT coalesce(track, '') AS track, id IS NOT NULL AS of_sample, json_merge_patch('{}', json_object(
        'ph', 'X', 'pid', 1, 'name', coalesce(name, ''), 'cat', stage,
        'ts', round(start_unix * 1e6)::BIGINT - round((SELECT min(start_unix) FROM shown) * 1e6)::BIGINT,
        'dur', round((start_unix + duration_s) * 1e6)::BIGINT - round(start_unix * 1e6)::BIGINT,
        'args', json_object('step', step, 'policy_version', policy_version, 'attempt', attempt, 'id', id,
            'tokens', tokens))) AS event
    FROM shown ORDER BY start_unix, duration_s DESC, place"""
# requests that each engine answered and that waited when a step ended
COUNTERS = """
    SELECT 'C' AS ph, 1 AS pid, 'requests in flight' AS name,
        round(time_unix * 1e6)::BIGINT - round((SELECT min(start_unix) FROM shown) * 1e6)::BIGINT AS ts,
        json_group_object(if(name = 'fleet/queued', 'queued', split_part(name, '/', 2)), value) AS args
    FROM points
    WHERE (name = 'fleet/queued' OR name LIKE 'engine/%/in_flight') AND step BETWEEN ? AND ?
    GROUP BY stage, step, time_unix HAVING ts >= 0 AND max(name LIKE 'engine/%')"""


def run_export_trace(arguments: Namespace) -> int:
    """Writes the trace of a run. Raises ConfigError for steps that are none, RunDirError where there are no
    spans.
    """
    output = arguments.output or arguments.run_dir / "trace.json"
    steps = None
    if text := arguments.steps:
        numbers = [int(number) if number.isdecimal() else -1 for number in text.split("..")]
        if len(numbers) > 2 or [0, *numbers] != sorted([0, *numbers]):
            raise ConfigError(
                f"--steps {text}: give two whole numbers, the first not above the second, as 10..20"
            )
        steps = numbers[0], numbers[-1]
    with open_record(arguments.run_dir, points=True) as record:
        count = export_trace(record, output, steps=steps)
    for note in record.notes:
        print(note, file=sys.stderr)
    print(f"wrote {output}: {count} spans; open it at https://ui.perfetto.dev")
    return 0


def export_trace(record: Record, output: Path, *, steps: tuple[int, int] | None = None) -> int:
    """How many spans were written to `output`, which appears when it is complete. `steps`: first and last.

    Raises RunDirError where the run has no spans (of these steps), StorageError where `output` cannot be
    written.
    """
    record.load("spans")
    between = list(steps or (-1, 1 << 62))
    record.execute(SHOWN, between)
    (found,) = record.rows("SELECT count(*) AS spans FROM shown")
    if not found["spans"]:
        raise RunDirError(
            f"{record.root}: spans.jsonl has no span{f' of steps {steps[0]} to {steps[1]}' if steps else ''};"
            " name a run that has trained a step"
        )
    events = chain(place_events(record.iterate_rows(EVENTS)), record.rows(COUNTERS, between))
    encode = msgspec.json.encode
    begin = b'{"traceEvents":[\n', encode(describe("process_name", 0, name=record.root.resolve().name))
    chunks = chain(begin, (b",\n" + encode(event) for event in events), [b"\n]}\n"])
    replace_file(output, chunks, way_out="name another file with --output FILE")
    return found["spans"]


def describe(what: str, tid: int, **arguments: object) -> Fields:
    """The event that says something of a thread or the process."""
    return {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": arguments}


def place_events(rows: Iterable[Row]) -> Iterator[Fields]:
    """The events of spans with their lanes, in order of their beginnings, and before the first of a lane the
    lane's name and place.
    """
    # by track and whether of samples: by tid, the ends of the open spans, outermost first
    lanes = {}
    places = {track: place for place, track in enumerate(FIRST_TRACKS)}
    count = 0
    for row in rows:
        event, track, of_sample = row["event"], row["track"], row["of_sample"]
        begin, end = event["ts"], event["ts"] + event["dur"]
        own = lanes.setdefault((track, of_sample), {})
        for tid, ends in own.items():  # noqa: B007
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (not of_sample and end <= ends[-1] + CLOCK_SLIP_US):
                break
        else:
            tid = count = count + 1
            ends = own[tid] = []
            label = f"{track} · {len(own)}" if of_sample or len(own) > 1 else track
            order = 1000 * places.setdefault(track, len(places)) + min(len(own), 400) + 500 * of_sample
            yield describe("thread_name", tid, name=label)
            yield describe("thread_sort_index", tid, sort_index=order)
        ends.append(min([end, *ends[-1:]]))
        yield event | {"tid": tid, "dur": ends[-1] - begin}

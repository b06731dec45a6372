"""What the commands that look at runs do; their options are in commands.toml."""

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any

import duckdb
import msgspec
from rich.console import Console

from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.chart import collect_panels, draw_chart, save_png
from rollouts.inspect.overview import print_comparison, print_run
from rollouts.inspect.record import ACCURACY, KINDS, Record, count_of, find_parts, open_record, open_records
from rollouts.inspect.samples import find_samples, print_samples
from rollouts.inspect.terminal import make_console, make_safe, make_table, write_lines
from rollouts.inspect.trace import export_trace

# panels of the PNG
PICTURES = f"""
    SELECT name FROM totals, (SELECT ['reward/mean', 'loss/total', 'response_length/mean', 'entropy/mean',
        'rewards/margins', 'value/explained_variance', 'optim/grad_norm', 'time/step'] AS wanted)
    WHERE list_contains(wanted, name) OR regexp_matches(name, '{ACCURACY}')
    GROUP BY name, wanted ORDER BY list_position(wanted, name), name"""
SHOWN_ROWS = 200  # of the table of a query
SHOWN_CHARACTERS = 200  # of a cell of it
SEARCH = ("step", "last", "stage", "status", "group", "grep", "sort", "reverse", "limit")  # of find_samples


def run_inspect(arguments: argparse.Namespace) -> int:
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
    parts = [part for kind in ("metrics", "evaluations") for part in find_parts(record.run_dir, kind)]
    names = [row["name"] for row in record.rows(PICTURES)]
    said = f"wrote {path}"
    try:
        if not names:
            said = f"no picture: {record.root} has no steps and no evaluations yet"
        elif (
            png is None
            and path.exists()
            and path.stat().st_mtime > max(part.stat().st_mtime for part in parts)
        ):
            said = f"{path} is up to date"
        else:
            save_png(collect_panels({"": record}, names), path)
    except RunDirError as error:
        if png is not None:
            raise
        said = f"no picture: {error}"
    console.print(said)


def run_samples(arguments: argparse.Namespace) -> int:
    """Prints samples. Raises RunDirError; ConfigError for a value out of range."""
    with open_record(arguments.run_dir) as record:
        found = find_samples(record, **{name: getattr(arguments, name) for name in SEARCH})
        if arguments.json:
            rows = record.read_samples(found.places)
            write_lines(msgspec.json.Encoder().encode_lines(rows).decode())
        else:
            print_samples(make_console(), record, found, color=arguments.color)
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
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
            width = max(20, min(100, console.width - 14))
            console.print(draw_chart(curves, width=width, log=log))
            console.print()
    return 0


def run_tail(arguments: argparse.Namespace) -> int:
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


def run_query(arguments: argparse.Namespace) -> int:
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
        pairs = zip(columns, rows[0] if rows else columns, strict=True)
        headings = [">" * isinstance(of, int | float) + format_cell(name) for name, of in pairs]
        table = make_table("", headings, (list(map(format_cell, row)) for row in rows[:SHOWN_ROWS]))
        more = f", the first {SHOWN_ROWS} are shown: --csv and --json print all" * (len(rows) > SHOWN_ROWS)
        table.caption, table.caption_justify = count_of(len(rows), "row") + more, "left"
        make_console().print(table, soft_wrap=False)
    return 0


def run_sql(record: Record, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a statement. Raises ConfigError for SQL that is wrong or does more than read."""
    try:
        statements = record.connection.extract_statements(sql)
        # no EXPLAIN: with ANALYZE it runs what it explains, and that may be a COPY onto the record
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise ConfigError("SQL: give one statement that reads, for example SELECT … FROM metrics")
        for kind in KINDS:
            if kind in sql.lower():
                record.add_views(kind)
                record.note_damage(kind, f"{kind}_lines")
        result = record.connection.execute(sql)
        return [str(column[0]) for column in result.description or ()], result.fetchall()
    except duckdb.Error as error:
        text = " ".join(str(error).partition("\n\nLINE")[0].split())
        raise ConfigError(
            f"SQL: {text}; the views are {', '.join(KINDS)}, each with _all for every attempt, and a name"
            ' with a slash stands in double quotes: "reward/mean"'
        ) from error


def format_cell(value: Any) -> str:
    """A value on one line; what would steer a terminal is written out."""
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = make_safe(text[:SHOWN_CHARACTERS], one_line=True)
    return f"{shown}…" if len(text) > SHOWN_CHARACTERS else shown


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the report. Raises RunDirError for what is no run, StorageError where the file cannot be
    written.
    """
    from rollouts.inspect.report.page import write_report

    path = arguments.output or arguments.run_dirs[0] / "report.html"
    size = write_report(arguments.run_dirs, path)
    print(f"wrote {path}, {size / 1e6:.1f} MB: open it in a browser")
    return 0


def run_export_trace(arguments: argparse.Namespace) -> int:
    """Writes the trace of a run. Raises ConfigError for steps that are none, RunDirError where there are no
    spans.
    """
    output = arguments.output or arguments.run_dir / "trace.json"
    steps: tuple[int, int] | None = None
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

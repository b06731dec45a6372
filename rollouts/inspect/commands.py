"""The commands that look at runs: what they take and what they print. Nothing heavy is imported until one
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rollouts.inspect.record import Record


def add_parser(
    commands: Any, name: str, what: str, run: object, *, several: bool = False
) -> argparse.ArgumentParser:
    """The parser of a command that takes a run directory, or several."""
    parser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    help_text = "a run directory, for example runs/demo"
    if several:
        parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help=help_text)
    else:
        parser.add_argument("run_dir", type=Path, metavar="RUN", help=help_text)
    parser.set_defaults(run=run)
    return parser


def add_inspect_parser(commands: Any) -> None:
    """Adds `inspect`."""
    what = "what became of a run, also while it runs; several runs side by side"
    parser = add_parser(commands, "inspect", what, run_inspect, several=True)
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="where to draw the curves as a picture (default RUN/curves.png; needs matplotlib)",
    )
    parser.add_argument(
        "--last", type=int, default=10, metavar="N", help="how many of the last steps to list (10)"
    )
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="also print the last N samples")


def add_samples_parser(commands: Any) -> None:
    """Adds `samples`."""
    what = "transcripts: samples by step, reward, status or text; the last ones, unless --sort is given"
    parser = add_parser(commands, "samples", what, run_samples)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="samples of this step")
    which.add_argument("--last", action="store_true", help="samples of the last step that has any")
    parser.add_argument("--stage", metavar="STAGE", help="samples of this stage, for example rl or eval-rl")
    parser.add_argument(
        "--status", help="samples that ended so: completed, truncated, aborted, failed or pending"
    )
    parser.add_argument("--group", type=int, metavar="G", help="samples of the group with this group_index")
    what = "samples whose prompt, response or failure message holds TEXT, in upper or lower case"
    parser.add_argument("--grep", default="", metavar="TEXT", help=what)
    what = "lowest first, by step, reward, length, tokens, lag or group"
    parser.add_argument("--sort", metavar="KEY", help=what)
    parser.add_argument("--reverse", action="store_true", help="highest first")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="how many to print (default 10)")
    what = "mark each token by advantage, logprob_diff or mask; needs the arrays that a run keeps per token"
    parser.add_argument("--color", metavar="VALUE", help=what)
    parser.add_argument("--json", action="store_true", help="the rows as JSON lines")


def add_plot_parser(commands: Any) -> None:
    """Adds `plot`."""
    parser = add_parser(commands, "plot", "curves of chosen metrics, of one run or several", run_plot)
    what = "a metric, or a pattern such as 'reward/*'; a directory is a further run"
    parser.add_argument("names", nargs="+", metavar="METRIC | RUN", help=what)
    parser.add_argument("--stage", metavar="STAGE", help="only this stage")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="draw means of N steps, up to each"
    )
    parser.add_argument(
        "--log", action="store_true", help="logarithmic; values that are not above 0 are left out"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture instead (needs matplotlib)")


def add_tail_parser(commands: Any) -> None:
    """Adds `tail`."""
    what = "follow a run while it goes on, also over ssh; ends with the run"
    parser = add_parser(commands, "tail", what, run_tail)
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    what = "seconds between looks at the files (default 0.5)"
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help=what)


def add_query_parser(commands: Any) -> None:
    """Adds `query`."""
    what = "SQL over the views metrics, evaluations, samples, contributions and spans of a run"
    parser = add_parser(commands, "query", what, run_query)
    parser.description = (
        f"{what}, which hold the newest attempt of each step; with _all appended (metrics_all) every attempt."
        ' Columns are called as logged: a name with a slash stands in double quotes, "reward/mean".'
    )
    what = """one statement, for example 'SELECT step, "reward/mean" FROM metrics'"""
    parser.add_argument("sql", metavar="SQL", help=what)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="as CSV, with a head line")
    form.add_argument("--json", action="store_true", help="as JSON lines")


def add_report_parser(commands: Any) -> None:
    """Adds `report`."""
    what = "write one HTML file that shows a run, or compares several; it loads nothing from elsewhere"
    parser = add_parser(commands, "report", what, run_report, several=True)
    what = "where to (default report.html in the first RUN)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)


def add_trace_parser(commands: Any) -> None:
    """Adds `export-trace`."""
    what = "when what was done, as a trace that ui.perfetto.dev and chrome://tracing open"
    parser = add_parser(commands, "export-trace", what, run_export_trace)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (default RUN/trace.json)")
    parser.add_argument("--steps", metavar="A..B", help="only these steps of each stage, both included")


def open_records(stack: ExitStack, roots: Sequence[Path]) -> dict[str, Record]:
    """The records of runs by name, open until the stack ends. Raises RunDirError."""
    from rollouts.inspect.overview import name_runs
    from rollouts.inspect.record import open_record

    roots = list(dict.fromkeys(roots))
    return {
        name: stack.enter_context(open_record(root))
        for name, root in zip(name_runs(roots), roots, strict=True)
    }


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints what the files of one run say, or what differs between several. Raises RolloutsError."""
    from rollouts.inspect.overview import print_comparison, print_run
    from rollouts.inspect.samples import SampleQuery, find_samples, print_sample
    from rollouts.inspect.terminal import make_console

    console = make_console()
    with ExitStack() as stack:
        records = open_records(stack, arguments.run_dirs)
        if len(records) > 1:
            if arguments.png is not None or arguments.samples > 0:
                raise ConfigError("--png and --samples are for one run; name one, or leave them out")
            print_comparison(console, records)
            return 0
        record = next(iter(records.values()))
        print_run(console, record, last=arguments.last)
        if arguments.samples > 0:
            for row in find_samples(record, SampleQuery(limit=arguments.samples)).rows:
                print_sample(console, row)
        print_picture(console, record, arguments.png)
    return 0


def print_picture(console: Console, record: Record, png: Path | None) -> None:
    """Draws the curves as a picture and says where. A RUN/curves.png newer than its rows is left alone."""
    from rollouts.errors import RunDirError

    path = png or record.root / "curves.png"
    shown = record.files("metrics") + record.files("evaluations")
    try:
        if (
            png is None
            and path.exists()
            and path.stat().st_mtime > max(part.stat().st_mtime for part in shown)
        ):
            console.print(f"{path} is up to date", soft_wrap=True)
            return
        draw_picture(record, path)
        console.print(f"wrote {path}", soft_wrap=True)
    except RunDirError as error:
        if png is not None:
            raise
        console.print(f"no picture: {error}", soft_wrap=True)


def draw_picture(record: Record, path: Path) -> None:
    """Draws the curves that every run has, and accuracies, as a PNG. Raises RunDirError."""
    from rollouts.errors import RunDirError
    from rollouts.inspect.chart import Curve, list_curves, save_png
    from rollouts.inspect.overview import ACCURACY, PICTURES

    curves = list_curves("", record)
    stages = dict.fromkeys(curve.stage for curve in curves)
    panels = [
        [curve]
        for stage in stages
        for name in PICTURES
        for curve in curves
        if (curve.stage, curve.name) == (stage, name)
    ]
    for stage in stages:
        found = [(curve, ACCURACY.fullmatch(curve.name)) for curve in curves if curve.stage == stage]
        accuracies = [
            Curve(f"{match['name']} {match['stat']}", stage, "accuracy, %", curve.steps, 100 * curve.values)
            for curve, match in found
            if match
        ]
        panels += [accuracies] if accuracies else []
    if not panels:
        raise RunDirError(f"{record.root} has no steps and no evaluations yet; there is nothing to plot")
    save_png(panels, path)


def run_samples(arguments: argparse.Namespace) -> int:
    """Prints samples. Raises RunDirError; ConfigError for a value out of range."""
    from rollouts.inspect.record import open_record
    from rollouts.inspect.samples import (
        COLOURS,
        SORT_KEYS,
        STATUSES,
        SampleQuery,
        find_samples,
        print_samples,
    )
    from rollouts.inspect.terminal import make_console, write_lines

    for option, value, known in (
        ("--status", arguments.status, STATUSES),
        ("--sort", arguments.sort, SORT_KEYS),
        ("--color", arguments.color, COLOURS),
    ):
        if value is not None and value not in known:
            raise ConfigError(f"{option} {value}: give one of {', '.join(known)}")
    query = SampleQuery(
        step=arguments.step,
        last_step=arguments.last,
        stage=arguments.stage,
        status=arguments.status,
        group=arguments.group,
        grep=arguments.grep,
        sort=arguments.sort,
        reverse=arguments.reverse,
        limit=arguments.limit,
    )
    with open_record(arguments.run_dir) as record:
        found = find_samples(record, query)
        if arguments.json:
            import msgspec

            write_lines("".join(f"{msgspec.json.encode(row).decode()}\n" for row in found.rows))
            return 0
        print_samples(make_console(), record, found, color=arguments.color)
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draws curves. Raises ConfigError for a metric or stage that is none, RunDirError for what is no run."""
    from rollouts.inspect.chart import collect_panels, save_png
    from rollouts.inspect.terminal import make_console

    if arguments.smooth < 1:
        raise ConfigError(f"--smooth {arguments.smooth}: at least 1")
    further = [Path(name) for name in arguments.names if Path(name).is_dir()]
    metrics = [name for name in arguments.names if not Path(name).is_dir()]
    if not metrics:
        raise ConfigError(
            "name at least one metric, for example reward/mean, or a pattern such as 'reward/*'"
        )
    console = make_console()
    with ExitStack() as stack:
        records = open_records(stack, [arguments.run_dir, *further])
        panels = collect_panels(records, metrics, stage=arguments.stage)
    if arguments.png is not None:
        save_png(panels, arguments.png, smooth=arguments.smooth, log=arguments.log)
        console.print(f"wrote {arguments.png}", soft_wrap=True)
        return 0
    draw_panels(console, panels, arguments)
    return 0


def draw_panels(console: Console, panels: Sequence[Sequence[Any]], arguments: argparse.Namespace) -> None:
    """Draws panels on a terminal: runs over each other, or below each other where there are no colours."""
    from rollouts.inspect.chart import draw_chart

    overlaid = console.is_terminal and console.color_system is not None and not console.no_color
    width = max(20, min(100, console.width - 14))
    for panel in panels:
        for curves in [panel] if overlaid else [[curve] for curve in panel]:
            if len(panel) > len(curves):
                console.print(curves[0].run, soft_wrap=True)
            chart = draw_chart(curves, width=width, smooth=arguments.smooth, log=arguments.log)
            console.print(chart, soft_wrap=True)
            console.print()


def run_tail(arguments: argparse.Namespace) -> int:
    """0 when the run is over, 130 for Ctrl-C. Raises RunDirError for a directory that is no run."""
    import trio

    from rollouts.inspect.tail import follow_on_console
    from rollouts.inspect.terminal import make_console

    if not arguments.every > 0:
        raise ConfigError(f"--every {arguments.every:g}: more than 0 seconds")
    try:
        trio.run(follow_on_console, arguments.run_dir, make_console(), arguments.every, arguments.once)
    except KeyboardInterrupt:
        return 130
    return 0


def run_query(arguments: argparse.Namespace) -> int:
    """Prints what the statement answers. Raises ConfigError for SQL that cannot be run, RunDirError."""
    from rollouts.inspect.query import format_csv, format_json, make_answer_table, run_sql
    from rollouts.inspect.record import open_record
    from rollouts.inspect.terminal import make_console, write_lines

    with open_record(arguments.run_dir) as record:
        answer = run_sql(record, arguments.sql)
    for note in record.notes:
        print(note, file=sys.stderr)
    if arguments.csv or arguments.json:
        write_lines(format_csv(answer) if arguments.csv else format_json(answer))
    else:
        make_console().print(make_answer_table(answer))
    return 0


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
    from rollouts.inspect.record import open_record
    from rollouts.inspect.trace import export_trace

    output = arguments.output or arguments.run_dir / "trace.json"
    steps: range | None = None
    if text := arguments.steps:
        first, dots, last = text.partition("..")
        last = last if dots else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(
                f"--steps {text}: give two whole numbers, the first not above the second, as 10..20"
            )
        steps = range(int(first), int(last) + 1)
    with open_record(arguments.run_dir) as record:
        count = export_trace(record, output, steps=steps)
    for note in record.notes:
        print(note, file=sys.stderr)
    print(f"wrote {output}: {count} spans; open it at https://ui.perfetto.dev")
    return 0

"""The commands `plot`, `tail` and `query`: what they take and what they print."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError

WIDEST_CHART = 100


def add_plot_parser(commands: Any) -> None:
    """Adds `plot`."""
    plot = commands.add_parser(
        "plot",
        help="curves of chosen metrics, of one run or several",
        description=(
            "Curves in the terminal, one for each stage and metric; several runs over each other, or below"
            " where there are no colours."
        ),
        allow_abbrev=False,
    )
    plot.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    plot.add_argument(
        "names",
        nargs="+",
        metavar="METRIC | RUN",
        help="a metric, or a pattern such as 'reward/*'; a directory is a further run",
    )
    plot.add_argument("--stage", metavar="STAGE", help="only this stage")
    plot.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="N",
        help="draw means of N steps, up to each (default 1: the values)",
    )
    plot.add_argument(
        "--log", action="store_true", help="logarithmic; values that are not above 0 are left out"
    )
    plot.add_argument("--png", type=Path, metavar="FILE", help="draw a picture instead (needs matplotlib)")
    plot.set_defaults(run=run_plot)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draws curves. Raises ConfigError for a metric or stage that is none, RunDirError for a directory that
    is no run.
    """
    from rollouts.inspect.chart import ChartOptions, collect_panels, draw_chart, save_charts
    from rollouts.inspect.commands import make_console
    from rollouts.inspect.compare import name_runs
    from rollouts.inspect.read import read_run

    if arguments.smooth < 1:
        raise ConfigError(f"--smooth {arguments.smooth}: at least 1")
    further = [Path(name) for name in arguments.names if Path(name).is_dir()]
    metrics = [name for name in arguments.names if not Path(name).is_dir()]
    if not metrics:
        raise ConfigError(
            "name at least one metric, for example reward/mean, or a pattern such as 'reward/*'"
        )
    roots = list(dict.fromkeys([arguments.run_dir, *further]))
    records = dict(zip(name_runs(roots), map(read_run, roots), strict=True))
    panels = collect_panels(records, metrics, stage=arguments.stage)
    console = make_console()
    options = ChartOptions(
        width=max(20, min(WIDEST_CHART, console.width - 14)), smooth=arguments.smooth, log=arguments.log
    )
    if arguments.png is not None:
        save_charts(panels, options, arguments.png)
        console.print(f"wrote {arguments.png}", soft_wrap=True)
        return 0
    overlaid = console.is_terminal and console.color_system is not None and not console.no_color
    for panel in panels:
        for curves in [panel] if overlaid or len(panel) == 1 else [[curve] for curve in panel]:
            if len(panel) > 1 and not overlaid:
                console.print(curves[0].run, soft_wrap=True)
            console.print(draw_chart(curves, options), soft_wrap=True)
            console.print()
    return 0


def add_tail_parser(commands: Any) -> None:
    """Adds `tail`."""
    what = "follow a run while it goes on, also over ssh; ends with the run"
    tail = commands.add_parser("tail", help=what, description=what, allow_abbrev=False)
    tail.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    tail.add_argument("--once", action="store_true", help="print one screen and end")
    tail.add_argument(
        "--every",
        type=float,
        default=0.5,
        metavar="S",
        help="seconds between looks at the files (default 0.5)",
    )
    tail.set_defaults(run=run_tail)


def run_tail(arguments: argparse.Namespace) -> int:
    """0 when the run is over, 130 for Ctrl-C. Raises RunDirError for a directory that is no run."""
    import trio

    from rollouts.inspect.commands import make_console
    from rollouts.inspect.tail import follow_on_console

    if not arguments.every > 0:
        raise ConfigError(f"--every {arguments.every:g}: more than 0 seconds")
    try:
        trio.run(follow_on_console, arguments.run_dir, make_console(), arguments.every, arguments.once)
    except KeyboardInterrupt:
        return 130
    return 0


def add_query_parser(commands: Any) -> None:
    """Adds `query`."""
    query = commands.add_parser(
        "query",
        help="SQL over a run's rows (needs duckdb)",
        description=(
            "SQL over the views metrics, evaluations, samples, contributions and spans, which hold the newest"
            " attempt of each step; with _all appended (metrics_all) every attempt. Columns are called as"
            ' logged: a name with a slash stands in double quotes, "reward/mean".'
        ),
        allow_abbrev=False,
    )
    query.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    query.add_argument(
        "sql", metavar="SQL", help="""one statement, for example 'SELECT step, "reward/mean" FROM metrics'"""
    )
    form = query.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="as CSV, with a head line")
    form.add_argument("--json", action="store_true", help="as JSON lines")
    query.set_defaults(run=run_query)


def run_query(arguments: argparse.Namespace) -> int:
    """Prints what the statement answers. Raises ConfigError for SQL that cannot be run, RunDirError for a
    directory that is no run.
    """
    from rollouts.inspect.commands import make_console
    from rollouts.inspect.query import format_answer_csv, format_answer_json, make_answer_table, query_run
    from rollouts.inspect.terminal import write_lines

    answer = query_run(arguments.run_dir, arguments.sql)
    for note in answer.notes:
        print(note, file=sys.stderr)
    if arguments.csv:
        write_lines(format_answer_csv(answer))
    elif arguments.json:
        write_lines(format_answer_json(answer))
    else:
        make_console().print(make_answer_table(answer))
    return 0

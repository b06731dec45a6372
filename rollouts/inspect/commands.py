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

STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
PICTURES = (  # panels of the PNG
    *("reward/mean", "loss/total", "response_length/mean", "entropy/mean", "rewards/margins"),
    *("value/explained_variance", "optim/grad_norm", "time/step"),
)


def add_parser(
    commands: Any, name: str, what: str, run: object, *, several: bool = False, more: str = ""
) -> argparse.ArgumentParser:
    """The parser of a command that takes a run directory, or several."""
    parser = commands.add_parser(name, help=what, description=what + more, allow_abbrev=False)
    place = {"dest": "run_dirs", "nargs": "+"} if several else {"dest": "run_dir"}
    parser.add_argument(type=Path, metavar="RUN", help="a run directory, for example runs/demo", **place)
    parser.set_defaults(run=run)
    return parser


def add_inspect_parser(commands: Any) -> None:
    """Adds `inspect`."""
    what = "what became of a run, also while it runs; several runs side by side"
    add = add_parser(commands, "inspect", what, run_inspect, several=True).add_argument
    what = "where to draw the curves as a picture (default RUN/curves.png; needs matplotlib)"
    add("--png", type=Path, metavar="FILE", help=what)
    add("--last", type=int, default=10, metavar="N", help="how many of the last steps to list (10)")
    add("--samples", type=int, default=0, metavar="N", help="also print the last N samples")


def add_samples_parser(commands: Any) -> None:
    """Adds `samples`."""
    what = "transcripts: samples by step, reward, status or text; the last ones, unless --sort is given"
    parser = add_parser(commands, "samples", what, run_samples)
    which, add = parser.add_mutually_exclusive_group(), parser.add_argument
    which.add_argument("--step", type=int, metavar="N", help="samples of this step")
    which.add_argument("--last", action="store_true", help="samples of the last step that has any")
    add("--stage", metavar="STAGE", help="samples of this stage, for example rl or eval-rl")
    add("--status", choices=STATUSES, help="samples that ended so")
    add("--group", type=int, metavar="G", help="samples of the group with this group_index")
    what = "samples whose prompt, response or failure message holds TEXT, in upper or lower case"
    add("--grep", default="", metavar="TEXT", help=what)
    keys = ("step", "reward", "length", "tokens", "lag", "group")
    add("--sort", choices=keys, help="lowest first, by this value")
    add("--reverse", action="store_true", help="highest first")
    add("--limit", type=int, default=10, metavar="N", help="how many to print (default 10)")
    what = "mark each token by this value; needs the arrays that a run keeps per token"
    add("--color", choices=("advantage", "logprob_diff", "mask"), help=what)
    add("--json", action="store_true", help="the rows as JSON lines")


def add_plot_parser(commands: Any) -> None:
    """Adds `plot`."""
    add = add_parser(
        commands, "plot", "curves of chosen metrics, of one run or several", run_plot
    ).add_argument
    what = "a metric, or a pattern such as 'reward/*'; a directory is a further run"
    add("names", nargs="+", metavar="METRIC | RUN", help=what)
    add("--stage", metavar="STAGE", help="only this stage")
    add("--smooth", type=int, default=1, metavar="N", help="draw means of N steps, up to each")
    add("--log", action="store_true", help="logarithmic; values that are not above 0 are left out")
    add("--png", type=Path, metavar="FILE", help="draw a picture instead (needs matplotlib)")


def add_tail_parser(commands: Any) -> None:
    """Adds `tail`."""
    what = "follow a run while it goes on, also over ssh; ends with the run"
    add = add_parser(commands, "tail", what, run_tail).add_argument
    add("--once", action="store_true", help="print one screen and end")
    what = "seconds between looks at the files (default 0.5)"
    add("--every", type=float, default=0.5, metavar="S", help=what)


def add_query_parser(commands: Any) -> None:
    """Adds `query`."""
    what = "SQL over the views metrics, evaluations, samples, contributions and spans of a run"
    more = (
        ", which hold the newest attempt of each step; with _all appended (metrics_all) every attempt."
        ' Columns are called as logged: a name with a slash stands in double quotes, "reward/mean".'
    )
    parser = add_parser(commands, "query", what, run_query, more=more)
    what = """one statement, for example 'SELECT step, "reward/mean" FROM metrics'"""
    parser.add_argument("sql", metavar="SQL", help=what)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="as CSV, with a head line")
    form.add_argument("--json", action="store_true", help="as JSON lines")


def add_report_parser(commands: Any) -> None:
    """Adds `report`."""
    what = "write one HTML file that shows a run, or compares several; it loads nothing from elsewhere"
    add = add_parser(commands, "report", what, run_report, several=True).add_argument
    what = "where to (default report.html in the first RUN)"
    add("-o", "--output", type=Path, metavar="FILE", help=what)


def add_trace_parser(commands: Any) -> None:
    """Adds `export-trace`."""
    what = "when what was done, as a trace that ui.perfetto.dev and chrome://tracing open"
    add = add_parser(commands, "export-trace", what, run_export_trace).add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="where to (default RUN/trace.json)")
    add("--steps", metavar="A..B", help="only these steps of each stage, both included")


def open_records(stack: ExitStack, roots: Sequence[Path]) -> dict[str, Record]:
    """The records of runs, open until the stack ends, each by its directory's name with as many directories
    above it as tell the runs apart. Raises RunDirError.
    """
    from rollouts.inspect.record import open_record

    roots = list(dict.fromkeys(root.resolve() for root in roots))
    depth = 1
    while len({root.parts[-depth:] for root in roots}) < len(roots):
        depth += 1
    return {"/".join(root.parts[-depth:]): stack.enter_context(open_record(root)) for root in roots}


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints what the files of one run say, or what differs between several. Raises RolloutsError."""
    from rollouts.inspect.overview import print_comparison, print_run
    from rollouts.inspect.record import open_record
    from rollouts.inspect.samples import SampleQuery, find_samples, print_sample
    from rollouts.inspect.terminal import make_console

    console = make_console()
    with ExitStack() as stack:
        if len(arguments.run_dirs) > 1:
            if arguments.png is not None or arguments.samples > 0:
                raise ConfigError("--png and --samples are for one run; name one, or leave them out")
            print_comparison(console, open_records(stack, arguments.run_dirs))
            return 0
        record = stack.enter_context(open_record(arguments.run_dirs[0]))
        print_run(console, record, last=arguments.last)
        if arguments.samples > 0:
            for row in find_samples(record, SampleQuery(limit=arguments.samples)).rows:
                print_sample(console, row)
        print_picture(console, record, arguments.png)
    return 0


def print_picture(console: Console, record: Record, png: Path | None) -> None:
    """Draws the curves as a picture and says where. A RUN/curves.png newer than its rows is left alone."""
    from rollouts.errors import RunDirError
    from rollouts.inspect.record import find_parts

    path = png or record.root / "curves.png"
    rows = [part for kind in ("metrics", "evaluations") for part in find_parts(record.run_dir, kind)]
    changed = max((part.stat().st_mtime for part in rows), default=0.0)
    try:
        if png is None and path.exists() and path.stat().st_mtime > changed:
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
    from rollouts.inspect.facts import ACCURACY

    panels: dict[tuple[str, int], list[Curve]] = {}
    for curve in list_curves("", record):
        if match := ACCURACY.fullmatch(curve.name):
            label, percent = f"{match['name']} {match['stat']}", 100 * curve.values
            shown = Curve(label, curve.stage, "accuracy, %", curve.steps, percent)
            panels.setdefault((curve.stage, len(PICTURES)), []).append(shown)
        elif curve.name in PICTURES:
            panels[curve.stage, PICTURES.index(curve.name)] = [curve]
    if not panels:
        raise RunDirError(f"{record.root} has no steps and no evaluations yet; there is nothing to plot")
    save_png([panels[key] for key in sorted(panels, key=lambda key: key[1])], path)


def run_samples(arguments: argparse.Namespace) -> int:
    """Prints samples. Raises RunDirError; ConfigError for a value out of range."""
    from rollouts.inspect.record import open_record
    from rollouts.inspect.samples import SampleQuery, find_samples, print_samples
    from rollouts.inspect.terminal import make_console, write_lines

    query = SampleQuery(**{name: getattr(arguments, name) for name in SampleQuery.__slots__})
    with open_record(arguments.run_dir) as record:
        found = find_samples(record, query)
        if arguments.json:
            import msgspec

            write_lines(msgspec.json.Encoder().encode_lines(found.rows).decode())
        else:
            print_samples(make_console(), record, found, color=arguments.color)
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draws curves. Raises ConfigError for a metric or stage that is none, RunDirError for what is no run."""
    from rollouts.inspect.chart import collect_panels, draw_chart, save_png
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
    how = {"smooth": arguments.smooth, "log": arguments.log}
    if arguments.png is not None:
        save_png(panels, arguments.png, **how)
        console.print(f"wrote {arguments.png}", soft_wrap=True)
        return 0
    # runs lie over each other, or below each other where there are no colours
    overlaid = console.is_terminal and console.color_system is not None and not console.no_color
    for panel in panels:
        for curves in [panel] if overlaid else [[curve] for curve in panel]:
            if len(panel) > len(curves):
                console.print(curves[0].run, soft_wrap=True)
            width = max(20, min(100, console.width - 14))
            console.print(draw_chart(curves, width=width, **how), soft_wrap=True)
            console.print()
    return 0


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
    if record.notes:
        print(*record.notes, sep="\n", file=sys.stderr)
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
        first, _, last = text.partition("..")
        numbers = [int(number) for number in (first, last or first) if number.isdecimal()]
        if len(numbers) < 2 or numbers[0] > numbers[1]:
            raise ConfigError(
                f"--steps {text}: give two whole numbers, the first not above the second, as 10..20"
            )
        steps = range(numbers[0], numbers[1] + 1)
    with open_record(arguments.run_dir) as record:
        count = export_trace(record, output, steps=steps)
    if record.notes:
        print(*record.notes, sep="\n", file=sys.stderr)
    print(f"wrote {output}: {count} spans; open it at https://ui.perfetto.dev")
    return 0

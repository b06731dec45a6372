"""The commands `inspect` and `samples`: what they take and what they print. Nothing heavy is imported until
one of them runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rollouts.inspect.read import RunRecord

PLAIN_WIDTH = 160  # columns where the output is no terminal
NARROWEST_CURVE, WIDEST_CURVE = 20, 72
SAMPLE_ORDERS = (
    "step",
    "reward",
    "length",
    "tokens",
    "lag",
    "group",
)  # what rollouts.inspect.samples sorts by
COLOURS = ("advantage", "logprob_diff", "mask")  # what rollouts.inspect.transcripts colours by
STATUSES = ("completed", "truncated", "aborted", "failed", "pending")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `inspect` and `samples` to the command line."""
    inspect = commands.add_parser(
        "inspect",
        help="what became of a run, also while it runs; several runs side by side",
        description=(
            "Curves, metrics, time by phase, failures and staleness of a run; of several runs what differs."
        ),
        allow_abbrev=False,
    )
    inspect.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="a run directory, for example runs/demo"
    )
    inspect.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="where to draw the curves as a picture (default RUN/curves.png; needs matplotlib)",
    )
    inspect.add_argument(
        "--last", type=int, default=10, metavar="N", help="how many of the last steps to list (default 10)"
    )
    inspect.add_argument("--samples", type=int, default=0, metavar="N", help="also print the last N samples")
    inspect.set_defaults(run=run_inspect)

    samples = commands.add_parser(
        "samples",
        help="transcripts: samples by step, reward, status or text",
        description=(
            "Samples that were logged. Without --sort the last ones that match, in the order in which they"
            " were written."
        ),
        allow_abbrev=False,
    )
    samples.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    which = samples.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="samples of this step")
    which.add_argument("--last", action="store_true", help="samples of the last step that has any")
    samples.add_argument("--stage", metavar="STAGE", help="samples of this stage, for example rl or eval-rl")
    samples.add_argument("--status", choices=STATUSES, help="samples that ended so")
    samples.add_argument("--group", type=int, metavar="G", help="samples of the group with this group_index")
    samples.add_argument(
        "--grep",
        metavar="TEXT",
        help="samples whose prompt, response or failure message holds TEXT, in upper or lower case",
    )
    samples.add_argument("--sort", choices=SAMPLE_ORDERS, help="lowest first")
    samples.add_argument("--reverse", action="store_true", help="highest first")
    samples.add_argument("--limit", type=int, default=10, metavar="N", help="how many to print (default 10)")
    samples.add_argument(
        "--color",
        choices=COLOURS,
        help="mark each token by this value; needs the arrays that a run keeps per token",
    )
    samples.add_argument("--json", action="store_true", help="the rows as JSON lines")
    samples.set_defaults(run=run_samples)


def make_console() -> Console:
    """The terminal, or PLAIN_WIDTH columns where there is none. What it prints stays as it is, but for what
    would steer the terminal.
    """
    from rollouts.inspect.console import SafeConsole

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where it does not take lines and curves, a question mark
    return SafeConsole(
        width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False, emoji=False
    )


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints what the files of one run say, or what differs between several. Raises RunDirError; ConfigError
    for options that do not go together.
    """
    from rollouts.errors import ConfigError
    from rollouts.inspect.read import read_run

    console = make_console()
    if len(arguments.run_dirs) == 1:
        record = read_run(arguments.run_dirs[0], with_samples=arguments.samples > 0)
        print_run(console, record, last=arguments.last, samples=arguments.samples)
        return print_picture(console, record, arguments.png)
    if arguments.png is not None or arguments.samples > 0:
        option = "--samples" if arguments.png is None else "--png"
        raise ConfigError(
            f"{option} is for one run, and {len(arguments.run_dirs)} were named; name one, or leave"
            f" {option} out"
        )
    print_comparison(console, arguments.run_dirs)
    return 0


def print_run(console: Console, record: RunRecord, *, last: int, samples: int) -> None:
    """Everything about one run but the picture, the state and the outcome last."""
    from rollouts.inspect.columns import open_columns
    from rollouts.inspect.outcomes import (
        collect_failures,
        count_lags,
        describe_lags,
        list_trouble,
        make_dropped_table,
        make_failure_table,
    )
    from rollouts.inspect.phases import make_phase_table
    from rollouts.inspect.plot import draw_curves
    from rollouts.inspect.sparklines import make_sparkline_table
    from rollouts.inspect.table import (
        describe_state,
        make_evaluation_table,
        make_stage_table,
        make_step_table,
        make_summary_lines,
    )
    from rollouts.inspect.transcripts import print_sample
    from rollouts.run_dir import RunDir

    logged = open_columns(RunDir(record.root), "samples")
    for curve in draw_curves(record, width=max(NARROWEST_CURVE, min(WIDEST_CURVE, console.width - 14))):
        print_part(console, curve)
    for stage in record.stages:
        print_part(console, make_sparkline_table(record, stage, width=console.width))
    print_part(console, make_step_table(record, last=last, width=console.width))
    print_part(console, make_evaluation_table(record))
    for stage in record.stages:
        print_part(console, make_phase_table(record, stage, width=console.width))
    print_part(console, describe_lags(count_lags(logged), width=console.width))
    print_part(console, make_dropped_table(record))
    print_part(console, make_failure_table(collect_failures(record, logged), width=console.width))
    print_part(console, "\n".join(list_trouble(record)))
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    if record.stages:
        stages = make_stage_table(record, width=console.width)
        console.print(stages, soft_wrap=isinstance(stages, str))
    for line in [*make_summary_lines(record), *dict.fromkeys([*record.notes, *logged.notes])]:
        console.print(line, soft_wrap=True)
    for row in record.samples[-samples:] if samples > 0 else ():
        print_sample(console, row)


def print_part(console: Console, part: object) -> None:
    """A part and an empty line; nothing for a part that is empty."""
    from rich.text import Text

    if part:
        console.print(part, soft_wrap=isinstance(part, str | Text))
        console.print()


def print_picture(console: Console, record: RunRecord, png: Path | None) -> int:
    """Draws the curves as a picture and says where it is, or what it takes. RUN/curves.png that is newer than
    what it shows is left alone.
    """
    from rollouts.errors import RunDirError
    from rollouts.inspect.plot import save_png

    if png is None and importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: pip install 'rollouts-rl[plot]'")
        return 0
    path = png or record.root / "curves.png"
    if png is None and is_newer(path, record):
        console.print(f"{path} is up to date", soft_wrap=True)
        return 0
    try:
        save_png(record, path)
    except RunDirError as error:
        if png is not None:
            raise
        console.print(f"no picture: {error}", soft_wrap=True)  # which nobody has asked for
        return 0
    console.print(f"wrote {path}", soft_wrap=True)
    return 0


def is_newer(path: Path, record: RunRecord) -> bool:
    """Whether the file is there and was written after the last row of metrics and evaluations."""
    from rollouts.run_dir import RunDir

    run_dir = RunDir(record.root)
    shown = [*run_dir.parts(run_dir.metrics), *run_dir.parts(run_dir.evaluations)]
    return path.exists() and path.stat().st_mtime > max((part.stat().st_mtime for part in shown), default=0)


def print_comparison(console: Console, roots: Sequence[Path]) -> None:
    """Several runs side by side."""
    from rollouts.inspect.compare import make_fact_table, make_metric_table, make_setting_table, name_runs
    from rollouts.inspect.read import read_run

    records = dict(zip(name_runs(roots), map(read_run, roots), strict=True))
    stages = dict.fromkeys(stage for record in records.values() for stage in record.stages)
    for stage in stages:
        print_part(console, make_metric_table(records, stage))
    print_part(console, make_setting_table(records))
    print_part(console, make_fact_table(records))
    for note in dict.fromkeys(note for record in records.values() for note in record.notes):
        console.print(note, soft_wrap=True)


def run_samples(arguments: argparse.Namespace) -> int:
    """Prints samples. Raises RunDirError; ConfigError for a value out of range."""
    from rollouts.inspect.samples import SampleQuery, find_samples
    from rollouts.inspect.transcripts import print_json, print_samples

    query = SampleQuery(
        step=arguments.step,
        last_step=arguments.last,
        stage=arguments.stage,
        status=arguments.status,
        group=arguments.group,
        grep=arguments.grep or "",
        sort=arguments.sort,
        reverse=arguments.reverse,
        limit=arguments.limit,
    )
    found = find_samples(arguments.run_dir, query)
    if arguments.json:
        print_json(found)
        return 0
    print_samples(make_console(), found, color=arguments.color)
    return 0

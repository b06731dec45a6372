"""The `rollouts` command: looks at runs and at settings. Training is started with integration_training/train.py.

Exit codes: 0 done; 1 a failure; 2 wrong usage, or a directory or file that is not what it should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollouts import __version__
from rollouts.errors import ConfigError, DataError, RolloutsError, RunDirError

BAD_INPUT = (ConfigError, DataError, RunDirError)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `rollouts ARGV`. A known error is one message on stderr, without a traceback."""
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this, Python complains again when it flushes stdout at exit. rich does the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RolloutsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BAD_INPUT) else 1


def make_parser() -> argparse.ArgumentParser:
    """The command line; each subcommand sets `run`, which imports what it needs."""
    parser = argparse.ArgumentParser(prog="rollouts", description="Reinforcement learning of language models: runs and settings.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="tables and curves of a run directory, also while it runs", allow_abbrev=False)
    inspect.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    inspect.add_argument("--png", type=Path, metavar="FILE", help="where to draw the curves as a picture (default RUN/curves.png; needs matplotlib)")
    inspect.add_argument("--last", type=int, default=10, metavar="N", help="how many of the last steps to list (default 10)")
    inspect.add_argument("--samples", type=int, default=0, metavar="N", help="also print the last N samples")
    inspect.set_defaults(run=run_inspect)

    config = commands.add_parser("config", help="every setting with its type, default and meaning", allow_abbrev=False)
    config.add_argument("table", nargs="?", default="", metavar="TABLE", help="only this table, for example rl.rollout")
    config.set_defaults(run=run_config)
    return parser


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints what the files of a run say. Raises RunDirError."""
    from rich.console import Console

    from rollouts.inspect.plot import draw_curves, save_png
    from rollouts.inspect.read import read_run
    from rollouts.inspect.table import (
        describe_state,
        format_sample,
        make_evaluation_table,
        make_stage_table,
        make_step_table,
        make_summary_lines,
    )

    record = read_run(arguments.run_dir, with_samples=arguments.samples > 0)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    curves = draw_curves(record, width=min(72, console.width - 14))
    steps, evaluations = make_step_table(record, last=arguments.last), make_evaluation_table(record)
    for part in (curves, steps, evaluations):
        if part:
            console.print(part, soft_wrap=isinstance(part, str))
            console.print()
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    console.print(make_stage_table(record))
    for line in make_summary_lines(record):
        console.print(line, soft_wrap=True)
    for row in record.samples[-arguments.samples :] if arguments.samples > 0 else ():
        console.print(format_sample(row), soft_wrap=True)
    if arguments.png is None and importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: pip install 'rollouts-rl[plot]'")
        return 0
    png = arguments.png or record.root / "curves.png"
    save_png(record, png)
    console.print(f"wrote {png}", soft_wrap=True)
    return 0


def run_config(arguments: argparse.Namespace) -> int:
    """Prints the settings. Raises ConfigError for a table that does not exist."""
    from rollouts.config.explain import explain_config

    try:
        text = explain_config(arguments.table)
    except KeyError as error:
        raise ConfigError(error.args[0]) from error
    print(text, end="", flush=True)
    return 0

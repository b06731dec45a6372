"""The command `export-trace`. Nothing heavy is imported until it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollouts.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `export-trace` to the command line."""
    what = "when what was done, as a trace that ui.perfetto.dev and chrome://tracing open"
    parser = commands.add_parser("export-trace", help=what, description=what, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (default RUN/trace.json)")
    parser.add_argument("--steps", metavar="A..B", help="only these steps of each stage, both included")
    parser.set_defaults(run=run_export_trace)


def run_export_trace(arguments: argparse.Namespace) -> int:
    """Writes the trace of a run. Raises ConfigError for steps that are none, RunDirError where there are no
    spans or a file is damaged.
    """
    from rollouts.inspect.trace import export_trace

    output = arguments.output or arguments.run_dir / "trace.json"
    count = export_trace(
        arguments.run_dir, output, steps=parse_steps(arguments.steps) if arguments.steps else None
    )
    print(f"wrote {output}: {count} spans; open it at https://ui.perfetto.dev")
    return 0


def parse_steps(text: str) -> range:
    """The steps of "A..B", both included, or of one number. Raises ConfigError."""
    first, dots, last = text.partition("..")
    last = last if dots else first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(
            f"--steps {text}: give two whole numbers, the first not above the second, for example 10..20"
        )
    return range(int(first), int(last) + 1)

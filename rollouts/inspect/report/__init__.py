"""`rollouts report RUN`: one HTML file that holds curves, phases, distributions, failures, samples and
settings of runs, and loads nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand `report`."""
    what = (
        "write one HTML file that shows a run, or compares several: curves, samples, failures, settings; it"
        " loads nothing from elsewhere"
    )
    parser = commands.add_parser("report", help=what, description=what, allow_abbrev=False)
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="a run directory; several are compared"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to (default report.html in the first RUN)"
    )
    parser.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the file and prints where it is. Raises RunDirError for a directory that is no run, StorageError
    where the file cannot be written.
    """
    from rollouts.inspect.report.page import write_report

    path = arguments.output or arguments.run_dirs[0] / "report.html"
    size = write_report(arguments.run_dirs, path)
    print(f"wrote {path}, {size / 1e6:.1f} MB: open it in a browser")
    return 0

"""The parsers of the commands that look at runs, by commands.toml. What a command needs is imported when it
runs.
"""

from __future__ import annotations

import argparse
import importlib
import tomllib
from pathlib import Path
from typing import Any


def add_parser(commands: Any, name: str, run: str) -> None:
    """Adds the command `name`, which the function `run` of rollouts.inspect.commands does."""
    known = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))[name]
    description = known["help"] + known.get("more", "")
    parser = commands.add_parser(name, help=known["help"], description=description, allow_abbrev=False)
    for kind in (int, float, Path):
        parser.register("type", kind.__name__, kind)
    runs = {"dest": "run_dirs", "nargs": "+"} if known.get("several") else {"dest": "run_dir"}
    parser.add_argument(type=Path, metavar="RUN", help="a run directory, for example runs/demo", **runs)
    options = known["options"]
    either = (
        parser.add_mutually_exclusive_group() if any("either" in option for option in options) else parser
    )
    for option in options:
        to = either if option.pop("either", False) else parser
        to.add_argument(*option.pop("names"), **option)

    def run_command(arguments: argparse.Namespace) -> int:
        return getattr(importlib.import_module("rollouts.inspect.commands"), run)(arguments)

    parser.set_defaults(run=run_command)

"""The parsers of the commands that look at runs or follow them, by commands.toml. What a command needs is
imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import tomllib
from pathlib import Path
from typing import Any


def add_parser(commands: Any, name: str) -> None:
    """Adds the command `name`, which the function run_NAME of its module does."""
    known = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))[name]
    description, several = known["help"] + known.get("more", ""), known.get("several", False)
    parser = commands.add_parser(
        name, help=known["help"], description=description, epilog=known.get("epilog"), allow_abbrev=False
    )
    for kind in (int, float, Path):
        parser.register("type", kind.__name__, kind)
    runs = {"dest": "run_dirs", "nargs": "+"} if several else {"dest": "run_dir"}
    parser.add_argument(type=Path, metavar="RUN", help="a run directory, for example runs/demo", **runs)
    options = known["options"]
    either = parser.add_mutually_exclusive_group() if "either" in str(options) else parser
    for option in options:
        to = either if option.pop("either", False) else parser
        to.add_argument(*option.pop("names"), **option)

    def run_command(arguments: argparse.Namespace) -> int:
        module = importlib.import_module(known.get("module", "rollouts.inspect.commands"))
        return getattr(module, f"run_{name.replace('-', '_')}")(arguments)

    parser.set_defaults(run=run_command)

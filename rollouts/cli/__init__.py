"""The `rollouts` command: begins a task, explains settings, checks a run before it starts, looks at it,
installs inference servers. Training is started with integration_training/train.py.

A command's module is imported when it is that command's turn, and what the command itself needs when it runs:
--help answers at once. Exit codes: 0 done; 1 a failure; 2 wrong usage, or a directory or file that is not
what it should be; 130 stopped by Ctrl-C.
"""

import argparse
import importlib
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts import __version__
from rollouts.errors import RolloutsError
from rollouts.inspect.terminal import make_safe

COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `rollouts ARGV`. A known error is one message on stderr, without a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser(words[0] if words else "")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    arguments, overrides = parser.parse_known_args(words)
    if overrides and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return arguments.run(arguments, overrides) if arguments.takes_settings else arguments.run(arguments)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this, Python complains again when it flushes stdout
        # at exit. rich does the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RolloutsError as error:
        print(f"{type(error).__name__}: {make_safe(str(error))}", file=sys.stderr)
        return error.exit_code


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The command line with this command, or with all where it is none; each sets `run`, which imports what
    it needs.
    """
    parser = argparse.ArgumentParser(
        prog="rollouts",
        description="Reinforcement learning of language models: runs and settings.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [command] if command in COMMANDS else COMMANDS:
        add_parser(commands, name)
    return parser


def add_parser(commands: Any, name: str) -> None:
    """Adds the command `name`, which the function run_NAME of its module does."""
    known = COMMANDS[name]
    parser = commands.add_parser(
        name,
        help=known["help"],
        description=known["help"] + known.get("more", ""),
        epilog=known.get("epilog"),
        allow_abbrev=False,
    )
    for kind in (int, float, Path):
        parser.register("type", kind.__name__, kind)
    if "runs" in known:
        what = "a run directory, for example runs/demo"
        parser.add_argument(type=Path, metavar="RUN", help=what, **known["runs"])
    options = known["options"]
    either = parser.add_mutually_exclusive_group() if "either" in str(options) else parser
    for option in options:
        option = dict(option)
        to = either if option.pop("either", False) else parser
        to.add_argument(*option.pop("names"), **option)

    def run_command(*given: Any) -> int:
        module = importlib.import_module(known["module"])
        return getattr(module, f"run_{name.replace('-', '_')}")(*given)

    parser.set_defaults(run=run_command, takes_settings=known.get("takes_settings", False))

"""The command `engines`: installs inference servers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any, name: str) -> None:
    """Adds `engines` with a subcommand for each kind of server."""
    engines = commands.add_parser(name, help="environments for inference servers", allow_abbrev=False)
    kinds = engines.add_subparsers(required=True, metavar="COMMAND")
    for kind, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        what = f"make a Python environment in which {title} serves on a CPU; a complete one is left alone"
        install = kinds.add_parser(f"install-{kind}-cpu", help=what, description=what, allow_abbrev=False)
        install.add_argument(
            "--into",
            type=Path,
            default=Path(f".venv-{kind}"),
            metavar="DIR",
            help=f"where to (default .venv-{kind})",
        )
        install.set_defaults(run=run_install_engine, kind=kind)


def run_install_engine(arguments: argparse.Namespace) -> int:
    """Makes an environment for a server. Raises ConfigError for a directory in use, EngineSetupError if a
    step fails.
    """
    from functools import partial

    from rollouts.engines.environments import install_cpu_environment

    install_cpu_environment(arguments.kind, arguments.into, say=partial(print, flush=True))
    return 0

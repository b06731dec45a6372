"""The commands before a run: `init` begins a task, `explain` tells settings, `check` looks at a run that is
to start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.schema import RunConfig
    from rollouts.preflight.findings import Finding


def add_command(
    commands: Any, name: str, what: str, run: Callable[..., int], *, takes_settings: bool = False
) -> Callable[..., Any]:
    """Adds a command; returns what adds an argument to it."""
    epilog = "any setting: --section.key value" if takes_settings else None
    parser = commands.add_parser(name, help=what, description=what, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(run=run, takes_settings=takes_settings)
    return parser.add_argument


def add_init_parser(commands: Any) -> None:
    """Adds `init`."""
    add = add_command(commands, "init", "write a config and a task that run as they are", run_init)
    add("directory", type=Path, nargs="?", default=Path("task"), metavar="DIR", help="default task")
    add("--task", default="counting", metavar="NAME", help="which task (default counting)")


def add_explain_parser(commands: Any) -> None:
    """Adds `explain`."""
    what = "every setting, or one: meaning, type, default, and its value in a config"
    add = add_command(commands, "explain", what, run_explain, takes_settings=True)
    for name, meaning in (
        ("config", "a TOML file; without it the defaults are shown"),
        ("key", "a setting or table, for example rl.rollout"),
    ):
        add(name, nargs="?", default="", metavar=name.upper(), help=meaning)


def add_check_parser(commands: Any) -> None:
    """Adds `check`."""
    what = "what would stop a run and what it will need; of a run directory, whether its files are whole"
    add = add_command(commands, "check", what, run_check, takes_settings=True)
    add("config", type=Path, metavar="CONFIG | RUN", help="a TOML file, or a run directory")
    add("--mode", metavar="STAGES", help="the stages, joined by + (default: those of the config)")
    for flag, meaning in (
        ("--deep", "of a run: read every byte of its checkpoints"),
        ("--call", "also call the reward, filters and curriculum once, on a made-up sample"),
    ):
        add(flag, action="store_true", help=meaning)


def run_init(arguments: argparse.Namespace) -> int:
    """Writes a config and a task file. Raises ConfigError for a task that does not exist, RunDirError where
    files are in the way.
    """
    from rollouts.preflight.init import write_task

    written = write_task(arguments.directory, arguments.task)
    config = written[0]
    print("\n".join(f"wrote {path}" for path in written))
    print(f"check it:  python -m rollouts check {config} --call")
    print(f"train it:  python integration_training/train.py --config {config} --mode sft+rl")
    return 0


def run_explain(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints settings. Raises ConfigError for a setting that does not exist, or a config that is wrong."""
    from rollouts.config.explain import explain_config
    from rollouts.config.load import load_with_origins

    words = [word for word in (arguments.config, arguments.key) if word]
    has_config = bool(words) and (len(words) == 2 or words[0].endswith(".toml") or Path(words[0]).is_file())
    key = "" if has_config and len(words) == 1 else words[-1] if words else ""
    if overrides and not has_config:
        raise ConfigError(
            f"{overrides[0]}: name the config that it changes: python -m rollouts explain CONFIG KEY"
            f" {overrides[0]} …"
        )
    values = load_with_origins(words[0], overrides)[1] if has_config else None
    print(explain_config(key, values), end="", flush=True)
    return 0


def run_check(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints what was found: 0 if nothing would stop the run, otherwise 2. Raises ConfigError for the config
    alone, RunDirError for a directory that is no run.
    """
    from rich.console import Console

    from rollouts.preflight.findings import print_findings

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if arguments.config.is_dir():
        findings = check_run(arguments.config, deep=arguments.deep)
        return print_findings(findings, console, good="this run is whole", bad="wrong with this run", end="")
    import trio

    from rollouts.config.load import load_config
    from rollouts.config.modes import STAGES, check_mode, list_stages, parse_mode
    from rollouts.preflight.checks import check_servers, look_at_run
    from rollouts.preflight.functions import call_functions
    from rollouts.preflight.run_directory import choose_run_dir

    config = load_config(arguments.config, overrides)
    stages = parse_mode(arguments.mode) if arguments.mode else list_stages(config)
    if not stages:
        tables = ", ".join(f"[{stage}]" for stage in STAGES)
        raise ConfigError(
            f"{arguments.config}: none of {tables}: there is nothing to train; add one of the tables"
        )
    check_mode(config, arguments.mode or "+".join(stages))
    ranks = config.distributed.ranks
    run = look_at_run(config, stages, choose_run_dir(config), base_dir=Path.cwd(), local_ranks=ranks)
    findings = [*check_output(config), *run.findings, *(check_servers(config.engine) if config.rl else ())]
    if arguments.call:
        findings += trio.run(lambda: call_functions(config, stages, run.rows, base_dir=Path.cwd()))
    return print_findings(findings, console)


def check_run(root: Path, *, deep: bool) -> list[Finding]:
    """What is to be said of a run's files, checkpoints and trackers."""
    from rollouts.preflight.checks import check_written_run
    from rollouts.preflight.findings import note, reporting
    from rollouts.run_dir import open_run_dir
    from rollouts.trackers.launch import read_state
    from rollouts.trackers.position import position_path
    from rollouts.trackers.sinks import SINKS

    findings = check_written_run(open_run_dir(root), deep=deep)
    for name in SINKS:
        if position_path(root, name).exists():
            with reporting(findings, f"tracker {name}"):
                left_out, behind = read_state(root, name)
                state = left_out or ("it does not have all rows yet" if behind else "it has all rows")
                note(findings, "warning" if left_out or behind else "ok", f"tracker {name}", state)
    return findings


def check_output(config: RunConfig) -> list[Finding]:
    """Whether a run may write into its directory, and its trackers can be fed; a run that could go on there
    is a warning.
    """
    from rollouts.preflight.findings import note, reporting
    from rollouts.preflight.run_directory import check_run_dir, choose_run_dir
    from rollouts.trackers.sinks import check_trackers

    run_dir = choose_run_dir(config)
    findings: list[Finding] = []
    with reporting(findings, "output.dir"):
        check_run_dir(run_dir, config, resume=True)
        used = "holds a run with these settings, which needs --resume; or name another directory"
        exists = run_dir.config.exists()
        message = f"{run_dir.root} {used}" if exists else str(run_dir.root)
        note(findings, "warning" if exists else "ok", "output.dir", message)
    with reporting(findings, "output.trackers"):
        check_trackers(config.output.trackers)
        if config.output.trackers:
            note(findings, "ok", "output.trackers", ", ".join(config.output.trackers))
    return findings

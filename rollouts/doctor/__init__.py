"""`rollouts doctor`: what could hurt a run on this machine, what servers of a config say, what is wrong with
a run that was made.

machine.py   Python, packages, GPU, cores, memory, disk, limits, isolation of rewards, engines' environments, what earlier runs left
servers.py   servers that a config names
record.py    files, checkpoints and trackers of a run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.preflight.findings import STYLES, Finding

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {"ok": "ok", "warning": "warning", "error": "problem"}


def examine(
    root: Path | None, *, config_path: Path | None = None, deep: bool = False, environment: Mapping[str, str]
) -> list[Finding]:
    """What was found on this machine, of the run at `root` and of what a config needs; `deep`: every byte of
    checkpoints is read.

    Raises RunDirError where `root` is no run directory, ConfigError for a config that cannot be read.
    """
    import trio

    from rollouts.config.load import load_config
    from rollouts.doctor.machine import examine_machine
    from rollouts.doctor.record import examine_run
    from rollouts.doctor.servers import examine_servers
    from rollouts.inspect.read import open_run_dir
    from rollouts.preflight.run_directory import choose_run_dir

    run_dir = None if root is None else open_run_dir(root)
    config = None if config_path is None else load_config(config_path)
    place = root if root is not None else choose_run_dir(config).root if config is not None else Path("runs")
    findings = examine_machine(place, environment=environment)
    if config is not None and config.rl is not None:
        findings += trio.run(examine_servers, config.engine)
    return findings if run_dir is None else [*findings, *examine_run(run_dir, deep=deep)]


def print_report(findings: Sequence[Finding], console: Console) -> int:
    """1 if something is a problem, else 0. Prints a line for each finding and how many are problems and
    warnings.
    """
    from rich.text import Text

    for finding in findings:
        line = Text(f"{WORDS[finding.level]:<8} ", STYLES[finding.level])
        line.append(f"{finding.subject}: ", "bold")
        console.print(line.append(finding.message, ""), soft_wrap=True)
    problems = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(
        f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
    )
    return 1 if problems else 0

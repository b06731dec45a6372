"""The commands before a run: `init` begins a task, `explain` tells settings, `check` looks at a run that is
to start, `engines` installs inference servers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rollouts.errors import ConfigError


def run_init(arguments: argparse.Namespace) -> int:
    """Writes a config and a task file. Raises ConfigError for a task that does not exist, RunDirError where
    files are in the way.
    """
    from rollouts.preflight.init import write_task

    config, source = write_task(arguments.directory, arguments.task)
    print(f"wrote {config}\nwrote {source}")
    print(f"check it:  python -m rollouts check {config} --call")
    print(f"train it:  python integration_training/train.py --config {config}")
    return 0


def run_explain(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints settings. Raises ConfigError for a setting that does not exist, or a config that is wrong."""
    from rollouts.config.explain import explain_config
    from rollouts.config.load import load_with_origins

    config, key = arguments.config, arguments.key
    if not (key or config.endswith(".toml") or Path(config).is_file()):
        config, key = "", config
    if overrides and not config:
        raise ConfigError(
            f"{overrides[0]}: name the config that it changes: python -m rollouts explain CONFIG KEY"
            f" {overrides[0]} …"
        )
    values = load_with_origins(config, overrides)[1] if config else None
    print(explain_config(key, values), end="", flush=True)
    return 0


def run_check(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints what was found: 0 if nothing would stop the run, otherwise 2. Raises ConfigError for the config
    alone, RunDirError for a directory that is no run.
    """
    from rich.console import Console

    from rollouts.preflight.findings import Findings, print_findings

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if arguments.config.is_dir():
        from rollouts.preflight.checks import check_written_run
        from rollouts.run_dir import open_run_dir
        from rollouts.trackers.follower import position_path
        from rollouts.trackers.launch import read_state
        from rollouts.trackers.sinks import SINKS

        root = arguments.config
        findings = check_written_run(open_run_dir(root), deep=arguments.deep)
        for name in SINKS:
            if position_path(root, name).exists():
                with findings.reporting(f"tracker {name}"):
                    left_out, behind = read_state(root, name)
                    state = left_out or ("it does not have all rows yet" if behind else "it has all rows")
                    findings.note("warning" if left_out or behind else "ok", f"tracker {name}", state)
        return print_findings(findings, console, good="this run is whole", bad="wrong with this run", end="")
    import trio

    from rollouts.config.load import choose_stages, load_config
    from rollouts.preflight.checks import check_servers, look_at_run
    from rollouts.preflight.functions import call_functions
    from rollouts.preflight.run_directory import check_run_dir, choose_run_dir
    from rollouts.trackers.sinks import check_trackers

    config, findings = load_config(arguments.config, overrides), Findings()
    stages, run_dir = choose_stages(config, arguments.mode), choose_run_dir(config)
    with findings.reporting("output.dir"):
        check_run_dir(run_dir, config, resume=True)
        if run_dir.config.exists():
            used = "holds a run with these settings, which needs --resume; or name another directory"
            findings.note("warning", "output.dir", f"{run_dir.root} {used}")
        else:
            findings.note("ok", "output.dir", str(run_dir.root))
    with findings.reporting("output.trackers"):
        check_trackers(config.output.trackers)
    run = look_at_run(config, stages, run_dir, findings, local_ranks=config.distributed.ranks)
    if config.rl:
        check_servers(config.engine, findings)
    if arguments.call:
        trio.run(call_functions, config, run.functions, run.rows, findings)
    return print_findings(findings, console)


def run_engines(arguments: argparse.Namespace) -> int:
    """Makes an environment for a server. Raises ConfigError for a directory in use, EngineSetupError if a
    step fails.
    """
    from functools import partial

    from rollouts.engines.environments import install_cpu_environment

    kind = "vllm" if "vllm" in arguments.command else "sglang"
    install_cpu_environment(kind, arguments.into or Path(f".venv-{kind}"), say=partial(print, flush=True))
    return 0

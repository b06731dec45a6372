"""The commands before a run: `init` begins a task, `explain` tells settings, `check` looks at a run that is
to start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig
    from rollouts.preflight.findings import Finding

SETTINGS_HELP = "any setting: --section.key value"


def add_init_parser(commands: Any) -> None:
    """Adds `init`."""
    what = "write a config and a task that run as they are"
    init = commands.add_parser("init", help=what, description=what, allow_abbrev=False)
    init.add_argument(
        "directory", type=Path, nargs="?", default=Path("task"), metavar="DIR", help="where to (default task)"
    )
    init.add_argument(
        "--task", default="counting", metavar="NAME", help="which task to begin with (default counting)"
    )
    init.set_defaults(run=run_init)


def add_explain_parser(commands: Any) -> None:
    """Adds `explain`."""
    what = "every setting, or one: meaning, type, default, and its value in a config"
    explain = commands.add_parser(
        "explain", help=what, description=what, epilog=SETTINGS_HELP, allow_abbrev=False
    )
    explain.add_argument(
        "config",
        nargs="?",
        default="",
        metavar="CONFIG",
        help="a TOML file; without it the defaults are shown",
    )
    explain.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a setting or table, for example rl.rollout"
    )
    explain.add_argument("--markdown", action="store_true", help="the page docs/config.md")
    explain.set_defaults(run=run_explain, takes_settings=True)


def add_check_parser(commands: Any) -> None:
    """Adds `check`."""
    what = "what would stop a run and what it will need; of a run directory, whether its files are whole"
    check = commands.add_parser(
        "check", help=what, description=what, epilog=SETTINGS_HELP, allow_abbrev=False
    )
    check.add_argument("config", type=Path, metavar="CONFIG | RUN", help="a TOML file, or a run directory")
    check.add_argument("--deep", action="store_true", help="of a run: read every byte of its checkpoints")
    check.add_argument(
        "--mode", metavar="STAGES", help="the stages to check, joined by + (default: those the config has)"
    )
    check.add_argument(
        "--call",
        action="store_true",
        help="also call the reward, filters and curriculum once, on a made-up sample",
    )
    check.set_defaults(run=run_check, takes_settings=True)


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
    from rollouts.config.explain import explain_config, explain_markdown
    from rollouts.config.load import load_with_origins

    if arguments.markdown:
        print(explain_markdown(), end="", flush=True)
        return 0
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
    if arguments.config.is_dir():
        return run_check_run(arguments.config, deep=arguments.deep)
    import trio
    from rich.console import Console

    from rollouts.config.load import load_config
    from rollouts.config.modes import STAGES, check_mode, list_stages, parse_mode
    from rollouts.preflight.checks import look_at_run
    from rollouts.preflight.findings import print_findings
    from rollouts.preflight.reward_models import check_reward_models
    from rollouts.preflight.run_directory import choose_run_dir
    from rollouts.preflight.servers import check_servers
    from rollouts.preflight.trial import call_functions

    config = load_config(arguments.config, overrides)
    stages = parse_mode(arguments.mode) if arguments.mode else list_stages(config)
    if not stages:
        tables = ", ".join(f"[{stage}]" for stage in STAGES)
        raise ConfigError(
            f"{arguments.config}: none of {tables}: there is nothing to train; add one of the tables"
        )
    check_mode(config, arguments.mode or "+".join(stages))
    from rollouts.models.devices import (
        look_at_device,
    )  # loads torch, seconds: after what can be wrong without it
    from rollouts.models.load import load_tokenizer, resolve_model

    template = Path(config.model.chat_template) if config.model.chat_template else None
    run = look_at_run(
        config,
        stages,
        find_model=lambda name: resolve_model(name, seed=config.seed),
        open_tokenizer=lambda path: load_tokenizer(path, chat_template=template),
        base_dir=Path.cwd(),
        check_loss=check_loss,
        check_models=lambda tokenizer: check_reward_models(config, stages, choose_run_dir(config), tokenizer),
        look_at_device=lambda: look_at_device(
            config.model.device, deterministic=config.deterministic, local_ranks=config.distributed.ranks
        ),
    )
    findings = [*check_output(config), *run.findings, *(check_servers(config.engine) if config.rl else ())]
    if arguments.call:
        findings += trio.run(lambda: call_functions(config, stages, run.rows, base_dir=Path.cwd()))
    return print_findings(findings, Console(width=None if sys.stdout.isatty() else 160, highlight=False))


def run_check_run(root: Path, *, deep: bool) -> int:
    """Prints what is wrong with a run's files, checkpoints and trackers: 0 if nothing is, otherwise 2."""
    from rich.console import Console

    from rollouts.preflight.findings import Finding, print_findings, reporting
    from rollouts.preflight.written_run import check_written_run
    from rollouts.run_dir import RunDir
    from rollouts.trackers.commands import check_followable
    from rollouts.trackers.launch import is_behind, read_left_out
    from rollouts.trackers.position import position_path
    from rollouts.trackers.sinks import SINKS

    check_followable(root)
    findings = check_written_run(RunDir(root), deep=deep)
    for name in SINKS:
        if position_path(root, name).exists():
            with reporting(findings, f"tracker {name}"):
                left_out, behind = read_left_out(root, name), is_behind(root, name)
                state = left_out or ("it does not have all rows yet" if behind else "it has all rows")
                findings.append(Finding("warning" if left_out or behind else "ok", f"tracker {name}", state))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    return print_findings(findings, console, good="this run is whole", bad="wrong with this run", end="")


def check_output(config: RunConfig) -> list[Finding]:
    """Whether a run may write into its directory, and its trackers can be fed; a run that could go on there
    is a warning.
    """
    from rollouts.preflight.findings import Finding, reporting
    from rollouts.preflight.run_directory import check_run_dir, choose_run_dir
    from rollouts.trackers.launch import check_trackers

    run_dir = choose_run_dir(config)
    findings: list[Finding] = []
    with reporting(findings, "output.dir"):
        check_run_dir(run_dir, config, resume=True)
        used = run_dir.config.exists()
        message = (
            f"{run_dir.root} holds a run with these settings, which needs --resume; or name another directory"
            if used
            else str(run_dir.root)
        )
        findings.append(Finding("warning" if used else "ok", "output.dir", message))
    with reporting(findings, "output.trackers"):
        check_trackers(config.output.trackers)
        if config.output.trackers:
            findings.append(Finding("ok", "output.trackers", ", ".join(config.output.trackers)))
    return findings


def check_loss(config: RLTrainingConfig | PreferenceTrainingConfig) -> None:
    """Raises ConfigError or PlugInError if there is no such loss, or it cannot be called with these
    parameters on what a batch will hold.
    """
    from rollouts.config import schema

    if isinstance(config, schema.PreferenceTrainingConfig):
        from rollouts.losses.row_losses import check_preference_loss

        check_preference_loss(config.loss, config.loss_params)
        return
    from rollouts.loops.algorithm import check_algorithms, needs_reference
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import try_loss

    def check(settings: RLTrainingConfig) -> None:
        spec = make_loss_spec(settings)
        try_loss(
            spec.name,
            spec.params,
            unit=spec.unit,
            recompute_old=settings.recompute_old,
            reference=needs_reference(settings),
        )

    check_algorithms(config, check)

"""The `rollouts` command: begins a task, explains settings, checks a run before it starts, looks at it, installs inference servers.
Training is started with integration_training/train.py.

Exit codes: 0 done; 1 a failure; 2 wrong usage, or a directory or file that is not what it should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts import __version__
from rollouts.errors import ConfigError, DataError, ModelError, PlugInError, RolloutsError, RunDirError

if TYPE_CHECKING:
    from rollouts.config.schema import PreferenceTrainingConfig, RLTrainingConfig, RunConfig
    from rollouts.preflight.findings import Finding

BAD_INPUT = (ConfigError, DataError, ModelError, PlugInError, RunDirError)
SETTINGS_HELP = "any setting: --section.key value"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `rollouts ARGV`. A known error is one message on stderr, without a traceback."""
    parser = make_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    arguments, overrides = parser.parse_known_args(words)
    if overrides and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return arguments.run(arguments, overrides) if arguments.takes_settings else arguments.run(arguments)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this, Python complains again when it flushes stdout at exit. rich does the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RolloutsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BAD_INPUT) else 1


def make_parser() -> argparse.ArgumentParser:
    """The command line; each subcommand sets `run`, which imports what it needs."""
    what = "Reinforcement learning of language models: runs and settings."
    parser = argparse.ArgumentParser(prog="rollouts", description=what, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    parser.set_defaults(takes_settings=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="write a config and a task that run as they are", allow_abbrev=False)
    init.add_argument("directory", type=Path, nargs="?", default=Path("task"), metavar="DIR", help="where to (default task)")
    init.add_argument("--task", default="counting", metavar="NAME", help="which task to begin with (default counting)")
    init.set_defaults(run=run_init)

    explain = commands.add_parser(
        "explain", help="every setting, or one: meaning, type, default, and its value in a config", epilog=SETTINGS_HELP, allow_abbrev=False
    )
    explain.add_argument("config", nargs="?", default="", metavar="CONFIG", help="a TOML file; without it the defaults are shown")
    explain.add_argument("key", nargs="?", default="", metavar="KEY", help="a setting or table, for example rl.rollout")
    explain.add_argument("--markdown", action="store_true", help="the page docs/config.md")
    explain.set_defaults(run=run_explain, takes_settings=True)

    check = commands.add_parser(
        "check", help="what would stop a run, and what it will need, before it starts", epilog=SETTINGS_HELP, allow_abbrev=False
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    check.add_argument("--mode", metavar="STAGES", help="the stages to check, joined by + (default: those the config has)")
    check.add_argument("--call", action="store_true", help="also call the reward, filters and curriculum once, on a made-up sample")
    check.set_defaults(run=run_check, takes_settings=True)

    inspect = commands.add_parser("inspect", help="tables and curves of a run directory, also while it runs", allow_abbrev=False)
    inspect.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/demo")
    inspect.add_argument("--png", type=Path, metavar="FILE", help="where to draw the curves as a picture (default RUN/curves.png; needs matplotlib)")
    inspect.add_argument("--last", type=int, default=10, metavar="N", help="how many of the last steps to list (default 10)")
    inspect.add_argument("--samples", type=int, default=0, metavar="N", help="also print the last N samples")
    inspect.set_defaults(run=run_inspect)

    sim = commands.add_parser(
        "sim", help="RL over servers that fail, simulated: runs made of a number, checked after every event", allow_abbrev=False
    )
    which = sim.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, metavar="N", help="the run to make (default 0)")
    which.add_argument("--seeds", metavar="A..B", help="the runs from A to B, both included, until one breaks an invariant")
    sim.set_defaults(run=run_sim)

    engines = commands.add_parser("engines", help="environments for inference servers", allow_abbrev=False)
    kinds = engines.add_subparsers(required=True, metavar="COMMAND")
    for kind, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        what = f"make a Python environment in which {title} serves on a CPU; a complete one is left alone"
        install = kinds.add_parser(f"install-{kind}-cpu", help=what, description=what, allow_abbrev=False)
        install.add_argument("--into", type=Path, default=Path(f".venv-{kind}"), metavar="DIR", help=f"where to (default .venv-{kind})")
        install.set_defaults(run=run_install_engine, kind=kind)
    return parser


def run_install_engine(arguments: argparse.Namespace) -> int:
    """Makes an environment for a server. Raises ConfigError for a directory in use, EngineSetupError if a step fails."""
    from functools import partial

    from rollouts.engines.environments import install_cpu_environment

    install_cpu_environment(arguments.kind, arguments.into, say=partial(print, flush=True))
    return 0


def run_sim(arguments: argparse.Namespace) -> int:
    """Prints a line for each simulated run: 0 if all were sound, 1 with the first broken invariant. Raises ConfigError for seeds that are none."""
    import logging

    from rollouts.testing.fleet_schedule import draw_fleet_schedule
    from rollouts.testing.fleet_simulator import BrokenInvariant, describe_report, run_fleet_simulation

    seeds = parse_seeds(arguments.seeds) if arguments.seeds else [arguments.seed]
    logger = logging.getLogger("rollouts")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # failures are the subject
    try:
        for seed in seeds:
            try:
                report = run_fleet_simulation(draw_fleet_schedule(seed))
            except BrokenInvariant as broken:
                print(f"seed {seed}: broken: {broken}\nsee it again: {broken.__notes__[0]}", file=sys.stderr)
                return 1
            print(f"seed {seed}: {describe_report(report)}", flush=True)
    finally:
        logger.setLevel(level)  # a caller in this process keeps its warnings
    return 0


def parse_seeds(text: str) -> range:
    """The numbers of "A..B", both included. Raises ConfigError."""
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--seeds {text}: give two whole numbers, the first not above the second, for example 0..99")
    return range(int(first), int(last) + 1)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints what the files of a run say. Raises RunDirError."""
    from rich.console import Console

    from rollouts.inspect.plot import draw_curves, save_png
    from rollouts.inspect.read import read_run
    from rollouts.inspect.table import (
        describe_state,
        format_sample,
        make_evaluation_table,
        make_stage_table,
        make_step_table,
        make_summary_lines,
    )

    record = read_run(arguments.run_dir, with_samples=arguments.samples > 0)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    curves = draw_curves(record, width=min(72, console.width - 14))
    steps, evaluations = make_step_table(record, last=arguments.last), make_evaluation_table(record)
    for part in (curves, steps, evaluations):
        if part:
            console.print(part, soft_wrap=isinstance(part, str))
            console.print()
    console.print(f"{record.root}: {describe_state(record)}", soft_wrap=True)
    console.print(make_stage_table(record))
    for line in make_summary_lines(record):
        console.print(line, soft_wrap=True)
    for row in record.samples[-arguments.samples :] if arguments.samples > 0 else ():
        console.print(format_sample(row), soft_wrap=True)
    if arguments.png is None and importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: pip install 'rollouts-rl[plot]'")
        return 0
    png = arguments.png or record.root / "curves.png"
    save_png(record, png)
    console.print(f"wrote {png}", soft_wrap=True)
    return 0


def run_init(arguments: argparse.Namespace) -> int:
    """Writes a config and a task file. Raises ConfigError for a task that does not exist, RunDirError where files are in the way."""
    from rollouts.preflight.init import write_task

    written = write_task(arguments.directory, arguments.task)
    config = written[0]
    print("\n".join(f"wrote {path}" for path in written))
    print(f"check it:  python -m rollouts check {config} --call")
    print(f"train it:  python integration_training/train.py --config {config} --mode sft+rl")
    return 0


def run_explain(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints settings. Raises ConfigError for a setting that does not exist, or a config that is wrong."""
    from rollouts.config.explain import explain_config, explain_key, explain_markdown
    from rollouts.config.load import load_with_origins

    if arguments.markdown:
        print(explain_markdown(), end="", flush=True)
        return 0
    words = [word for word in (arguments.config, arguments.key) if word]
    has_config = bool(words) and (len(words) == 2 or words[0].endswith(".toml") or Path(words[0]).is_file())
    key = "" if has_config and len(words) == 1 else words[-1] if words else ""
    if overrides and not has_config:
        raise ConfigError(f"{overrides[0]}: name the config that it changes: python -m rollouts explain CONFIG KEY {overrides[0]} …")
    values = load_with_origins(words[0], overrides)[1] if has_config else None
    try:
        text = explain_key(key, values) if key else explain_config("", values)
    except KeyError as error:
        raise ConfigError(error.args[0]) from error
    print(text, end="", flush=True)
    return 0


def run_check(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints what was found: 0 if nothing would stop the run, otherwise 2. Raises ConfigError for the config alone."""
    import trio
    from rich.console import Console

    from rollouts.config.load import load_config
    from rollouts.config.modes import STAGES, check_mode, list_stages, parse_mode
    from rollouts.preflight.checks import look_at_run
    from rollouts.preflight.findings import print_findings
    from rollouts.preflight.reward_models import check_reward_models
    from rollouts.preflight.run_directory import choose_run_dir
    from rollouts.preflight.trial import call_functions

    config = load_config(arguments.config, overrides)
    stages = parse_mode(arguments.mode) if arguments.mode else list_stages(config)
    if not stages:
        tables = ", ".join(f"[{stage}]" for stage in STAGES)
        raise ConfigError(f"{arguments.config}: none of {tables}: there is nothing to train; add one of the tables")
    check_mode(config, arguments.mode or "+".join(stages))
    from rollouts.models.devices import look_at_device  # loads torch, seconds: after what can be wrong without it
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
    findings = [*check_output(config), *run.findings]
    if arguments.call:
        findings += trio.run(lambda: call_functions(config, stages, run.rows, base_dir=Path.cwd()))
    return print_findings(findings, Console(width=None if sys.stdout.isatty() else 160, highlight=False))


def check_output(config: RunConfig) -> list[Finding]:
    """Whether a run may write into its directory; a run that could go on there is a warning."""
    from rollouts.preflight.findings import Finding, reporting
    from rollouts.preflight.run_directory import check_run_dir, choose_run_dir

    run_dir = choose_run_dir(config)
    findings: list[Finding] = []
    with reporting(findings, "output.dir"):
        check_run_dir(run_dir, config, resume=True)
        used = run_dir.config.exists()
        message = f"{run_dir.root} holds a run with these settings, which needs --resume; or name another directory" if used else str(run_dir.root)
        findings.append(Finding("warning" if used else "ok", "output.dir", message))
    return findings


def check_loss(config: RLTrainingConfig | PreferenceTrainingConfig) -> None:
    """Raises ConfigError or PlugInError if there is no such loss, or it cannot be called with these parameters on what a batch will hold."""
    from rollouts.config import schema

    if isinstance(config, schema.PreferenceTrainingConfig):
        from rollouts.losses.row_losses import check_preference_loss

        check_preference_loss(config.loss, config.loss_params, reference=config.reference != "none")
        return
    from rollouts.loops.algorithm import check_algorithms, needs_reference
    from rollouts.loops.rl_batch import make_loss_spec
    from rollouts.losses import try_loss

    def check(settings: RLTrainingConfig) -> None:
        spec = make_loss_spec(settings)
        try_loss(spec.name, spec.params, unit=spec.unit, recompute_old=settings.recompute_old, reference=needs_reference(settings))

    check_algorithms(config, check)

"""The `rollouts` command: begins a task, explains settings, checks a run before it starts, looks at it,
installs inference servers. Training is started with integration_training/train.py.

A command's module is imported when it is that command's turn, and what the command itself needs when it runs:
--help answers at once. Exit codes: 0 done; 1 a failure; 2 wrong usage, or a directory or file that is not
what it should be; 130 stopped by Ctrl-C.
"""

import importlib
import os
import shutil
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rollouts import __version__
from rollouts.errors import ConfigError, RolloutsError, RunDirError
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
    known = COMMANDS[arguments.chosen]
    given = (arguments, overrides) if known.get("takes_settings") else (arguments,)
    if overrides and len(given) == 1:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        module = importlib.import_module(known["module"])
        return getattr(module, f"run_{arguments.chosen.replace('-', '_')}")(*given)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this, Python complains again when it flushes stdout
        # at exit. rich does the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RolloutsError as error:
        print(f"{type(error).__name__}: {make_safe(str(error))}", file=sys.stderr)
        return error.exit_code


def make_parser(command: str = "") -> ArgumentParser:
    """The command line with this command, or with all where it is none. `chosen` is the name of the one that
    was given, which the function run_NAME of its module does.
    """
    whole = ArgumentParser(
        prog="rollouts",
        description="Reinforcement learning of language models: runs and settings.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"rollouts {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", dest="chosen")
    for name in [command] if command in COMMANDS else COMMANDS:
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
        for option in map(dict, options):
            to = either if option.pop("either", False) else parser
            to.add_argument(*option.pop("names"), **option)
    return whole


# --- before a run and after it ------------------------------------------------------------------------------


def run_init(arguments: Namespace) -> int:
    """Writes a config and a task file. Raises ConfigError for a task that does not exist, RunDirError where
    files are in the way.
    """
    from rollouts.preflight.init import write_task

    config, source = write_task(arguments.directory, arguments.task)
    print(
        f"wrote {config}\nwrote {source}\ncheck it:  python -m rollouts check {config} --call\n"
        f"train it:  python integration_training/train.py --config {config}"
    )
    return 0


def run_explain(arguments: Namespace, overrides: Sequence[str]) -> int:
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


def run_check(arguments: Namespace, overrides: Sequence[str]) -> int:
    """Prints what was found: 0 if nothing would stop the run, otherwise 2. Raises ConfigError for the config
    alone, RunDirError for a directory that is no run.
    """
    from rich.console import Console

    from rollouts.preflight.checks import check_servers, check_written_run, look_at_run
    from rollouts.preflight.findings import Findings, print_findings
    from rollouts.trackers.sinks import SINKS, check_trackers

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if arguments.config.is_dir():
        from rollouts.run_dir import open_run_dir
        from rollouts.trackers.follower import position_path
        from rollouts.trackers.launch import read_state

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
    from rollouts.preflight.functions import call_functions
    from rollouts.preflight.run_directory import check_run_dir, choose_run_dir

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


def run_engines(arguments: Namespace) -> int:
    """Makes an environment for a server. Raises ConfigError for a directory in use, EngineSetupError if a
    step fails.
    """
    from functools import partial

    from rollouts.engines.environments import install_cpu_environment

    kind = "vllm" if "vllm" in arguments.command else "sglang"
    install_cpu_environment(kind, arguments.into or Path(f".venv-{kind}"), say=partial(print, flush=True))
    return 0


def run_export(arguments: Namespace) -> int:
    """Writes the model or adapter of a run, whole or not at all. Raises RunDirError for a directory that is
    there, CheckpointError for a checkpoint that is not whole, ModelError for an adapter whose base is gone.
    """
    from rollouts.checkpoints.load import check_checkpoint, find_run_model
    from rollouts.models.directories import build_directory_once, is_adapter
    from rollouts.models.load import save_merged
    from rollouts.run_dir import checkpoint_manifest, checkpoint_state_dir, parse_step

    source, target = Path(find_run_model(arguments.model)), arguments.to
    if parse_step(source.name) is not None:
        check_checkpoint(source, hashes=True)

    def write(path: Path) -> None:
        if arguments.merge and is_adapter(source):
            save_merged(source, path, arguments.dtype)
            return
        for file in set(source.iterdir()) - {checkpoint_state_dir(source), checkpoint_manifest(source)}:
            if file.is_file():
                shutil.copyfile(file, path / file.name)

    if not build_directory_once(target, write):
        raise RunDirError(f"{target} is there already; name a new directory")
    print(f"wrote {target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    return 0

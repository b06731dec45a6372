"""Whether a run may write where its config says."""

from __future__ import annotations

from pathlib import Path

from rollouts.config.load import check_same_run, load_config
from rollouts.config.schema import RunConfig
from rollouts.errors import RunDirError
from rollouts.run_dir import RunDir


def choose_run_dir(config: RunConfig) -> RunDir:
    """output.dir, or runs/NAME where it is empty."""
    return RunDir(Path(config.output.dir or f"runs/{config.name}"))


def check_run_dir(run_dir: RunDir, config: RunConfig, *, resume: bool) -> None:
    """Raises RunDirError if the directory is another run's. Changes nothing on disk."""
    if run_dir.root.exists() and not run_dir.root.is_dir():
        raise RunDirError(f"output.dir={run_dir.root} is a file; name a directory")
    used = run_dir.root.is_dir() and any(run_dir.root.iterdir())
    if used and not resume:
        raise RunDirError(f"output.dir={run_dir.root} is not empty; go on with --resume, or name another directory with --output.dir DIR")
    if used and not run_dir.config.exists():
        raise RunDirError(f"output.dir={run_dir.root} holds files but no config.toml: it is not a run; name another directory with --output.dir DIR")
    if used:
        check_same_run(load_config(run_dir.config, ()), config)

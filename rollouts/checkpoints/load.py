"""Which checkpoints are complete, and what they hold. Only reads."""

from __future__ import annotations

import json
from pathlib import Path

from rollouts.checkpoints.manifest import compute_sha256, read_manifest
from rollouts.errors import CheckpointError
from rollouts.run_dir import checkpoint_state_dir, parse_step
from rollouts.types import JSONValue

TRAINER_STATE = "trainer.json"


def trainer_state_path(checkpoint: Path) -> Path:
    """Where a checkpoint keeps the loop's own state, as JSON."""
    return checkpoint_state_dir(checkpoint) / TRAINER_STATE


def check_checkpoint(path: Path, *, hashes: bool) -> None:
    """Raises CheckpointError naming the first file that is missing, or differs in size or, with `hashes`, in content.

    Sizes cost a stat per file; hashes read every byte, so run those in a thread. Files that the manifest does not name are ignored.
    """
    way_out = f"use an older checkpoint, or remove {path} and resume"
    manifest = read_manifest(path)
    if parse_step(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path} holds step {manifest.step}; its name says another; rename it to step_{manifest.step}")
    for record in manifest.files:
        file = path / record.path
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}), but the manifest names it; {way_out}") from error
        if size != record.size:
            raise CheckpointError(f"{file} has {size} bytes; the manifest says {record.size}; {way_out}")
        if hashes and compute_sha256(file) != record.sha256:
            raise CheckpointError(f"{file} has not the SHA-256 that the manifest says: it was changed or damaged; {way_out}")


def is_complete(path: Path) -> bool:
    """Whether the manifest can be read and every file is there with its size."""
    try:
        check_checkpoint(path, hashes=False)
    except CheckpointError:
        return False
    return True


def list_checkpoints(stage_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints of a stage, oldest first. Empty if the directory does not exist."""
    if not stage_dir.is_dir():
        return []
    named = [(step, path) for path in stage_dir.iterdir() if (step := parse_step(path.name)) is not None]
    return sorted((step, path) for step, path in named if is_complete(path))


def find_newest_checkpoint(stage_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step, None if there is none. Incomplete ones are passed over."""
    complete = list_checkpoints(stage_dir)
    return complete[-1][1] if complete else None


def load_trainer_state(path: Path) -> dict[str, JSONValue]:
    """The mapping that `save_checkpoint` was given as `state`. Raises CheckpointError if it cannot be read."""
    file = trainer_state_path(path)
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error}); use an older checkpoint") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds a {type(state).__name__}; it must be an object; use an older checkpoint")
    return state

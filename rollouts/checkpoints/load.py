"""Which checkpoints are complete, and what they hold. Only reads."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rollouts.checkpoints.manifest import (
    Manifest,
    compute_sha256,
    describe_unreadable,
    read_manifest,
)
from rollouts.errors import CheckpointDamaged, CheckpointError
from rollouts.run_dir import checkpoint_state_dir, parse_step
from rollouts.types import JSONValue

TRAINER_STATE = "trainer.json"
Report = Callable[[str], object]  # takes one line for a person


def trainer_state_path(checkpoint: Path) -> Path:
    """Where a checkpoint keeps the loop's own state, as JSON."""
    return checkpoint_state_dir(checkpoint) / TRAINER_STATE


def check_checkpoint(path: Path, *, hashes: bool) -> Manifest:
    """The manifest. Raises CheckpointDamaged naming the first file that is missing, or differs in size or,
    with `hashes`, in content; CheckpointError where that cannot be known, as when the system does not let a
    file be read, or the checkpoint is not in its place.

    Sizes cost a stat per file; hashes read every byte, so run those in a thread. Files that the manifest does
    not name are ignored; one that is a link is refused, for what it leads to lies outside.
    """
    way_out = f"use an older checkpoint, or remove {path} and resume"
    manifest = read_manifest(path)
    if parse_step(path.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{path} holds step {manifest.step}; its name says another; rename it to step_{manifest.step}"
        )
    here = path.resolve()
    for record in manifest.files:
        file = path / record.path
        try:
            size, leads_to = file.stat().st_size, file.resolve()
            if leads_to != here / record.path:
                raise CheckpointError(
                    f"{file} is a link to {leads_to}; a checkpoint holds plain files; {way_out}"
                )
            if size != record.size:
                raise CheckpointDamaged(
                    f"{file} has {size} bytes; the manifest says {record.size}; {way_out}"
                )
            if hashes and compute_sha256(file) != record.sha256:
                raise CheckpointDamaged(
                    f"{file} has not the SHA-256 that the manifest says: it was changed or damaged; {way_out}"
                )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamaged(
                f"{file} cannot be read ({error.strerror}), but the manifest names it; {way_out}"
            ) from error
        except OSError as error:
            raise describe_unreadable(file, error) from error
    return manifest


def is_complete(path: Path) -> bool:
    """Whether every file that the manifest names is there with its size. Raises CheckpointError where that
    cannot be known.
    """
    if not os.path.lexists(path):
        return False
    try:
        check_checkpoint(path, hashes=False)
    except CheckpointDamaged:
        return False
    return True


def list_checkpoints(stage_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints of a stage, oldest first. Empty if the directory does not
    exist.

    Whatever has a checkpoint's name and is none, or a damaged one, is passed over. Raises CheckpointError for
    one that may be whole but cannot be read or used where it is: to pass it over could be to lose it.
    """
    return list(_walk_complete(stage_dir, hashes=False, report=lambda line: None))[::-1]


def find_newest_checkpoint(
    stage_dir: Path, *, hashes: bool = False, report: Report = lambda line: None
) -> Path | None:
    """The complete checkpoint of the highest step, None if there is none. Like list_checkpoints, but older
    ones are not looked at; with `hashes` every byte is read. `report` gets a line about each that is passed
    over.
    """
    return next((path for _, path in _walk_complete(stage_dir, hashes=hashes, report=report)), None)


def list_named(stage_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that has a checkpoint's name, newest first. Raises CheckpointError if the
    directory cannot be read.
    """
    try:
        return sorted(
            ((step, path) for path in stage_dir.iterdir() if (step := parse_step(path.name)) is not None),
            reverse=True,
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise describe_unreadable(stage_dir, error) from error


def _walk_complete(stage_dir: Path, *, hashes: bool, report: Report) -> Iterator[tuple[int, Path]]:
    """Newest first."""
    for step, path in list_named(stage_dir):
        try:
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link to {path.readlink()}; put the checkpoint itself there, or remove the"
                    " link"
                )
            manifest = check_checkpoint(path, hashes=hashes)
        except CheckpointDamaged as error:
            report(f"skipped a checkpoint that is incomplete or damaged: {error}")
            continue
        except OSError as error:
            raise describe_unreadable(path, error) from error
        if manifest.stage != path.parent.name:
            raise CheckpointError(
                f"{path} is of the stage {manifest.stage!r}, not {path.parent.name!r}; move it to where it"
                " belongs"
            )
        yield step, path


def load_trainer_state(path: Path) -> dict[str, JSONValue]:
    """The mapping that `save_checkpoint` was given as `state`. Raises CheckpointError if it cannot be
    read.
    """
    file = trainer_state_path(path)
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}: {error}); use an older checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{file} holds a {type(state).__name__}; it must be an object; use an older checkpoint"
        )
    return state

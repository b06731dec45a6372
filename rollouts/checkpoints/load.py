"""Which checkpoints are complete, and what they hold.

The manifest makes a checkpoint complete: every other file with its size and hash, and a hash of itself. It
knows nothing of what the files are: whatever lies in the directory when it is made belongs to the
checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from rollouts.errors import CheckpointDamaged, CheckpointError, RunDirError
from rollouts.protocols import Say
from rollouts.run_dir import RunDir, checkpoint_manifest, checkpoint_state_dir, parse_step
from rollouts.types import JSONObject

# --- the manifest -------------------------------------------------------------------------------------------


MANIFEST_SCHEMA = 2


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint, with forward slashes
    size: int  # bytes
    sha256: str  # hexadecimal


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint holds."""

    stage: str  # sft, rl
    step: int  # completed steps of the stage
    config_hash: str | None  # of the settings that decide what is trained; None: nobody said
    files: tuple[FileRecord, ...]  # sorted by path; the manifest itself is not among them


def compute_manifest(checkpoint: Path, *, stage: str, step: int, config_hash: str | None = None) -> Manifest:
    """The manifest of the files that lie in `checkpoint` now, where none is yet. Reads every byte: run it in
    a thread.

    Raises CheckpointError for a link or anything else that is neither file nor directory: what it leads to
    may change.
    """
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return Manifest(stage, step, config_hash, tuple(record_file(checkpoint, path) for path in paths))


def record_file(checkpoint: Path, path: Path) -> FileRecord:
    """Size and hash of a file as it reads now."""
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path} is a link or no file; a checkpoint holds plain files only")
    return FileRecord(path.relative_to(checkpoint).as_posix(), path.stat().st_size, compute_sha256(path))


def compute_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def drop_from_cache(path: Path) -> None:
    """Asks the system to forget a file that is synced, so that reading it asks the disk. A hint: what reads
    next may come from memory still.
    """
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes, the same for the same manifest. Its last field is the SHA-256 of itself without that
    field.
    """
    content = {"schema": MANIFEST_SCHEMA, **msgspec.to_builtins(manifest)}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointDamaged if it is missing or not as it was written;
    CheckpointError if it is of a schema that this version does not know, or the system does not let it be
    read: then nobody knows what the checkpoint is.
    """
    path = checkpoint_manifest(checkpoint)
    way_out = f"use an older checkpoint and remove {checkpoint}"
    try:
        raw = path.read_bytes()
        schema = msgspec.json.decode(raw, type=_Schema).schema
        if schema == MANIFEST_SCHEMA:
            manifest = msgspec.json.decode(raw, type=Manifest)
            if raw == encode_manifest(manifest) and all(map(_lies_inside, manifest.files)):
                return manifest
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamaged(
            f"{checkpoint} has no manifest.json: it was not finished; {way_out}"
        ) from error
    except OSError as error:
        raise describe_unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read ({type(error).__name__}: {error}); {way_out}"
        ) from error
    if schema != MANIFEST_SCHEMA:
        raise CheckpointError(
            f"{path} has schema {schema!r}; this version reads {MANIFEST_SCHEMA}: use the version of rollouts"
            " that wrote it"
        )
    raise CheckpointDamaged(f"{path} is not as it was written: it was changed or damaged; {way_out}")


class _Schema(msgspec.Struct):
    schema: int


def _lies_inside(record: FileRecord) -> bool:
    path = PurePosixPath(record.path)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in record.path


def describe_unreadable(path: Path, error: OSError) -> CheckpointError:
    """What to raise where the system does not let a file be read that may be as good as ever."""
    return CheckpointError(
        f"{path} cannot be read now ({error.strerror or error}), which says nothing about what it holds, so"
        " nothing was changed; see that the disk, the mount and the permissions are in order, and try again"
    )


# --- checkpoints --------------------------------------------------------------------------------------------


GENERATE = ("rl", "preference", "sft")  # stages whose models do, the last of a run first


def trainer_state_path(checkpoint: Path) -> Path:
    """Where a checkpoint keeps the loop's own state, as JSON."""
    return checkpoint_state_dir(checkpoint) / "trainer.json"


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
    stage_dir: Path, *, hashes: bool = False, report: Say = lambda line: None
) -> Path | None:
    """The complete checkpoint of the highest step, None if there is none. Like list_checkpoints, but older
    ones are not looked at; with `hashes` every byte is read. `report` gets a line about each that is passed
    over.
    """
    return next((path for _, path in _walk_complete(stage_dir, hashes=hashes, report=report)), None)


def find_run_model(name: str) -> str:
    """The name, but of a run directory its newest complete checkpoint of the last stage that generates.
    Raises RunDirError for a run without one.
    """
    path = Path(name)
    if not (path / "config.toml").is_file():
        return name
    newest = map(find_newest_checkpoint, map(RunDir(path).stage_checkpoints, GENERATE))
    for checkpoint in filter(None, newest):
        return str(checkpoint)
    raise RunDirError(f"{path} has no complete checkpoint yet; wait for one, or name a model")


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


def _walk_complete(stage_dir: Path, *, hashes: bool, report: Say) -> Iterator[tuple[int, Path]]:
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


def load_trainer_state(path: Path) -> JSONObject:
    """The mapping that `save_checkpoint` was given as `state`. Raises CheckpointError if it cannot be
    read.
    """
    file = trainer_state_path(path)
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}: {error}); use an older checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{file} holds a {type(state).__name__}; it must be an object; use an older checkpoint"
        )
    return state

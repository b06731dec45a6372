"""The file that makes a checkpoint complete: every other file with its size and hash, and a hash of itself.

It knows nothing of what the files are: whatever lies in the directory when it is made belongs to the
checkpoint.
"""

import hashlib
import json
import os
from pathlib import Path, PurePosixPath

import msgspec

from rollouts.errors import CheckpointDamaged, CheckpointError
from rollouts.run_dir import checkpoint_manifest

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
    files: tuple[FileRecord, ...]  # sorted by path; the manifest itself is not among them
    config_hash: str | None = None  # of the settings that decide what is trained; None: nobody said


def compute_manifest(checkpoint: Path, *, stage: str, step: int, config_hash: str | None = None) -> Manifest:
    """The manifest of the files that lie in `checkpoint` now. Reads every byte: run it in a thread.

    Raises CheckpointError for a link or anything else that is neither file nor directory: what it leads to
    may change.
    """
    manifest_path = checkpoint_manifest(checkpoint)
    paths = sorted(
        path
        for path in checkpoint.rglob("*")
        if path != manifest_path and (path.is_symlink() or not path.is_dir())
    )
    return Manifest(stage, step, tuple(record_file(checkpoint, path) for path in paths), config_hash)


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
    content = {
        "schema": MANIFEST_SCHEMA,
        "stage": manifest.stage,
        "step": manifest.step,
        "config_hash": manifest.config_hash,
        "files": msgspec.to_builtins(manifest.files),
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Writes the manifest file. Not synced: the caller decides when the checkpoint becomes visible."""
    checkpoint_manifest(checkpoint).write_bytes(encode_manifest(manifest))


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

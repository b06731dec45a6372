"""The file that makes a checkpoint complete: every other file with its size and hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollouts.errors import CheckpointError
from rollouts.run_dir import checkpoint_manifest

MANIFEST_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint, with forward slashes
    size: int  # bytes
    sha256: str  # hexadecimal


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint holds."""

    stage: str  # sft, rl
    step: int  # completed steps of the stage
    files: tuple[FileRecord, ...]  # sorted by path; the manifest itself is not among them


def compute_manifest(checkpoint: Path, *, stage: str, step: int) -> Manifest:
    """The manifest of the files that lie in `checkpoint` now. Reads every byte: run it in a thread."""
    manifest_path = checkpoint_manifest(checkpoint)
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != manifest_path)
    records = tuple(FileRecord(path.relative_to(checkpoint).as_posix(), path.stat().st_size, compute_sha256(path)) for path in paths)
    return Manifest(stage, step, records)


def compute_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Writes the manifest file. Not synced: the caller decides when the checkpoint becomes visible."""
    content = {
        "schema": MANIFEST_SCHEMA,
        "stage": manifest.stage,
        "step": manifest.step,
        "files": [{"path": record.path, "size": record.size, "sha256": record.sha256} for record in manifest.files],
    }
    checkpoint_manifest(checkpoint).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if it is missing, unreadable or of another schema."""
    path = checkpoint_manifest(checkpoint)
    try:
        content = json.loads(path.read_bytes())
        schema = content["schema"]
        if schema != MANIFEST_SCHEMA:
            raise CheckpointError(f"{path} has schema {schema!r}; this version reads {MANIFEST_SCHEMA}: use the version that wrote it")
        files = tuple(FileRecord(_relative(record["path"]), int(record["size"]), str(record["sha256"])) for record in content["files"])
        return Manifest(str(content["stage"]), int(content["step"]), files)
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} has no manifest.json: it was not finished; use an older checkpoint and remove this one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); use an older checkpoint and remove this one") from error


def _relative(path: object) -> str:
    if not isinstance(path, str) or not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path {path!r} does not lie in the checkpoint")
    return path

"""Weight snapshots as files: `weights/vN/`, immutable, complete when the directory has its name. No torch.

    .tmp-vN-xxxxxxxx/    shards, each hashed and synced as it is closed ← disk.export_snapshot
      └─ index, config ─ manifest.json (sizes, hashes) last ─ synced ─ renamed to vN/ ─ parent synced
                                                                          │ open_reader: an engine loads
    older than the published one, and nobody reads it ◄── prune ──────────┘

A crash at any point leaves vN complete or a .tmp- directory that no reader looks at.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollouts.checkpoints.manifest import FileRecord, compute_sha256
from rollouts.errors import ModelError, SnapshotError
from rollouts.models.directories import WEIGHT_INDEX, fsync_path, read_shard_names

SNAPSHOT_SCHEMA = 1
MANIFEST_NAME = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"
SNAPSHOT_NAME = re.compile(
    r"v(0|[1-9][0-9]{0,17})(?:-([2-9]|[1-9][0-9]{1,8}))?"
)  # one name for each version and edition


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """What a complete snapshot holds."""

    version: int
    files: tuple[FileRecord, ...]  # sorted by path; the manifest itself is not among them

    @property
    def weight_bytes(self) -> int:
        """Size of all shards."""
        return sum(record.size for record in self.files if record.path.endswith(".safetensors"))

    @property
    def digest(self) -> str:
        """Equal for two snapshots exactly if their shards are equal, byte for byte."""
        shards = [
            f"{record.path} {record.sha256}" for record in self.files if record.path.endswith(".safetensors")
        ]
        return hashlib.sha256("\n".join(shards).encode()).hexdigest()


def parse_snapshot_name(name: str) -> tuple[int, int] | None:
    """(version, edition) of `vN` (edition 1) or `vN-E`; None for any other name."""
    match = SNAPSHOT_NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2) or 1)) if match else None


def list_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(version, path) of every snapshot in `folder`, oldest first; within a version by edition. Incomplete
    ones have other names.
    """
    named = [
        (parsed, path) for path in folder.glob("v*") if (parsed := parse_snapshot_name(path.name)) is not None
    ]
    return [(version, path) for (version, _), path in sorted(named)]


# --- the manifest -------------------------------------------------------------------------------------------


def record_file(path: Path) -> FileRecord:
    """Size and hash of a file that is on disk when this returns. Reads every byte: run it in a thread."""
    fsync_path(path)
    return hash_file(path)


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it reads now. Reads every byte: run it in a thread."""
    return FileRecord(path.name, path.stat().st_size, compute_sha256(path))


def write_manifest(snapshot: Path, manifest: SnapshotManifest) -> None:
    """Writes and syncs the manifest file."""
    content = {
        "schema": SNAPSHOT_SCHEMA,
        "version": manifest.version,
        "files": [
            {"path": record.path, "size": record.size, "sha256": record.sha256} for record in manifest.files
        ],
    }
    (snapshot / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    fsync_path(snapshot / MANIFEST_NAME)


def read_manifest(snapshot: Path) -> SnapshotManifest:
    """The manifest of a snapshot. Raises SnapshotError naming the file if it is missing, unreadable or of
    another schema.
    """
    path = snapshot / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SNAPSHOT_SCHEMA:
            raise SnapshotError(
                f"{path} has schema {content['schema']!r}; this version reads {SNAPSHOT_SCHEMA}: remove"
                f" {snapshot}"
            )
        files = tuple(
            FileRecord(_plain_name(record["path"]), int(record["size"]), str(record["sha256"]))
            for record in content["files"]
        )
        return SnapshotManifest(int(content["version"]), files)
    except FileNotFoundError as error:
        raise SnapshotError(
            f"{path} is missing: {snapshot} was not finished or is no snapshot; remove it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SnapshotError(
            f"{path} cannot be read ({type(error).__name__}: {error}); remove {snapshot}"
        ) from error


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or not name or name != PurePosixPath(name).name or name == "..":
        raise ValueError(f"path {name!r} is not the name of a file in the snapshot")
    return name


def check_snapshot(snapshot: Path, *, hashes: bool = True) -> SnapshotManifest:
    """The manifest, if every file is as it says. `hashes` False compares sizes only. Raises SnapshotError
    naming the file. Blocks.
    """
    manifest = read_manifest(snapshot)
    for record in manifest.files:
        path = snapshot / record.path
        if not path.is_file():
            raise SnapshotError(f"{path} is missing, though the manifest names it; remove {snapshot}")
        if path.stat().st_size != record.size:
            raise SnapshotError(
                f"{path} has {path.stat().st_size} bytes; the manifest says {record.size}: it is damaged,"
                f" remove {snapshot}"
            )
        if hashes and compute_sha256(path) != record.sha256:
            raise SnapshotError(
                f"{path} has other bytes than the manifest says (sha256): it is damaged, remove {snapshot}"
            )
    try:
        unnamed = set(read_shard_names(snapshot)) - {record.path for record in manifest.files}
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    if unnamed:
        raise SnapshotError(
            f"{snapshot / WEIGHT_INDEX} names {min(unnamed)}, which the manifest does not have; remove"
            f" {snapshot}"
        )
    return manifest


# --- making -------------------------------------------------------------------------------------------------


def make_temporary(path: Path) -> Path:
    """A new directory beside `path` whose name no reader looks at."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    return temporary


def publish_files(
    temporary: Path, path: Path, *, version: int, shards: dict[str, FileRecord]
) -> SnapshotManifest:
    """The manifest of the snapshot `path`, complete on disk now. `shards`: those in `temporary` that are
    hashed and synced already. Blocks.
    """
    others = [record_file(file) for file in temporary.iterdir() if file.name not in shards]
    manifest = SnapshotManifest(
        version, tuple(sorted([*shards.values(), *others], key=lambda record: record.path))
    )
    write_manifest(temporary, manifest)
    fsync_path(temporary)
    temporary.rename(path)
    fsync_path(path.parent)
    return manifest


# --- keeping ------------------------------------------------------------------------------------------------


class Snapshots:
    """The snapshots in one folder, and who reads them in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[Path, int] = {}

    @contextmanager
    def open_reader(self, path: Path) -> Iterator[Path]:
        """`path`, which stays until the context is left. Raises SnapshotError if it is not there any more."""
        if not path.is_dir():
            raise SnapshotError(
                f"snapshot {path} is not there; it was pruned before it was opened: load the published one"
            )
        self._readers[path] = self._readers.get(path, 0) + 1
        try:
            yield path
        finally:
            self._readers[path] -= 1
            if not self._readers[path]:
                del self._readers[path]

    def readers(self, path: Path) -> int:
        """How many read `path` now."""
        return self._readers.get(path, 0)

    def find_name(self, version: int) -> Path:
        """A path for `version` that nothing has yet: vN, or vN-2, … where an earlier run left a vN."""
        edition = 1
        while (path := self.folder / (f"v{version}" if edition == 1 else f"v{version}-{edition}")).exists():
            edition += 1
        return path

    def removable(self, keep: Path) -> list[Path]:
        """Every snapshot but `keep` that nobody reads."""
        return [path for _, path in list_snapshots(self.folder) if path != keep and not self.readers(path)]

    def clear_after_restart(self, version: int) -> list[Path]:
        """Removes what a run that was killed left: half-written snapshots, and versions above `version`,
        which training will make again.

        The snapshots of `version` itself, which may or may not be of the weights that the trainer has now.
        Blocks.
        """
        for path in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        found = list_snapshots(self.folder)
        for newer, path in found:
            if newer > version:
                remove_snapshot(path)
        return [path for same, path in found if same == version]


def remove_snapshot(path: Path) -> None:
    """Removes a snapshot so that no reader ever sees half of it: its name goes first. One that is gone is
    fine. Blocks. Raises OSError.
    """
    hidden = path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)  # what stays is cleared at the next start

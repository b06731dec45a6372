"""Model directories as files: what a usable one holds, and how one is made so that nobody ever sees half of
it. No torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from rollouts.errors import ModelError

WEIGHT_INDEX = "model.safetensors.index.json"


def check_model_directory(path: Path) -> None:
    """Raises ModelError unless `path` holds config.json and safetensors weights, every shard of an index
    included.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model directory {path} has no config.json; a Hugging Face model directory has one beside its"
            " weights"
        )
    if (path / WEIGHT_INDEX).is_file():
        missing = [name for name in read_shard_names(path) if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"model directory {path} lacks {missing[0]} (and {len(missing) - 1} more) named in"
                f" {WEIGHT_INDEX}; copy it again"
            )
        return
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ModelError(
            f"model directory {path} has pickled weights only, which are never loaded; convert them to"
            " safetensors"
        )
    raise ModelError(
        f"{path} is a model directory without weights: there is no *.safetensors in it; copy the weights"
        " beside config.json"
    )


def read_shard_names(path: Path) -> list[str]:
    """Sorted file names of the shards in the directory's weight index. Raises ModelError if the index cannot
    be read.
    """
    try:
        weight_map = json.loads((path / WEIGHT_INDEX).read_text("utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path / WEIGHT_INDEX} cannot be read ({error}); copy the model directory again"
        ) from error


def build_directory_once(path: Path, write: Callable[[Path], None]) -> bool:
    """True if `write` made `path` now, False if it was there. Afterwards `path` is complete: it appears by a
    rename, synced to disk.

    A second process that wants the same directory waits for the first (a file lock that dies with its holder)
    and then uses what it made. When `write` raises, nothing is left behind.
    """
    if path.is_dir():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():
            return False
        for leftover in path.parent.glob(
            f".tmp-{path.name}-*"
        ):  # of a process that was killed; whoever lives holds the lock
            shutil.rmtree(leftover)
        temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            write(temporary)
            fsync_tree(temporary)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_path(path.parent)
    return True


def fsync_tree(root: Path) -> None:
    """Returns once every file and directory below `root`, and `root`, is on disk."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync_path(Path(folder) / name)
        fsync_path(Path(folder))


def fsync_path(path: Path) -> None:
    """Returns once the file's bytes, or the directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

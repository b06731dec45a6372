"""Saving a checkpoint: complete on disk afterwards, or absent.

    .tmp-step_N-xxxxxxxx/     model and state/ ← write_model, then state/trainer.json
      └─ all files hashed ─ synced ─ read back and compared ─ manifest.json written, synced, read back ─
          renamed to step_N/ ─ parent synced

A crash at any point leaves either step_N complete or a .tmp- directory that no reader looks at;
`remove_incomplete` clears those. Reading back goes to the disk where the system forgets a synced file when
asked to, and to the page cache where it does not.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from trio.to_thread import run_sync as run_in_thread

from rollouts.checkpoints.load import (
    Manifest,
    compute_manifest,
    drop_from_cache,
    encode_manifest,
    is_complete,
    record_file,
    trainer_state_path,
)
from rollouts.crash_points import reach
from rollouts.errors import CheckpointError, StorageError
from rollouts.models.directories import fsync_tree
from rollouts.run_dir import checkpoint_manifest, fsync_path, parse_step
from rollouts.types import JSONObject, check_json, encode_json

TEMPORARY_PREFIX = ".tmp-"
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust say errno
WriteModel = Callable[[Path], Awaitable[None]]


async def save_checkpoint(
    path: Path,
    *,
    write_model: WriteModel,
    state: JSONObject,
    stage: str,
    step: int,
    config_hash: str | None = None,
    expected_bytes: int = 0,
) -> None:
    """Writes the checkpoint `path`, whose name is step_{step}: what `write_model` puts there and `state`,
    which is read at once.

    Waits for `write_model`, then for a thread that hashes, syncs and reads back; once hashing has begun a
    cancellation is felt only when the checkpoint is in place. An incomplete directory of that name is
    replaced; a complete one never: CheckpointError. ValueError if `state` is not JSON. StorageError when the
    disk refuses, or gives other bytes back; before anything is written when it has less than `expected_bytes`
    free. When `write_model` raises, its files are removed; when it is cancelled they stay, for someone may be
    writing still.
    """
    reach("checkpoint.begin")
    if parse_step(path.name) != step:
        raise CheckpointError(f"checkpoint {path} is to hold step {step}; its name must be step_{step}")
    check_json("state", state)
    text = encode_json(state)
    if is_complete(path):
        raise CheckpointError(
            f"checkpoint {path} is complete already and is never overwritten; remove it first, or resume"
            " from it"
        )
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        await run_in_thread(_make_temporary, temporary, expected_bytes)
        await write_model(temporary)
        reach("checkpoint.after_model")
        describe = partial(compute_manifest, temporary, stage=stage, step=step, config_hash=config_hash)
        await run_in_thread(_finish, temporary, path, text, describe)
    except Exception as error:
        await run_in_thread(lambda: shutil.rmtree(temporary, ignore_errors=True))
        refused = find_os_error(error)
        if refused is None:
            raise
        raise describe_refusal(path, refused, expected_bytes) from error


def _make_temporary(temporary: Path, expected_bytes: int) -> None:
    temporary.mkdir(parents=True)
    reach("checkpoint.directory_made")
    if shutil.disk_usage(temporary).free < expected_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _finish(temporary: Path, path: Path, state_text: str, describe: Callable[[], Manifest]) -> None:
    state_file = trainer_state_path(temporary)
    state_file.parent.mkdir(exist_ok=True)
    state_file.write_text(state_text, "utf-8")
    reach("checkpoint.after_state")
    manifest, manifest_file = describe(), checkpoint_manifest(temporary)
    fsync_tree(temporary)
    reach("checkpoint.before_manifest")
    manifest_file.write_bytes(encode_manifest(manifest))
    reach("checkpoint.after_manifest")
    fsync_path(manifest_file)
    read_back(temporary, manifest)
    fsync_path(temporary)
    if path.exists() or path.is_symlink():
        move_aside(path)
    reach("checkpoint.before_rename")
    temporary.rename(path)
    reach("checkpoint.after_rename")
    try:
        fsync_path(path.parent)
        reach("checkpoint.complete")
    except OSError:
        path.rename(temporary)  # it may be there after a power cut or not: what was not promised is absent
        raise


def read_back(checkpoint: Path, manifest: Manifest) -> None:
    """Raises StorageError naming the first file that does not read as the manifest says, or the manifest.
    Files must be synced. Blocks.
    """
    for record in manifest.files:
        file = checkpoint / record.path
        drop_from_cache(file)
        if record_file(checkpoint, file) != record:
            break
    else:
        file = checkpoint_manifest(checkpoint)
        drop_from_cache(file)
        if file.read_bytes() == encode_manifest(manifest):
            return
    raise StorageError(
        f"{file} reads back otherwise than it was written; the disk or its file system is failing: check it,"
        " and name another directory with --output.dir DIR"
    )


def move_aside(path: Path) -> Path:
    """The new name of a checkpoint that readers no longer see; `remove_incomplete` deletes it."""
    hidden = path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(hidden)
    return hidden


# --- what a disk refuses ------------------------------------------------------------------------------------


def find_os_error(error: BaseException) -> OSError | None:
    """The system's error that this is, or that it says in words as libraries written in Rust do; None for any
    other.
    """
    if isinstance(error, OSError):
        return error
    said = OS_ERROR.search(str(error))
    if said is None or (type(error) is not Exception and type(error).__name__ != "SafetensorError"):
        return None
    number = int(said[1])
    return OSError(number, os.strerror(number))


def describe_refusal(path: Path, error: OSError, expected_bytes: int) -> StorageError:
    """What could not be written and why, how much room there is, and what to do."""
    folder = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        room = f"; {format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        room = ""
    needed = f", {format_bytes(expected_bytes)} are needed" if expected_bytes else ""
    where = f" at {error.filename}" if error.filename else ""
    return StorageError(
        f"{path} cannot be written ({error.strerror or error}{where}){room}{needed}; free space, set"
        " output.keep_checkpoints, or go on in another place: copy the run directory and resume with"
        " --output.dir DIR"
    )


def format_bytes(count: float) -> str:
    """As people read sizes: 1.5 GiB, 20.0 MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

"""Saving a checkpoint: complete on disk afterwards, or absent.

    .tmp-step_N-xxxxxxxx/     model and state/ ← write_model, then state/trainer.json
      └─ all files hashed and synced ─ manifest.json written and synced ─ renamed to step_N/ ─ parent synced

A crash at any point leaves either step_N complete or a .tmp- directory that no reader looks at; `remove_incomplete` clears those.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio

from rollouts.checkpoints.load import is_complete, trainer_state_path
from rollouts.checkpoints.manifest import compute_manifest, write_manifest
from rollouts.errors import CheckpointError
from rollouts.models.directories import fsync_path, fsync_tree
from rollouts.run_dir import checkpoint_manifest, parse_step
from rollouts.types import JSONValue, check_json, encode_json

TEMPORARY_PREFIX = ".tmp-"


async def save_checkpoint(
    path: Path,
    *,
    write_model: Callable[[Path], Awaitable[None]],
    state: Mapping[str, JSONValue],
    stage: str,
    step: int,
) -> None:
    """Writes the checkpoint `path`, whose name is step_{step}: what `write_model` puts there and `state`.

    Waits for `write_model`, then for a thread that hashes and syncs; once hashing has begun a cancellation is felt only when the
    checkpoint is in place. An incomplete directory of that name is replaced; a complete one never: CheckpointError. ValueError if
    `state` is not JSON. When `write_model` raises, its files are removed; when it is cancelled they stay, for someone may be writing still.
    """
    if parse_step(path.name) != step:
        raise CheckpointError(f"checkpoint {path} is to hold step {step}; its name must be step_{step}")
    check_json("state", state)
    if is_complete(path):
        raise CheckpointError(f"checkpoint {path} is complete already and is never overwritten; remove it first, or resume from it")
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        await write_model(temporary)
        text = encode_json(state)
        await trio.to_thread.run_sync(lambda: _finish(temporary, path, state_text=text, stage=stage, step=step))
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _finish(temporary: Path, path: Path, *, state_text: str, stage: str, step: int) -> None:
    state_file = trainer_state_path(temporary)
    state_file.parent.mkdir(exist_ok=True)
    state_file.write_text(state_text, "utf-8")
    manifest = compute_manifest(temporary, stage=stage, step=step)
    fsync_tree(temporary)
    write_manifest(temporary, manifest)
    fsync_path(checkpoint_manifest(temporary))
    fsync_path(temporary)
    if path.exists():
        move_aside(path)
    temporary.rename(path)
    fsync_path(path.parent)


def move_aside(path: Path) -> Path:
    """The new name of a checkpoint that readers no longer see; `remove_incomplete` deletes it."""
    hidden = path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(hidden)
    return hidden

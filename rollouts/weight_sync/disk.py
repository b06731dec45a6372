"""Weight snapshots on disk, `weights/vN/`: immutable, complete when the directory has its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from safetensors.torch import save_file

from rollouts.protocols import TrainingBackend

if TYPE_CHECKING:
    import torch


async def export_snapshot(backend: TrainingBackend, path: Path) -> Path:
    """`path`, holding model.safetensors with every parameter in Hugging Face names. An existing snapshot is kept as it is.

    Written beside its name and moved there at the end, so a reader never sees half of one.
    """
    if path.exists():
        return path
    partial = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights: dict[str, torch.Tensor] = await backend.get_weights().result()
    await trio.to_thread.run_sync(save_file, weights, partial / "model.safetensors")
    partial.rename(path)
    return path

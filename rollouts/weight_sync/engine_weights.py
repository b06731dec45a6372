"""The weights of an embedded engine that is behind the trainer, in a checkpoint: a resumed run generates with
what an unbroken one would.

    a save between two updates:   engine ──► state/engine.safetensors, with its version
    resume:                       state/engine.safetensors ──► trainer ──► engine, by a verified update;
                                  the trainer's own weights are restored after it

Only a stop, or what ends a run, saves between two updates (`rl.sync_every` > 1): checkpoints that are due
come after an update.
"""

from functools import partial
from pathlib import Path

import trio
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.checkpoints.save import WriteModel
from rollouts.engines.local.engine import LocalEngine
from rollouts.errors import CheckpointError
from rollouts.models.export import write_safetensors
from rollouts.protocols import InferenceEngine, SyncWeights, TrainingBackend
from rollouts.run_dir import checkpoint_state_dir

ENGINE_FILE = "engine.safetensors"
VERSION = "version"  # in the file's metadata


async def hold_engine_weights(engine: InferenceEngine, version: int) -> WriteModel | None:
    """What writes a copy of the engine's weights into a checkpoint; None if they are the trainer's, of
    `version`, or are a server's to keep.
    """
    if not isinstance(engine, LocalEngine) or engine.features.shares_weights:
        return None
    served = await engine.weight_version()
    if served == version:
        return None
    weights = await engine.copy_weights()

    def write(checkpoint: Path) -> None:
        folder = checkpoint_state_dir(checkpoint)
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / ENGINE_FILE, weights, metadata={VERSION: str(served)})

    return partial(trio.to_thread.run_sync, write)


def read_engine_weights(checkpoint: Path) -> tuple[dict[str, Tensor], int] | None:
    """The weights that the engine had when `checkpoint` was saved, and their version; None if they were the
    trainer's. Blocks.

    Raises CheckpointError if they cannot be read.
    """
    path = checkpoint_state_dir(checkpoint) / ENGINE_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return weights, int((file.metadata() or {})[VERSION])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


async def sync_as_saved(
    backend: TrainingBackend,
    engine: InferenceEngine,
    sync_weights: SyncWeights,
    checkpoint: Path,
    version: int,
) -> bool:
    """Brings `engine` to the weights that it had when `checkpoint` was saved, else to the trainer's, which
    are of `version`.

    True if the trainer's weights are not its own any more: restore them.
    """
    held = await trio.to_thread.run_sync(read_engine_weights, checkpoint)
    if not held or not engine.features.in_memory_update:
        await sync_weights(backend, [engine], version)
        return False
    weights, served = held
    await backend.load_weights(weights)
    await backend.set_weight_version(served)
    await sync_weights(backend, [engine], served)
    return True

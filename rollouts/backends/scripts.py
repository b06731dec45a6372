"""Checkpoints of a training loop written by hand, in the format of the backends', which can read them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from rollouts.backends.state import Position, hold_state, read_state
from rollouts.checkpoints.load import load_trainer_state
from rollouts.checkpoints.retention import choose_checkpoint
from rollouts.checkpoints.save import save_checkpoint
from rollouts.models.devices import find_device
from rollouts.models.export import save_hf_model
from rollouts.models.sharded import load_sharded_weights
from rollouts.ranks.meet import Ranks
from rollouts.run_dir import RunDir
from rollouts.types import JSONObject

STAGE = "rl"


def save_training(
    directory: Path,
    step: int,
    model: Any,
    optimizer: Any,
    state: JSONObject,
    *,
    tokenizer: Any = None,
    beside: Mapping[str, Any] = {},
) -> None:
    """The checkpoint of `step` in a run directory, complete or absent: a model directory, the moments of
    AdamW, torch's random states, the models `beside` it in folders of their names (a reference that moves, a
    critic), and `state`, which is JSON: of the DataBuffer, and what else you keep.

    Raises CheckpointError if the step is saved already; StorageError.
    """
    ranks = Ranks(0, 1, 1, find_device(model))

    async def write_model(folder: Path) -> None:
        for name, one in {"": model, **beside}.items():
            save_hf_model(one, folder / name, tokenizer)
        hold_state(model, optimizer, Position(step, 0, step), ranks, copied=False).write(folder)

    path = RunDir(directory).checkpoint(STAGE, step)
    trio.run(partial(save_checkpoint, path, write_model=write_model, state=state, stage=STAGE, step=step))


def resume_training(
    directory: Path, model: Any, optimizer: Any, *, beside: Mapping[str, Any] = {}
) -> tuple[int, JSONObject]:
    """(step, state) of the newest checkpoint that reads as it was written; weights, moments and random states
    are as they were then. (0, {}) if there is none, with nothing changed.

    What unfinished saves left is removed. Raises CheckpointError or ModelError for other models, and
    CheckpointError if all checkpoints are damaged.
    """
    path = choose_checkpoint(RunDir(directory).stage_checkpoints(STAGE), config_hash=None, report=print)
    if not path:
        return 0, {}
    ranks = Ranks(0, 1, 1, find_device(model))
    loaded = read_state(path, model, ranks)
    for name, one in {"": model, **beside}.items():
        load_sharded_weights(one, path / name, device=ranks.device)
    loaded.apply(optimizer, ranks.device)
    return loaded.position.steps, load_trainer_state(path)

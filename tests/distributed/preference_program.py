"""Three steps of DPO, KTO and a reward model, for tests.distributed.test_preference_ranks.

torchrun … -m tests.distributed.preference_program OUT        weights go to OUT.<stage>.safetensors
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import trio
from safetensors.torch import save_file
from torch import Tensor

from rollouts.config.schema import PreferenceTrainingConfig, RewardModelTrainingConfig
from rollouts.config.tables import DataSourceConfig, OptimConfig
from rollouts.data.preference import make_preference_mixture
from rollouts.loops.linearised import on_thread
from rollouts.loops.preference import run_preference_training
from rollouts.loops.reward_model import run_reward_model_training
from rollouts.losses.row_losses import make_kto_loss, make_pair_loss, make_score_loss
from rollouts.types import RolloutBatch
from tests.unit.test_loops import MemoryLogger
from tests.unit.test_preference_loops import make_labelled, make_pairs

OPTIM = OptimConfig(lr=1e-3)
STAGES = ("dpo", "kto", "reward_model")
OPTIONS: dict[str, Any] = {
    "optim": OPTIM,
    "total_steps": 3,
    "micro_batch_tokens": 40,
    "autocast": "off",
    "threads": 1,
}
DATA = [DataSourceConfig(kind="jsonl", path="unused.jsonl")]


class FlatReference:
    """A LogProbScorer that gives every token the same."""

    async def score(self, batch: RolloutBatch) -> tuple[Any, ...]:
        return tuple((mask * -5.0).astype("float32") for mask in batch.loss_masks)


async def train(backend: Any, stage: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The metrics of the steps, and the weights. A micro-batch holds two or three rows of the pairs."""
    submit, logger = backend.device_thread.submit, MemoryLogger()
    if stage == "reward_model":
        config = RewardModelTrainingConfig(data=DATA, steps=3, batch_size=5)
        pairs = make_preference_mixture(make_pairs(8))
        history = await run_reward_model_training(
            backend, pairs, config, logger, loss=on_thread(submit, make_score_loss(0.01))
        )
    elif stage == "kto":
        config = PreferenceTrainingConfig(data=DATA, steps=3, batch_size=5, loss="kto")
        loss = on_thread(submit, make_kto_loss({"beta": 0.3}, num_desirable=5, num_undesirable=3))
        rows = make_preference_mixture(make_labelled(8))
        history = await run_preference_training(
            backend, rows, config, logger, loss=loss, reference=FlatReference()
        )
    else:
        config = PreferenceTrainingConfig(data=DATA, steps=3, batch_size=5)
        pairs, loss = (
            make_preference_mixture(make_pairs(8)),
            on_thread(submit, make_pair_loss("dpo", {"beta": 0.3})),
        )
        history = await run_preference_training(
            backend, pairs, config, logger, loss=loss, reference=FlatReference()
        )
    return history, await backend.get_weights().result()


def head_of(stage: str) -> Any:
    return "scalar" if stage == "reward_model" else "tokens"


async def drive(channel: Any, ranks: Any) -> dict[str, list[dict[str, float]]]:
    from rollouts.backends.fsdp import open_fsdp_backend
    from rollouts.models.load import resolve_model

    found: dict[str, list[dict[str, float]]] = {}
    for stage in STAGES:
        path = await trio.to_thread.run_sync(resolve_model, "tiny:llama")
        async with open_fsdp_backend(
            path, channel=channel, ranks=ranks, head=head_of(stage), **OPTIONS
        ) as backend:
            found[stage], weights = await train(backend, stage)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            f"{sys.argv[-1]}.{stage}.safetensors",
        )
    return found


if __name__ == "__main__":
    from tests.distributed.job import main

    torch.set_num_threads(1)
    main(drive)

"""A frozen copy of a model that answers with log-probs: the reference of a KL term."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollouts.data.packing import make_micro_batches, spread_to_rows
from rollouts.device_thread import DeviceThread
from rollouts.models.load import load_hf_model
from rollouts.models.log_probs import check_trainable_architecture, compute_micro_batch_log_probs, supports_shared_prefix
from rollouts.types import FloatArray, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenReference:
    """A LogProbScorer over a model that never changes. Made by open_frozen_reference."""

    def __init__(self, model: PreTrainedModel, device_thread: DeviceThread, micro_batch_tokens: int) -> None:
        self._model = model
        self._device_thread = device_thread
        self._micro_batch_tokens = micro_batch_tokens
        self._share_prefix = supports_shared_prefix(model)

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0."""
        return await self._device_thread.submit(lambda: self._score(batch))

    def _score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        micro_batches = make_micro_batches(
            batch.tokens, batch.loss_masks, micro_batch_tokens=self._micro_batch_tokens, share_prefix=self._share_prefix
        )
        with torch.no_grad():
            flats = [compute_micro_batch_log_probs(self._model, part, temperature=batch.temperature) for part in micro_batches]
        return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)


@asynccontextmanager
async def open_frozen_reference(
    model_path: Path, *, device_thread: DeviceThread, micro_batch_tokens: int = 8192, device: str = "cpu"
) -> AsyncIterator[FrozenReference]:
    """The model at `model_path` in float32, without gradients, on a device thread that somebody else owns. Raises ModelError."""

    def load() -> PreTrainedModel:
        model = load_hf_model(model_path).to(device)  # pyright: ignore[reportArgumentType]  (transformers types .to narrowly)
        check_trainable_architecture(model)
        return model.requires_grad_(False)

    yield FrozenReference(await device_thread.submit(load), device_thread, micro_batch_tokens)

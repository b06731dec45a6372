"""A frozen copy of a model that answers with log-probs: the reference of a KL term."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollouts.data.packing import make_micro_batches, spread_to_rows
from rollouts.device_thread import DeviceThread
from rollouts.losses.logprobs import LinearLogProbs
from rollouts.models.load import load_hf_model
from rollouts.models.log_probs import ForwardPlan, compute_micro_batch_log_probs
from rollouts.reference.forward_plan import plan_forward
from rollouts.types import FloatArray, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenReference:
    """A LogProbScorer over a model that never changes. Made by open_frozen_reference."""

    def __init__(self, model: PreTrainedModel, device_thread: DeviceThread, plan: ForwardPlan, micro_batch_tokens: int) -> None:
        self._model = model
        self._device_thread = device_thread
        self._micro_batch_tokens = micro_batch_tokens
        self._plan = plan

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0."""
        return await self._device_thread.submit(lambda: self._score(batch))

    def _score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        layout = self._plan.choose_layout(max(len(row) for row in batch.tokens))
        budget = 1 if layout == "single" else self._micro_batch_tokens
        micro_batches = make_micro_batches(batch.tokens, batch.loss_masks, micro_batch_tokens=budget, share_prefix=layout == "tries")
        flats: list[LinearLogProbs] = []
        with torch.no_grad():
            for part in micro_batches:
                self._device_thread.check_open()
                flats.append(compute_micro_batch_log_probs(self._model, part, plan=self._plan, temperature=batch.temperature))
        return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)


@asynccontextmanager
async def open_frozen_reference(
    model_path: Path, *, device_thread: DeviceThread, micro_batch_tokens: int = 8192, device: str = "cpu"
) -> AsyncIterator[FrozenReference]:
    """The model at `model_path` in float32 on `device`, without gradients, on a device thread that somebody else owns. Raises ModelError."""

    def load() -> tuple[PreTrainedModel, ForwardPlan]:
        loaded = load_hf_model(model_path).to(device)  # pyright: ignore[reportArgumentType]  (transformers types .to narrowly)
        return loaded.requires_grad_(False), plan_forward(loaded)

    model, plan = await device_thread.submit(load)
    yield FrozenReference(model, device_thread, plan, micro_batch_tokens)

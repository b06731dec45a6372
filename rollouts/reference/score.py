"""A frozen copy of a model that answers with log-probs: the reference of a KL term."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollouts.data.packing import make_micro_batches, spread_to_rows
from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendClosed
from rollouts.models.load import ModelHead, load_hf_model
from rollouts.models.log_probs import ForwardPlan, TokenOutputs, compute_micro_batch_outputs
from rollouts.models.scalar_head import load_scalar_model
from rollouts.reference.forward_plan import plan_forward
from rollouts.types import FloatArray, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenReference:
    """A LogProbScorer over a model that it never changes itself. Made by open_frozen_reference,
    open_reference and the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device_thread: DeviceThread,
        plan: ForwardPlan,
        micro_batch_tokens: int,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """`metrics`: what was measured when the model was opened, see rollouts.reference.quantize; None:
        nothing.
        """
        self.metrics = dict(metrics or {})
        self._model: PreTrainedModel | None = model
        self._device_thread = device_thread
        self._micro_batch_tokens = micro_batch_tokens
        self._plan = plan

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Raises BackendClosed after
        release().
        """
        return await self._device_thread.submit(lambda: self._score(batch))

    async def release(self) -> None:
        """Lets go of the model. Returns when its memory is free; later calls of score() raise BackendClosed."""
        await self._device_thread.submit(self._release)

    def _score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        if self._model is None:
            raise BackendClosed(
                "this reference model was released; score inside the `async with` of its lease"
            )
        return score_batch(
            self._model,
            batch,
            plan=self._plan,
            micro_batch_tokens=self._micro_batch_tokens,
            on_boundary=self._device_thread.check_open,
        )

    def _release(self) -> None:
        self._model = None
        gc.collect()  # modules refer to each other in circles
        if torch.cuda.is_initialized():  # pragma: gpu
            torch.cuda.empty_cache()


def score_batch(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    plan: ForwardPlan,
    micro_batch_tokens: int,
    on_boundary: Callable[[], None] = lambda: None,
) -> tuple[FloatArray, ...]:
    """Log-probs [T_i] per row at batch.temperature, float32, nats; 0.0 where the loss mask is 0. No rows give
    no arrays. Of a model with a scalar head: its values.

    `on_boundary` is called before each micro-batch and may raise to end the work. Raises ModelError for rows
    longer than the plan is exact for.
    """
    if not len(batch):
        return ()
    layout = plan.choose_layout(max(len(row) for row in batch.tokens))
    budget = 1 if layout == "single" else micro_batch_tokens
    share_prefix, padding_free = layout in ("packed", "tries"), layout == "packed"
    micro_batches = make_micro_batches(
        batch.tokens,
        batch.loss_masks,
        micro_batch_tokens=budget,
        share_prefix=share_prefix,
        padding_free=padding_free,
    )
    flats: list[TokenOutputs] = []
    with torch.no_grad():
        for part in micro_batches:
            on_boundary()
            flats.append(compute_micro_batch_outputs(model, part, plan=plan, temperature=batch.temperature))
    return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)


@asynccontextmanager
async def open_frozen_reference(
    model_path: Path,
    *,
    device_thread: DeviceThread,
    micro_batch_tokens: int = 8192,
    device: str = "cpu",
    head: ModelHead = "tokens",
) -> AsyncIterator[FrozenReference]:
    """The model at `model_path` in float32 on `device`, without gradients, on a device thread that somebody
    else owns. Raises ModelError.

    head: "scalar" loads a reward model, whose scores a batch of make_score_batch gets.
    """

    def load() -> tuple[PreTrainedModel, ForwardPlan]:
        made = load_scalar_model(model_path) if head == "scalar" else load_hf_model(model_path)
        loaded = made.to(device)  # pyright: ignore[reportArgumentType]  (transformers types .to narrowly)
        return loaded.requires_grad_(False), plan_forward(loaded)

    model, plan = await device_thread.submit(load)
    yield FrozenReference(model, device_thread, plan, micro_batch_tokens)

"""A frozen model that answers with log-probs: the reference of a KL term, a teacher, a reward model."""

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trio

from rollouts.config.tables import FrozenDtype
from rollouts.data.packing import make_micro_batches, spread_to_rows
from rollouts.device_thread import DeviceThread
from rollouts.errors import BackendClosed
from rollouts.models.directories import ModelHead
from rollouts.models.forward_plan import ForwardPlan, compute_micro_batch_outputs, plan_forward, plan_plainly
from rollouts.models.layers import has_scalar_head
from rollouts.models.limits import find_context_limit
from rollouts.models.load import load_hf_model
from rollouts.protocols import Say
from rollouts.reference.quantize import compare_log_probs, load_torchao, quantize_model, sample_probe
from rollouts.types import FloatRows, Numbers, RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenReference:
    """A LogProbScorer over a model that does not change. Made by open_frozen_reference and the cache."""

    metrics: Numbers = {}  # reference/… of a quantised model, see compare_log_probs

    def __init__(
        self, model: "PreTrainedModel", device_thread: DeviceThread, micro_batch_tokens: int
    ) -> None:
        """In a job of the device thread: how rows run is found out by running some."""
        self.model: PreTrainedModel | None = model.requires_grad_(False)  # None after release()
        self.is_reward_model = has_scalar_head(model)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.context_length = find_context_limit(model.config)  # None: there is none
        self.plan = plan_forward(model)
        self._device_thread = device_thread
        self._micro_batch_tokens = micro_batch_tokens

    async def score(self, batch: RolloutBatch) -> FloatRows:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. Raises BackendClosed after
        release().
        """
        return await self._device_thread.submit(lambda: self.score_now(batch))

    def score_now(self, batch: RolloutBatch) -> FloatRows:
        """`score`, for jobs of the device thread."""
        if not self.model:
            raise BackendClosed("this reference was released; score inside the `async with` of its lease")
        return score_batch(
            self.model,
            batch,
            plan=self.plan,
            micro_batch_tokens=self._micro_batch_tokens,
            on_boundary=self._device_thread.check_open,
        )

    async def release(self) -> None:
        """Returns when the memory of the model is free."""

        def free() -> None:
            self.model = None
            gc.collect()  # modules refer to each other in circles
            if torch.cuda.is_initialized():  # pragma: gpu
                torch.cuda.empty_cache()

        await self._device_thread.submit(free)


def score_batch(
    model: "PreTrainedModel",
    batch: RolloutBatch,
    *,
    plan: ForwardPlan | None = None,
    micro_batch_tokens: int = 8192,
    on_boundary: Callable[[], None] = lambda: None,
) -> FloatRows:
    """Log-probs [T_i] per row at batch.temperature, float32, nats; 0.0 where the loss mask is 0. No rows give
    no arrays. A model with a scalar head gives its values. plan: as compute_token_log_probs of
    rollouts.models.padded.

    `on_boundary` is called before each micro-batch and may raise to end the work. Raises ModelError for rows
    longer than the plan is exact for.
    """
    if not len(batch):
        return ()
    plan = plan or plan_plainly(model)
    layout = plan.choose_layout(max(len(row) for row in batch.tokens))
    micro_batches = make_micro_batches(
        batch.tokens,
        batch.loss_masks,
        micro_batch_tokens=1 if layout == "single" else micro_batch_tokens,
        share_prefix=True,
        padding_free=layout == "packed",
    )
    flats = []
    with torch.no_grad():
        for part in micro_batches:
            on_boundary()
            flats.append(compute_micro_batch_outputs(model, part, plan=plan, temperature=batch.temperature))
    return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)


@asynccontextmanager
async def open_frozen_reference(
    path: Path,
    *,
    device_thread: DeviceThread,
    dtype: FrozenDtype = "float32",
    device: str = "cpu",
    head: ModelHead = "tokens",
    micro_batch_tokens: int = 8192,
    say: Say = lambda _: None,
) -> AsyncIterator[FrozenReference]:
    """The model at `path` as a LogProbScorer on `device_thread`, which somebody else owns.

    head="scalar" loads a reward model, whose scores a batch of make_score_batch gets. 8bit and 4bit: the
    model is loaded in float32 on the CPU and scores rows that it samples itself, before and after it is
    quantised; the difference goes into the metrics and, as a sentence, to `say`. Raises ModelError;
    ConfigError for a dtype whose library is not installed.
    """

    def load() -> FrozenReference:
        quantised = dtype in ("8bit", "4bit")
        if quantised:
            load_torchao()  # before the minutes that a large model takes
        own_dtype = torch.float32 if quantised or head == "scalar" else getattr(torch, dtype)
        model: Any = load_hf_model(path, dtype=own_dtype, head=head)
        model = model.to("cpu" if quantised else device)
        reference = FrozenReference(model, device_thread, micro_batch_tokens)
        if not quantised:
            return reference
        probe = sample_probe(model)
        exact = reference.score_now(probe)
        quantize_model(model, 8 if dtype == "8bit" else 4)
        reference = FrozenReference(model.to(device), device_thread, micro_batch_tokens)
        reference.metrics = compare_log_probs(reference.score_now(probe), exact, probe)
        return reference

    loading = device_thread.submit(load)
    with trio.CancelScope(shield=True):  # a job that has begun goes on, and its model would have no owner
        await loading
    reference = await loading
    if metrics := reference.metrics:
        say(
            f"the reference's {dtype} weights change log-probs by"
            f" {metrics['reference/log_prob_error/mean']:.3g} nats a token on average and by at most"
            f" {metrics['reference/log_prob_error/max']:.3g}; a k1 KL against it is"
            f" {metrics['reference/kl_bias']:+.3g} nats a token off"
        )
    yield reference

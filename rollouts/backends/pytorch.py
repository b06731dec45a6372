"""One model, one optimizer, one device thread: the backend that trains in a single process.

    caller ──forward_backward, optim_step, …──► queue of the device thread ──► model, gradients, optimizer
       ◄───────────── TrainFuture ──────────────────┘ in submission order

A job that raises makes every later job fail with EarlierStepFailed until reset(). What is not finite is skipped, not failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rollouts.backends.state import load_backend_state, read_model_weights, save_backend_state
from rollouts.config.schema import OptimConfig
from rollouts.data.packing import MICRO_BATCH_COST, MicroBatch, make_micro_batches, spread_to_rows
from rollouts.device_thread import DeviceFuture, DeviceThread
from rollouts.errors import BackendError, CheckpointError, DenominatorMismatch, EarlierStepFailed, NonFiniteSteps
from rollouts.losses import LossFn, LossInputs, LossOutput, resolve_loss
from rollouts.losses.logprobs import LinearLogProbs
from rollouts.models.export import save_hf_model
from rollouts.models.log_probs import ForwardPlan, compute_micro_batch_log_probs
from rollouts.models.optim import compute_lr
from rollouts.protocols import WeightSink
from rollouts.reference.forward_plan import log_plan, plan_forward
from rollouts.types import (
    BoolArray,
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    Mean,
    Metrics,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    merge_metrics,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
BUCKET_BYTES = 256 * 2**20
TOKEN_FIELDS = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")


class PyTorchTrainingBackend:
    """A TrainingBackend (see rollouts.protocols for its rules) on one device. Make it with open_pytorch_backend, or from its parts.

    `skip_zero_advantage` leaves rows out whose advantages are all 0. That is exact only if the loss has no term but the advantage's (no KL,
    no entropy). The denominator counts them all the same; metrics are then means over the rows that ran. `plan` says which shortcuts are
    exact for the model; None finds that out with the first batch. The model is put in evaluation mode: dropout would make its log-probs
    another policy's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.AdamW,
        device_thread: DeviceThread,
        *,
        optim: OptimConfig,
        total_steps: int,
        plan: ForwardPlan | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        autocast_dtype: torch.dtype | None = None,
        micro_batch_tokens: int = 8192,
        share_prefix: bool = True,
        skip_zero_advantage: bool = False,
    ) -> None:
        self.model = model.eval()
        self.device_thread = device_thread
        self._optimizer = optimizer
        self._optim = optim
        self._total_steps = total_steps
        self._tokenizer = tokenizer
        self._autocast_dtype = autocast_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._plan = plan
        self._share_prefix = share_prefix
        self._skip_zero_advantage = skip_zero_advantage
        self._micro_batch_cost = MICRO_BATCH_COST if model.device.type == "cpu" else micro_batch_tokens
        self._failure: BaseException | None = None  # of the job that failed; None when the backend works
        self._version = 0
        self._version_set: tuple[DeviceFuture[None], int] | None = None  # the last set_weight_version
        self._poisoned: str | None = None  # why the pending step will be skipped
        self._pending_batches = 0  # forward_backward calls since the last optim_step
        self._steps = 0  # optimizer steps, skipped ones included: the schedule's position
        self._skipped_in_a_row = 0
        self._counts = {"skipped_steps": 0.0, "trained_tokens": 0.0, "computed_tokens": 0.0, "skipped_rows": 0.0}
        self._layouts = {"tries": 0.0, "rows": 0.0, "single": 0.0}  # batches computed in each layout since the backend was opened
        if plan is not None:
            log_plan(model, plan)

    # --- the queue

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        if self._version_set is not None:
            future, version = self._version_set
            if not future.done() and self._failure is None:
                return version
        return self._version

    def _submit(self, work: Callable[[], T]) -> DeviceFuture[T]:
        def job() -> T:
            if self._failure is not None:
                raise EarlierStepFailed(f"a step before this one failed ({self._failure!r}); call reset()") from self._failure
            try:
                return work()
            except BaseException as error:
                self._failure = error
                self._discard_pending()
                raise

        return self.device_thread.submit(job)

    def reset(self) -> DeviceFuture[None]:
        """Discards accumulated gradients and forgets an earlier failure."""

        def job() -> None:
            self._failure = None
            self._skipped_in_a_row = 0
            self._discard_pending()

        return self.device_thread.submit(job)

    def _discard_pending(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._poisoned = None
        self._pending_batches = 0

    def statistics(self) -> Mapping[str, float]:
        """Optimizer steps, skipped ones, tokens trained and computed (padding included), batches by layout, and the device thread's queue."""
        layouts = {f"batches_as_{layout}": count for layout, count in self._layouts.items()}
        return {"steps": float(self._steps), **self._counts, **layouts, **self.device_thread.statistics()}

    # --- training

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> DeviceFuture[ForwardBackwardResult]:
        """Adds the batch's gradient of sum / denominator to what has accumulated since the last optim_step."""
        return self._submit(lambda: self._forward_backward(batch, loss))

    def optim_step(self, params: OptimParams | None = None) -> DeviceFuture[OptimStepResult]:
        """One step of AdamW with the accumulated gradients; lr and clipping are the schedule's, or those of `params`."""
        return self._submit(lambda: self._optim_step(params))

    def forward(self, batch: RolloutBatch) -> DeviceFuture[tuple[FloatArray, ...]]:
        """Log-probs [T_i] of every row's trained tokens at batch.temperature; 0.0 elsewhere."""
        return self._submit(lambda: self._forward(batch))

    def _find_plan(self) -> ForwardPlan:
        if self._plan is None:
            self._plan = plan_forward(self.model)
            log_plan(self.model, self._plan)
        return self._plan

    def _make_micro_batches(self, batch: RolloutBatch, skip_rows: BoolArray | None = None) -> list[MicroBatch]:
        check_token_ids(batch, self.model.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]
        layout = self._find_plan().choose_layout(max(len(row) for row in batch.tokens), share_prefix=self._share_prefix)
        self._layouts[layout] += 1
        micro_batches = make_micro_batches(
            batch.tokens,
            batch.loss_masks,
            micro_batch_tokens=1 if layout == "single" else self._micro_batch_tokens,
            share_prefix=layout == "tries",
            micro_batch_cost=self._micro_batch_cost,
            skip_rows=skip_rows,
        )
        self._counts["computed_tokens"] += sum(micro_batch.computed_tokens for micro_batch in micro_batches)
        return micro_batches

    def _forward_backward(self, batch: RolloutBatch, spec: LossSpec) -> ForwardBackwardResult:
        loss_fn = resolve_loss(spec.name)
        denominator, expected_count = compute_denominator(batch, spec)
        skip_rows = find_zero_advantage_rows(batch) if self._skip_zero_advantage else None
        if skip_rows is not None:
            expected_count -= count_unit(batch, spec, skip_rows)
            self._counts["skipped_rows"] += float(skip_rows.sum())
        self._pending_batches += 1
        total, count = 0.0, 0.0
        metrics: list[Metrics] = []
        for micro_batch in self._make_micro_batches(batch, skip_rows):
            self.device_thread.check_open()
            output, entropy = self._compute_loss(micro_batch, batch, loss_fn, spec)
            total += float(output.sum.detach())
            count += float(output.count)
            if self._poisoned is None and not math.isfinite(total):
                self._poisoned = f"the loss is {total}"
                self._optimizer.zero_grad(set_to_none=True)
            if self._poisoned is not None:
                return ForwardBackwardResult(loss=None, denominator=denominator, metrics={}, skipped=self._poisoned)
            if not output.sum.requires_grad:
                raise BackendError(f"loss {spec.name!r} returned a sum without gradient; it must depend on inputs.log_probs, not detached")
            (output.sum / denominator).backward()
            metrics.append({"entropy/mean": Mean(float(entropy.sum()), float(len(entropy))), **output.metrics})
        if not math.isclose(count, expected_count, rel_tol=1e-6):
            raise DenominatorMismatch(
                f"loss {spec.name!r} counted {count:g} {spec.unit} where the batch has {expected_count:g}; its count must be that of its unit"
            )
        self._counts["trained_tokens"] += float(batch.response_lengths.sum())
        return ForwardBackwardResult(loss=total / denominator, denominator=denominator, metrics=merge_metrics(metrics))

    def _compute_loss(self, micro_batch: MicroBatch, batch: RolloutBatch, loss_fn: LossFn, spec: LossSpec) -> tuple[LossOutput, Tensor]:
        """The loss of one micro-batch, and the entropy [M] of its trained tokens."""
        flat = self._compute_log_probs(micro_batch, batch)
        device = flat.log_probs.device
        pairs = torch.from_numpy(micro_batch.token_pairs).to(device)
        place = torch.from_numpy(micro_batch.token_rows).to(device), torch.from_numpy(micro_batch.token_positions).to(device)
        shape = len(micro_batch.rows), max(len(batch.tokens[row]) for row in micro_batch.rows)

        def spread(values: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=values.dtype, device=device).index_put(place, values)

        fields: dict[str, Tensor] = {}
        for name in TOKEN_FIELDS:
            rows = getattr(batch, name)
            if rows is not None:
                fields[name] = torch.from_numpy(pad_rows([rows[row] for row in micro_batch.rows], shape[1])).to(device)
        entropy = flat.entropy[pairs]
        inputs = LossInputs(
            log_probs=spread(flat.log_probs[pairs]), mask=spread(torch.ones_like(pairs, dtype=torch.bool)), entropy=spread(entropy), **fields
        )
        return loss_fn(inputs, unit=spec.unit, **spec.params), entropy

    def _compute_log_probs(self, micro_batch: MicroBatch, batch: RolloutBatch) -> LinearLogProbs:
        return compute_micro_batch_log_probs(
            self.model, micro_batch, plan=self._find_plan(), temperature=batch.temperature, autocast_dtype=self._autocast_dtype
        )

    def _optim_step(self, params: OptimParams | None) -> OptimStepResult:
        if self._pending_batches == 0:
            raise BackendError("optim_step without a forward_backward since the last one; there is no gradient to step with")
        if params is None:
            lr, max_grad_norm = compute_lr(self._steps, self._total_steps, self._optim), self._optim.max_grad_norm
        else:
            lr, max_grad_norm = params.lr, params.max_grad_norm
        gradients = self._collect_gradients()
        skipped, grad_norm = self._poisoned, None
        if skipped is None:
            norm = torch.nn.utils.get_total_norm(gradients)
            grad_norm = float(norm)
            if not math.isfinite(grad_norm):
                skipped, grad_norm = f"the gradient norm is {grad_norm}", None
        self._steps += 1
        if skipped is not None:
            return self._skip_step(skipped, lr)
        clipped = max_grad_norm is not None and grad_norm is not None and grad_norm > max_grad_norm
        if clipped and max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_grad_norm, torch.as_tensor(grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._discard_pending()
        self._skipped_in_a_row = 0
        return OptimStepResult(step=self._steps, lr=lr, grad_norm=grad_norm, clipped=clipped)

    def _collect_gradients(self) -> list[Tensor]:
        """Every gradient; zeros where no row ran at all, for AdamW moves a parameter with a zero gradient and passes over one without."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in parameters):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _skip_step(self, reason: str, lr: float) -> OptimStepResult:
        self._discard_pending()
        self._skipped_in_a_row += 1
        self._counts["skipped_steps"] += 1
        if self._skipped_in_a_row >= self._optim.max_nonfinite_steps:
            raise NonFiniteSteps(
                f"{self._skipped_in_a_row} steps in a row were not finite, the last because {reason}; optim.max_nonfinite_steps="
                f"{self._optim.max_nonfinite_steps}: lower optim.lr, or look at samples.jsonl for what the batch holds"
            )
        return OptimStepResult(step=self._steps, lr=lr, grad_norm=None, clipped=False, skipped=reason)

    def _forward(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        micro_batches = self._make_micro_batches(batch)
        with torch.no_grad():
            flats: list[LinearLogProbs] = []
            for part in micro_batches:
                self.device_thread.check_open()
                flats.append(self._compute_log_probs(part, batch))
        return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)

    # --- weights

    def set_weight_version(self, version: int) -> DeviceFuture[None]:
        """Names the weights as they are after everything queued so far."""

        def work() -> None:
            self._version = version

        future = self._submit(work)
        self._version_set = (future, version)
        return future

    def stream_weights(self, sink: WeightSink) -> DeviceFuture[None]:
        """Hands every parameter to `sink` in buckets of at most 256 MiB (a larger parameter alone). Tied weights come once."""

        def work() -> None:
            bucket: list[tuple[str, Tensor]] = []
            size = 0
            for name, parameter in self.model.named_parameters():
                if bucket and size + parameter.nbytes > BUCKET_BYTES:
                    sink(bucket)
                    bucket, size = [], 0
                bucket.append((name, parameter.detach()))
                size += parameter.nbytes
            if bucket:
                sink(bucket)

        return self._submit(work)

    def get_weights(self) -> DeviceFuture[dict[str, Tensor]]:
        """Copies of all parameters on the CPU, by Hugging Face name. Tied weights come once."""
        return self._submit(lambda: {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()})

    def load_weights(self, weights: Mapping[str, Tensor]) -> DeviceFuture[None]:
        """Replaces all parameters. Raises BackendError naming what is missing, unknown or of another shape, before anything is copied."""
        return self._submit(lambda: copy_weights(self.model, weights))

    def save(self, path: Path) -> DeviceFuture[None]:
        """Writes the model directory and, in `state/`, everything an exact resume needs. Not atomic: see rollouts.checkpoints.save."""

        def work() -> None:
            save_hf_model(self.model, path, self._tokenizer)
            position = {"steps": self._steps, "skipped_in_a_row": self._skipped_in_a_row, "weight_version": self._version, **self._counts}
            save_backend_state(path, self.model, self._optimizer, position)

        return self._submit(work)

    def load(self, path: Path) -> DeviceFuture[None]:
        """Restores what save() wrote, bit for bit; accumulated gradients are discarded. Raises CheckpointError naming what is wrong."""

        def work() -> None:
            weights = read_model_weights(path, self.model)
            try:
                check_weights(self.model, weights)
            except BackendError as error:
                raise CheckpointError(f"{path} is not of this model: {error}") from error
            fields = ("steps", "skipped_in_a_row", "weight_version", *self._counts)
            position = load_backend_state(path, self.model, self._optimizer, fields)
            copy_weights(self.model, weights)
            self._discard_pending()
            self._steps, self._skipped_in_a_row = int(position["steps"]), int(position["skipped_in_a_row"])
            self._version = int(position["weight_version"])
            self._counts = {name: float(position[name]) for name in self._counts}

        return self._submit(work)


def compute_denominator(batch: RolloutBatch, spec: LossSpec) -> tuple[float, float]:
    """What the loss's sum over the whole batch is divided by, and what its counts must add up to. Raises BackendError if nothing trains."""
    count = count_unit(batch, spec, np.ones(len(batch), np.bool_))
    if count == 0:
        raise BackendError(f"none of the batch's {len(batch)} rows has a token to train on; check its loss masks")
    if spec.unit == "constant":
        if spec.constant is None or not spec.constant > 0:
            raise BackendError(f"LossSpec(unit='constant') has constant={spec.constant}; give the denominator, a number above 0")
        return spec.constant, count
    return count, count


def count_unit(batch: RolloutBatch, spec: LossSpec, rows: BoolArray) -> float:
    """How many of the loss's unit are in the chosen rows [B]: trained tokens, or rows that have one."""
    lengths = batch.response_lengths[rows]
    return float((lengths > 0).sum() if spec.unit == "sequences" else lengths.sum())


def find_zero_advantage_rows(batch: RolloutBatch) -> BoolArray | None:
    """[B] rows whose trained tokens all have advantage 0; None when the batch has no advantages."""
    if batch.advantages is None:
        return None
    rows = zip(batch.advantages, batch.loss_masks, strict=True)
    return np.asarray([not np.any(advantages[mask]) for advantages, mask in rows], np.bool_)


def check_token_ids(batch: RolloutBatch, vocab_size: int) -> None:
    """Raises BackendError naming the first row with an id outside the model's vocabulary; on an accelerator torch would abort the process."""
    for row, ids in enumerate(batch.tokens):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            worst = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise BackendError(f"batch.tokens[{row}] has the id {worst}; the model's ids are 0 to {vocab_size - 1}: use the model's own tokenizer")


def pad_rows(rows: list[FloatArray], width: int) -> FloatArray:
    """[B, T] float32, right-padded with 0."""
    padded = np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copies `weights` into the model's parameters. Raises BackendError before anything is copied."""
    check_weights(model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def check_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Raises BackendError naming the weights that are missing, unknown or of another shape. A tied weight may come under each of its names."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    missing = sorted(set(parameters) - set(weights))
    unknown = sorted(set(weights) - set(parameters) - tied)
    shapes = [
        f"{name} {tuple(weights[name].shape)} for {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    for what, names in (("are missing", missing), ("are not the model's", unknown), ("have another shape", shapes)):
        if names:
            raise BackendError(f"{len(names)} weights {what}: {', '.join(names[:5])}; nothing was loaded")

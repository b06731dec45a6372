"""One model, one optimizer, one device thread: the backend that trains in a single process.

    caller ──forward_backward, optim_step, …──► queue of the device thread ──► model, gradients, optimizer
       ◄───────────── TrainFuture ──────────────────┘ in submission order

A job that raises makes every later job fail with EarlierStepFailed until reset(). What is not finite is
skipped, not failed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trio
from torch import Tensor

from rollouts.backends.held_state import HeldState, hold_state
from rollouts.backends.random_states import DrawsOfSteps
from rollouts.backends.shares import make_portion
from rollouts.backends.state import load_backend_state, read_model_weights
from rollouts.backends.steps import (
    BUCKET_BYTES,
    POSITION_FIELDS,
    OptimizerSteps,
    PackingOptions,
    PreparedBatch,
    StepQueue,
    check_count,
    check_weights,
    clip_gradients,
    collect_gradients,
    compute_loss,
    find_buckets,
    prepare_batch,
    with_entropy,
    with_skipped,
)
from rollouts.backends.token_traces import make_token_arrays
from rollouts.config.schema import OptimConfig
from rollouts.crash_points import reach
from rollouts.data.packing import MICRO_BATCH_COST, MicroBatch, spread_to_rows
from rollouts.device_thread import DeviceFuture, DeviceThread
from rollouts.errors import BackendError, CheckpointError
from rollouts.losses import resolve_loss, wants_entropy_gradient
from rollouts.models.forward_plan import log_plan, plan_forward
from rollouts.models.log_probs import ForwardPlan, TokenOutputs, compute_micro_batch_outputs
from rollouts.protocols import WeightSink
from rollouts.types import (
    FloatArray,
    ForwardBackwardResult,
    LossSpec,
    Metrics,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    merge_metrics,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PyTorchTrainingBackend:
    """A TrainingBackend (see rollouts.protocols for its rules) on one device. Make it with
    open_pytorch_backend, or from its parts.

    `skip_zero_advantage` leaves rows out whose advantages are all 0, unless the loss has a term of KL,
    entropy or else that needs them, or is the user's own. The denominator counts them all the same; metrics
    are then means over the rows that ran. `plan` says which shortcuts are exact for the model; None finds
    that out with the first batch. The model is put in evaluation mode: dropout would make its log-probs
    another policy's. A model with a scalar head (rollouts.models.scalar_head) trains alike: where others have
    the log-prob of a token, it has its value at the position before.
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
        self._tokenizer = tokenizer
        self._tokenizer_copy: PreTrainedTokenizerBase | None = (
            None  # made when a checkpoint is first written beside training
        )
        self._autocast_dtype = autocast_dtype
        self._plan = plan
        self._packing = PackingOptions(
            micro_batch_tokens=micro_batch_tokens,
            micro_batch_cost=MICRO_BATCH_COST if model.device.type == "cpu" else micro_batch_tokens,
            share_prefix=share_prefix,
            skip_zero_advantage=skip_zero_advantage,
        )
        self._steps = OptimizerSteps(optim, total_steps)
        self._draws = DrawsOfSteps(model.device)
        self._queue = StepQueue(device_thread, self._discard_pending)
        if plan is not None:
            log_plan(model, plan)

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        return self._queue.weight_version

    def interrupt(self) -> None:
        """forward_backward and forward queued so far end at their next micro-batch, with StepInterrupted.
        Returns at once.
        """
        self.device_thread.interrupt()

    def reset(self) -> DeviceFuture[None]:
        """Discards accumulated gradients and forgets an earlier failure. Counters and torch's random states
        are as after the last step.
        """

        def work() -> None:
            self._steps.reset()
            self._discard_pending()
            self._draws.restore()

        return self._queue.reset(work)

    def _discard_pending(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._steps.discard_pending()

    def statistics(self) -> Mapping[str, float]:
        """Optimizer steps, skipped ones, tokens trained and computed (padding included), batches by layout,
        and the device thread's queue.
        """
        return {**self._steps.statistics(), **self.device_thread.statistics()}

    # --- training

    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> DeviceFuture[ForwardBackwardResult]:
        """Adds the batch's gradient of sum / denominator to what has accumulated since the last optim_step."""
        return self._queue.submit(lambda: self._forward_backward(batch, loss))

    def optim_step(self, params: OptimParams | None = None) -> DeviceFuture[OptimStepResult]:
        """One step of AdamW with the accumulated gradients; lr and clipping are the schedule's, or those of
        `params`.
        """
        return self._queue.submit(lambda: self._optim_step(params))

    def forward(self, batch: RolloutBatch) -> DeviceFuture[tuple[FloatArray, ...]]:
        """Log-probs [T_i] of every row's trained tokens at batch.temperature; of a scalar head its values
        before them. 0.0 elsewhere.
        """
        return self._queue.submit(lambda: self._forward(batch))

    def _find_plan(self) -> ForwardPlan:
        if self._plan is None:
            self._plan = plan_forward(self.model)
            log_plan(self.model, self._plan)
        return self._plan

    def _pack(self, batch: RolloutBatch, spec: LossSpec | None) -> tuple[PreparedBatch, list[MicroBatch]]:
        vocab_size = int(self.model.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]
        prepared = prepare_batch(batch, spec, self._find_plan(), self._packing, vocab_size=vocab_size)
        micro_batches = prepared.pack(1)
        self._steps.add_batch(
            prepared,
            sum(micro_batch.computed_tokens for micro_batch in micro_batches),
            trains=spec is not None,
        )
        return prepared, micro_batches

    def _forward_backward(self, batch: RolloutBatch, spec: LossSpec) -> ForwardBackwardResult:
        loss_fn = resolve_loss(spec.name)
        self._draws.begin()
        prepared, micro_batches = self._pack(batch, spec)
        denominator, state = prepared.denominator, self._steps
        entropy_gradient = wants_entropy_gradient(spec.name, spec.params)
        state.pending_batches += 1
        total, count = 0.0, 0.0
        metrics: list[Metrics] = []
        traces: list[Tensor] = []
        for micro_batch in micro_batches:
            self.device_thread.check_open()
            flat = self._compute_outputs(micro_batch, batch, entropy_gradient=entropy_gradient)
            output, entropy, trace = compute_loss(flat, make_portion(micro_batch, batch), loss_fn, spec)
            total += float(output.sum.detach())
            count += float(output.count)
            if state.poisoned is None and not math.isfinite(total):
                state.poisoned = f"the loss is {total}"
                self._optimizer.zero_grad(set_to_none=True)
            if state.poisoned is not None:
                return ForwardBackwardResult(
                    loss=None, denominator=denominator, metrics={}, skipped=state.poisoned
                )
            (output.sum / denominator).backward()
            metrics.append(with_entropy(output, entropy))
            if trace is not None:
                traces.append(trace.read())
        check_count(spec, count, prepared.expected_count)
        state.counts["trained_tokens"] += float(batch.response_lengths.sum())
        reach("train.after_forward_backward")
        return ForwardBackwardResult(
            loss=total / denominator,
            denominator=denominator,
            metrics=with_skipped(merge_metrics(metrics), prepared),
            per_token=(
                make_token_arrays(micro_batches, [trace.cpu().numpy() for trace in traces], batch)
                if spec.per_token
                else None
            ),
        )

    def _compute_outputs(
        self, micro_batch: MicroBatch, batch: RolloutBatch, *, entropy_gradient: bool = False
    ) -> TokenOutputs:
        return compute_micro_batch_outputs(
            self.model,
            micro_batch,
            plan=self._find_plan(),
            temperature=batch.temperature,
            autocast_dtype=self._autocast_dtype,
            entropy_gradient=entropy_gradient,
        )

    def _optim_step(self, params: OptimParams | None) -> OptimStepResult:
        params = self._steps.choose_params(params)
        self._draws.note()
        skipped = self._steps.poisoned
        gradients = collect_gradients(self.model)
        grad_norm = float("nan") if skipped is not None else float(torch.nn.utils.get_total_norm(gradients))
        if skipped is None and not math.isfinite(grad_norm):
            skipped = f"the gradient norm is {grad_norm}"
        if skipped is not None:
            self._optimizer.zero_grad(set_to_none=True)
            return self._steps.skip_step(skipped, params.lr)
        clipped = clip_gradients(gradients, grad_norm, params.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = params.lr
        reach("train.before_optim_step")
        self._optimizer.step()
        reach("train.after_optim_step")
        self._optimizer.zero_grad(set_to_none=True)
        return self._steps.finish_step(params.lr, grad_norm, clipped=clipped)

    def _forward(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        _, micro_batches = self._pack(batch, None)
        with torch.no_grad():
            flats: list[TokenOutputs] = []
            for part in micro_batches:
                self.device_thread.check_open()
                flats.append(self._compute_outputs(part, batch))
        return spread_to_rows(micro_batches, [flat.log_probs.cpu().numpy() for flat in flats], batch.tokens)

    # --- weights

    def set_weight_version(self, version: int) -> DeviceFuture[None]:
        """Names the weights as they are after everything queued so far."""
        return self._queue.set_weight_version(version)

    def stream_weights(self, sink: WeightSink) -> DeviceFuture[None]:
        """Hands every parameter to `sink` in buckets of at most 256 MiB (a larger parameter alone). Tied
        weights come once.
        """

        def work() -> None:
            for bucket in find_buckets(self.model, BUCKET_BYTES):
                sink([(name, parameter.detach()) for name, parameter in bucket])

        return self._queue.submit(work)

    def get_weights(self) -> DeviceFuture[dict[str, Tensor]]:
        """Copies of all parameters on the CPU, by Hugging Face name. Tied weights come once."""
        return self._queue.submit(
            lambda: {
                name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()
            }
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> DeviceFuture[None]:
        """Replaces all parameters. Raises BackendError naming what is missing, unknown or of another shape,
        before anything is copied.
        """
        return self._queue.submit(lambda: copy_weights(self.model, weights))

    def save(self, path: Path) -> DeviceFuture[None]:
        """Writes the model directory and, in `state/`, everything an exact resume needs. Not atomic: see
        rollouts.checkpoints.save.
        """

        def work() -> None:
            path.mkdir(parents=True, exist_ok=True)
            self._hold(self._tokenizer, copied=False).write(path)

        return self._queue.submit(work)

    def capture(self) -> DeviceFuture[Callable[[Path], Awaitable[None]]]:
        """What save() would write now, copied to host memory: the result writes it to a directory later, in a
        thread, while steps run.
        """

        def work() -> Callable[[Path], Awaitable[None]]:
            if self._tokenizer_copy is None and self._tokenizer is not None:
                self._tokenizer_copy = copy.deepcopy(
                    self._tokenizer
                )  # generation uses the other while this one is written
            held = self._hold(self._tokenizer_copy, copied=True)

            async def write(path: Path) -> None:
                await trio.to_thread.run_sync(held.write, path)

            return write

        return self._queue.submit(work)

    def held_bytes(self) -> int:
        """What capture() holds."""
        return self.state_bytes()

    def state_bytes(self) -> int:
        """Size of what capture() holds and save() writes: parameters and AdamW's two moments."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def _hold(self, tokenizer: PreTrainedTokenizerBase | None, *, copied: bool) -> HeldState:
        return hold_state(
            self.model, self._optimizer, self._steps.position(self._queue.version), tokenizer, copied=copied
        )

    def load(self, path: Path) -> DeviceFuture[None]:
        """Restores what save() wrote, bit for bit; accumulated gradients are discarded. Raises
        CheckpointError naming what is wrong.
        """

        def work() -> None:
            weights = read_model_weights(path, self.model)
            try:
                check_weights(self.model, weights)
            except BackendError as error:
                raise CheckpointError(f"{path} is not of this model: {error}") from error
            position = load_backend_state(path, self.model, self._optimizer, POSITION_FIELDS)
            copy_weights(self.model, weights)
            self._discard_pending()
            self._draws.note()
            self._queue.version = self._steps.restore(position)

        return self._queue.submit(work)


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copies `weights` into the model's parameters. Raises BackendError before anything is copied."""
    check_weights(model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

"""The backend that drives a Trainer: on one rank by itself, or on rank 0 of many.

    caller ──forward_backward, optim_step, …──► queue of the device thread ──► command to the other ranks
       ◄───────────── TrainFuture ──────────────────┘                     └──► Trainer.method, on all ranks

A command goes out when rank 0's job begins, not when it is submitted: the others never wait inside a
collective for rank 0's earlier work. Versions, schedule, counts and whether a step failed are kept here
alone. A job that raises makes every later job fail with EarlierStepFailed until reset(). What is not finite
is skipped, not failed.
"""

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Required, TypedDict, Unpack

import torch
from torch import Tensor

from rollouts.backends.captures import HeldCheckpoint
from rollouts.backends.shares import (
    COUNTS,
    OptimizerSteps,
    PackingOptions,
    PreparedBatch,
    collect_token_arrays,
    find_attention_cost,
    prepare_batch,
    split_values,
)
from rollouts.backends.trainer import ShareResult, Trainer
from rollouts.config.tables import OptimConfig
from rollouts.crash_points import reach
from rollouts.data.packing import ATTENTION_COST, MICRO_BATCH_COST, spread_to_rows
from rollouts.device_thread import DeviceFuture, DeviceThread
from rollouts.errors import BackendError, EarlierStepFailed, ModelError
from rollouts.messages import drop_none
from rollouts.models.export import copy_bucket
from rollouts.models.forward_plan import ForwardPlan
from rollouts.models.lora import list_trained
from rollouts.protocols import WeightSink
from rollouts.ranks.channel import NoOtherRanks, RankChannel
from rollouts.ranks.meet import AgreedFailure, Ranks
from rollouts.types import (
    FloatRows,
    ForwardBackwardResult,
    LossSpec,
    Numbers,
    OptimParams,
    OptimStepResult,
    RolloutBatch,
    T,
    TimedResult,
    Total,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollouts.reference.score import FrozenReference

P = ParamSpec("P")


class BackendSettings(TypedDict, total=False):
    """How a backend trains, on one rank or many."""

    optim: Required[OptimConfig]
    total_steps: Required[int]  # where its schedule ends
    tokenizer: "PreTrainedTokenizerBase | None"  # written into model directories
    micro_batch_tokens: int
    share_prefix: bool  # rows that begin alike share tokens, where that is exact for the model
    skip_zero_advantage: bool  # see PyTorchTrainingBackend


def queued(
    work: "Callable[Concatenate[RankedTrainingBackend, P], T]",
) -> "Callable[Concatenate[RankedTrainingBackend, P], DeviceFuture[T]]":
    """A method that returns a future of `work`, which runs on the device thread after everything submitted
    before, unless that failed. What has a place for it is told how long it took.
    """

    @functools.wraps(work)
    def submit(self: "RankedTrainingBackend", *args: P.args, **options: P.kwargs) -> DeviceFuture[T]:
        queued = int(self.device_thread.statistics()["queued"])

        def job() -> T:
            start = time.perf_counter()
            with self.working():
                found = work(self, *args, **options)
            if isinstance(found, TimedResult):
                return replace(found, seconds=time.perf_counter() - start, queued=queued)
            return found

        return self.device_thread.submit(job)

    return submit


class RankedTrainingBackend:
    """A TrainingBackend (see rollouts.protocols for its rules) on the ranks of a trainer; lives on rank 0.

    `number` tells backends apart that are open on the same ranks: a policy is 0, a critic beside it 1.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: RankChannel,
        device_thread: DeviceThread,
        *,
        optim: OptimConfig,
        total_steps: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        micro_batch_tokens: int = 8192,
        share_prefix: bool = True,
        skip_zero_advantage: bool = False,
        number: int = 0,
    ) -> None:
        self.model = trainer.model
        self.trained = trainer.trained  # the model, or an adapter of it
        self.ranks = trainer.ranks
        self.autocast_dtype = trainer.autocast_dtype  # that the trainer multiplies in; None: float32
        self.device_thread = device_thread
        self.trainer = trainer
        self._channel = channel
        self.number = number  # of the backend on its ranks
        self.packing = PackingOptions(
            micro_batch_tokens=micro_batch_tokens,
            micro_batch_cost=MICRO_BATCH_COST if self.ranks.device.type == "cpu" else micro_batch_tokens,
            share_prefix=share_prefix,
            skip_zero_advantage=skip_zero_advantage,
            attention_cost=find_attention_cost(self.model) if self.ranks.mesh else ATTENTION_COST,
        )
        self._tokenizer = tokenizer
        self._tokenizer_copy: PreTrainedTokenizerBase | None = None  # for writing while generation uses it
        self._captures = itertools.count(1)
        self._steps = OptimizerSteps(optim, total_steps)
        self._failure: BaseException | None = None  # of the job that failed; None when the backend works
        self._naming: tuple[DeviceFuture[None], int] | None = None  # the last set_weight_version

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.model.config.get_text_config().vocab_size

    # --- the queue

    @property
    def weight_version(self) -> int:
        """Version of the weights after everything queued so far."""
        if self._naming and not self._naming[0].done() and not self._failure:
            return self._naming[1]
        return self._steps.position.weight_version  # as of the jobs that have run

    def set_weight_version(self, version: int) -> DeviceFuture[None]:
        """Names the weights as they are after everything queued so far."""
        future = self._set_version(version)
        self._naming = (future, version)
        return future

    @queued
    def _set_version(self, version: int) -> None:
        self._steps.place(weight_version=version)
        reach("train.version_set")

    def statistics(self) -> Numbers:
        """Optimizer steps, and since the backend was opened: skipped ones, tokens trained and, for that,
        computed (padding included), batches by layout; and the device thread's queue.
        """
        counts = self._steps.counts
        return {
            "steps": float(self._steps.position.steps),
            **{name: float(counts[name]) for name in (*COUNTS, *counts)},
            **self.device_thread.statistics(),
        }

    def interrupt(self) -> None:
        """forward_backward and forward queued so far end at their next micro-batch, with StepInterrupted.
        Returns at once.
        """
        self.device_thread.interrupt()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, on the device thread, this backend does a step, which fails by what is raised there. Raises
        EarlierStepFailed after a step that failed, until reset().
        """
        if self._failure:
            raise EarlierStepFailed(
                f"a step before this one failed ({self._failure!r}); call reset()"
            ) from self._failure
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._steps.discard_pending()
            if self.ranks.world_size == 1:
                self.trainer.discard()
            raise

    def reset(self) -> DeviceFuture[None]:
        """Discards accumulated gradients and forgets an earlier failure. torch's random states are as after
        the last step. Raises BackendError if the ranks are out of step.
        """

        def job() -> None:
            self._failure = None
            self._steps.discard_pending()
            self._together("reset")

        return self.device_thread.submit(job)

    def _together(self, name: str, local: Any = None, /, **fields: Any) -> Any:
        """What the trainer's method `name` returns for `local`, which only this rank has, and `fields`; the
        other ranks call it too. On the device thread.
        """
        if failed := self.device_thread.out_of_step:
            raise BackendError(
                f"the ranks are out of step since {failed!r}; start them all again"
            ) from failed
        phase = f"{name} of step {self._steps.position.steps + 1}{' of the critic' if self.number else ''}"
        self._channel.send({"name": name, "phase": phase, "backend": self.number, "fields": fields})
        self._channel.phase = phase
        try:
            return getattr(self.trainer, name)(local, **fields)
        except AgreedFailure as failure:
            self.trainer.discard()
            error = failure.error
        except BaseException as raised:
            if self.ranks.world_size > 1:
                # the others are, or soon will be, in a collective that this rank never comes to
                self.device_thread.out_of_step = raised
            raise
        raise error

    # --- training

    def prepare(self, batch: RolloutBatch, spec: LossSpec | None) -> PreparedBatch:
        """The batch, checked and packed for the ranks. Raises BackendError or ModelError."""
        return prepare_batch(
            batch,
            spec,
            self.trainer.find_plan(),
            self.packing,
            vocab_size=self.vocab_size,
            ranks=self.ranks.world_size,
        )

    @queued
    def forward_backward(self, batch: RolloutBatch, loss: LossSpec) -> ForwardBackwardResult:
        """Adds the batch's gradient of sum / denominator to what has accumulated since the last step."""
        return self.train(self.prepare(batch, loss))

    @queued
    def compute_loss(self, batch: RolloutBatch, loss: LossSpec) -> ForwardBackwardResult:
        """What forward_backward would answer, without dropout and with slopes of 0; nothing accumulates, and
        what has stays.
        """
        return self.train(self.prepare(batch, loss), gradient=False)

    def train(self, prepared: PreparedBatch, *, gradient: bool = True) -> ForwardBackwardResult:
        """forward_backward of a prepared batch, or without gradient compute_loss, on the device thread."""
        result = self._together("forward_backward", prepared.shares, gradient=gradient)
        return self.answer(result, prepared, gradient=gradient)

    def answer(
        self, result: ShareResult, prepared: PreparedBatch, *, gradient: bool
    ) -> ForwardBackwardResult:
        """What the trainers' result means for the step under way."""
        steps, counts, (batch, layout, skipped_rows, shares) = self._steps, self._steps.counts, prepared
        portions, share = [one.portions for one in shares], shares[0]
        counts[f"batches_as_{layout}"] += 1
        counts["computed_tokens"] += sum(one.micro_batch.computed_tokens for mine in portions for one in mine)
        counts["skipped_rows"] += skipped_rows
        skipped = None if math.isfinite(result.total) else f"the loss is {result.total}"
        if gradient:
            steps.pending_batches += 1
            skipped = steps.poisoned = steps.poisoned or skipped
        if skipped:
            return ForwardBackwardResult(
                loss=None, denominator=share.denominator, metrics={}, skipped=skipped
            )
        if gradient:
            counts["trained_tokens"] += int(batch.response_lengths.sum())
            reach("train.after_forward_backward")
        metrics = result.metrics  # of the rows that were computed
        if skipped_rows:
            metrics = {**metrics, "advantage/skipped_rows": Total(float(skipped_rows))}
        spec = share.spec
        return ForwardBackwardResult(
            loss=result.total / share.denominator,
            denominator=share.denominator,
            metrics=metrics,
            per_token=(
                collect_token_arrays(portions, result.traces, batch, spec)
                if spec and spec.per_token
                else None
            ),
        )

    @queued
    def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        """One step of AdamW with the accumulated gradients; lr and clipping are the schedule's, or those of
        `params`, as what else it sets for this step.
        """
        steps, params = self._steps, self._steps.choose_params(params)
        if steps.poisoned:
            self._together("skip_step")
            return steps.finish_step(params, None, steps.poisoned)
        own = {name: getattr(params, name) for name in ("lr", "betas", "eps", "weight_decay")}
        norm = self._together("optim_step", settings=drop_none(own), max_grad_norm=params.max_grad_norm)
        if math.isfinite(norm):
            return steps.finish_step(params, norm, None)
        return steps.finish_step(params, None, f"the gradient norm is {norm}")

    @queued
    def hold(self) -> None:
        """Keeps a copy of weights and moments where they are, in place of the copy before."""
        self._together("hold")

    @queued
    def revert(self) -> None:
        """Puts the copy of the last hold() back, once, and discards gradients. The schedule goes on, as after
        a skipped step.
        """
        self._together("revert")
        self._steps.discard_pending()

    @queued
    def forward(self, batch: RolloutBatch) -> FloatRows:
        """Log-probs [T_i] of every row's trained tokens at batch.temperature; of a scalar head its values
        before them. 0.0 elsewhere.
        """
        return next(self._forward(batch))

    @queued
    def forward_start(self, batch: RolloutBatch) -> FloatRows:
        """What `forward` gave before an adapter's first step: of its model with the adapter switched off, or
        with the one that training started from.
        """
        return next(self._forward(batch, start=True))

    @queued
    def forward_with_entropy(self, batch: RolloutBatch, **fields: Any) -> list[FloatRows]:
        """What `forward` gives, then the entropies of the distributions that the same tokens are of: [T_i]
        per row, nats, 0.0 where nothing trains. For models with a head of tokens.

        project=True: then, by each of D fixed random directions, the hidden states that the tokens are
        predicted from, in a unit of their micro-batch.
        """
        return list(self._forward(batch, **fields))

    @queued
    def compare_with(self, reference: "FrozenReference") -> None:
        """From here on losses may ask for the exact KL to `reference`, a model on this device thread.

        Raises ModelError unless the logits of both are products of hidden states with one matrix, exact in
        the same layout of batches.
        """
        plan, other = self.trainer.find_plan()[:3], reference.plan[:3]  # head, scale, layout
        if plan[0] != "linear" or plan != other:
            raise ModelError(
                f"kl_estimator='exact' needs a linear head, and the same layout of policy and reference; they"
                f" have {plan} and {other}: use 'k2' or 'k3'"
            )
        self.trainer.reference = reference.model

    def _forward(self, batch: RolloutBatch, **fields: Any) -> Iterator[FloatRows]:
        prepared = self.prepare(batch, None)
        blocks = self._together("forward", prepared.shares, **fields)
        self._steps.counts[f"batches_as_{prepared.layout}"] += 1
        parts = []
        values = []
        for share, block in zip(prepared.shares, blocks, strict=True):
            mine = [portion.micro_batch for portion in share.portions]
            parts += mine
            values += split_values(block, [len(one.targets) for one in mine])
        for kind in range(len(blocks[0])):
            yield spread_to_rows(parts, [both[kind] for both in values], batch.tokens)

    # --- weights

    @queued
    def stream_weights(self, sink: WeightSink) -> None:
        """Hands every parameter that training is about, whole, to `sink` in buckets (a parameter that is
        larger alone). Tied weights come once.
        """
        self._together("stream_weights", sink)

    @queued
    def get_weights(self) -> dict[str, Tensor]:
        """Copies of all parameters on the CPU, by Hugging Face name. Tied weights come once."""
        weights: dict[str, Tensor] = {}
        self._together("stream_weights", lambda bucket: weights.update(copy_bucket(bucket)))
        return weights

    @queued
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces all parameters. Raises BackendError naming what is missing, unknown or of another shape,
        before anything is copied.
        """
        self._together("load_weights", weights)

    # --- checkpoints

    @queued
    def save(self, path: Path) -> None:
        """Writes the model directory and, in `state/`, everything an exact resume needs; each rank writes
        about as much, and none holds the whole. Not atomic: see rollouts.checkpoints.save.
        """
        self._together("save", (self._steps.position, self._tokenizer), path=str(path))

    @queued
    def capture(self) -> HeldCheckpoint | None:
        """What save() would write now, in equal parts in the host memory of the ranks; None if one has no
        room for its part.

        The result writes it to a directory that all ranks see, once, while steps run; where nothing is
        written, drop() it.
        """
        name = f"{self.number}-{next(self._captures)}"
        self._tokenizer_copy = self._tokenizer_copy or copy.deepcopy(self._tokenizer)
        held = self._together("capture", (self._steps.position, self._tokenizer_copy), name=name)
        return held and HeldCheckpoint(self._channel, name, held)

    def state_bytes(self) -> int:
        """Size of what save() writes, on all ranks together: parameters and AdamW's two moments."""
        return 3 * sum(parameter.nbytes for parameter in list_trained(self.trained).values())

    @queued
    def load(self, path: Path) -> None:
        """Restores what save() wrote, on any number of ranks, bit for bit; accumulated gradients are
        discarded. Raises CheckpointError naming what is wrong.
        """
        self._steps.position = self._together("load", path=str(path))
        self._steps.discard_pending()


class PyTorchTrainingBackend(RankedTrainingBackend):
    """A TrainingBackend in one process. Make it with open_pytorch_backend, or from its parts.

    `skip_zero_advantage` leaves rows out whose advantages are all 0, unless the loss has a term of KL,
    entropy or else that needs them, or is the user's own. The denominator counts them all the same; metrics
    are then means over the rows that ran. `plan` says which shortcuts are exact for the model; None finds
    that out with the first batch. A model with a scalar head (rollouts.models.layers) trains alike:
    where others have the log-prob of a token, it has its value at the position before. `trainer`: one that is
    made of the parts already, and of an adapter.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        optimizer: torch.optim.AdamW,
        device_thread: DeviceThread,
        *,
        plan: ForwardPlan | None = None,
        autocast_dtype: torch.dtype | None = None,
        trainer: Trainer | None = None,
        **settings: Unpack[BackendSettings],
    ) -> None:
        trainer = trainer or Trainer(
            model,
            optimizer,
            Ranks(0, 1, 1, model.device),
            plan,
            check_open=device_thread.check_open,
            autocast_dtype=autocast_dtype,
        )
        super().__init__(trainer, NoOtherRanks(), device_thread, **settings)

"""forward_backward of several adapters of one model as one job, with one pass over the model for all.

    each: checked, packed ─► packed rows of all, joined up to micro_batch_tokens ─► one forward
        ─► each: its own loss ─► one backward ─► each: its own gradient, and its answer

Each adapter is active on its own slice of a joined row. Nothing of one reaches another: rows see nothing of
each other, and no kernel of attention crosses from one to the next, so that even a NaN stays where it is.
What cannot be joined runs by itself, in the same job.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollouts.backends.pytorch import RankedTrainingBackend
from rollouts.backends.shares import ComputedLoss, Portion, check_count, compute_loss, join_traces
from rollouts.backends.trainer import ShareResult
from rollouts.data.packing import join_packed_rows
from rollouts.device_thread import DeviceFuture
from rollouts.losses import resolve_loss, wants_entropy_gradient
from rollouts.models.forward_plan import TokenOutputs
from rollouts.models.layers import is_compiled
from rollouts.models.lora import EXPERTS, use_adapters
from rollouts.types import ForwardBackwardResult, LossSpec, Metrics, RolloutBatch, T, live, merge_metrics

BLOCK = 128  # nodes of a block of an accelerator's attention, in which everything meets


class Asked(NamedTuple):
    """What is asked of one backend."""

    backend: RankedTrainingBackend
    batch: RolloutBatch
    loss: LossSpec
    gradient: bool = True  # False: compute_loss


def forward_backward_together(
    asked: Sequence[Asked],
) -> DeviceFuture[list[ForwardBackwardResult | Exception]]:
    """What forward_backward, or compute_loss, of each backend gives or raises, equal up to rounding.

    Adapters of one model on one device thread and one rank, opened with `beside`, each there once. A failure
    is of the backend that it came from, as if it had been alone; one of a pass over the model (memory), or an
    interruption, of all that were in the pass.
    """
    backends = [one.backend for one in asked]
    assert len({*backends}) == len(asked), "a backend does one thing after the other"
    assert all(one.model is backends[0].model and one.ranks.world_size == 1 for one in backends)
    thread = backends[0].device_thread
    return thread.submit(partial(_run, [_Part(*one) for one in asked], int(thread.statistics()["queued"])))


@live
class _Part:
    """One backend's part of the job: what is asked of it, and what has come of it."""

    backend: RankedTrainingBackend
    batch: RolloutBatch
    loss: LossSpec
    gradient: bool
    answer: Any = None  # a result or an error
    total: float = 0.0  # of the loss; not finite: nothing more is computed
    count: float = 0.0
    metrics: list[Metrics] = field(default_factory=list)
    traces: list[Tensor] = field(default_factory=list)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What it gives; None where it raises, which is then the answer."""
        try:
            with self.backend.working():
                return work()
        except Exception as error:
            self.answer = error
            return None

    def prepare(self) -> Any:
        """The batch is checked and packed; what it has in common with those that it can be joined with."""
        self.backend.trainer.begin()
        self.prepared = self.backend.prepare(self.batch, self.loss)
        self.loss_fn = resolve_loss(self.loss.name)
        adapter = self.backend.trainer.adapter
        assert adapter is not None, "only adapters share a model"
        if (
            self.prepared.layout != "packed"
            or adapter.head is not None
            or (self.gradient and adapter.config.dropout)  # whose draws would be others
            or any(EXPERTS in name for name in adapter.pairs)  # which see some of the tokens
            or is_compiled(self.backend.model)  # programs know one adapter
        ):
            return self
        wants_entropy = wants_entropy_gradient(self.loss.name, self.loss.params)
        return self.batch.temperature, self.gradient, wants_entropy

    @property
    def goes_on(self) -> bool:
        return self.answer is None and math.isfinite(self.total)

    def compute_loss(self, flat: TokenOutputs, portion: Portion) -> ComputedLoss:
        """The loss of a micro-batch, noted."""
        found = compute_loss(flat, portion, self.loss_fn, self.loss, gradient=self.gradient)
        self.total += float(found.sum.detach())
        self.count += found.count
        self.metrics.append(found.metrics)
        return found

    def run_alone(self) -> None:
        """As in a job of its own."""
        self.answer = self.backend.train(self.prepared, gradient=self.gradient)

    def finish(self) -> None:
        """The answer, after all passes."""
        result = ShareResult(self.total, {})
        if math.isfinite(self.total):
            check_count(self.count, self.prepared.shares[0].expected_count, self.loss)
            result = ShareResult(self.total, merge_metrics(self.metrics), [join_traces(self.traces)])
        elif self.gradient:
            self.backend.trainer.discard()
        self.answer = self.backend.answer(result, self.prepared, gradient=self.gradient)


def _run(parts: list[_Part], queued: int) -> list[ForwardBackwardResult | Exception]:
    start = time.perf_counter()
    kinds: dict[Any, list[_Part]] = {}
    for part in parts:
        kind = part.attempt(part.prepare)
        if part.answer is None:
            kinds.setdefault(kind, []).append(part)
    for alike in kinds.values():
        joined = len(alike) > 1
        if joined:
            _run_joined(alike)
        for part in alike:
            if part.answer is None:
                part.attempt(part.finish if joined else part.run_alone)
    seconds, answers = time.perf_counter() - start, [part.answer for part in parts]
    return [
        one if isinstance(one, Exception) else replace(one, seconds=seconds, queued=queued) for one in answers
    ]


def _run_joined(parts: list[_Part]) -> None:
    """Passes of as many micro-batches, in their order, as the budget has room for."""
    align = BLOCK if parts[0].backend.ranks.device.type == "cuda" else 1
    budget = min(part.backend.packing.micro_batch_tokens for part in parts)
    passes, held = [list[tuple[_Part, Portion]]()], 0
    for part in parts:
        for portion in part.prepared.shares[0].portions:
            size = -(-portion.micro_batch.computed_tokens // align) * align
            if passes[-1] and held + size > budget:
                passes, held = [*passes, []], 0
            passes[-1].append((part, portion))
            held += size
    for pieces in passes:
        going = [piece for piece in pieces if piece[0].goes_on]
        try:
            with ExitStack() as stack:
                for part in {part: None for part, _ in going}:
                    stack.enter_context(part.backend.working())
                if going:
                    _run_pass(going, align)
        except Exception as error:
            for part, _ in going:
                part.answer = error


def _run_pass(pieces: list[tuple[_Part, Portion]], align: int) -> None:
    """One forward and one backward of the model."""
    parts, portions = zip(*pieces, strict=True)
    first, trainer, gradient = parts[0], parts[0].backend.trainer, parts[0].gradient
    trainer.check_open()
    joined, slices = join_packed_rows([portion.micro_batch for portion in portions], align=align)
    counts = [len(portion.micro_batch.targets) for portion in portions]
    routes: Any = [(part.backend.trainer.adapter, rows) for part, rows in zip(parts, slices, strict=True)]
    routed = use_adapters(trainer.model, routes, training=gradient)
    with torch.set_grad_enabled(gradient), routed, trainer.rounding():
        outputs: Any = trainer.compute_outputs(joined, first.batch.temperature, first.loss)
        flats = map(TokenOutputs, *(values.split(counts) for values in outputs[:2]))
        found = [
            (part, part.attempt(partial(part.compute_loss, flat, portion)))
            for (part, portion), flat in zip(pieces, flats, strict=True)
        ]
        losses: list[tuple[_Part, Any]] = [one for one in found if one[0].goes_on]
        if gradient and losses:
            sums = [computed.sum / part.prepared.shares[0].denominator for part, computed in losses]
            torch.stack(sums).sum().backward()
    for part, computed in losses:
        if computed.trace is not None:
            part.traces.append(computed.trace.read())

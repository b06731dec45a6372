"""A model, its gradients and its optimizer spread over ranks: what each rank's device thread does of a step.
Every method is collective.

    rank 0 packs the batch ──scatter──► each rank's share ──► rounds: forward ─► loss, agreed ─► backward ──► gradients, summed and sharded

All ranks call the same method at the same time; only rank 0 is given what comes from outside and gets results
back. Three ways to fail: AgreedFailure, raised by all ranks alike, which are in step afterwards; any other
error, after which the ranks are out of step and the job must end; and loss or gradients that are not finite,
which all ranks see alike and report.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rollouts.backends.random_states import DrawsOfSteps
from rollouts.backends.sharded_capture import HeldPart, check_seen, hold_together
from rollouts.backends.sharded_model import discard_iteration, run_unsharded
from rollouts.backends.sharded_state import read_sharded_state, save_sharded_state
from rollouts.backends.sharded_weights import RANK_BUCKET_BYTES, gather_bucket, gather_parts, scatter_weight
from rollouts.backends.shares import Portion, Share, decode_share, encode_share
from rollouts.backends.steps import (
    POSITION_FIELDS,
    check_count,
    check_weights,
    clip_gradients,
    collect_gradients,
    compute_loss,
    find_buckets,
    with_entropy,
)
from rollouts.backends.token_traces import TokenTrace
from rollouts.crash_points import reach
from rollouts.distributed.process_group import (
    AgreedFailure,
    Ranks,
    all_gather_floats,
    gather_bytes,
    run_agreed,
    scatter_bytes,
)
from rollouts.errors import CheckpointError, ModelError, RolloutsError
from rollouts.losses import LossFn, LossOutput, resolve_loss, wants_entropy_gradient
from rollouts.models.export import write_description
from rollouts.models.log_probs import ForwardPlan, TokenOutputs, compute_micro_batch_outputs
from rollouts.models.parts import Deal, deal_weights, name_parts, write_part
from rollouts.models.shard_writer import ShardWriter
from rollouts.models.sharded import get_local, load_sharded_weights, reshard
from rollouts.protocols import WeightSink
from rollouts.types import FloatArray, Metric, Metrics, merge_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRIC_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Metric)}


@dataclass(frozen=True, slots=True)
class ShareResult:
    """What all ranks together made of a batch."""

    total: float  # sum of the loss over the whole batch; not finite: no gradient was kept
    metrics: Metrics  # on rank 0; empty on the others
    traces: tuple[
        FloatArray, ...
    ] = ()  # on rank 0, where the loss asks for it, of each rank: [3, tokens of its portions that count]


# --- the trainer --------------------------------------------------------------------------------------------


class ShardedTrainer:
    """One rank's part of the training. Made with a model that shard_model divided and an optimizer over its
    parameters.

    check_open: called at each boundary between micro-batches; what it raises on any rank ends the step on
    all. reduce_each_micro_batch: sum gradients over the ranks after every micro-batch instead of once per
    batch. That costs communication and saves memory: else each rank holds the whole gradient while it works
    on a batch of several micro-batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.AdamW,
        ranks: Ranks,
        plan: ForwardPlan,
        *,
        check_open: Callable[[], None],
        autocast_dtype: torch.dtype | None = None,
        reduce_each_micro_batch: bool = False,
    ) -> None:
        self.model = model.eval()
        self.optimizer = optimizer
        self.ranks = ranks
        self.plan = plan
        self._check_open = check_open
        self._autocast_dtype = autocast_dtype
        self._reduce_each = reduce_each_micro_batch
        self._draws = DrawsOfSteps(ranks.device)

    def discard(self) -> None:
        """Throws accumulated gradients away, and what a failed step left behind. Does not communicate."""
        discard_iteration(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """As after the last step: what was begun since is thrown away, and this rank's random states are as
        they were. Does not communicate.
        """
        self.discard()
        self._draws.restore()

    def skip_step(self) -> None:
        """Ends a step that changes nothing. Does not communicate."""
        self.discard()
        self._draws.note()

    # --- batches

    def forward_backward(self, make_shares: Callable[[], Sequence[Share]] | None) -> ShareResult:
        """Adds the gradient of sum / denominator to what has accumulated. `make_shares` is rank 0's: one
        share for each rank.
        """
        self._draws.begin()
        share = self._receive_share(make_shares)
        assert share.spec is not None
        name = share.spec.name
        loss_fn = run_agreed(self.ranks, lambda: resolve_loss(name)).value
        total, count = 0.0, 0.0
        metrics: list[Metrics] = []
        traces: list[Tensor] = []
        for number, portion in enumerate(share.portions):
            cast(FSDPModule, self.model).set_requires_gradient_sync(
                self._reduce_each or number == len(share.portions) - 1
            )
            flat = self._compute_outputs(portion, share)
            (output, trace), gathered = self._agree_on_loss(flat, portion, share, loss_fn, metrics)
            total += float(gathered[:, 0].sum())
            count += float(gathered[:, 1].sum())
            if not math.isfinite(total):
                self.discard()
                return ShareResult(total, {})
            (output.sum / share.denominator).backward()
            if trace is not None:
                traces.append(trace.read())
        reshard(self.model)
        self._agree_alike(lambda: check_count(share.spec, count, share.expected_count))  # pyright: ignore[reportArgumentType]
        return ShareResult(
            total, self._gather_metrics(metrics), self._gather_traces(traces) if share.spec.per_token else ()
        )

    def forward(self, make_shares: Callable[[], Sequence[Share]] | None) -> list[FloatArray] | None:
        """On rank 0, of each rank: log-probs (of a scalar head: values) [sum of N] of its portions' pairs, in
        their order. `make_shares` as above, without a loss.
        """
        share = self._receive_share(make_shares)
        found: list[FloatArray] = []
        with torch.no_grad():
            for portion in share.portions:
                run_agreed(self.ranks, self._check_open)
                found.append(self._compute_outputs(portion, share).log_probs.float().cpu().numpy())
        reshard(self.model)
        blocks = gather_bytes(self.ranks, np.concatenate([np.zeros(0, np.float32), *found]).tobytes())
        return None if blocks is None else [np.frombuffer(block, np.float32) for block in blocks]

    def _receive_share(self, make_shares: Callable[[], Sequence[Share]] | None) -> Share:
        def encode() -> list[bytes] | None:
            return None if make_shares is None else [encode_share(share) for share in make_shares()]

        return decode_share(scatter_bytes(self.ranks, run_agreed(self.ranks, encode).value))

    def _compute_outputs(self, portion: Portion, share: Share) -> TokenOutputs:
        entropy_gradient = share.spec is not None and wants_entropy_gradient(
            share.spec.name, share.spec.params
        )

        def compute() -> TokenOutputs:
            return compute_micro_batch_outputs(
                self.model,
                portion.micro_batch,
                plan=self.plan,
                temperature=share.temperature,
                autocast_dtype=self._autocast_dtype,
                entropy_gradient=entropy_gradient,
            )

        return (
            compute() if self.plan.head == "whole" else run_unsharded(self.model, compute)
        )  # the whole model is the root's own forward

    def _agree_on_loss(
        self, flat: TokenOutputs, portion: Portion, share: Share, loss_fn: LossFn, metrics: list[Metrics]
    ) -> tuple[tuple[LossOutput, TokenTrace | None], FloatArray]:
        """This rank's loss with its trace, and every rank's (sum, count) [W, 2]."""
        reach("train.before_agreement")

        def work() -> tuple[LossOutput, TokenTrace | None]:
            self._check_open()
            if not portion.counts:
                return LossOutput(flat.log_probs.sum() * 0.0, 0.0, {}), None
            assert share.spec is not None
            output, entropy, trace = compute_loss(flat, portion, loss_fn, share.spec)
            metrics.append(with_entropy(output, entropy))
            return output, trace

        return run_agreed(
            self.ranks, work, lambda found: (float(found[0].sum.detach()), float(found[0].count)), count=2
        )

    def _agree_alike(self, check: Callable[[], None]) -> None:
        """A check of what is the same on all ranks: it fails on all or on none."""
        try:
            check()
        except RolloutsError as error:
            raise AgreedFailure(error) from error

    def _gather_metrics(self, metrics: Sequence[Metrics]) -> Metrics:
        data = run_agreed(self.ranks, lambda: encode_metrics(merge_metrics(metrics))).value
        parts = gather_bytes(self.ranks, data)
        merged = run_agreed(
            self.ranks,
            lambda: {} if parts is None else merge_metrics([decode_metrics(part) for part in parts]),
        )
        return merged.value

    def _gather_traces(self, traces: Sequence[Tensor]) -> tuple[FloatArray, ...]:
        data = run_agreed(
            self.ranks,
            lambda: (
                torch.cat([torch.zeros(3, 0), *(trace.cpu() for trace in traces)], dim=1).numpy().tobytes()
            ),
        ).value
        blocks = gather_bytes(self.ranks, data)
        return (
            ()
            if blocks is None
            else tuple(np.frombuffer(block, np.float32).reshape(3, -1) for block in blocks)
        )

    # --- the optimizer

    def optim_step(self, lr: float, max_grad_norm: float | None) -> float:
        """The gradient's norm over all ranks, before clipping. Where it is not finite nothing changes but
        that the gradient is gone.
        """
        self._draws.note()
        gradients = [get_local(gradient) for gradient in collect_gradients(self.model)]
        mine = float(torch.nn.utils.get_total_norm(gradients))
        # in one order on every rank, so that all have the same bits; a replica's part counts once
        told = all_gather_floats(self.ranks, [mine if self.ranks.first_replica else 0.0])
        norm = math.sqrt(float(np.square(told[:, 0]).sum()))
        if math.isfinite(norm):
            clip_gradients(gradients, norm, max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            reach("train.before_optim_step")
            self.optimizer.step()
            reach("train.after_optim_step")
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    # --- weights

    def stream_weights(self, sink: WeightSink | None) -> None:
        """Hands every parameter to rank 0's `sink`, bucket by bucket. The others hold no more than their
        shards.
        """
        for bucket in find_buckets(self.model, RANK_BUCKET_BYTES):
            gathered = gather_bucket(self.ranks, bucket)

            def take(gathered: list[tuple[str, Tensor]] | None = gathered) -> None:
                if sink is not None and gathered is not None:
                    sink(gathered)

            run_agreed(self.ranks, take)

    def load_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Replaces all parameters by rank 0's `weights`. Raises AgreedFailure before anything is copied."""
        run_agreed(self.ranks, lambda: None if weights is None else check_weights(self.model, weights))
        for name, parameter in self.model.named_parameters():
            scatter_weight(self.ranks, parameter, None if weights is None else weights[name])

    # --- checkpoints

    def save(
        self, path: Path, position: Mapping[str, float], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Writes the model directory and its `state/`, each rank its own part. All ranks must see `path`;
        rank 0's `position` and `tokenizer` count.

        Raises AgreedFailure with an OSError if a disk refuses a write on any rank, with a RunDirError if a
        rank does not see `path`.
        """
        rank, world = self.ranks.rank, self.ranks.world_size

        def describe() -> None:
            if rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                write_description(self.model, path, tokenizer)

        def name(counts: Sequence[float]) -> None:
            if rank == 0:
                name_parts(path, [int(count) for count in counts])

        run_agreed(self.ranks, describe)
        with ExitStack() as stack:

            def begin() -> tuple[Deal, ShardWriter]:
                check_seen(path, rank)
                deal = deal_weights(self.model, rank, world)
                return deal, stack.enter_context(write_part(path, deal.names, rank))

            deal, writer = run_agreed(self.ranks, begin).value
            gather_parts(self.ranks, deal.parameters, writer.take)
            counts = run_agreed(
                self.ranks, stack.close, lambda _: [float(len(writer.shards))], count=1
            ).numbers
        run_agreed(self.ranks, lambda: name(counts[:, 0].tolist()))
        run_agreed(
            self.ranks,
            lambda: save_sharded_state(path, self.model, self.optimizer, position, rank=rank, ranks=world),
        )

    def capture(
        self, position: Mapping[str, float], tokenizer: PreTrainedTokenizerBase | None
    ) -> HeldPart | None:
        """This rank's part of what save() would write now, copied to host memory; None, on all ranks, if one
        has no room for it. Rank 0's `position` and `tokenizer` count; generation must not use the tokenizer
        while it is written.
        """
        return hold_together(self.model, self.optimizer, self.ranks, position, tokenizer)

    def load(self, path: Path) -> Mapping[str, float]:
        """The position that save() was given, on any number of ranks; weights, optimizer and random states
        are as they were. Gradients are discarded. Raises AgreedFailure with a CheckpointError; what does not
        fit is found before anything is changed.
        """
        rank, world = self.ranks.rank, self.ranks.world_size
        self.discard()

        def load_weights() -> None:
            try:
                load_sharded_weights(self.model, path, device=self.ranks.device)
            except ModelError as error:
                raise CheckpointError(f"{path} is not of this model, or damaged: {error}") from error

        loaded = run_agreed(
            self.ranks, lambda: read_sharded_state(path, self.model, POSITION_FIELDS, rank=rank, ranks=world)
        ).value
        run_agreed(self.ranks, load_weights)
        loaded.apply(self.optimizer, self.ranks.device)
        self._draws.note()
        return loaded.position


# --- metrics as bytes ---------------------------------------------------------------------------------------


def encode_metrics(metrics: Metrics) -> bytes:
    """JSON; what is not finite is written as Python's json writes it."""
    return json.dumps(
        {name: [type(metric).__name__, *_list_values(metric)] for name, metric in metrics.items()}
    ).encode()


def _list_values(metric: Metric) -> list[float]:
    return [float(getattr(metric, field.name)) for field in dataclasses.fields(metric)]


def decode_metrics(data: bytes) -> dict[str, Metric]:
    """What encode_metrics was given."""
    return {name: METRIC_KINDS[kind](*values) for name, (kind, *values) in json.loads(data).items()}

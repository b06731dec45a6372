"""A model, its gradients and its optimizer on one rank or spread over many: what each rank's device thread
does of a step. Every method is collective; on one rank the collectives do nothing.

    rank 0 packs the batch ──scatter──► each rank's share ──► rounds: forward ─► loss, agreed ─► backward
                                                                └──► gradients, summed and sharded

All ranks call the same public method at the same time, with the same named arguments; the first argument
is what only rank 0 has, None elsewhere, and only rank 0 uses results. Three ways to fail: AgreedFailure,
raised by all ranks alike, which are in step afterwards; any other error, after which the ranks are out of
step and the job must end; and loss or gradients that are not finite, which all ranks see alike and report.

A Hugging Face model whose parameters FSDP2 divides among ranks: how it is divided, run, planned and put in
order after a failure. A model that is not divided runs as it is.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rollouts.backends.captures import HeldPart, hold_together, save_together
from rollouts.backends.sharded_compat import list_groups, reduce_unused, reset_iteration
from rollouts.backends.shares import Portion, Share, decode_share, encode_share
from rollouts.backends.state import (
    BUCKET_BYTES,
    RANK_BUCKET_BYTES,
    Position,
    check_weights,
    copy_random_states,
    gather_bucket,
    read_state,
    scatter_weight,
    set_random_states,
)
from rollouts.backends.steps import CLIP_EPS, ComputedLoss, collect_gradients, compute_loss
from rollouts.crash_points import reach
from rollouts.errors import BackendError, CheckpointError, DenominatorMismatch, ModelError
from rollouts.losses import LossFn, resolve_loss, wants_entropy_gradient
from rollouts.models.forward_plan import log_plan, plan_forward
from rollouts.models.layers import find_layers
from rollouts.models.log_probs import ForwardPlan, TokenOutputs, compute_micro_batch_outputs
from rollouts.models.lora import Adapter, check_reached, list_trained, route_all, use_adapters
from rollouts.models.lora_files import load_adapter
from rollouts.models.sharded import get_local, load_sharded_weights, reshard
from rollouts.protocols import WeightSink
from rollouts.ranks.meet import (
    AgreedFailure,
    Ranks,
    all_gather_bytes,
    all_gather_floats,
    all_reduce,
    meet_all,
    run_agreed,
    scatter_bytes,
)
from rollouts.types import FloatArray, Metric, Metrics, merge_metrics
from rollouts.weight_sync.flat_buckets import split_buckets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# --- a divided model ----------------------------------------------------------------------------------------


T = TypeVar("T")
RUN = "run_unsharded"  # method of the root module
MEET_S = 4.0  # between ranks that fail alike: a forward of some tokens keeps them together
COMPILE_MEET_S = 60.0  # the same for compilers, which take their own time


def shard_model(model: PreTrainedModel, ranks: Ranks, *, cpu_offload: bool) -> None:
    """Divides the parameters of each decoder layer, and of what is around them, among the ranks. Gradients
    become sums over all ranks.

    Layers gather their parameters when they run and free them afterwards; those of the root (embedding, last
    norm, head) stay gathered from its forward to its backward. Layers with their own gradient checkpointing
    must have it before. Shards, gathered parameters and gradients have the dtype of the model; autocast
    rounds for each product alone. cpu_offload: shards and reduced gradients lie in pinned host memory; for
    ranks on GPUs.
    """
    assert ranks.mesh is not None
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in find_layers(model):
        fully_shard(layer, mesh=ranks.mesh, offload_policy=offload)
    fully_shard(model, mesh=ranks.mesh, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # denominators are global: gradients of the ranks add up
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    reduce_unused(model)  # one rank's tokens may pass by an expert that another's use: both must reduce it
    setattr(model, RUN, types.MethodType(lambda self, work: work(), model))
    register_fsdp_forward_method(model, RUN)


def run_unsharded(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """`work()` as a forward pass of the model, with the root's parameters gathered: then they are plain
    tensors.
    """
    return getattr(model, RUN)(work) if isinstance(model, FSDPModule) else work()


def plan_sharded_forward(model: PreTrainedModel, ranks: Ranks) -> ForwardPlan:
    """What plan_forward finds; where it takes the model's own head, the whole model runs instead. Collective.

    The own head is a forward pass of the model without its layers, which sharded layers do not stand. What
    fails on all ranks alike is a finding of the probe, or an AgreedFailure with a ModelError. What fails on
    this rank alone (memory, a device) is raised as it is: the others are in a collective that this one has
    left, so it must end.
    """

    def check_alike(error: Exception) -> None:
        if not meet_all(ranks, MEET_S):
            raise error

    try:
        with torch.no_grad():
            plan = run_unsharded(model, lambda: plan_forward(model, on_error=check_alike))
    except ModelError as error:
        check_alike(error)
        raise AgreedFailure(error) from error
    finally:
        discard_iteration(model)
    own = plan.head == "own" and isinstance(model, FSDPModule)
    return plan._replace(head="whole") if own else plan


def discard_iteration(model: torch.nn.Module) -> None:
    """Frees what a forward without its backward left gathered, and gradients that were not reduced yet. Does
    not communicate.
    """
    if not isinstance(model, FSDPModule):
        return
    reset_iteration(model)
    reshard(model)
    for group in list_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None  # reset_iter_state leaves these
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


# --- the trainer --------------------------------------------------------------------------------------------


METRIC_KINDS = {kind.__name__: kind for kind in get_args(Metric)}
Saved = tuple[Position, Any]
"""Rank 0's position and tokenizer."""
NOTHING = Position(0, 0, 0), None
Shares = Sequence[Share] | None
"""Rank 0's: one for each rank. None on the others."""


class ShareResult(NamedTuple):
    """What all ranks together made of a batch."""

    total: float  # sum of the loss over the whole batch; not finite: no gradient was kept
    metrics: Metrics
    # of each rank, where the loss asks for it: [3, tokens of its portions that count]
    traces: Sequence[FloatArray] = ()


@dataclass(eq=False)
class Trainer:
    """One rank's part of the training."""

    model: PreTrainedModel  # whole on one rank, else divided by shard_model
    optimizer: torch.optim.AdamW
    ranks: Ranks
    # which shortcuts are exact for the model; None: the first batch finds that out, on one rank
    plan: ForwardPlan | None
    # called at each boundary between micro-batches; what it raises on any rank ends the step on all
    check_open: Callable[[], None]
    autocast_dtype: torch.dtype | None = None
    # sum gradients over the ranks after every micro-batch instead of once per batch, which costs
    # communication and saves memory
    reduce_each: bool = False
    # what trains beside the model, which does not then: each rank has all of it
    adapter: Adapter | None = None
    # the adapter that training started from, as it was; None: none, or it was new
    start: Adapter | None = None
    # torch's as of the last completed step, so that a step that is given up and repeated draws the same
    # numbers; empty: no step began yet
    _random_states: Mapping[str, Tensor] = field(default_factory=dict)
    # copies of what trains and of the optimizer's state, from hold() to revert()
    _held: tuple[Mapping[torch.nn.Parameter, Tensor], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.model.eval()  # dropout would make its log-probs another policy's

    @property
    def trained(self) -> PreTrainedModel | Adapter:
        """What training is about."""
        return self.adapter or self.model

    def find_plan(self) -> ForwardPlan:
        """Which shortcuts are exact for the model."""
        if self.plan is None:
            self.plan = plan_forward(self.model)
            log_plan(self.model, self.plan)
        return self.plan

    def discard(self) -> None:
        """Throws accumulated gradients away, and what a failed step left behind. Does not communicate."""
        discard_iteration(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self, _: None) -> None:
        """As after the last step: what was begun since is thrown away, and this rank's random states are as
        they were. Does not communicate.
        """
        self.discard()
        set_random_states(self._random_states, self.ranks.device)

    def skip_step(self, _: None) -> None:
        """Ends a step that changes nothing. Does not communicate."""
        self.discard()
        self._note_random_states()

    def _note_random_states(self) -> None:
        self._random_states = copy_random_states(self.ranks.device)

    # --- batches

    def forward_backward(self, shares: Shares) -> ShareResult:
        """Adds the gradient of sum / denominator to what has accumulated."""
        with use_adapters(self.model, route_all(self.adapter), training=True):
            return self._forward_backward(shares)

    def _forward_backward(self, shares: Shares) -> ShareResult:
        if not self._random_states:
            self._note_random_states()
        share = self._receive_share(shares)
        spec = share.spec
        assert spec is not None
        loss_fn = run_agreed(self.ranks, lambda: resolve_loss(spec.name)).value
        total = count = 0.0
        metrics: list[Metrics] = []
        traces: list[Tensor] = []
        for number, portion in enumerate(share.portions):
            if isinstance(self.model, FSDPModule):
                last = number == len(share.portions) - 1
                self.model.set_requires_gradient_sync(self.reduce_each or last)
            flat = self._compute_outputs(portion, share)
            computed, sums = self._agree_on_loss(flat, portion, share, loss_fn)
            total += float(sums[:, 0].sum())
            count += float(sums[:, 1].sum())
            if not math.isfinite(total):
                self.discard()
                return ShareResult(total, {})
            (computed.sum / share.denominator).backward()
            if portion.counts:
                metrics.append(computed.metrics)
            if computed.trace is not None:
                traces.append(computed.trace.read())
            del flat, computed  # what the graph holds is free before the next forward
        reshard(self.model)
        expected = share.expected_count
        if not math.isclose(count, expected, rel_tol=1e-6):  # on all ranks or on none
            raise AgreedFailure(
                DenominatorMismatch(
                    f"loss {spec.name!r} counted {count:g} {spec.unit} where the batch has {expected:g}; its"
                    " count must be that of its unit"
                )
            )

        def encode() -> bytes:
            mine = {
                name: (type(metric).__name__, *map(float, metric))
                for name, metric in merge_metrics(metrics).items()
            }
            arrays = [np.zeros((3, 0), np.float32), *(trace.cpu().numpy() for trace in traces)]
            return msgspec.msgpack.encode((mine, np.concatenate(arrays, axis=1).tobytes()))

        encoded = run_agreed(self.ranks, encode).value
        parts = [msgspec.msgpack.decode(part) for part in all_gather_bytes(self.ranks, encoded)]
        merged = run_agreed(
            self.ranks,
            lambda: merge_metrics(
                [
                    {name: METRIC_KINDS[kind](*values) for name, (kind, *values) in theirs.items()}
                    for theirs, _ in parts
                ]
            ),
        ).value
        return ShareResult(
            total, merged, [np.frombuffer(block, np.float32).reshape(3, -1) for _, block in parts]
        )

    def forward(self, shares: Shares, *, start: bool = False) -> list[FloatArray]:
        """Of each rank, [2, sum of N]: log-probs and entropies (of a scalar head: values, twice) of its
        portions' pairs, in their order. The shares have no loss. start: of the model that an adapter's
        training started from.
        """
        share = self._receive_share(shares)
        found = [np.zeros((2, 0), np.float32)]
        adapter = self.start if start else self.adapter
        with torch.no_grad(), use_adapters(self.model, route_all(adapter)):
            for portion in share.portions:
                run_agreed(self.ranks, self.check_open)
                values, entropy = self._compute_outputs(portion, share)
                both = torch.stack([values, values if entropy is None else entropy])
                found.append(both.float().cpu().numpy())
        reshard(self.model)
        blocks = all_gather_bytes(self.ranks, np.concatenate(found, axis=1).tobytes())
        return [np.frombuffer(block, np.float32).reshape(2, -1) for block in blocks]

    def _receive_share(self, shares: Shares) -> Share:
        if self.ranks.world_size == 1:
            assert shares is not None
            return shares[0]
        encoded = run_agreed(
            self.ranks, lambda: None if shares is None else [encode_share(share) for share in shares]
        )
        return decode_share(scatter_bytes(self.ranks, encoded.value))

    def _compute_outputs(self, portion: Portion, share: Share) -> TokenOutputs:
        spec, plan = share.spec, self.find_plan()

        def compute() -> TokenOutputs:
            return compute_micro_batch_outputs(
                self.model,
                portion.micro_batch,
                plan=plan,
                temperature=share.temperature,
                autocast_dtype=self.autocast_dtype,
                entropy_gradient=spec is not None and wants_entropy_gradient(spec.name, spec.params),
            )

        # the whole model is the root's own forward
        return compute() if plan.head == "whole" else run_unsharded(self.model, compute)

    def _agree_on_loss(
        self, flat: TokenOutputs, portion: Portion, share: Share, loss_fn: LossFn
    ) -> tuple[ComputedLoss, FloatArray]:
        """This rank's loss, and every rank's (sum, count) [W, 2]."""
        reach("train.before_agreement")

        def work() -> ComputedLoss:
            self.check_open()
            if not portion.counts:
                return ComputedLoss(flat.log_probs.sum() * 0.0, 0.0, {})
            assert share.spec is not None
            return compute_loss(flat, portion, loss_fn, share.spec)

        return run_agreed(self.ranks, work, lambda found: (float(found.sum.detach()), found.count), count=2)

    # --- the optimizer

    def optim_step(self, _: None, *, lr: float, max_grad_norm: float | None) -> float:
        """The gradient's norm over all ranks, before clipping. Where it is not finite nothing changes but
        that the gradient is gone.
        """
        self._note_random_states()
        # of an adapter, which FSDP knows nothing of, every rank has all
        whole, trained = self.adapter is not None, list_trained(self.trained)
        gradients = [get_local(gradient) for gradient in collect_gradients(trained, every=whole)]
        counts = self.ranks.first_replica
        if self.adapter is not None:
            run_agreed(self.ranks, partial(check_reached, self.adapter))
            all_reduce(self.ranks, gradients)
            counts = self.ranks.rank == 0
        mine = float(torch.nn.utils.get_total_norm(gradients))
        # in one order on every rank, so that all have the same bits; a replica's part counts once
        norms = all_gather_floats(self.ranks, [mine if counts else 0.0])
        norm = math.sqrt(float(np.square(norms[:, 0]).sum()))
        if math.isfinite(norm):
            if max_grad_norm is not None and norm > max_grad_norm:
                # by a number, in each gradient's own precision: a tensor of the norm would be float32
                cast(Any, torch)._foreach_mul_(gradients, max_grad_norm / (norm + CLIP_EPS))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            reach("train.before_optim_step")
            self.optimizer.step()
            reach("train.after_optim_step")
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def hold(self, _: None) -> None:
        """Copies what the optimizer changes, on its own device, in place of the copy before. Does not
        communicate.
        """
        self._held = None  # its memory is free for the next one
        weights = {
            weight: get_local(weight).clone()
            for weight in list_trained(self.trained).values()
            if weight.requires_grad
        }
        self._held = weights, copy.deepcopy(self.optimizer.state_dict())

    def revert(self, _: None) -> None:
        """Weights and optimizer are as of the last hold(), whose copy is used up; gradients are discarded.
        Does not communicate. Raises AgreedFailure if there is none.
        """
        if self._held is None:
            raise AgreedFailure(BackendError("revert() needs a hold() before it, and each its own"))
        self.discard()
        (weights, state), self._held = self._held, None
        for weight, held in weights.items():
            get_local(weight).copy_(held)
        self.optimizer.load_state_dict(dict(state))

    # --- weights

    def stream_weights(self, sink: WeightSink | None) -> None:
        """Hands every parameter to rank 0's `sink`, bucket by bucket. The others hold no more than their
        shards.
        """
        size = BUCKET_BYTES if self.ranks.mesh is None else RANK_BUCKET_BYTES
        for bucket in split_buckets(list_trained(self.trained).items(), size):
            whole = gather_bucket(self.ranks, bucket)
            run_agreed(self.ranks, lambda whole=whole: None if sink is None or whole is None else sink(whole))

    def load_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Replaces all parameters by rank 0's `weights`. Raises AgreedFailure before anything is copied."""
        run_agreed(self.ranks, lambda: None if weights is None else check_weights(self.trained, weights))
        for name, parameter in list_trained(self.trained).items():
            scatter_weight(self.ranks, parameter, None if weights is None else weights[name])

    # --- checkpoints

    def save(self, local: Saved | None, *, path: str) -> None:
        """See save_together."""
        save_together(self.trained, self.optimizer, self.ranks, Path(path), *(local or NOTHING))

    def capture(self, local: Saved | None, *, name: str) -> HeldPart | None:
        """See hold_together. Generation must not use the tokenizer while it is written. `name`: of what the
        rank keeps.
        """
        return hold_together(self.trained, self.optimizer, self.ranks, *(local or NOTHING))

    def load(self, _: None, *, path: str) -> Position:
        """The position that save() was given, on any number of ranks; weights, optimizer and random states
        are as they were. Gradients are discarded. Raises AgreedFailure with a CheckpointError; what does not
        fit is found before anything is changed.
        """
        self.discard()

        def load_weights() -> None:
            try:
                if self.adapter is None:
                    load_sharded_weights(self.model, Path(path), device=self.ranks.device)
                else:
                    load_adapter(self.adapter, Path(path))
            except ModelError as error:
                raise CheckpointError(f"{path} is not of this model, or damaged: {error}") from error

        loaded = run_agreed(self.ranks, lambda: read_state(Path(path), self.trained, self.ranks)).value
        run_agreed(self.ranks, load_weights)
        loaded.apply(self.optimizer, self.ranks.device)
        self._note_random_states()
        return loaded.position

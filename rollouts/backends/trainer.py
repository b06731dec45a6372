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

import copy
import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
from rollouts.backends.shares import (
    CLIP_EPS,
    ComputedLoss,
    Portion,
    Share,
    check_count,
    compute_loss,
    join_traces,
)
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
from rollouts.codec import decode, encode, pack_metrics, unpack_metrics
from rollouts.crash_points import reach
from rollouts.data.packing import MicroBatch
from rollouts.errors import BackendError, CheckpointError, DenominatorMismatch, ModelError
from rollouts.losses import LossFn, resolve_loss, wants_entropy_gradient
from rollouts.models.devices import rounding_products
from rollouts.models.export import split_buckets
from rollouts.models.forward_plan import (
    ForwardPlan,
    TokenOutputs,
    compute_micro_batch_outputs,
    log_plan,
    plan_forward,
)
from rollouts.models.layers import PROBING_DIRECTIONS, find_layers, make_probing_directions
from rollouts.models.lora import (
    Adapter,
    Trained,
    check_reached,
    list_trained,
    load_adapter,
    route_all,
    use_adapters,
)
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
from rollouts.types import Fields, FloatArray, LossSpec, Metrics, T, live, merge_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# --- a divided model ----------------------------------------------------------------------------------------


RUN = "run_unsharded"  # method of the root module
MEET_S = 4.0  # between ranks that fail alike: a forward of some tokens keeps them together
COMPILE_MEET_S = 60.0  # the same for compilers, which take their own time


def shard_model(model: "PreTrainedModel", ranks: Ranks, *, cpu_offload: bool) -> None:
    """Divides the parameters of each decoder layer, and of what is around them, among the ranks. Gradients
    become sums over all ranks.

    Layers gather their parameters when they run and free them afterwards; those of the root (embedding, last
    norm, head) stay gathered from its forward to its backward. Layers with their own gradient checkpointing
    must have it before. Shards, gathered parameters and gradients have the dtype of the model; autocast
    rounds for each product alone. cpu_offload: shards and reduced gradients lie in pinned host memory; for
    ranks on GPUs.
    """
    assert ranks.mesh
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for module in (*find_layers(model), model):
        divided = fully_shard(module, mesh=ranks.mesh, offload_policy=offload)
        divided.set_gradient_divide_factor(1.0)  # denominators are global: gradients of the ranks add up
        divided.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    reduce_unused(model)  # one rank's tokens may pass by an expert that another's use: both must reduce it
    setattr(model, RUN, types.MethodType(lambda self, work: work(), model))
    register_fsdp_forward_method(model, RUN)


def run_unsharded(model: "PreTrainedModel", work: Callable[[], T]) -> T:
    """`work()` as a forward pass of the model, with the root's parameters gathered: then they are plain
    tensors.
    """
    return getattr(model, RUN)(work) if isinstance(model, FSDPModule) else work()


def plan_sharded_forward(model: "PreTrainedModel", ranks: Ranks) -> ForwardPlan:
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


Saved = tuple[Position, Any]
"""Rank 0's position and tokenizer."""
NOTHING = Position(0, 0, 0), None
Shares = Sequence[Share] | None
"""Rank 0's: one for each rank. None on the others."""


Told = tuple[Any, FloatArray]
"""What a rank tells of its share: what pack_metrics gives, and its trace [3, M]."""


class ShareResult(NamedTuple):
    """What all ranks together made of a batch."""

    total: float  # sum of the loss over the whole batch; not finite: no gradient was kept
    metrics: Metrics
    # of each rank, where the loss asks for it: [3, tokens of its portions that count]
    traces: Sequence[FloatArray] = ()


@live
class Trainer:
    """One rank's part of the training."""

    model: "PreTrainedModel"  # whole on one rank, else divided by shard_model
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
    reference: "PreTrainedModel | None" = None  # that an exact KL is from; on one rank, with the model's plan

    def __post_init__(self) -> None:
        self.model.eval()  # dropout would make its log-probs another policy's
        # torch's as of the last completed step, so that a step that is given up and repeated draws the same
        # numbers; empty: no step began yet
        self._random_states: Mapping[str, Tensor] = {}
        # copies of what trains and of the optimizer's state, from hold() to revert()
        self._held: tuple[Mapping[torch.nn.Parameter, Tensor], Fields] | None = None

    @property
    def trained(self) -> Trained:
        """What training is about."""
        return self.adapter or self.model

    def rounding(self) -> AbstractContextManager[None]:
        """Inside, a CPU multiplies as it was told to, in backward passes too."""
        return rounding_products(self.autocast_dtype, self.ranks.device)

    def find_plan(self) -> ForwardPlan:
        """Which shortcuts are exact for the model."""
        if not self.plan:
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

    def begin(self) -> None:
        """Notes the random states before the first step."""
        if not self._random_states:
            self._note_random_states()

    def _note_random_states(self) -> None:
        self._random_states = copy_random_states(self.ranks.device)

    # --- batches

    def forward_backward(self, shares: Shares, *, gradient: bool = True) -> ShareResult:
        """Adds the gradient of sum / denominator to what has accumulated; without `gradient` only says what
        the loss is.
        """
        self.begin()
        share = self._receive_share(shares)
        spec = share.spec
        assert spec
        loss_fn = run_agreed(self.ranks, lambda: resolve_loss(spec.name)).value
        total = count = 0.0
        metrics, traces = list[Metrics](), list[Tensor]()
        routes = route_all(self.adapter)
        routed = use_adapters(self.model, routes, training=gradient)
        with torch.set_grad_enabled(gradient), routed, self.rounding():
            for number, portion in enumerate(share.portions):
                if isinstance(self.model, FSDPModule):
                    last = number == len(share.portions) - 1
                    self.model.set_requires_gradient_sync(self.reduce_each or last)
                computed, sums = self._agree_on_loss(portion, share, loss_fn)
                total += float(sums[:, 0].sum())
                count += float(sums[:, 1].sum())
                if not math.isfinite(total):
                    if gradient:
                        self.discard()
                    reshard(self.model)
                    return ShareResult(total, {})
                if gradient:
                    (computed.sum / share.denominator).backward()
                if portion.counts:
                    metrics.append(computed.metrics)
                if computed.trace:
                    traces.append(computed.trace.read())
                del computed  # what the graph holds is free before the next forward
        reshard(self.model)
        try:
            check_count(count, share.expected_count, spec)
        except DenominatorMismatch as error:  # on all ranks or on none
            raise AgreedFailure(error) from None

        def encode_own() -> bytes:
            return encode((pack_metrics(merge_metrics(metrics)), join_traces(traces)))

        gathered = all_gather_bytes(self.ranks, run_agreed(self.ranks, encode_own).value)
        theirs, blocks = zip(*(decode(one, Told, max_axes=2) for one in gathered), strict=True)
        merged = run_agreed(self.ranks, lambda: merge_metrics([*map(unpack_metrics, theirs)])).value
        return ShareResult(total, merged, blocks)

    def forward(self, shares: Shares, *, start: bool = False, project: bool = False) -> list[FloatArray]:
        """Of each rank, [2, sum of N]: log-probs and entropies (of a scalar head: values, twice) of its
        portions' pairs, in their order. The shares have no loss. start: of the model that an adapter's
        training started from. project: [2 + D, sum of N], with the hidden states at the predictors along
        make_probing_directions.
        """
        share = self._receive_share(shares)
        found = [np.zeros((2 + PROBING_DIRECTIONS * project, 0), np.float32)]
        routes = route_all(self.start if start else self.adapter)
        with torch.no_grad(), use_adapters(self.model, routes), self.rounding():
            for portion in share.portions:
                run_agreed(self.ranks, self.check_open)
                values, entropy, _, states = self.compute_outputs(portion.micro_batch, share.temperature)
                kinds = [values, values if entropy is None else entropy]
                if project:
                    kinds += make_probing_directions(states) @ states.T
                found.append(torch.stack(kinds).float().cpu().numpy())
        reshard(self.model)
        blocks = all_gather_bytes(self.ranks, np.concatenate(found, axis=1).tobytes())
        return [np.frombuffer(block, np.float32).reshape(len(found[0]), -1) for block in blocks]

    def _receive_share(self, shares: Shares) -> Share:
        if self.ranks.world_size == 1:
            assert shares
            return shares[0]
        encoded = run_agreed(
            self.ranks, lambda: None if shares is None else [encode(share) for share in shares]
        )
        return decode(scatter_bytes(self.ranks, encoded.value), Share, max_axes=2)

    def compute_outputs(
        self, micro_batch: MicroBatch, temperature: float, spec: LossSpec | None = None
    ) -> TokenOutputs:
        """What the model, and the adapters that are active, say of a micro-batch, as a loss needs it."""
        plan = self.find_plan()
        compute = partial(
            compute_micro_batch_outputs,
            self.model,
            micro_batch,
            plan=plan,
            temperature=temperature,
            autocast_dtype=self.autocast_dtype,
            entropy_gradient=spec is not None and wants_entropy_gradient(spec.name, spec.params),
            reference=self.reference if spec and spec.params.get("kl_estimator") == "exact" else None,
        )
        # the whole model is the root's own forward
        return compute() if plan.head == "whole" else run_unsharded(self.model, compute)

    def _agree_on_loss(
        self, portion: Portion, share: Share, loss_fn: LossFn
    ) -> tuple[ComputedLoss, FloatArray]:
        """This rank's loss, and every rank's (sum, count) [W, 2]."""
        spec = share.spec
        flat = self.compute_outputs(portion.micro_batch, share.temperature, spec)
        reach("train.before_agreement")

        def work() -> ComputedLoss:
            self.check_open()
            if not (portion.counts and spec):
                return ComputedLoss(flat.log_probs.sum() * 0.0, 0.0, {})
            return compute_loss(flat, portion, loss_fn, spec, gradient=torch.is_grad_enabled())

        return run_agreed(self.ranks, work, lambda found: (float(found.sum.detach()), found.count), count=2)

    # --- the optimizer

    def optim_step(self, _: None, *, settings: Fields, max_grad_norm: float | None) -> float:
        """The gradient's norm over all ranks, before clipping. Where it is not finite nothing changes but
        that the gradient is gone. settings: of AdamW, for this step; weight_decay is of matrices.
        """
        self._note_random_states()
        parameters = [one for one in list_trained(self.trained).values() if one.requires_grad]
        # zeros where no row ran at all, and of an adapter where none ran of a parameter's, as an expert's:
        # AdamW moves a parameter with a zero gradient and passes over one without
        if self.adapter or all(one.grad is None for one in parameters):
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [get_local(one.grad) for one in parameters if one.grad is not None]
        counts = self.ranks.first_replica  # of an adapter, which FSDP knows nothing of, every rank has all
        if self.adapter:
            run_agreed(self.ranks, partial(check_reached, self.adapter))
            all_reduce(self.ranks, gradients)
            counts = self.ranks.rank == 0
        # in one order on every rank, so that all have the same bits; a replica's part counts once
        norms = all_gather_floats(
            self.ranks, [float(torch.nn.utils.get_total_norm(gradients)) if counts else 0.0]
        )
        norm = math.sqrt(float(np.square(norms[:, 0]).sum()))
        if math.isfinite(norm):
            if max_grad_norm is not None and norm > max_grad_norm:
                # by a number, in each gradient's own precision: a tensor of the norm would be float32
                cast(Any, torch)._foreach_mul_(gradients, max_grad_norm / (norm + CLIP_EPS))
            groups = self.optimizer.param_groups
            self.optimizer.param_groups = [
                group | settings | {"weight_decay": group["weight_decay"]}
                if all(weight.ndim < 2 for weight in group["params"])
                else group | settings
                for group in groups
            ]
            reach("train.before_optim_step")
            try:
                self.optimizer.step()
            finally:
                self.optimizer.param_groups = groups
                # a fused step does not count as a change, which an engine with these weights looks for
                torch.autograd.graph.increment_version(one for group in groups for one in group["params"])
            reach("train.after_optim_step")
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def hold(self, _: None) -> None:
        """Copies what the optimizer changes, on its own device, in place of the last. No communication."""
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
        if not self._held:
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
        size = RANK_BUCKET_BYTES if self.ranks.mesh else BUCKET_BYTES
        for bucket in split_buckets(list_trained(self.trained).items(), size):
            whole = gather_bucket(self.ranks, bucket)
            run_agreed(self.ranks, lambda whole=whole: sink and whole and sink(whole))

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
                if not self.adapter:
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

"""A Hugging Face model whose parameters FSDP2 divides among ranks: how it is divided, run, planned and put in
order after a failure. A model that is not divided runs as it is.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rollouts.backends.compiled import compile_and_prove
from rollouts.errors import ConfigError, ModelError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.layers import find_layers
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.sharded import reshard
from rollouts.ranks.group import AgreedFailure, Ranks, meet_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
RUN = "run_unsharded"  # method of the root module
MEET_S = 4.0  # between ranks that fail alike: a forward of some tokens keeps them together
COMPILE_MEET_S = 60.0  # the same for compilers, which take their own time


def shard_model(model: PreTrainedModel, ranks: Ranks, *, cpu_offload: bool = False) -> None:
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
    return dataclasses.replace(plan, head="whole") if plan.head == "own" else plan


def compile_sharded(
    model: PreTrainedModel,
    plan: ForwardPlan,
    ranks: Ranks,
    autocast_dtype: torch.dtype | None,
    *,
    backend: str,
) -> None:
    """compile_and_prove on all ranks. Collective. Raises AgreedFailure if it fails on all alike; what fails
    on this rank alone, as it is.
    """

    def run(work: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return work() if plan.head == "whole" else run_unsharded(model, work)
        finally:
            discard_iteration(model)

    try:
        compile_and_prove(model, plan, autocast_dtype, backend=backend, run=run)
    except (ConfigError, ModelError) as error:
        if not meet_all(ranks, COMPILE_MEET_S):
            raise
        raise AgreedFailure(error) from error


def discard_iteration(model: torch.nn.Module) -> None:
    """Frees what a forward without its backward left gathered, and gradients that were not reduced yet."""
    if not isinstance(model, FSDPModule):
        return
    reset_iteration(model)
    reshard(model)
    for group in list_groups(model):
        for parameter in group.fsdp_params:  # reset_iteration leaves these
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


# --- what FSDP2 has from torch 2.13 on, made of the private members of torch 2.11 and 2.12 ------------------


def list_groups(model: torch.nn.Module) -> list[Any]:
    """Every group of parameters that FSDP gathers and reduces together."""
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups += (
                state._fsdp_param_groups
                if hasattr(state, "_fsdp_param_groups")
                else [state._fsdp_param_group]
            )
    return [group for group in groups if group is not None]


def reduce_unused(root: torch.nn.Module) -> None:
    """A parameter without a gradient on this rank is reduced all the same, as zeros: another rank may have
    one.
    """
    if hasattr(root, "set_reduce_scatter_unused_params"):
        cast(FSDPModule, root).set_reduce_scatter_unused_params(True)
        return
    for group in list_groups(root):
        group.post_backward = partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Any, *unused: Any) -> None:
    if group.reduce_grads:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and parameter.unsharded_accumulated_grad is None:
                unsharded = parameter.unsharded_param
                if unsharded.requires_grad and unsharded.grad is None:
                    unsharded.grad = torch.zeros_like(unsharded)
    post_backward(*unused)


def reset_iteration(root: torch.nn.Module) -> None:
    """Forgets the iteration that was cut: waits for what is in flight, drops its gradients, frees what was
    gathered. Does not communicate.

    A root that has not run yet has nothing to forget.
    """
    module = cast(FSDPModule, root)
    state: Any = module._get_fsdp_state()
    if not state._is_root:  # None before the first forward
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        _reset_iteration(state)


def _reset_iteration(root: Any) -> None:
    """As FSDPState._reset_iter_state of torch 2.13."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    comm = root._comm_ctx
    stream = root._device_handle.current_stream()
    single = hasattr(comm, "reduce_scatter_state")  # 2.11
    reducing = [comm.reduce_scatter_state] if single else list(comm.reduce_scatter_states)
    for held in (comm.all_gather_state, *reducing):
        if held is not None and held.event is not None:
            stream.wait_event(held.event)
    comm.all_gather_state = None
    if single:
        comm.reduce_scatter_state = None
    else:
        comm.reduce_scatter_states.clear()
    comm.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        groups = [state._fsdp_param_group] if single else state._fsdp_param_groups
        for group in filter(None, groups):
            group.finalize_backward()  # waits for what this group has in flight
            if group._reshard_after_forward_event is not None:
                group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False

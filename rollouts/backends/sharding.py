"""A Hugging Face model whose parameters FSDP2 divides among ranks: how it is divided, run, planned and put in
order after a failure. A model that is not divided runs as it is.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rollouts.backends.sharded_compat import list_groups, reduce_unused, reset_iteration
from rollouts.errors import ModelError
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
    own = plan.head == "own" and isinstance(model, FSDPModule)
    return dataclasses.replace(plan, head="whole") if own else plan


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

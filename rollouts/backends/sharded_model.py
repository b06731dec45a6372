"""A Hugging Face model whose parameters are divided among ranks by FSDP2: how it is divided, run, planned and
put in order after a failure.
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

from rollouts.backends.compiled import compile_and_prove
from rollouts.backends.sharded_compat import list_groups, reduce_unused, reset_iteration
from rollouts.distributed.process_group import AgreedFailure, Ranks, meet_all
from rollouts.errors import ConfigError, ModelError
from rollouts.models.forward_plan import plan_forward
from rollouts.models.layers import find_layers
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.sharded import reshard

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
    must have it before.

    Precision: shards, gathered parameters, gradients and their sums all have the dtype of the model, float32
    in training; autocast rounds for each product alone. cpu_offload: shards and reduced gradients lie in host
    memory, pinned; for ranks on GPUs.
    """
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in find_layers(model):
        fully_shard(layer, mesh=ranks.mesh, offload_policy=offload)
    fully_shard(model, mesh=ranks.mesh, offload_policy=offload)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # denominators are global: gradients of the ranks add up
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    reduce_unused(model)  # one rank's tokens may pass by an expert that another's use: both must reduce it
    setattr(model, RUN, types.MethodType(lambda self, work: work(), model))
    register_fsdp_forward_method(model, RUN)


def _fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def run_unsharded(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """`work()` as a forward pass of the model, with the root's parameters gathered: then they are plain
    tensors.
    """
    return getattr(model, RUN)(work)


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
    """Frees what a forward that had no backward has left gathered, and gradients that were not reduced yet."""
    reset_iteration(model)
    reshard(model)
    for group in list_groups(model):
        for parameter in group.fsdp_params:  # reset_iteration leaves these
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

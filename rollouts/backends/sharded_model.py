"""A Hugging Face model whose parameters are divided among ranks by FSDP2: how it is divided, run, planned and put in order after a failure."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from rollouts.distributed.process_group import AgreedFailure, Ranks
from rollouts.errors import ConfigError, ModelError
from rollouts.models.log_probs import ForwardPlan
from rollouts.models.sharded import reshard
from rollouts.reference.forward_plan import plan_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
RUN = "run_unsharded"  # method of the root module
NEEDED = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params", "reset_iter_state")


def shard_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Divides the parameters of each decoder layer, and of what is around them, among the ranks. Gradients become sums over all ranks.

    Layers gather their parameters when they run and free them afterwards; those of the root (embedding, last norm, head) stay gathered
    from its forward to its backward. Layers with their own gradient checkpointing must have it before. Raises ConfigError if torch is too old.
    """
    lacking = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if lacking:
        raise ConfigError(f"training on several ranks needs torch 2.13 or newer; torch {torch.__version__} has no FSDPModule.{lacking[0]}")
    for layer in find_layers(model):
        fully_shard(layer, mesh=ranks.mesh)
    root = cast(FSDPModule, fully_shard(model, mesh=ranks.mesh))
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # denominators are global: gradients of the ranks add up
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    # one rank's tokens may pass by an expert that another's use: both must reduce it
    root.set_reduce_scatter_unused_params(True)
    setattr(model, RUN, types.MethodType(lambda self, work: work(), model))
    register_fsdp_forward_method(model, RUN)


def find_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The outermost layers that repeat: those that transformers can compute twice, or must not split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside and (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in unsplit):
            found.append(module)
            inside.update(id(part) for part in module.modules())
    return found


def _fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def run_unsharded(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """`work()` as a forward pass of the model, with the root's parameters gathered: then they are plain tensors."""
    return getattr(model, RUN)(work)


def plan_sharded_forward(model: PreTrainedModel) -> ForwardPlan:
    """What plan_forward finds, the same on all ranks; where it takes the model's own head, the whole model runs instead.

    The own head is a forward pass of the model without its layers, which sharded layers do not stand. Raises AgreedFailure.
    """
    try:
        with torch.no_grad():
            plan = run_unsharded(model, lambda: plan_forward(model))
    except ModelError as error:  # of numbers that are the same on all ranks
        raise AgreedFailure(error) from error
    finally:
        discard_iteration(model)
    return dataclasses.replace(plan, head="whole") if plan.head == "own" else plan


def discard_iteration(model: torch.nn.Module) -> None:
    """Frees what a forward that had no backward has left gathered, and gradients that were not reduced yet."""
    root = cast(FSDPModule, model)
    if root._get_fsdp_state()._is_root:  # None before the first forward
        root.reset_iter_state()
    reshard(model)
    for module in _fsdp_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:  # reset_iter_state leaves these
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

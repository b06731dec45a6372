"""What FSDP2 has from torch 2.13 on, made of the private members of torch 2.11 and 2.12."""

from functools import partial
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule


def list_groups(model: torch.nn.Module) -> list[Any]:
    """Every group of parameters that FSDP gathers and reduces together."""
    groups = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups += (
                state._fsdp_param_groups
                if hasattr(state, "_fsdp_param_groups")
                else [state._fsdp_param_group]
            )
    return [group for group in groups if group]


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
    own: Any = module._get_fsdp_state()
    if not own._is_root:  # None before the first forward
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    # as FSDPState._reset_iter_state of torch 2.13
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    comm = own._comm_ctx
    stream = own._device_handle.current_stream()
    single = hasattr(comm, "reduce_scatter_state")  # 2.11
    reducing = [comm.reduce_scatter_state] if single else list(comm.reduce_scatter_states)
    for held in (comm.all_gather_state, *reducing):
        if held and held.event:
            stream.wait_event(held.event)
    comm.all_gather_state = None
    if single:
        comm.reduce_scatter_state = None
    else:
        comm.reduce_scatter_states.clear()
    comm.post_forward_order.clear()
    for state in own._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in filter(None, [state._fsdp_param_group] if single else state._fsdp_param_groups):
            group.finalize_backward()  # waits for what this group has in flight
            if group._reshard_after_forward_event:
                group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    own._state_ctx.iter_forward_root = None
    own._state_ctx.post_backward_final_callback_queued = False

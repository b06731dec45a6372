"""Log-probs of given tokens under a linear head, without ever holding all logits.

Axes: N positions, H hidden size, V vocabulary. Logits exist for one tile of positions and vocabulary at a
time, in float32; the backward pass computes them again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Positions and vocabulary of a tile: 4 MiB fit a CPU's caches, 256 MiB keep an accelerator busy.
CPU_ROWS, CPU_CHUNK = 1024, 1024
DEVICE_ROWS, DEVICE_CHUNK = 8192, 8192


def widen(values: Tensor) -> Tensor:
    """In float32, or in float64 if they are so."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class LinearLogProbs(NamedTuple):
    """Both [N], float32 (float64 for float64 inputs), in nats."""

    log_probs: Tensor  # with gradient
    entropy: Tensor  # of the whole distribution at the position; with gradient only if it was asked for


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """log softmax(hidden [N, H] · weightᵀ [H, V] / temperature) at targets [N], and the entropies.

    Memory: one tile of logits, of a size that suits the device, and the gradients.
    Half-precision products are accumulated and kept in float32. Gradients go to hidden and weight; the
    weight's is summed in float32 over all positions. With entropy_gradient the entropy has one too,
    dH/dlogit_v = −p_v·(log p_v + H). Positions whose incoming gradients are zero cost nothing backward. Empty
    input gives empty output. Raises: never; targets must lie in [0, V).
    """
    return LinearLogProbs(*_LinearLogProbs.apply(hidden, weight, targets, temperature, entropy_gradient))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # one tensor each: FSDP cannot wait for the gradient of an output that is a view
        log_sum, entropy, target_logits = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for rows in _split(len(hidden), DEVICE_ROWS if hidden.is_cuda else CPU_ROWS):
            states = hidden[rows]
            top = states.new_full((len(states),), torch.finfo(wide).min, dtype=wide)
            # z = Σ e^(l − top) and u = Σ e^(l − top)·(l − top), which move along with the largest logit
            z, u = torch.zeros_like(top), torch.zeros_like(top)
            for _, _, logits in _compute_tiles(states, weight, temperature):
                higher = torch.maximum(top, logits.amax(-1))
                exps = logits.sub_(higher[:, None]).exp()
                moved = top - higher
                shrink = moved.exp()
                u = shrink * (u + z * moved) + logits.mul_(exps).sum(-1)
                z = shrink * z + exps.sum(-1)
                top = higher
            log_sum[rows], entropy[rows] = top + z.log(), z.log() - u / z
            target_logits[rows] = (states.to(wide) * weight[targets[rows]]).sum(-1) / temperature
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.options = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logits - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        temperature, entropy_gradient = ctx.options
        wide = log_sum.dtype
        grad, grad_entropy = (each.to(wide) / temperature for each in grads)
        needed = (grad != 0) | (grad_entropy != 0) if entropy_gradient else grad != 0  # a NaN is not zero
        alive = needed.nonzero().squeeze(-1)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for rows in _split(len(alive), DEVICE_ROWS if hidden.is_cuda else CPU_ROWS):
            index = alive[rows]
            states, target, gradient = hidden[index], targets[index], grad[index, None]
            grad_states = gradient * weight[target]
            for cols, chunk, logits in _compute_tiles(states, weight, temperature):
                log_probs = logits.sub_(log_sum[index, None])
                if entropy_gradient:
                    probs = log_probs.exp()
                    slope = log_probs.add_(entropy[index, None]).mul_(grad_entropy[index, None])
                    change = slope.add_(gradient).mul_(probs).to(chunk.dtype)
                else:
                    change = log_probs.exp_().mul_(gradient).to(chunk.dtype)
                grad_states -= _multiply(change, chunk, wide)
                if grad_weight is not None:
                    grad_weight[cols] -= _multiply(change.T, states.to(chunk.dtype), wide)
            grad_hidden[index] = grad_states.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.index_add_(0, target, states.to(wide) * gradient)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 3


def _compute_tiles(
    states: Tensor, weight: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Columns, rows of the weight and logits [n, chunk] of each tile; the caller may change the logits.

    A CPU rounds products of half-precision matrices to half precision, so there both are widened first. An
    accelerator multiplies them as they are and keeps float32.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    factors = states if states.is_cuda else states.to(wide)
    for cols in _split(len(weight), DEVICE_CHUNK if states.is_cuda else CPU_CHUNK):
        chunk = weight[cols].to(factors.dtype)
        logits = _multiply(factors, chunk.T, wide)
        yield cols, chunk, logits if temperature == 1.0 else logits.div_(temperature)


def _multiply(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _split(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]

"""Log-probs of given tokens under a linear head, and the exact KL to a reference, without ever holding all
logits.

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

Factors = tuple[Tensor, Tensor]
"""Hidden states [N, H] and a head [V, H], which make logits."""


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
    return LinearLogProbs(*LinearScores.apply(hidden, weight, targets, temperature, entropy_gradient)[:2])


class LinearScores(torch.autograd.Function):
    """apply(hidden, weight, targets, temperature, entropy_gradient, reference) gives log-probs and entropies
    as linear_logprobs, and [N] Σ_v p_ref·(log p_ref − log p), the exact KL(reference || policy) of softmax(
    logits / temperature).

    Its gradient by the policy's logits is (p − p_ref) / temperature. The reference, whose hidden states have
    the policy's dtype and whose head has its vocabulary, gets none. The KL is compute_linear_divergence of
    rollouts.losses.distillation with beta = 0, on the tiles that the log-probs need anyway: beside those, the
    reference's logits are computed, twice if there is a gradient. Without a reference the KL means nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        *reference: Factors,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_sum = hidden.new_empty((1 + len(reference), len(hidden)), dtype=wide)
        # one tensor each: FSDP cannot wait for the gradient of an output that is a view
        entropy, target_logits, kl = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for rows in _split(len(hidden), DEVICE_ROWS if hidden.is_cuda else CPU_ROWS):
            top = torch.full_like(log_sum[:, rows], torch.finfo(wide).min)
            # z = Σ e^(l − top) and u = Σ e^(l − top)·(l − top), which move along with the largest logit; the
            # reference's u has (l − top) − the policy's (l − top). In float64: their rounding adds up
            z = u = torch.zeros_like(top, dtype=torch.float64)
            for _, _, logits in _compute_tiles(rows, temperature, (hidden, weight), *reference):
                higher = torch.maximum(top, logits.amax(-1))
                exps = logits.sub_(higher[..., None]).exp()
                moved = top - higher
                shrink = moved.exp()
                for each in logits, moved:
                    each[1:] -= each[:1]
                u = shrink * (u + z * moved) + logits.mul_(exps).sum(-1)
                z = shrink * z + exps.sum(-1)
                top = higher
            log_z, mean = z.log(), u / z
            log_sum[:, rows], entropy[rows] = top + log_z, log_z[0] - mean[0]
            kl[rows] = mean[-1] - log_z[-1] + log_z[0]
            target_logits[rows] = (hidden[rows].to(wide) * weight[targets[rows]]).sum(-1) / temperature
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.options = temperature, entropy_gradient, reference
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logits - log_sum[0], entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        temperature, entropy_gradient, reference = ctx.options
        wide = log_sum.dtype
        slopes = torch.stack(grads, -1).to(wide) / temperature
        alive = (slopes != 0).any(-1).nonzero().squeeze(-1)  # a NaN is not zero
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for rows in _split(len(alive), DEVICE_ROWS if hidden.is_cuda else CPU_ROWS):
            index = alive[rows]
            states, target = hidden[index], targets[index]
            gradient, grad_entropy, grad_kl = slopes[index].split(1, -1)
            grad_states = gradient * weight[target]
            for cols, chunk, logits in _compute_tiles(index, temperature, (hidden, weight), *reference):
                log_probs, *others = logits.sub_(log_sum[:, index, None])
                slope = gradient - grad_kl
                if entropy_gradient:
                    slope = (log_probs + entropy[index, None]).mul_(grad_entropy).add_(slope)
                change = log_probs.exp_().mul_(slope)
                for other in others:
                    change += other.exp_().mul_(grad_kl)
                change = change.to(chunk.dtype)
                grad_states -= _multiply(change, chunk, wide)
                if grad_weight is not None:
                    grad_weight[cols] -= _multiply(change.T, states.to(chunk.dtype), wide)
            grad_hidden[index] = grad_states.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.index_add_(0, target, states.to(wide) * gradient)
        others = [None] * (3 + len(reference))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *others


def _compute_tiles(
    rows: slice | Tensor, temperature: float, *models: Factors
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Columns, rows of the first head, and logits [M, n, chunk] of the M models, of each tile; the caller may
    change the logits.

    A CPU rounds products of half-precision matrices to half precision, so there both are widened first. An
    accelerator multiplies them as they are and keeps float32.
    """
    hidden, weight = models[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    factors = [(states[rows] if hidden.is_cuda else states[rows].to(wide), head) for states, head in models]
    for cols in _split(len(weight), DEVICE_CHUNK if hidden.is_cuda else CPU_CHUNK):
        products = [_multiply(states, head[cols].to(states.dtype).T, wide) for states, head in factors]
        logits = torch.stack(products) if products[1:] else products[0][None]
        chunk = weight[cols].to(factors[0][0].dtype)
        yield cols, chunk, logits if temperature == 1.0 else logits.div_(temperature)


def _multiply(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _split(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]

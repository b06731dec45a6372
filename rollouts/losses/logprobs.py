"""Log-probs of given tokens under a linear head, without ever holding the logits.

Axes: N positions, H hidden size, V vocabulary. Logits exist for one tile of positions and vocabulary at a time, in float32, forward and
backward; the backward pass computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CPU_TILE = 4 * 2**20  # logits of one tile: 16 MiB, two of which fit the last-level cache of a server
DEVICE_TILE = 128 * 2**20  # 512 MiB: large enough to keep an accelerator busy


class LinearLogProbs(NamedTuple):
    """Both [N], float32 (float64 for float64 inputs), in nats."""

    log_probs: Tensor  # with gradient
    entropy: Tensor  # of the whole distribution at the position; with gradient only if it was asked for


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_chunk: int = 8192, entropy_gradient: bool = False
) -> LinearLogProbs:
    """log softmax(hidden [N, H] · weightᵀ [H, V] / temperature) at targets [N], and the entropy of each distribution.

    Memory: one tile of at most `vocab_chunk` logits per position, and the gradients. Half-precision inputs: products are accumulated and
    kept in float32, so nothing is rounded between the matrix product and the softmax. Gradients go to hidden and weight; the weight's is
    summed in float32 over all positions. With entropy_gradient the entropy has one too, dH/dlogit_v = −p_v·(log p_v + H), from the same
    tiles. Positions whose incoming gradients are zero cost nothing backward. Empty input gives empty output.
    Raises: never; targets must lie in [0, V).
    """
    arguments = (hidden, weight, targets, temperature, vocab_chunk, entropy_gradient)
    log_probs, entropy = _LinearLogProbs.apply(*arguments)  # pyright: ignore[reportGeneralTypeIssues]
    return LinearLogProbs(log_probs, entropy)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_chunk: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, temperature, vocab_chunk)
        # one tensor each: with a gradient, the entropy must not be a view, on which FSDP refuses to wait for the gradient
        log_sum, entropy, target_logits = (hidden.new_empty(len(hidden), dtype=head.wide) for _ in range(3))
        for rows in head.row_slices(len(hidden)):
            log_sum[rows], entropy[rows] = head.reduce_logits(hidden[rows])
            target_logits[rows] = (hidden[rows].to(head.wide) * weight[targets[rows]]).sum(-1) / temperature
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.temperature, ctx.vocab_chunk, ctx.entropy_gradient = temperature, vocab_chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logits - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, ctx.temperature, ctx.vocab_chunk)
        grad = grads[0].to(head.wide) / ctx.temperature  # of the logits before the temperature
        grad_entropy = grads[1].to(head.wide) / ctx.temperature if ctx.entropy_gradient else None
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=head.wide) if ctx.needs_input_grad[1] else None
        needed = grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)  # a NaN is not zero
        alive = needed.nonzero().squeeze(-1)
        for rows in head.row_slices(len(alive)):
            index = alive[rows]
            states, target, gradient = hidden[index], targets[index], grad[index, None]
            weighted = states.to(head.wide) * gradient
            if grad_entropy is None:
                mean_weight = head.subtract_probs(states, log_sum[index], weighted, grad_weight)
                grad_states = (weight[target].to(head.wide) - mean_weight) * gradient
            else:
                subtracted = head.subtract_both(states, log_sum[index], entropy[index], gradient, grad_entropy[index, None], grad_weight)
                grad_states = weight[target].to(head.wide) * gradient - subtracted
            grad_hidden[index] = grad_states.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.index_add_(0, target, weighted)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


class _Head:
    """The products of one head, a chunk of the vocabulary at a time.

    A CPU rounds the product of two half-precision matrices to half precision, so there they are widened first. An accelerator multiplies
    them as they are and keeps float32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, vocab_chunk: int) -> None:
        self.weight = weight
        self.temperature = temperature
        self.vocab_chunk = min(vocab_chunk, max(len(weight), 1))
        self.on_device = hidden.is_cuda
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.factor = hidden.dtype if self.on_device else self.wide  # dtype of what is multiplied

    def row_slices(self, count: int) -> list[slice]:
        """Positions in pieces whose logits make one tile."""
        size = max((DEVICE_TILE if self.on_device else CPU_TILE) // self.vocab_chunk, 1)
        return [slice(start, start + size) for start in range(0, count, size)]

    def reduce_logits(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ e^l and the entropy of each position: z = Σ e^(l − top) and u = Σ e^(l − top)·(l − top), moved along with the largest logit."""
        states = states.to(self.factor)
        top = states.new_full((len(states),), torch.finfo(self.wide).min, dtype=self.wide)
        z, u = torch.zeros_like(top), torch.zeros_like(top)
        tile, spare = (states.new_empty((len(states), self.vocab_chunk), dtype=self.wide) for _ in range(2))
        for chunk in self.weight.split(self.vocab_chunk):
            logits = self._multiply(states, chunk, tile)
            higher = torch.maximum(top, logits.amax(-1))
            exps = torch.exp(logits.sub_(higher[:, None]), out=spare[:, : len(chunk)])
            shrink = (top - higher).exp_()
            u = shrink * (u + z * (top - higher)) + logits.mul_(exps).sum(-1)
            z = shrink * z + exps.sum(-1)
            top = higher
        log_z = z.log()
        return top + log_z, log_z - u / z

    def subtract_probs(self, states: Tensor, log_sum: Tensor, weighted: Tensor, grad_weight: Tensor | None) -> Tensor:
        """Σ_v p_v · weight_v, [n, H]. On the way pᵀ · weighted is taken off `grad_weight`."""
        states = states.to(self.factor)
        narrow_weighted = weighted.to(self.factor)
        mean_weight = torch.zeros_like(states, dtype=self.wide)
        tile = states.new_empty((len(states), self.vocab_chunk), dtype=self.wide)
        for index, chunk in enumerate(self.weight.split(self.vocab_chunk)):
            probs = self._multiply(states, chunk, tile).sub_(log_sum[:, None]).exp_().to(self.factor)
            self._add_product(mean_weight, probs, chunk.to(self.factor), alpha=1.0)
            if grad_weight is not None:
                start = index * self.vocab_chunk
                self._add_product(grad_weight[start : start + len(chunk)], probs.T, narrow_weighted, alpha=-1.0)
        return mean_weight

    def subtract_both(
        self, states: Tensor, log_sum: Tensor, entropy: Tensor, grad: Tensor, grad_entropy: Tensor, grad_weight: Tensor | None
    ) -> Tensor:
        """Σ_v c_v · weight_v, [n, H], with c_v = p_v · (grad + grad_entropy · (log p_v + H)). On the way cᵀ · states is taken off `grad_weight`."""
        states = states.to(self.factor)
        total = torch.zeros_like(states, dtype=self.wide)
        tile, spare = (states.new_empty((len(states), self.vocab_chunk), dtype=self.wide) for _ in range(2))
        for index, chunk in enumerate(self.weight.split(self.vocab_chunk)):
            log_probs = self._multiply(states, chunk, tile).sub_(log_sum[:, None])
            probs = torch.exp(log_probs, out=spare[:, : len(chunk)])
            changes = log_probs.add_(entropy[:, None]).mul_(grad_entropy).add_(grad).mul_(probs).to(self.factor)
            self._add_product(total, changes, chunk.to(self.factor), alpha=1.0)
            if grad_weight is not None:
                start = index * self.vocab_chunk
                self._add_product(grad_weight[start : start + len(chunk)], changes.T, states, alpha=-1.0)
        return total

    def _multiply(self, states: Tensor, chunk: Tensor, tile: Tensor) -> Tensor:
        """Logits [n, chunk] in float32, in `tile` where the product can be written there."""
        if self.factor == self.wide:
            logits = torch.mm(states, chunk.to(self.factor).T, out=tile[:, : len(chunk)])
        else:  # pragma: gpu
            logits = torch.mm(states, chunk.to(self.factor).T, out_dtype=self.wide)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor, *, alpha: float) -> None:
        if self.factor == self.wide:
            total.addmm_(left, right, alpha=alpha)
        else:  # pragma: gpu
            total.add_(torch.mm(left, right, out_dtype=self.wide), alpha=alpha)

"""Log-probs of given tokens under a linear head, without ever holding the logits.

Axes: N positions, H hidden size, V vocabulary. Logits exist for one tile of positions and vocabulary at a
time, in float32, forward and backward. The backward pass computes them again, except for the few positions
whose logits a CPU keeps (`CPU_KEPT`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# A tile is this many positions times `vocab_chunk`. On a CPU it is 4 MiB: small enough for the caches, large
# enough for the matrix product.
CPU_ROWS, CPU_CHUNK = 512, 2048
CPU_BLOCK = 1024  # positions that pass together over one chunk of the vocabulary
CPU_KEPT = (
    8 * 2**20
)  # logits kept from forward to backward, 32 MiB: a quarter less arithmetic for the positions that fit
DEVICE_ROWS, DEVICE_CHUNK = 8192, 8192  # 256 MiB: large enough to keep an accelerator busy

DEVICE_HEAD: Literal["tiled", "triton"] = (
    "tiled"  # cuBLAS is the proven path. "triton" is taken where its kernels pass `triton_agrees`
)


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
    vocab_chunk: int | None = None,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """log softmax(hidden [N, H] · weightᵀ [H, V] / temperature) at targets [N], and the entropy of each
    distribution.

    Memory: one tile of at most `vocab_chunk` logits per position (default: what suits the device), and the
    gradients. Half-precision inputs: products are accumulated and kept in float32, so nothing is rounded
    between the matrix product and the softmax. Gradients go to hidden and weight; the weight's is summed in
    float32 over all positions. With entropy_gradient the entropy has one too, dH/dlogit_v = −p_v·(log p_v +
    H), from the same tiles. Positions whose incoming gradients are zero cost nothing backward. Empty input
    gives empty output. Raises: never; targets must lie in [0, V).
    """
    if DEVICE_HEAD == "triton" and vocab_chunk is None and can_use_triton(hidden, weight):  # pragma: gpu
        from rollouts.losses.logprobs_triton import (
            linear_logprobs_triton,
        )  # Triton comes with torch for CUDA only

        return linear_logprobs_triton(
            hidden, weight, targets, temperature=temperature, entropy_gradient=entropy_gradient
        )
    return linear_logprobs_tiled(
        hidden,
        weight,
        targets,
        temperature=temperature,
        vocab_chunk=vocab_chunk,
        entropy_gradient=entropy_gradient,
    )


def linear_logprobs_tiled(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_chunk: int | None = None,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """`linear_logprobs` by matrix products of the vendor's library, a tile at a time; on any device."""
    return apply_linear_logprobs(
        hidden, weight, targets, HeadOptions(temperature, vocab_chunk, entropy_gradient, None)
    )


class Tile(NamedTuple):
    """Where a tile of logits lies."""

    rows: slice  # of a block of positions
    cols: slice  # of the vocabulary
    weight: Tensor  # [cols, H], in the dtype that is multiplied


class Kernels(NamedTuple):
    """What a device can do in one kernel each, instead of tile by tile in torch."""

    reduce_logits: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    change_tiles: Callable[
        [Iterator[Tile], Tensor, Tensor, float, tuple[Tensor, ...], torch.dtype],
        Iterator[tuple[Tile, Tensor]],
    ]


class HeadOptions(NamedTuple):
    """How a head is computed, beside its tensors."""

    temperature: float
    vocab_chunk: int | None  # None: the device's own
    entropy_gradient: bool
    kernels: Kernels | None  # None: in torch


def apply_linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions
) -> LinearLogProbs:
    """`linear_logprobs` by the given kernels, or in torch."""
    keep = (
        options.kernels is None and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    )
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, options, keep)  # pyright: ignore[reportGeneralTypeIssues]
    return LinearLogProbs(log_probs, entropy)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, keep: bool
    ) -> tuple[Tensor, Tensor]:
        temperature, kernels = options.temperature, options.kernels
        head = _Head(hidden, weight, temperature, options.vocab_chunk)
        kept = hidden.new_empty(
            (min(len(hidden), head.max_kept) if keep else 0, len(weight)), dtype=head.wide
        )
        # one tensor each: with a gradient, the entropy must not be a view, on which FSDP refuses to wait for
        # the gradient
        if kernels is not None:
            log_sum, entropy, target_logits = kernels.reduce_logits(hidden, weight, targets, temperature)
        else:
            log_sum, entropy, target_logits = (
                hidden.new_empty(len(hidden), dtype=head.wide) for _ in range(3)
            )
            for block in head.split_positions(len(hidden), len(kept)):
                log_sum[block], entropy[block] = head.reduce_logits(hidden[block], kept[block])
                target_logits[block] = (hidden[block].to(head.wide) * weight[targets[block]]).sum(
                    -1
                ) / temperature
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy, kept)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logits - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy, kept = ctx.saved_tensors
        temperature, vocab_chunk, entropy_gradient, kernels = ctx.options
        head = _Head(hidden, weight, temperature, vocab_chunk)
        grad = grads[0].to(head.wide) / temperature  # of the logits before the temperature
        grad_entropy = grads[1].to(head.wide) / temperature if entropy_gradient else None
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=head.wide) if ctx.needs_input_grad[1] else None
        needed = grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)  # a NaN is not zero
        alive = needed.nonzero().squeeze(-1)
        num_kept = int((alive < len(kept)).sum()) if len(kept) else 0
        for block in head.split_positions(len(alive), num_kept):
            index = alive[block]
            states, target, gradient = hidden[index], targets[index], grad[index, None]
            weighted = states.to(head.wide) * gradient
            grad_states = weight[target].to(head.wide)
            of_both = (
                () if grad_entropy is None else (entropy[index, None], gradient, grad_entropy[index, None])
            )
            if kernels is not None:
                per_row = (log_sum[index], *of_both)
                changes = kernels.change_tiles(
                    head.list_tiles(len(index)), states, weight, temperature, per_row, head.factor
                )
            else:
                tiles = head.recompute_log_probs(
                    states, log_sum[index], kept if block.start < num_kept else kept[:0], index
                )
                changes = (
                    change_by_both(tiles, *of_both)
                    if of_both
                    else ((tile, log_probs.exp_()) for tile, log_probs in tiles)
                )
            if of_both:
                grad_states.mul_(gradient).sub_(head.subtract(changes, states.to(head.wide), grad_weight))
            else:
                grad_states.sub_(head.subtract(changes, weighted, grad_weight)).mul_(gradient)
            grad_hidden[index] = grad_states.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.index_add_(0, target, weighted)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def change_by_both(
    tiles: Iterable[tuple[Tile, Tensor]], entropy: Tensor, grad: Tensor, grad_entropy: Tensor
) -> Iterator[tuple[Tile, Tensor]]:
    """c_v = p_v · (grad + grad_entropy · (log p_v + H)) of log-probs, tile by tile."""
    for tile, log_probs in tiles:
        rows, probs = tile.rows, log_probs.exp()
        yield tile, log_probs.add_(entropy[rows]).mul_(grad_entropy[rows]).add_(grad[rows]).mul_(probs)


class _Head:
    """The products of one head, tile by tile.

    A CPU rounds the product of two half-precision matrices to half precision, so there they are widened
    first. An accelerator multiplies them as they are and keeps float32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, vocab_chunk: int | None) -> None:
        self.weight = weight
        self.temperature = temperature
        self.on_device = hidden.is_cuda
        self.chunk = min(vocab_chunk or (DEVICE_CHUNK if self.on_device else CPU_CHUNK), max(len(weight), 1))
        self.tile_rows, self.block_rows = (
            (DEVICE_ROWS, DEVICE_ROWS) if self.on_device else (CPU_ROWS, CPU_BLOCK)
        )
        self.max_kept = 0 if self.on_device else CPU_KEPT // max(len(weight), 1)
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.factor = hidden.dtype if self.on_device else self.wide  # dtype of what is multiplied

    def split_positions(self, count: int, num_kept: int) -> list[slice]:
        """Blocks of positions, in each of which all logits are kept or none."""
        starts = [*range(0, num_kept, self.block_rows), *range(num_kept, count, self.block_rows)]
        return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=False)]

    def list_tiles(self, num_rows: int) -> Iterator[Tile]:
        """All tiles of a block; those of one chunk of the vocabulary, which stays in the cache, follow each
        other.
        """
        for start in range(0, len(self.weight), self.chunk):
            cols = slice(start, min(start + self.chunk, len(self.weight)))
            chunk = self.weight[cols].to(self.factor)
            for first in range(0, num_rows, self.tile_rows):
                yield Tile(slice(first, min(first + self.tile_rows, num_rows)), cols, chunk)

    def new_tile(self, num_rows: int) -> Tensor:
        """Space for one tile of a block, [rows, chunk]."""
        return self.weight.new_empty((min(num_rows, self.tile_rows), self.chunk), dtype=self.wide)

    def new_product(self, num_rows: int) -> Tensor:
        """Space for the products that `_multiply` can write into space."""
        return self.new_tile(num_rows if self.factor == self.wide else 0)

    def reduce_logits(self, states: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ e^l and the entropy of each position: z = Σ e^(l − top) and u = Σ e^(l − top)·(l − top),
        moved along with the largest logit.

        The logits stay in `kept`, where that has room for them.
        """
        states = self._scale(states)
        top = states.new_full((len(states),), torch.finfo(self.wide).min, dtype=self.wide)
        z, u = torch.zeros_like(top), torch.zeros_like(top)
        space, spare = self.new_product(len(states)), self.new_tile(len(states))
        for tile in self.list_tiles(len(states)):
            rows = tile.rows
            logits = self._multiply(
                states[rows], tile.weight, kept[rows, tile.cols] if len(kept) else view_as_tile(space, tile)
            )
            higher = torch.maximum(top[rows], logits.amax(-1))
            shifted = torch.sub(
                logits, higher[:, None], out=view_as_tile(space, tile) if len(kept) else logits
            )
            exps = torch.exp(shifted, out=view_as_tile(spare, tile))
            moved = top[rows] - higher
            shrink = moved.exp()
            u[rows] = shrink * (u[rows] + z[rows] * moved) + shifted.mul_(exps).sum(-1)
            z[rows] = shrink * z[rows] + exps.sum(-1)
            top[rows] = higher
        log_z = z.log()
        return top + log_z, log_z - u / z

    def recompute_log_probs(
        self, states: Tensor, log_sum: Tensor, kept: Tensor, index: Tensor
    ) -> Iterator[tuple[Tile, Tensor]]:
        """Each tile's log-probs: in float32, overwritten by the next, to be changed in place. `kept` holds
        the logits of `index`, or nothing.
        """
        states = self._scale(states)
        space = self.new_product(len(states))
        for tile in self.list_tiles(len(states)):
            into = view_as_tile(space, tile)
            if len(kept):
                logits = torch.index_select(kept[:, tile.cols], 0, index[tile.rows], out=into)
            else:
                logits = self._multiply(states[tile.rows], tile.weight, into)
            yield tile, logits.sub_(log_sum[tile.rows, None])

    def subtract(
        self, changes: Iterable[tuple[Tile, Tensor]], right: Tensor, grad_weight: Tensor | None
    ) -> Tensor:
        """Σ_v c_v · weight_v, [n, H], of the tiles c [rows, cols]. On the way cᵀ · right is taken off
        `grad_weight`.
        """
        total = torch.zeros_like(right)
        narrow_right = right.to(self.factor)
        for tile, change in changes:
            narrow_change = change.to(self.factor)
            self._add_product(total[tile.rows], narrow_change, tile.weight, alpha=1.0)
            if grad_weight is not None:
                self._add_product(
                    grad_weight[tile.cols], narrow_change.T, narrow_right[tile.rows], alpha=-1.0
                )
        return total

    def _scale(self, states: Tensor) -> Tensor:
        """The states to be multiplied. A CPU divides them by the temperature; in half precision that would
        round.
        """
        states = states.to(self.factor)
        return states if self.on_device or self.temperature == 1.0 else states / self.temperature

    def _multiply(self, states: Tensor, chunk: Tensor, into: Tensor) -> Tensor:
        """Logits [n, chunk] in float32, in `into` where the product can be written there."""
        if not self.on_device:
            return torch.mm(states, chunk.T, out=into)
        narrow = self.factor != self.wide  # pragma: gpu
        logits = (
            torch.mm(states, chunk.T, out_dtype=self.wide) if narrow else torch.mm(states, chunk.T, out=into)
        )  # pragma: gpu
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)  # pragma: gpu

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor, *, alpha: float) -> None:
        if self.factor == self.wide:
            total.addmm_(left, right, alpha=alpha)
        else:  # pragma: gpu
            total.add_(torch.mm(left, right, out_dtype=self.wide), alpha=alpha)


def view_as_tile(space: Tensor, tile: Tile) -> Tensor:
    """The first part of `space`, as large as the tile; empty if `space` is."""
    return space[: tile.rows.stop - tile.rows.start, : tile.cols.stop - tile.cols.start]


def can_use_triton(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernels serve these tensors: on a GPU, of one dtype that is not float64, and after
    the check of the device.
    """
    supported = (
        hidden.is_cuda
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    return supported and triton_agrees(hidden.device, hidden.dtype)


@functools.cache
def triton_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be had and agree with the tiled path on `device`; found out once, with a
    warning where they do not.
    """
    try:
        from rollouts.losses.logprobs_triton import find_disagreement
    except ImportError as error:
        reason = f"Triton cannot be imported: {error}"
    else:
        reason = find_disagreement(device, dtype)
    if reason is not None:
        warnings.warn(f"the log-prob head runs tiled on {device}: {reason}", RuntimeWarning, stacklevel=2)
    return reason is None

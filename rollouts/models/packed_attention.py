"""Attention of one packed row without padding, where each node sees its ancestors and itself, and what is
masked is not computed.

    subtree_end [S] ──find_pieces──► rectangles of the S x S square that hold every visible pair once
    queries, keys, values ──attend_packed──► each rectangle by a fused kernel; softmaxes merged by their
        log-sum-exp

A node's descendants are the nodes after it, up to subtree_end, so the keys of a shared beginning are seen by
one slice of queries, without a mask. A long sequence is halved until its triangles are small. Only
neighbouring subtrees of a few nodes together, and the edges of windows, have a mask. On a CPU memory is
linear in S, and work is the number of visible pairs and little more. On an accelerator FlexAttention takes
the place of the pieces.

A model of transformers takes this through its own attention: register_packed_attention replaces "sdpa" by a
function that does what "sdpa" did, unless the forward pass was given `packed_row`. That argument travels with
a layer's others, so a layer that is computed twice for its gradient has it both times. A layer's window is
the `sliding_window` that transformers hands to its attention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.models.devices import unrounded
from rollouts.types import IntArray

ARGUMENT = "packed_row"  # of the model's forward
# Nodes of the largest triangle or masked square, measured on a server's CPU for models of 0.1 M to 135 M
# parameters: the kernel computes the whole square of a triangle; smaller ones spend their time in calls.
TILE = 128
SMALL_TILE = 4  # with which a few nodes have pieces of every kind
WINDOW_TILES = 4  # a rectangle at the edge of a window is cut to so many tiles before it gets a mask
# added to what is not visible: exp gives exactly 0, and a query that sees none of a piece's keys has no
# infinity to subtract
HIDDEN = -30000.0
UNKNOWN = ("softcap", "position_bias", "s_aux")  # what a layer may ask of attention, and a packed row has not


class Piece(NamedTuple):
    """Queries against keys of one row."""

    queries: slice
    keys: slice
    causal: bool = False  # a square on the diagonal of one sequence: its upper half is hidden
    # [queries, keys], added to scores: 0 or HIDDEN; None: all is visible, or the causal half
    mask: Tensor | None = None

    def cut(self, *tensors: Tensor) -> list[Tensor]:
        """The piece's queries of the first of the tensors [1, H, S, D], and its keys of the others."""
        first, *others = tensors
        return [first[:, :, self.queries], *(other[:, :, self.keys] for other in others)]


@dataclass(slots=True, eq=False)  # not frozen: torch.compile would make a case of every value
class PackedRow:
    """What the attention of every layer needs to know of one micro-batch."""

    subtree_end: IntArray  # [S] first node after the subtree
    depths: IntArray  # [S] position ids
    tile: int = TILE
    fences: tuple[int, ...] = ()  # see MicroBatch
    # by the layers' window: pieces, or an accelerator's mask of blocks; empty until a layer reads it
    made: dict[int | None, Any] = field(default_factory=dict)


# --- pieces -------------------------------------------------------------------------------------------------


def find_pieces(row: PackedRow, window: int | None, dtype: torch.dtype) -> list[Piece]:
    """Pieces that hold every visible pair (i, j), j <= i < subtree_end[j], exactly once and, beside masked
    ones, no other. With a window a node sees only those less than `window` above it, counted along its path,
    that is in depths.

    A node's piece on the diagonal comes before the others that have it as a query. The square of the row is
    cut where subtrees end and where a sequence branches; then what lies below the diagonal is visible as a
    whole or not at all, but for the edge of a window. Subtrees side by side of at most `tile` nodes together
    share one masked square, where one's values that are not finite reach the others: not beyond a fence.
    """
    ends, depths, tile = row.subtree_end, row.depths, row.tile
    nodes, reach = np.arange(1, len(ends)), math.inf if window is None else window
    only_child = (ends[1:] == ends[:-1]) & (nodes < ends[:-1])  # of the node before
    branches = np.append(nodes[~only_child], len(ends))  # where an unbranched run of nodes ends
    parts = [slice(*edges) for edges in pairwise((0, *row.fences, len(ends)))]
    pieces, blocks = list[Piece](), [(part, part) for part in parts]
    while blocks:
        queries, keys = blocks.pop()
        first, end, cut = queries.start, queries.stop, queries.stop
        if queries != keys:
            if depths[queries].max() - depths[keys].min() < reach:
                pieces.append(Piece(queries, keys))
                continue
            if max(end - first, keys.stop - keys.start) > WINDOW_TILES * tile:
                blocks += product(_halve(queries), _halve(keys))
                continue
        elif (branch := int(branches[np.searchsorted(branches, first, side="right")])) >= end:
            if end - first <= min(tile, reach):
                pieces.append(Piece(queries, keys, causal=True))
                continue
            if end - first > tile:
                cut = first + tile * (-(-(end - first) // tile) // 2)
        else:
            cut = int(ends[first])
            while cut < end and ends[cut] - first <= tile:
                cut = int(ends[cut])
            if cut == end > first + tile:  # one tree
                cut = branch
        if cut < end:
            before, after = slice(first, cut), slice(cut, end)
            blocks += [(after, after), (before, before)]
            if ends[first] > cut:
                blocks.append((after, before))
            continue
        i, j = np.ogrid[queries, keys]
        seen = (j <= i) & (i < ends[j]) & (depths[i] - depths[j] < reach)
        if seen.any():
            mask = torch.from_numpy(np.where(seen, 0.0, HIDDEN)).to(dtype)
            pieces.append(Piece(queries, keys, mask=mask))
    return sorted(pieces, key=lambda piece: piece.queries != piece.keys)


def _halve(whole: slice) -> list[slice]:
    middle = (whole.start + whole.stop) // 2
    return [slice(whole.start, middle)] * (middle > whole.start) + [slice(middle, whole.stop)]


# --- kernels ------------------------------------------------------------------------------------------------


class _Pieces(torch.autograd.Function):
    """Each piece has its own softmax, with weights e^(s - l'), l' its log-sum-exp. Of all pieces together it
    is e^(s - l) with e^l = Σ e^l', so that a piece's output counts by e^(l' - l). Backward, the kernel's
    gradient of a piece is right as it stands if it is given the l and the output of all: it needs no more of
    the softmax than them.
    """

    @staticmethod
    @unrounded
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float | None
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(query.dtype, torch.float32)
        _, heads, count, size = query.shape
        # the order that the kernel writes
        log_sum = torch.empty((1, count, heads), dtype=wide).transpose(1, 2)
        merged = torch.empty((1, count, heads, size), dtype=wide).transpose(1, 2)
        for piece in pieces:
            found, own_sum = kernel(
                *piece.cut(query, key, value), 0.0, piece.causal, attn_mask=piece.mask, scale=scale
            )
            if piece.queries == piece.keys:  # these come first, and cover all queries
                merged[:, :, piece.queries], log_sum[:, :, piece.queries] = found, own_sum
                continue
            before, target = log_sum[:, :, piece.queries], merged[:, :, piece.queries]
            after = torch.logaddexp(before, own_sum)
            target.mul_((before - after).exp_()[..., None])
            target.addcmul_(found, (own_sum - after).exp_()[..., None])
            before.copy_(after)
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.pieces, ctx.scale = pieces, scale
        return output

    @staticmethod
    @unrounded
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = torch.promote_types(query.dtype, torch.float32)
        grad = grads[0].to(query.dtype)
        sums = [torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value)]
        for piece in ctx.pieces:
            cut = piece.cut(query, key, value)
            inputs = [*piece.cut(grad), *cut, *piece.cut(output), *piece.cut(log_sum)]
            found = kernel(*inputs, 0.0, piece.causal, attn_mask=piece.mask, scale=ctx.scale)
            for total, part in zip(piece.cut(*sums), found, strict=True):
                total += part
        return (*(total.to(query.dtype) for total in sums), None, None)


def make_block_mask(row: PackedRow, window: int | None, device: torch.device) -> Any:
    """What FlexAttention computes of a row. Not on a GPU, it holds one number for each pair of nodes."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends, depths = (torch.from_numpy(one).to(device, torch.int32) for one in (row.subtree_end, row.depths))

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) & (i < ends[j])
        return seen if window is None else seen & (depths[i] - depths[j] < window)

    count, compiled = len(ends), device.type == "cuda"
    return create_block_mask(visible, None, None, count, count, device=str(device), _compile=compiled)


@cache
def _compile_flex() -> Any:  # pragma: gpu
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


# --- transformers -------------------------------------------------------------------------------------------


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, *, window: int | None, scale: float | None
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value of what is visible, [1, S, H, D] as transformers expects it:
    query [1, H, S, D], key and value [1, H / groups, S, D].

    scale: None for 1 / √D. Gradients go to all three, exactly. Raises ValueError if the tensors are not those
    of the row.
    """
    count = len(row.subtree_end)
    if not (len(query) == 1 and query.shape[-2] == key.shape[-2] == count):
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(key.shape)} are not those of one packed row of"
            f" {count} nodes"
        )
    device = query.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    on_cpu = device.type == "cpu"
    if window not in row.made:
        row.made[window] = (
            find_pieces(row, window, query.dtype) if on_cpu else make_block_mask(row, window, device)
        )
    if on_cpu:
        found = _Pieces.apply(query, key, value, row.made[window], scale)
    else:  # pragma: gpu
        options = {"block_mask": row.made[window], "scale": scale, "enable_gqa": query.shape != key.shape}
        found = _compile_flex()(query, key, value, **options)
    return found.transpose(1, 2).contiguous()


@cache
def register_packed_attention() -> None:
    """Models that attend by "sdpa" understand `packed_row` from now on; without it they do what they did."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    # pieces differ from row to row; every row would be a program
    run: Any = torch.compiler.disable(attend_packed)
    unpacked = unrounded(before)

    def attend(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """inputs: the module, queries, keys, values, a mask."""
        row = options.pop(ARGUMENT, None)
        if row is None:
            # a compiler takes attention into its program, where the setting cannot change
            alone = inputs[1].is_cuda or torch.compiler.is_compiling()
            return (before if alone else unpacked)(*inputs, **options)
        asked = [name for name in UNKNOWN if options.get(name) is not None]
        if asked := asked + ["dropout"] * bool(options.get("dropout")):
            raise ValueError(f"attention of packed rows knows no {', '.join(asked)}")
        window, scale = options.get("sliding_window"), options.get("scaling")
        return run(*inputs[1:4], row, window=window, scale=scale), None

    AttentionInterface.register("sdpa", attend)

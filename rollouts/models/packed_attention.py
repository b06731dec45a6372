"""Attention of one packed row without padding, where each node sees its ancestors and itself, and what is
masked is not computed.

    subtree_end [S] ──find_pieces──► rectangles of the S x S square that hold every visible pair once
    queries, keys, values ──attend_in_pieces──► each rectangle by a fused kernel; softmaxes merged by their
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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollouts.types import BoolArray, IntArray

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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Queries against keys of one row."""

    queries: slice
    keys: slice
    causal: bool = False  # a square on the diagonal of one sequence: its upper half is hidden
    visible: BoolArray | None = None  # [queries, keys]; None: all of them, or the causal half

    def cut(self, *tensors: Tensor) -> list[Tensor]:
        """The piece's queries of the first of the tensors [1, H, S, D], and its keys of the others."""
        first, *others = tensors
        return [first[:, :, self.queries], *(other[:, :, self.keys] for other in others)]


Masked = Sequence[tuple[Piece, Tensor | None]]  # with the masks, [queries, keys], of those that have one


@dataclass(slots=True, eq=False)  # not frozen: torch.compile would make a case of every value
class PackedRow:
    """What the attention of every layer needs to know of one micro-batch."""

    subtree_end: IntArray  # [S] first node after the subtree
    depths: IntArray  # [S] position ids
    tile: int = TILE
    # by the layers' window: masked pieces, or an accelerator's mask of blocks; empty until a layer reads it
    made: dict[int | None, Any] = field(default_factory=dict)


# --- pieces -------------------------------------------------------------------------------------------------


def find_pieces(subtree_end: IntArray, tile: int = TILE) -> list[Piece]:
    """Pieces that hold every pair (i, j) with j <= i < subtree_end[j] exactly once and, beside masked ones,
    no other.

    A node's piece on the diagonal comes before the others that have it as a query. The longest unbranched run
    of nodes is a segment; its keys are seen by itself, in halves, and by all that follows it in its subtree.
    Subtrees side by side of at most `tile` nodes together share one masked square.
    """
    count, ends, nodes = len(subtree_end), subtree_end.tolist(), np.arange(1, len(subtree_end))
    only_child = (subtree_end[1:] == subtree_end[:-1]) & (nodes < subtree_end[:-1])  # of the node before
    starts = np.concatenate([[0], nodes[~only_child], [count]])
    segment_end = np.repeat(starts[1:], np.diff(starts)).tolist()  # of the segment that a node is in
    pieces: list[Piece] = []
    forests = [(0, count)]  # ranges of whole subtrees side by side, still to be cut

    def add_square(first: int, end: int) -> None:
        """Of whole subtrees [first, end); a single sequence needs no mask."""
        if first < end == segment_end[first]:
            pieces.extend(halve(first, end, tile))
        elif first < end:
            own, square = np.arange(first, end), slice(first, end)
            seen = (own[:, None] >= own) & (own[:, None] < subtree_end[square])
            pieces.append(Piece(square, square, visible=seen))

    while forests:
        first, end = forests.pop()
        block = node = first
        while node < end:
            after = ends[node]
            if after - block > tile:
                add_square(block, node)
                block = node
            if after - node > tile:
                fork = segment_end[node]
                pieces += halve(node, fork, tile)
                if fork < after:
                    pieces.append(Piece(slice(fork, after), slice(node, fork)))
                    forests.append((fork, after))
                block = after
            node = after
        add_square(block, end)
    return sorted(pieces, key=lambda piece: piece.queries != piece.keys)  # stable: the diagonal first


def halve(first: int, end: int, tile: int) -> list[Piece]:
    """The triangle of one sequence: small triangles, and the squares between them."""
    length = end - first
    if length <= tile:
        return [Piece(slice(first, end), slice(first, end), causal=True)]
    half = first + tile * (-(-length // tile) // 2)
    square = Piece(slice(half, end), slice(first, half))
    return [*halve(first, half, tile), square, *halve(half, end, tile)]


def narrow_pieces(pieces: Sequence[Piece], depths: IntArray, window: int, tile: int = TILE) -> list[Piece]:
    """`pieces` of a layer in which a node sees only those less than `window` above it, counted along its
    path, that is in depths.

    What lies outside of every query's window is left out; what the edge goes through has a mask.
    """
    found: list[Piece] = []
    for piece in pieces:
        plain = not piece.causal and piece.visible is None
        step = WINDOW_TILES * tile if plain else len(depths)  # the others are small
        for queries, keys in product(_split(piece.queries, step), _split(piece.keys, step)):
            inside = depths[queries, None] - depths[keys] < window
            if inside.all():
                found.append(replace(piece, queries=queries, keys=keys))
                continue
            if piece.causal:
                inside = np.tril(inside)
            elif piece.visible is not None:
                inside &= piece.visible
            if inside.any():
                found.append(Piece(queries, keys, visible=inside))
    return found


def _split(whole: slice, step: int) -> list[slice]:
    return [slice(at, min(at + step, whole.stop)) for at in range(whole.start, whole.stop, step)]


def make_masked_pieces(row: PackedRow, window: int | None, dtype: torch.dtype) -> Masked:
    """The pieces of a row for layers with a window, or without one; masks are what is added to scores, 0 or
    HIDDEN.
    """
    pieces = find_pieces(row.subtree_end, row.tile)
    if window is not None:
        pieces = narrow_pieces(pieces, row.depths, window, row.tile)
    return [
        (piece, None if seen is None else torch.from_numpy(np.where(seen, 0.0, HIDDEN)).to(dtype))
        for piece in pieces
        for seen in (piece.visible,)
    ]


# --- kernels ------------------------------------------------------------------------------------------------


def attend_in_pieces(
    query: Tensor, key: Tensor, value: Tensor, pieces: Masked, scale: float | None
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value over the pieces: query [1, H, S, D], key and value [1, H /
    groups, S, D]; [1, H, S, D].

    scale: None for 1 / √D. Gradients go to all three, exactly. Every query must have a key in the first piece
    that it is in. CPU only.
    """
    return _Pieces.apply(query, key, value, pieces, scale)  # pyright: ignore[reportReturnType]


class _Pieces(torch.autograd.Function):
    """Each piece has its own softmax, with weights e^(s - l'), l' its log-sum-exp. Of all pieces together it
    is e^(s - l) with e^l = Σ e^l', so that a piece's output counts by e^(l' - l). Backward, the kernel's
    gradient of a piece is right as it stands if it is given the l and the output of all: it needs no more of
    the softmax than them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Masked, scale: float | None
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(query.dtype, torch.float32)
        _, heads, count, size = query.shape
        # the order that the kernel writes
        log_sum = torch.empty((1, count, heads), dtype=wide).transpose(1, 2)
        merged = torch.empty((1, count, heads, size), dtype=wide).transpose(1, 2)
        for piece, mask in pieces:
            found, own_sum = kernel(
                *piece.cut(query, key, value), 0.0, piece.causal, attn_mask=mask, scale=scale
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = torch.promote_types(query.dtype, torch.float32)
        grad = grads[0].to(query.dtype)
        sums = [torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value)]
        for piece, mask in ctx.pieces:
            cut = piece.cut(query, key, value)
            inputs = [*piece.cut(grad), *cut, *piece.cut(output), *piece.cut(log_sum)]
            found = kernel(*inputs, 0.0, piece.causal, attn_mask=mask, scale=ctx.scale)
            for total, part in zip(piece.cut(*sums), found, strict=True):
                total += part
        return sums[0].to(query.dtype), sums[1].to(query.dtype), sums[2].to(query.dtype), None, None


def make_block_mask(row: PackedRow, window: int | None, device: torch.device) -> Any:
    """What FlexAttention computes of a row. Not on a GPU, it holds one number for each pair of nodes."""
    from torch.nn.attention.flex_attention import create_block_mask

    arrays = (row.subtree_end, row.depths)
    ends, depths = (torch.from_numpy(values).to(device, torch.int32) for values in arrays)

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
    """[1, S, H, D], what transformers expects of an attention function. Raises ValueError if the tensors are
    not those of the row.
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
    if device.type == "cpu":
        if window not in row.made:
            row.made[window] = make_masked_pieces(row, window, query.dtype)
        found = attend_in_pieces(query, key, value, row.made[window], scale)
    else:  # pragma: gpu
        if window not in row.made:
            row.made[window] = make_block_mask(row, window, device)
        options = {"block_mask": row.made[window], "scale": scale, "enable_gqa": query.shape != key.shape}
        found = _compile_flex()(query, key, value, **options)
    return found.transpose(1, 2).contiguous()


def register_packed_attention() -> None:
    """Models that attend by "sdpa" understand `packed_row` from now on; without it they do what they did. May
    be called again.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    before: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(before, "takes_packed_row", False):
        return
    # pieces differ from row to row; every row would be a program
    run: Any = torch.compiler.disable(attend_packed)

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *inputs: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        row = options.pop(ARGUMENT, None)
        if row is None:
            return before(module, query, key, value, *inputs, **options)
        asked = [name for name in UNKNOWN if options.get(name) is not None]
        asked += ["dropout"] if options.get("dropout") else []
        if asked:
            raise ValueError(f"attention of packed rows knows no {', '.join(asked)}")
        window, scale = options.get("sliding_window"), options.get("scaling")
        return run(query, key, value, row, window=window, scale=scale), None

    attend.takes_packed_row = True  # pyright: ignore[reportFunctionMemberAccess]
    AttentionInterface.register("sdpa", attend)

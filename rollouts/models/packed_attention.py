"""Attention of one packed row without padding, where each node sees its ancestors and itself, and nobody
computes what is masked.

    subtree_end [S] ──find_pieces──► rectangles of the S x S square that hold every visible pair once
    queries, keys, values ─attend_in_pieces─► each rectangle by a fused kernel; softmaxes merged by their
        log-sum-exp

A node's descendants are the nodes after it, up to subtree_end, so what a shared beginning's keys are seen by
is one slice of queries, without a mask. A long sequence is halved until its triangles are small. Only
neighbouring subtrees of a few nodes together, and the edges of windows, have a mask. On a CPU memory is
linear in S, and work is the number of visible pairs and little more. On an accelerator FlexAttention takes
the place of the pieces, or varlen_attn where no two sequences share a node.

A model of transformers takes this through its own attention: register_packed_attention puts a function in the
place of "sdpa" that does what it did before, unless the forward pass was given `packed_row`. That argument
travels with a layer's others, so a layer that is computed twice for its gradient has it both times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.types import BoolArray, IntArray

ARGUMENT = "packed_row"  # of the model's forward
MaskForm = Literal["one", "windowed", "by_kind"]
"""Of a model's layers none has a window, all have it, or the model takes one mask for each kind of layer."""


class PieceSizes(NamedTuple):
    """Nodes."""

    # of one sequence; the kernel computes the whole square of a triangle that is smaller than its blocks of
    # 512
    triangle: int
    # of neighbouring subtrees that share one masked square; smaller ones would spend their time in calls
    masked: int
    window_tile: int  # a rectangle at the edge of a window is cut to these before it gets a mask


# measured on a server's CPU, for models of 0.1 M to 135 M parameters
SIZES = PieceSizes(triangle=128, masked=128, window_tile=512)
SMALL_SIZES = PieceSizes(triangle=2, masked=3, window_tile=2)  # so that a probe has pieces of every kind
# added to what is not visible: exp gives exactly 0, and a query that sees none of a piece's keys has no
# infinity to subtract
HIDDEN = -30000.0
UNKNOWN = ("softcap", "position_bias", "s_aux")  # what a layer may ask of attention, and a packed row has not
ALL_KEYS, WINDOWED = 1, 2  # last axis of the mask that tells a layer's attention which of the two it is


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Queries [first_query, end_query) against keys [first_key, end_key) of one row."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    causal: bool = False  # a square on the diagonal of one sequence: its upper half is hidden
    visible: BoolArray | None = None  # [queries, keys]; None: all of them, or the causal half

    def cut(self, *tensors: Tensor) -> list[Tensor]:
        """The piece's queries of the first of the tensors [1, H, S, D], and its keys of the others."""
        first, *others = tensors
        return [
            first[:, :, self.first_query : self.end_query],
            *(other[:, :, self.first_key : self.end_key] for other in others),
        ]


Masked = Sequence[tuple[Piece, Tensor | None]]  # with the masks, [queries, keys], of those that have one


@dataclass(slots=True, eq=False)  # not frozen: torch.compile would make a case of every value
class PackedRow:
    """What the attention of every layer needs to know of one micro-batch."""

    subtree_end: IntArray  # [S] first node after the subtree
    depths: IntArray  # [S] position ids
    window: int | None  # tokens that a layer with a window sees, itself included; None: no such layer
    pieces: Masked
    windowed: Masked  # the same of a layer with a window
    # what an accelerator makes once for all layers; and whether any layer has read the row
    on_device: dict[str, Any]


def make_packed_inputs(
    subtree_end: IntArray,
    depths: IntArray,
    *,
    masks: MaskForm,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: PieceSizes = SIZES,
) -> dict[str, Any]:
    """What a model's forward takes for one packed row: what its attention does, and for each kind of layer
    which of the two it is. `dtype` is that of the scores.
    """
    register_packed_attention()
    window = None if masks == "one" else window
    row = PackedRow(subtree_end, depths, window, (), (), {})
    if device.type == "cpu":
        pieces = find_pieces(subtree_end, sizes)
        row.pieces = [(piece, _make_mask(piece.visible, dtype)) for piece in pieces]
        if window is not None:
            narrow = narrow_pieces(pieces, depths, window, sizes)
            row.windowed = [(piece, _make_mask(piece.visible, dtype)) for piece in narrow]
    # a finished mask, of which nothing is read but its last axis
    full, own = (torch.zeros((1, 1, 1, kind), device=device) for kind in (ALL_KEYS, WINDOWED))
    by_kind = {"full_attention": full, "sliding_attention": own}
    chosen = {"one": full, "windowed": own, "by_kind": by_kind}[masks]
    return {"attention_mask": chosen, ARGUMENT: row}


def _make_mask(visible: BoolArray | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores, 0 or HIDDEN."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), HIDDEN)


# --- pieces -------------------------------------------------------------------------------------------------


def find_pieces(subtree_end: IntArray, sizes: PieceSizes = SIZES) -> list[Piece]:
    """Pieces that hold every pair (i, j) with j <= i < subtree_end[j] exactly once and, beside masked ones,
    no other.

    A node's piece on the diagonal comes before the others that have it as a query. The longest unbranched run
    of nodes is a segment; its keys are seen by itself, in halves, and by all that follows it in its subtree.
    Subtrees side by side of at most `sizes.masked` nodes together share one masked square.
    """
    count = len(subtree_end)
    ends = subtree_end.tolist()
    continues = np.zeros(count + 1, np.bool_)  # the only child of the node before
    continues[1:count] = (subtree_end[1:] == subtree_end[:-1]) & (np.arange(1, count) < subtree_end[:-1])
    starts = np.flatnonzero(~continues)
    segment_end = starts[
        np.searchsorted(starts, np.arange(count), side="right")
    ].tolist()  # of the segment that a node is in
    pieces: list[Piece] = []
    forests = [(0, count)]  # ranges of whole subtrees side by side, still to be cut
    while forests:
        first, end = forests.pop()
        block = node = first
        while node < end:
            after = ends[node]
            if after - block > sizes.masked:
                pieces += _square(subtree_end, block, node, segment_end, sizes.triangle)
                block = node
            if after - node > sizes.masked:
                pieces += halve(node, segment_end[node], sizes.triangle)
                if segment_end[node] < after:
                    pieces.append(Piece(segment_end[node], after, node, segment_end[node]))
                    forests.append((segment_end[node], after))
                block = after
            node = after
        pieces += _square(subtree_end, block, end, segment_end, sizes.triangle)
    return sorted(
        pieces, key=lambda piece: piece.first_query != piece.first_key
    )  # stable: the diagonal first


def halve(first: int, end: int, triangle: int) -> list[Piece]:
    """The triangle of one sequence: small triangles, and the squares between them."""
    length = end - first
    if length <= triangle:
        return [Piece(first, end, first, end, causal=True)] if length else []
    half = first + triangle * (-(-length // triangle) // 2)
    return [*halve(first, half, triangle), Piece(half, end, first, half), *halve(half, end, triangle)]


def _square(
    subtree_end: IntArray, first: int, end: int, segment_end: Sequence[int], triangle: int
) -> list[Piece]:
    """Whole subtrees [first, end) in one masked square; a single sequence needs no mask."""
    if first == end:
        return []
    if segment_end[first] == end:
        return halve(first, end, triangle)
    nodes = np.arange(first, end)
    visible = (nodes[:, None] >= nodes[None, :]) & (nodes[:, None] < subtree_end[None, first:end])
    return [Piece(first, end, first, end, visible=visible)]


def narrow_pieces(
    pieces: Sequence[Piece], depths: IntArray, window: int, sizes: PieceSizes = SIZES
) -> list[Piece]:
    """`pieces` of a layer in which a node sees only those less than `window` above it, counted along its
    path, that is in depths.

    What lies outside of every query's window is left out; what the edge goes through has a mask.
    """
    found: list[Piece] = []
    for piece in (part for whole in pieces for part in _tiles(whole, sizes.window_tile)):
        queries, keys = depths[piece.first_query : piece.end_query], depths[piece.first_key : piece.end_key]
        if int(queries.max()) - int(keys.min()) < window:
            found.append(piece)
            continue
        inside = queries[:, None] - keys[None, :] < window
        if piece.causal:
            inside &= queries[:, None] >= keys[None, :]
        elif piece.visible is not None:
            inside &= piece.visible
        if inside.any():
            found.append(
                Piece(piece.first_query, piece.end_query, piece.first_key, piece.end_key, visible=inside)
            )
    return found


def _tiles(piece: Piece, tile: int) -> list[Piece]:
    if piece.causal or piece.visible is not None:  # these are small
        return [piece]
    return [
        Piece(query, min(query + tile, piece.end_query), key, min(key + tile, piece.end_key))
        for query in range(piece.first_query, piece.end_query, tile)
        for key in range(piece.first_key, piece.end_key, tile)
    ]


# --- the kernel ---------------------------------------------------------------------------------------------


def attend_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Masked,
    scale: float | None,
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
    gradient of a piece is right as it stands once it is told the l and the output of all: it needs no more of
    the softmax than them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Masked,
        scale: float | None,
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(query.dtype, torch.float32)
        _, heads, count, size = query.shape
        log_sum = torch.empty((1, count, heads), dtype=wide).transpose(
            1, 2
        )  # the order that the kernel writes
        merged = torch.empty((1, count, heads, size), dtype=wide).transpose(1, 2)
        begun = 0  # diagonal pieces cover the queries before any other is merged
        for piece, mask in pieces:
            inputs = piece.cut(query, key, value)
            found, own_sum = kernel(*inputs, 0.0, piece.causal, attn_mask=mask, scale=scale)
            queries = slice(piece.first_query, piece.end_query)
            if piece.first_query == piece.first_key:
                merged[:, :, queries], log_sum[:, :, queries] = found, own_sum
                begun += piece.end_query - piece.first_query
                continue
            before, target = log_sum[:, :, queries], merged[:, :, queries]
            after = torch.logaddexp(before, own_sum)
            target.mul_((before - after).exp_()[..., None]).addcmul_(
                found, (own_sum - after).exp_()[..., None]
            )
            before.copy_(after)
        assert begun == count, (begun, count)
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


# --- accelerators -------------------------------------------------------------------------------------------


def attend_on_device(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, *, windowed: bool, scale: float | None
) -> Tensor:  # pragma: gpu
    """As attend_in_pieces, by the kernels of an accelerator."""
    ends = row.subtree_end
    unshared = not np.any(
        (ends[1:] != ends[:-1]) & (np.arange(1, len(ends)) < ends[:-1])
    )  # no node has two children
    if unshared and query.dtype in (torch.float16, torch.bfloat16) and find_spec("torch.nn.attention.varlen"):
        return _attend_documents(query, key, value, row, windowed=windowed, scale=scale)
    return attend_by_flex(query, key, value, row, windowed=windowed, scale=scale, run=_compile_flex())


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    *,
    windowed: bool,
    scale: float | None,
    run: Callable[..., Any],
) -> Tensor:
    """As attend_in_pieces, by `run`, which is flex_attention or a compiled one. The masks of blocks are made
    once for all layers.
    """
    name = "windowed_blocks" if windowed else "blocks"
    if name not in row.on_device:
        row.on_device[name] = _make_block_mask(row, query.device, row.window if windowed else None)
    return run(
        query,
        key,
        value,
        block_mask=row.on_device[name],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _make_block_mask(row: PackedRow, device: torch.device, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    ends, depths = (
        torch.from_numpy(values).to(device, torch.int32) for values in (row.subtree_end, row.depths)
    )

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) & (i < ends[j])
        return seen if window is None else seen & (depths[i] - depths[j] < window)

    # uncompiled it holds one number for each pair of nodes
    return create_block_mask(
        visible, None, None, len(ends), len(ends), device=str(device), _compile=device.type == "cuda"
    )


@cache
def _compile_flex() -> Any:  # pragma: gpu
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, *, windowed: bool, scale: float | None
) -> Tensor:  # pragma: gpu
    """Sequences side by side by flash attention's kernels of variable length."""
    from torch.nn.attention.varlen import varlen_attn

    if "documents" not in row.on_device:
        bounds = np.append(np.flatnonzero(row.depths == 0), len(row.depths)).astype(np.int32)
        row.on_device["documents"] = torch.from_numpy(bounds).to(query.device), int(np.diff(bounds).max())
    bounds, longest = row.on_device["documents"]
    groups = query.shape[1] // key.shape[1]
    key, value = (
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
    )  # older kernels know no groups
    left = row.window - 1 if windowed and row.window is not None else -1
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    found: Any = varlen_attn(
        flat[0], flat[1], flat[2], bounds, bounds, longest, longest, scale=scale, window_size=(left, 0)
    )
    return found.transpose(0, 1)[None]


# --- transformers -------------------------------------------------------------------------------------------


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row: PackedRow,
    scale: float | None,
) -> Tensor:
    """[1, S, H, D], what transformers expects of an attention function. Raises ValueError if the layer asks
    for what this cannot give.
    """
    if (
        attention_mask is None
        or query.shape[-2] != len(row.subtree_end)
        or key.shape[-2] != query.shape[-2]
        or len(query) != 1
    ):
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(key.shape)} are not those of one packed row of"
            f" {len(row.subtree_end)} nodes"
        )
    row.on_device["read"] = True
    windowed = attention_mask.shape[-1] == WINDOWED
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if kind != "cpu":  # pragma: gpu
        found = attend_on_device(query, key, value, row, windowed=windowed, scale=scale)
    else:
        found = attend_in_pieces(query, key, value, row.windowed if windowed else row.pieces, scale)
    return found.transpose(1, 2).contiguous()


def register_packed_attention() -> None:
    """Models that attend by "sdpa" understand `packed_row` from now on; without it they do what they did. May
    be called again.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    before: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(before, "takes_packed_row", False):
        return
    run: Any = torch.compiler.disable(
        attend_packed
    )  # pieces differ from row to row; every row would be a program

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *inputs: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        row = options.pop(ARGUMENT, None)
        if row is None:
            return before(module, query, key, value, attention_mask, *inputs, **options)
        asked = [name for name in UNKNOWN if options.get(name) is not None]
        asked += ["dropout"] if options.get("dropout") else []
        if asked:
            raise ValueError(f"attention of packed rows knows no {', '.join(asked)}")
        return run(query, key, value, attention_mask, row, options.get("scaling")), None

    attend.takes_packed_row = True  # pyright: ignore[reportFunctionMemberAccess]
    AttentionInterface.register("sdpa", attend)

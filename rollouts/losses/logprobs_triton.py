"""The two parts of the log-prob head that a GPU does better in one kernel than as a chain of torch
operations.

    reduce   log-sum-exp, entropy and target logit of each position, in one pass over the vocabulary: no logits leave the chip
    change   the gradient of one tile of logits, recomputed and written once, in the dtype that the library's matrix products then read

The products with the weight and the states remain the library's. Nothing is summed atomically: equal inputs
give equal bits. Importing this module needs Triton, which comes with torch for CUDA; with TRITON_INTERPRET=1
the kernels also run, slowly, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from rollouts.losses.logprobs import (
    HeadOptions,
    Kernels,
    LinearLogProbs,
    Tile,
    apply_linear_logprobs,
    linear_logprobs_tiled,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROGRAMS = 512  # enough to fill any GPU; few positions are spread by splitting the vocabulary


def linear_logprobs_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> LinearLogProbs:
    """`linear_logprobs` by these kernels. hidden and weight share one of `DTYPES`; float32 is multiplied as
    such, not as TF32.
    """
    assert hidden.dtype == weight.dtype and hidden.dtype in DTYPES, (hidden.dtype, weight.dtype)
    kernels = Kernels(reduce_logits, change_tiles)
    return apply_linear_logprobs(
        hidden, weight, targets, HeadOptions(temperature, None, entropy_gradient, kernels)
    )


def find_disagreement(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels must not be used on `device`: they fail to compile or run, or differ from the tiled
    path; None if they may.

    Compared are values and gradients of one small problem, norm-wise, to 1e-4 for float32 and 1e-2 for half
    precision.
    """
    generator = torch.Generator().manual_seed(0)
    states, head = (
        torch.randn(n, 192, generator=generator).to(device, dtype).requires_grad_() for n in (300, 1500)
    )
    targets = torch.randint(0, 1500, (300,), generator=generator).to(device)
    upstream = torch.randn(2, 300, generator=generator).to(device)
    found: list[list[Tensor]] = []
    try:
        for run in (linear_logprobs_tiled, linear_logprobs_triton):
            with torch.enable_grad():
                result = run(states, head, targets, temperature=4.0, entropy_gradient=True)
                gradients = torch.autograd.grad((torch.stack(result) * upstream).sum(), [states, head])
            found.append([*result, *gradients])
    except (
        Exception
    ) as error:  # the compiler, its C compiler, the driver: whatever it is, the tiled path does without
        return f"the Triton kernels fail: {type(error).__name__}: {error}"
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for name, tiled, fused in zip(
        ("log-probs", "entropy", "gradient of the states", "gradient of the weight"), *found, strict=True
    ):
        error = (fused.double() - tiled.double()).norm() / tiled.double().norm()
        if not error <= tolerance:
            return (
                f"the {name} of the Triton kernels differ from those of the tiled path by {error:.1e}, over"
                f" {tolerance}"
            )
    return None


# --- launches -----------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """What one program multiplies at a time."""

    rows: int
    cols: int
    depth: int  # of the hidden size
    warps: int
    stages: int


def pick_blocks(dtype: torch.dtype) -> _Blocks:
    """Half precision fills the tensor cores; float32 has none at full precision and needs the registers."""
    return _Blocks(64, 64, 32, 4, 2) if dtype == torch.float32 else _Blocks(128, 128, 64, 8, 3)


def reduce_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, entropy and target logit, each [N] in float32. Each program takes some positions and a
    part of the vocabulary.
    """
    blocks = pick_blocks(hidden.dtype)
    num_rows, num_cols = len(hidden), len(weight)
    row_blocks, col_blocks = triton.cdiv(num_rows, blocks.rows), triton.cdiv(num_cols, blocks.cols)
    parts = max(1, min(col_blocks, PROGRAMS // max(row_blocks, 1)))
    part_cols = triton.cdiv(col_blocks, parts) * blocks.cols
    parts = triton.cdiv(num_cols, part_cols)
    top, z, u, target_logits = (hidden.new_empty((parts, num_rows), dtype=torch.float32) for _ in range(4))
    if num_rows:
        states, rows = with_rows(hidden), with_rows(weight)
        launch: Any = _reduce_kernel[(row_blocks, parts)]  # pyright: ignore[reportIndexIssue]
        launch(
            *(
                states,
                rows,
                targets,
                top,
                z,
                u,
                target_logits,
                num_rows,
                num_cols,
                hidden.shape[1],
                states.stride(0),
                rows.stride(0),
            ),
            *(1.0 / temperature, part_cols),
            **_options(blocks, hidden),
        )
    highest = top.amax(0)
    moved = top - highest
    shrink = moved.exp()
    u = (shrink * (u + z * moved)).sum(0)
    z = (shrink * z).sum(0)
    log_z = z.log()
    return highest + log_z, log_z - u / z, target_logits.sum(0)


def change_tiles(
    tiles: Iterator[Tile],
    states: Tensor,
    weight: Tensor,
    temperature: float,
    scales: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Iterator[tuple[Tile, Tensor]]:
    """Of each tile the probabilities, or c_v = p_v · (grad + grad_entropy · (log p_v + H)), in `dtype`;
    overwritten by the next.

    `scales`: the log-sum-exp of each position; for c also its entropy, grad and grad_entropy.
    """
    blocks = pick_blocks(states.dtype)
    states, weight = with_rows(states), with_rows(weight)
    has_entropy = len(scales) > 1
    log_sum, entropy, grad, grad_entropy = (
        scale.flatten() for scale in (scales if has_entropy else scales * 4)
    )
    space: Tensor | None = None
    for tile in tiles:
        num_rows, num_cols = tile.rows.stop - tile.rows.start, tile.cols.stop - tile.cols.start
        if space is None:  # the first tile is the largest
            space = states.new_empty(num_rows * num_cols, dtype=dtype)
        changes = space[: num_rows * num_cols].view(num_rows, num_cols)
        grid = (triton.cdiv(num_rows, blocks.rows), triton.cdiv(num_cols, blocks.cols))
        per_row = (scale[tile.rows] for scale in (log_sum, entropy, grad, grad_entropy))
        launch: Any = _change_kernel[grid]  # pyright: ignore[reportIndexIssue]
        launch(
            *(states[tile.rows], weight[tile.cols], *per_row, changes),
            *(num_rows, num_cols, states.shape[1], states.stride(0), weight.stride(0), 1.0 / temperature),
            has_entropy=has_entropy,
            **_options(blocks, states),
        )
        yield tile, changes


def with_rows(matrix: Tensor) -> Tensor:
    """`matrix` with contiguous rows."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _options(blocks: _Blocks, states: Tensor) -> dict[str, Any]:
    sizes = {"block_rows": blocks.rows, "block_cols": blocks.cols, "block_depth": blocks.depth}
    widen = states.dtype == torch.float32 or not states.is_cuda  # the interpreter cannot multiply bfloat16
    return {**sizes, "widen": widen, "num_warps": blocks.warps, "num_stages": blocks.stages}


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _multiply(
    states, weight, rows, cols, num_rows, num_cols, depth, row_stride, col_stride,
    block_rows: tl.constexpr, block_cols: tl.constexpr, block_depth: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """Logits [block_rows, block_cols] in float32, before the temperature; 0 outside."""
    row_ok, col_ok = rows < num_rows, cols < num_cols
    left = states + rows.to(tl.int64) * row_stride
    right = weight + cols.to(tl.int64) * col_stride
    logits = tl.zeros((block_rows, block_cols), dtype=tl.float32)
    for first in range(0, depth, block_depth):
        k = first + tl.arange(0, block_depth)
        k_ok = k < depth
        a = tl.load(left[:, None] + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(right[None, :] + k[:, None], mask=col_ok[None, :] & k_ok[:, None], other=0.0)
        if widen:
            a, b = a.to(tl.float32), b.to(tl.float32)
        logits = tl.dot(a, b, logits, input_precision="ieee")  # not TF32
    return logits


@triton.jit
def _reduce_kernel(
    states, weight, targets, top_out, z_out, u_out, target_out, num_rows, num_cols, depth, row_stride, col_stride, scale, part_cols,
    block_rows: tl.constexpr, block_cols: tl.constexpr, block_depth: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """Largest logit, z = Σ e^(l − top), u = Σ e^(l − top)·(l − top) and the target's logit, over one part of
    the vocabulary.
    """
    part = tl.program_id(1)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    row_ok = rows < num_rows
    target = tl.load(targets + rows, mask=row_ok, other=-1)
    top = tl.full((block_rows,), -3.0e38, dtype=tl.float32)  # finite: 0 · (top − higher) below must stay 0
    z = tl.zeros((block_rows,), dtype=tl.float32)
    u = tl.zeros((block_rows,), dtype=tl.float32)
    target_logit = tl.zeros((block_rows,), dtype=tl.float32)
    for first in range(part * part_cols, tl.minimum((part + 1) * part_cols, num_cols), block_cols):
        cols = first + tl.arange(0, block_cols)
        logits = scale * _multiply(
            states,
            weight,
            rows,
            cols,
            num_rows,
            num_cols,
            depth,
            row_stride,
            col_stride,
            block_rows,
            block_cols,
            block_depth,
            widen,
        )
        target_logit += tl.sum(tl.where(cols[None, :] == target[:, None], logits, 0.0), axis=1)
        logits = tl.where((cols < num_cols)[None, :], logits, -3.0e38)
        higher = tl.maximum(top, tl.max(logits, axis=1))
        shifted = logits - higher[:, None]
        exps = tl.exp(shifted)
        moved = top - higher
        shrink = tl.exp(moved)
        u = shrink * (u + z * moved) + tl.sum(shifted * exps, axis=1)
        z = shrink * z + tl.sum(exps, axis=1)
        top = higher
    place = part.to(tl.int64) * num_rows + rows
    tl.store(top_out + place, top, mask=row_ok)
    tl.store(z_out + place, z, mask=row_ok)
    tl.store(u_out + place, u, mask=row_ok)
    tl.store(target_out + place, target_logit, mask=row_ok)


@triton.jit
def _change_kernel(
    states, weight, log_sum, entropy, grad, grad_entropy, changes, num_rows, num_cols, depth, row_stride, col_stride, scale,
    has_entropy: tl.constexpr, block_rows: tl.constexpr, block_cols: tl.constexpr, block_depth: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """Probabilities of one tile, or with has_entropy p · (grad + grad_entropy · (log p + H))."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    cols = tl.program_id(1) * block_cols + tl.arange(0, block_cols)
    row_ok = rows < num_rows
    logits = scale * _multiply(
        states,
        weight,
        rows,
        cols,
        num_rows,
        num_cols,
        depth,
        row_stride,
        col_stride,
        block_rows,
        block_cols,
        block_depth,
        widen,
    )
    log_probs = logits - tl.load(log_sum + rows, mask=row_ok, other=0.0)[:, None]
    change = tl.exp(log_probs)
    if has_entropy:
        of_entropy = tl.load(grad_entropy + rows, mask=row_ok, other=0.0)[:, None]
        of_log_prob = tl.load(grad + rows, mask=row_ok, other=0.0)[:, None]
        change *= of_log_prob + of_entropy * (
            log_probs + tl.load(entropy + rows, mask=row_ok, other=0.0)[:, None]
        )
    place = rows.to(tl.int64)[:, None] * num_cols + cols[None, :]
    tl.store(
        changes + place,
        change.to(changes.dtype.element_ty),
        mask=row_ok[:, None] & (cols < num_cols)[None, :],
    )

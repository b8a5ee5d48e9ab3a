"""A linear layer on a handful of tokens as one Triton kernel. Imported on CUDA only.

A program takes some rows of the weight and walks along them; tensor cores multiply them with all tokens, padded to
sixteen. Nothing is split, so nothing is summed afterwards, and the order of summation depends on the shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_TOKENS = 16
_TILE_ROWS = 32
_TILE_WIDTH = 256
_WARPS = 4
_STAGES = 4


@triton.jit
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    rows,
    width,
    x_stride,
    weight_stride,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    AHEAD_BYTES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = tl.arange(0, TILE_TOKENS)
    column = tl.arange(0, TILE_WIDTH)
    inside = row < rows
    weight_row = weight_ptr + tl.minimum(row, rows - 1).to(tl.int64) * weight_stride
    if DEPENDENT:  # what comes before may still run: begin with what does not depend on it
        if AHEAD_BYTES > 0:
            tl.inline_asm_elementwise(
                "{ .reg .u32 size; mov.u32 size, $2; cp.async.bulk.prefetch.L2.global [$1], size; mov.u32 $0, 0; }",
                "=r,l,r",
                [weight_row, tl.full([TILE_ROWS], AHEAD_BYTES, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weights = weight_row[:, None] + column[None, :]
    x_columns = x_ptr + token[None, :] * x_stride + column[:, None]
    total = tl.zeros((TILE_ROWS, TILE_TOKENS), tl.float32)
    for start in range(0, width, TILE_WIDTH):
        w = tl.load(weights + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_columns + start, mask=token[None, :] < tokens, other=0.0)
        total = tl.dot(w, x, total)
    to = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=(token[None, :] < tokens) & inside[:, None])


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel serves these shapes: whole tiles along the rows, rows without gaps."""
    return weight.shape[1] % _TILE_WIDTH == 0 and weight.stride(1) == 1 and x.stride(1) == 1


def launch_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T <= 16, I], weight [O, I] -> [T, O]."""
    (tokens, width), rows = x.shape, len(weight)
    out = x.new_empty(tokens, rows)
    dependent = DEPENDENT
    _linear_kernel[(triton.cdiv(rows, _TILE_ROWS),)](
        x,
        weight,
        out,
        tokens,
        rows,
        width,
        x.stride(0),
        weight.stride(0),
        TILE_TOKENS=_TILE_TOKENS,
        TILE_ROWS=_TILE_ROWS,
        TILE_WIDTH=_TILE_WIDTH,
        AHEAD_BYTES=AHEAD_BYTES if dependent else 0,
        DEPENDENT=dependent,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


DEPENDENT = False
AHEAD_BYTES = 1024

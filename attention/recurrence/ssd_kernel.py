"""Mamba2's scan on a GPU: short rows token by token, long ones in chunks. Imported on CUDA only."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.recurrence.chunks_kernel import launch_chunks
from attention.recurrence.kernel_rows import TOKENS_OF_SHORT_ROWS, Inputs, check_launch, inner_rows
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import ScanRing
from attention.recurrence.tokens_kernel import launch_tokens


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    state: Tensor, ring: ScanRing, rows: StateRows, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """The outputs of Mamba2's scan, [T, H, P] in float32; `state` and `ring` are written.

    Per token: S = S exp(dt A) + dt x Bᵀ; y = S C + D x. Short rows are read token by token, in one launch, longer ones
    in chunks.

    Args:
        x: [T, H, P]; dt: float32 [T, H], after softplus and limits; A: float32 [H], negative.
        B, C: [T, G, N], each group of them for H / G heads in turn; D: [H] or None.
        state: [slots, H, P, N], of any float dtype; ring: has the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
        in_order: read all rows token by token.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    check_launch(rows, state, ring, x=x, B=B, dt=dt)
    x, B, C = (inner_rows(each) for each in (x, B, C))
    kept = (ring.B, ring.x, ring.dt, ring.dt)
    call = Inputs(C, B, x, A.expand(dt.shape), dt, 1.0, False, state, kept, rows, out, delta=False, skip=D)
    launch_tokens(call, None if in_order else TOKENS_OF_SHORT_ROWS)
    if not in_order and rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_chunks(call, TOKENS_OF_SHORT_ROWS + 1)
    return out

"""Mamba2's scan on a GPU: short rows token by token, long ones in chunks. Imported on CUDA only."""

from __future__ import annotations

import torch

from attention.cache.state import SsdRing
from attention.kernels.recurrent import TOKENS_OF_SHORT_ROWS
from attention.kernels.ssd_chunks import launch_ssd_chunks
from attention.kernels.ssd_tokens import launch_ssd
from attention.recurrence.rows import StateRows


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    ring: SsdRing,
    rows: StateRows,
) -> torch.Tensor:
    """The outputs of Mamba2's scan, [T, H, P] in float32; `state` and `ring` are written.

    Per token: S = S exp(dt A) + dt x Bᵀ; y = S C + D x. Short rows are read token by token, in one launch, longer ones
    in chunks.

    Args:
        x: [T, H, P]; dt: float32 [T, H], after softplus and limits; A: float32 [H], negative.
        B, C: [T, G, N], each group of them for H / G heads in turn; D: [H] or None.
        state: float32 [slots, H, P, N]; ring: of the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    inputs = (x, dt, A, B, C, D, state, ring, rows, out)
    launch_ssd(*inputs, most_tokens=TOKENS_OF_SHORT_ROWS)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_ssd_chunks(*inputs, least_tokens=TOKENS_OF_SHORT_ROWS + 1)
    return out

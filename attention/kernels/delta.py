"""The gated delta rule on a GPU: short rows token by token, long ones in chunks. Imported on CUDA only."""

from __future__ import annotations

import torch

from attention.cache.state import DeltaRing
from attention.kernels.delta_chunks import launch_delta_chunks
from attention.kernels.delta_tokens import launch_delta
from attention.kernels.recurrent import TOKENS_OF_SHORT_ROWS
from attention.recurrence.rows import StateRows


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    l2_normalize: bool,
    state: torch.Tensor,
    ring: DeltaRing,
    rows: StateRows,
) -> torch.Tensor:
    """The outputs of the gated delta rule, [T, H, Dv] in v's dtype; `state` and `ring` are written.

    Per token: S *= exp(g); u = beta (v - S k); S += u kᵀ; o = S (q scale); q and k divided by their lengths before,
    where `l2_normalize`. Short rows are read token by token, in one launch, longer ones in chunks.

    Args:
        q, k: [T, Hk, Dk], each head of them for H / Hk value heads in turn; v: [T, H, Dv].
        g: float32, [T, H] or [T, H, Dk] (a gate of every key dimension), at most 0. beta: [T, H].
        state: float32 [slots, H, Dv, Dk]; ring: of the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inputs = (q, k, v, g, beta, scale, l2_normalize, state, ring, rows, out)
    launch_delta(*inputs, most_tokens=TOKENS_OF_SHORT_ROWS)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_delta_chunks(*inputs, least_tokens=TOKENS_OF_SHORT_ROWS + 1)
    return out

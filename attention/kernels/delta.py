"""The gated delta rule on a GPU: which kernel serves which rows. Imported on CUDA only.

    a gate of a head            2 to 16 tokens, the replayed ones counted: one chunk    (delta_short, delta_solve)
    one token and no replay,    up to 16 tokens of its own: token by token              (delta_tokens)
    more replayed, or a gate    more: in chunks of 64                                   (delta_chunks)
    of every key dimension

One chunk costs the same for any number of tokens, a token more 13 µs (32 rows of Qwen3.5-9B on an H200: 52 to 54 µs
against 50, 79 and 143 of 1, 3 and 7 tokens).

The device decides for each row, by its lengths; the host launches what the longest row may need, which is the same for
every replay of a CUDA graph.
"""

from __future__ import annotations

import torch

from attention.cache.state import DeltaRing
from attention.kernels.delta_chunks import launch_delta_chunks
from attention.kernels.delta_short import launch_delta_short
from attention.kernels.delta_tokens import launch_delta
from attention.kernels.recurrent import TOKENS_OF_SHORT_ROWS
from attention.recurrence.index import MOST_INPUTS
from attention.recurrence.rows import StateRows

ONE_CHUNK = True
"""False: short rows token by token, all of them, to compare the two."""


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
    where `l2_normalize`.

    Args:
        q, k: [T, Hk, Dk], each head of them for H / Hk value heads in turn; v: [T, H, Dv].
        g: float32, [T, H] or [T, H, Dk] (a gate of every key dimension), at most 0. beta: [T, H].
        state: float32 [slots, H, Dv, Dk]; ring: of the same slots.
        rows: no row reaches beyond T. Outputs of tokens of no row, after the last one, are zeros.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inputs = (q, k, v, g, beta, scale, l2_normalize, state, ring, rows, out)
    most = rows.max_replay + min(rows.max_query_len, TOKENS_OF_SHORT_ROWS)
    one_chunk = ONE_CHUNK and g.dim() == 2 and most > 1
    if one_chunk:
        launch_delta_short(*inputs)
    if not one_chunk or most > MOST_INPUTS:
        least = MOST_INPUTS + 1 if one_chunk else 0
        launch_delta(*inputs, most_tokens=TOKENS_OF_SHORT_ROWS, least_inputs=least)
    if rows.max_query_len > TOKENS_OF_SHORT_ROWS:
        launch_delta_chunks(*inputs, least_tokens=TOKENS_OF_SHORT_ROWS + 1)
    return out

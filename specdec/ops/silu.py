"""The gated activation of a feed-forward layer in half precision."""

from __future__ import annotations

import torch


@torch.library.custom_op("specdec::silu_product", mutates_args=())
def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [1, T, F] or [T, F] of one half-precision dtype -> silu(gate) · up, contiguous.

    Computed in float32 and rounded once, as the compiler does it; eager code rounds silu(gate) as well.
    Source: transformers, models/llama/modeling_llama.py (LlamaMLP).
    """
    if gate.is_cuda:
        from specdec.ops.silu_kernel import launch_silu_product

        return launch_silu_product(gate, up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


@silu_product.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)

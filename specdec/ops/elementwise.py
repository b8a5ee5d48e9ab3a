"""RMS norm, gated activation and rotary embedding: operators of compiled code that become one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.hf.custom_op import opaque_operator


@opaque_operator(lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [1, T, H], weight [H], both of one half-precision dtype -> weight · round(x / rms(x)) [1, T, H].

    Computed in float32 and rounded before and after the multiplication by the weight.
    Source: transformers, models/llama/modeling_llama.py (LlamaRMSNorm).
    """
    if x.is_cuda:
        from specdec.ops.elementwise_kernel import launch_norm

        return launch_norm(x, None, weight, eps)[1]
    return _norm_plain(x, weight, eps)


@opaque_operator(lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [1, T, H] -> their sum, rounded, and its `rms_norm`."""
    if x.is_cuda:
        from specdec.ops.elementwise_kernel import launch_norm

        return launch_norm(x, residual, weight, eps)
    total = (x + residual).contiguous()  # the operator's fake promises contiguous results, also for strided inputs
    return total, _norm_plain(total, weight, eps)


def _norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (values * scale).to(x.dtype)).contiguous()


@opaque_operator(lambda gate, up: gate.new_empty(gate.shape))
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [1, T, F] or [T, F] of one half-precision dtype -> silu(gate) · up, contiguous.

    Computed in float32 and rounded once, as the compiler does it; eager code rounds silu(gate) as well.
    Source: transformers, models/llama/modeling_llama.py (LlamaMLP).
    """
    if gate.is_cuda:
        from specdec.ops.elementwise_kernel import launch_silu_product

        return launch_silu_product(gate, up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


@opaque_operator(lambda query, key, cos, sin: (token_major(query), token_major(key)))
def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], cos and sin [1, 1, T, D], all of one half-precision dtype -> rotated.

    Dimension i is paired with i + D/2: x · cos + (-x₂, x₁) · sin. Computed in float32 and rounded once, as the compiler
    does it; eager code rounds the two terms as well. The memory layout of the results is [T, H, D].
    Source: transformers, models/llama/modeling_llama.py (apply_rotary_pos_emb).
    """
    if query.is_cuda:
        from specdec.ops.elementwise_kernel import launch_rotation

        outs = token_major(query), token_major(key)
        launch_rotation(query, key, cos, sin, outs)
        return outs
    return _rotate_plain(query, cos, sin), _rotate_plain(key, cos, sin)


@opaque_operator(
    lambda query, key, cos, sin: query.new_empty(query.shape[0], query.shape[1] + key.shape[1], query.shape[2])
)
def rotated_together(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """query [T, Hq, D], key [T, Hkv, D] in half precision, cos and sin [T, 1, D/2] float32 -> [T, Hq + Hkv, D].

    Both rotated, in one tensor, as `drafters.rope.rotate` gives of both side by side: computed in float32 and rounded
    once.
    """
    (tokens, query_heads, dim) = query.shape
    key_heads = key.shape[1]
    out = query.new_empty(tokens, query_heads + key_heads, dim)
    query, key, cos, sin = (x.transpose(0, 1)[None] for x in (query, key, cos, sin))
    outs = out[:, :query_heads].transpose(0, 1)[None], out[:, query_heads:].transpose(0, 1)[None]
    if query.is_cuda:
        from specdec.ops.elementwise_kernel import launch_rotation

        launch_rotation(query, key, cos, sin, outs)
    else:
        cos = torch.cat((cos, cos), -1)
        sin = torch.cat((sin, sin), -1)
        for rotated_part, part in zip(outs, (query, key), strict=True):
            rotated_part.copy_(_rotate_plain(part, cos, sin))
    return out


def token_major(x: Tensor) -> Tensor:
    """An uninitialised tensor like x [1, H, T, D] whose memory layout is [T, H, D]."""
    _, heads, tokens, dim = x.shape
    return x.new_empty(1, tokens, heads, dim).transpose(1, 2)


def _rotate_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    half_rotated = torch.cat((-second, first), -1)
    return token_major(x).copy_(x.float() * cos.float() + half_rotated * sin.float())

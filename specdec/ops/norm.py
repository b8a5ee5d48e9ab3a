"""RMS normalisation as transformers' models compute it in half precision, with the residual sum before it."""

from __future__ import annotations

import torch


@torch.library.custom_op("specdec::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [1, T, H], weight [H], both of one half-precision dtype -> weight · round(x / rms(x)) [1, T, H].

    Computed in float32 and rounded before and after the multiplication by the weight.
    Source: transformers, models/llama/modeling_llama.py (LlamaRMSNorm).
    """
    if x.is_cuda:
        from specdec.ops.norm_kernel import launch_norm

        return launch_norm(x, None, weight, eps)[1]
    return _norm_plain(x, weight, eps)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("specdec::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [1, T, H] -> their sum, rounded, and its `rms_norm`."""
    if x.is_cuda:
        from specdec.ops.norm_kernel import launch_norm

        return launch_norm(x, residual, weight, eps)
    total = (x + residual).contiguous()
    return total, _norm_plain(total, weight, eps)


@add_rms_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _norm_plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (values * scale).to(x.dtype)).contiguous()

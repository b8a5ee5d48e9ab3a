"""Linear layers in fine-grained FP8: weights in e4m3 with a scale for every block of 128 x 128, activations rounded to
e4m3 with a scale for every token and 128 of its values, or with one static scale.

    y[t, o] = sum over groups g of  x_scale[t, g] · weight_scale[o // 128, g] · (q[t, g] · weight[o, g])

The products inside a group are summed by tensor cores, the groups in float32. `fp8_linear` is two operators, so that
compiled code quantises an input once for all layers that read it.

Source: deepseek-ai/DeepSeek-V3, inference/kernel.py (act_quant, fp8_gemm); the least divisor equals that in
kernels-community/finegrained-fp8, which transformers' FP8Linear runs on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.hf.custom_op import opaque_operator
from specdec.ops.elementwise import add_rms_norm, rms_norm, silu_product

BLOCK = 128
"""Rows and columns of a block of a weight, and values of a group of a token."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_SCALE = 1e-12
"""What a group is divided by at least: one of zeros stays zeros."""


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """x [..., I] -> [..., O], dtype of x; the sum is rounded to it before the bias is added, as transformers does.

    Args:
        weight: [O, I] e4m3; weight_scale: float32 [⌈O/128⌉, ⌈I/128⌉], or one number for the whole weight.
        bias: [O] or None. x_scale: one number float32, the static scale of activations; None: dynamic ones.
    """
    rows = x.reshape(-1, x.shape[-1])
    groups = (rows.shape[0], -(-rows.shape[1] // BLOCK))
    if x_scale is None:
        quantised, scales = fp8_quantise(rows)
    else:
        quantised = fp8_quantise_by(rows, x_scale)
        scales = x_scale.reshape(1, 1).expand(groups)
    blocks = weight_scale
    if weight_scale.numel() == 1:
        blocks = weight_scale.reshape(1, 1).expand(-(-weight.shape[0] // BLOCK), groups[1])
    out = fp8_matmul(quantised, scales, weight, blocks, x.dtype)
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def unrounded_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `fp8_linear`, but activations are not rounded to 8 bits: the weight is dequantised to the dtype of x.

    For tests of the code between layers. A last bit of half precision moves some roundings to 8 bits, each by 6 % or
    more, and each such change moves further roundings in the next layer.
    """
    scale = weight_scale.reshape(1, 1) if weight_scale.numel() == 1 else weight_scale
    blocks = scale.expand(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    return F.linear(x, dequantised(weight, blocks, x.dtype), bias)


@opaque_operator(lambda x: _empty(x))
def fp8_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, I] -> e4m3 [T, I], and float32 [T, ⌈I/128⌉]: the largest magnitude of each group over 448."""
    if x.is_cuda:
        from specdec.ops.fp8_kernel import launch_quantise

        return launch_quantise(x)
    values = _grouped(x if x.dtype == torch.float64 else x.float())  # [T, G, 128]
    scales = (values.abs().amax(-1) / FP8_MAX).float()
    quantised = (values / scales.clamp_min(LEAST_SCALE)[..., None]).to(FP8)
    return quantised.flatten(1)[:, : x.shape[1]].contiguous(), scales


@opaque_operator(lambda x, scale: x.new_empty(x.shape, dtype=FP8))
def fp8_quantise_by(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, I], a scale of one number -> x / scale in e4m3, clamped to ±448."""
    values = x if x.dtype == torch.float64 else x.float()
    return (values / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()


@opaque_operator(lambda x, x_scale, weight, weight_scale, dtype: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype))
def fp8_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, I], weight [O, I] e4m3; x_scale [T, ⌈I/128⌉], weight_scale [⌈O/128⌉, ⌈I/128⌉] float32 -> [T, O] of dtype.

    On a GPU the weight is read once and stays in 8 bits; elsewhere it is dequantised to float32 at every call.
    """
    if x.is_cuda:
        from specdec.ops.fp8_kernel import launch_fp8_matmul

        return launch_fp8_matmul(x, x_scale, weight, weight_scale, dtype)
    return reference_matmul(x, x_scale, weight, weight_scale, dtype)


def reference_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As `fp8_matmul`, with weights and activations dequantised to float32, or to float64 if that is the dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    activations = (_grouped(x.to(wide)) * x_scale[..., None]).flatten(1)[:, : x.shape[1]]
    return (activations @ dequantised(weight, weight_scale, wide).t()).to(dtype)


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [..., O, I] e4m3, scale [..., ⌈O/128⌉, ⌈I/128⌉] -> weight · scale of its block, in that dtype.

    It allocates no other tensor of the weight's size.
    """
    rows, columns = weight.shape[-2:]
    by_row = scale.to(dtype).repeat_interleave(BLOCK, -2)[..., :rows, :]  # [..., O, ⌈I/128⌉]
    out = weight.to(dtype)
    blocks = columns // BLOCK
    whole = out[..., : blocks * BLOCK]
    rest = out[..., blocks * BLOCK :]
    whole.unflatten(-1, (blocks, BLOCK)).mul_(by_row[..., :blocks, None])
    rest.mul_(by_row[..., blocks:])
    return out


def _grouped(x: Tensor) -> Tensor:
    """[T, I] -> [T, ⌈I/128⌉, 128], zeros at the end of the last group."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


@opaque_operator(lambda x, weight, eps: _empty(x))
def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [1, T, H], weight [H] in half precision -> its `rms_norm` as e4m3 [T, H], scales [T, ⌈H/128⌉] float32."""
    if x.is_cuda:
        from specdec.ops.elementwise_kernel import launch_norm_fp8

        return launch_norm_fp8(x, None, weight, eps)[1:]
    return fp8_quantise(rms_norm(x, weight, eps)[0])


@opaque_operator(lambda x, residual, weight, eps: (x.new_empty(x.shape), *_empty(x)))
def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [1, T, H] -> their sum, rounded, and its `rms_norm_fp8`."""
    if x.is_cuda:
        from specdec.ops.elementwise_kernel import launch_norm_fp8

        return launch_norm_fp8(x, residual, weight, eps)
    total, normed = add_rms_norm(x, residual, weight, eps)
    return total, *fp8_quantise(normed[0])


@opaque_operator(lambda gate, up: _empty(gate))
def silu_product_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """gate, up [1, T, F] or [T, F] -> their `silu_product` as e4m3 [T, F], scales [T, ⌈F/128⌉] float32."""
    if gate.is_cuda:
        from specdec.ops.elementwise_kernel import launch_silu_product_fp8

        return launch_silu_product_fp8(gate, up)
    return fp8_quantise(silu_product(gate, up).view(-1, gate.shape[-1]))


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    """Empty results for x [1, T, H] or [T, H]."""
    tokens, width = x.shape[-2:]
    return x.new_empty(tokens, width, dtype=FP8), x.new_empty(tokens, -(-width // BLOCK), dtype=torch.float32)

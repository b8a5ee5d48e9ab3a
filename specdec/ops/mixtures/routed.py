"""A mixture of experts as two operators: the router's choice, and SwiGLU experts in half precision, blocks in FP8, or
MXFP4 with 16-bit activations.

Each chosen expert's weights are read once and where they lie. torch's own top-k of some hundred scores is a kernel and
a sort, and softmax and normalising two kernels more: 13 µs a layer at one token on an H200. MXFP4: numbers of 4 bits
(sign, two bits of exponent, one of mantissa), 32 of a row with one power of two: byte 0, 2^-127, is 0 to the kernels.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1; the order of a byte's two numbers is
as in openai/gpt-oss, gpt_oss/torch/weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.hf.custom_op import opaque_operator
from attention.hf.padding import padding_among
from specdec.ops.fp8 import FP8, fp8_quantise, reference_matmul
from specdec.ops.mixtures import Gating

BLOCK = 32
"""Numbers in MXFP4 that share an exponent."""
_BIAS, _VALUES = 127, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@opaque_operator(lambda x, index, gate_up, down, *others: x.new_empty(*index.shape, down.shape[1]))
def routed_experts(
    x: Tensor,
    index: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    interleaved: bool,
    alpha: float,
    limit: float | None,
) -> Tensor:
    """The chosen experts' results, not yet weighted: [T, k, H], dtype of x.

    down · activated(gate_up · x + bias) + bias, summed in float32; gate, up and their activation are rounded to the
    dtype of x, as layers of a model do. In FP8 the inputs of both matmuls are rounded to 8 bits as `fp8_quantise` does.

    Args:
        x: [T, H] in half precision. index: [T, k] int64, distinct experts of a token.
        gate_up: [E, 2·F, H] and down: [E, H, F] in the dtype of x, any strides; or both e4m3, contiguous; or both
            MXFP4, uint8 [E, 2·F, H/2] and [E, H, F/2], contiguous.
        gate_up_scale, down_scale: None; of blocks of 128 x 128, float32; or exponents of MXFP4, uint8 [E, rows, I/32].
        gate_up_bias: [E, 2·F] or None. down_bias: [E, H] or None.
        interleaved: rows of gate and up take turns; else gate's come first.
        alpha, limit: parameters of gpt-oss's clamped SwiGLU, see `activated`; None: plain SwiGLU.
    """
    gating = Gating(interleaved, alpha, limit)
    scales = (gate_up_scale, down_scale)
    biases = (gate_up_bias, down_bias)
    if x.is_cuda:
        from specdec.ops.mixtures.routed_kernel import launch_routed

        return launch_routed(
            x.contiguous(), gate_up, down, index, scales, biases, gating, padding=padding_among(len(x))
        )
    out = x.new_empty(*index.shape, down.shape[1])
    for expert, own, pairs in by_expert(x[:, None], index):
        of_gate_up, of_down = (
            (stack[expert], None if scale is None else scale[expert], None if bias is None else bias[expert])
            for stack, scale, bias in zip((gate_up, down), scales, biases, strict=True)
        )
        inner = times(own, *of_gate_up)
        gate, up = (inner[:, 0::2], inner[:, 1::2]) if interleaved else inner.chunk(2, -1)
        out[pairs] = times(activated(gate, up, alpha, limit), *of_down)
    return out


def by_expert(x: Tensor, index: Tensor) -> Iterator[tuple[int, Tensor, tuple[Tensor, Tensor]]]:
    """Each expert of index [T, k], the rows [N, I] of x [T, 1 or k, I] that it multiplies, and places of its pairs."""
    x = x.expand(-1, index.shape[1], -1)
    for expert in index.unique().tolist():
        pairs = (index == expert).nonzero(as_tuple=True)
        yield expert, x[pairs], pairs


def activated(gate: Tensor, up: Tensor, alpha: float = 1.0, limit: float | None = None) -> Tensor:
    """silu(gate) · up; with a limit, both clamped: (up + 1) · gate · sigmoid(alpha · gate). Rounded once.

    Source: huggingface/transformers, modeling_gpt_oss.py, GptOssExperts._apply_gate.
    """
    wide_gate = gate.float()
    wide_up = up.float()
    if limit is None:
        return (F.silu(wide_gate) * wide_up).to(gate.dtype)
    wide_gate = wide_gate.clamp(max=limit)
    wide_up = wide_up.clamp(-limit, limit)
    return ((wide_up + 1) * wide_gate * torch.sigmoid(alpha * wide_gate)).to(gate.dtype)


def times(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x [N, I] times one expert's matrix, plus its bias -> [N, O], in torch."""
    if matrix.dtype == FP8 and scale is not None:
        quantised, x_scale = fp8_quantise(x)
        return reference_matmul(quantised, x_scale, matrix, scale, x.dtype)
    wide = matrix.float() if scale is None else dequantised_mxfp4(matrix, scale)
    return F.linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)


def dequantised_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """blocks [..., O, I/2] uint8, the earlier number of two in the low bits; exponents [..., O, I/32] uint8 -> float32
    [..., O, I]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [..., O, I]
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - _BIAS)
    return (values[pairs.int()].unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


MOST_EXPERTS = 1024
SUM = "sum"
SOFTMAX = "softmax"
"""How the chosen experts' scores are normalised: divided by their sum, or as logits of a softmax among them."""


def _empty(scores: Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], chosen)
    return scores.new_empty(shape, dtype=dtype), scores.new_empty(shape, dtype=torch.int64)


@opaque_operator(_empty)
def best_experts(
    scores: Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The `chosen` largest of scores [T, E] -> their weights [T, k] of a dtype, and places [T, k] int64, largest first.

    Of equal scores the first is chosen, a NaN before all others. Everything is computed in float32.

    Args:
        softmax: apply softmax to all scores before choosing. normalise: "", `SUM` or `SOFTMAX`, over the chosen.
    """
    if scores.is_cuda:
        from specdec.ops.mixtures.routed_kernel import launch_best_experts

        return launch_best_experts(scores, chosen, softmax, normalise, dtype)
    wide = scores.float()
    wide = wide.softmax(-1) if softmax else wide
    # Not topk: of equal scores the lowest expert comes first, as in the kernel; topk leaves that open.
    sorted_scores, places = torch.sort(wide, dim=-1, descending=True, stable=True)
    best = sorted_scores[:, :chosen]
    if normalise == SUM:
        best = best / best.sum(-1, keepdim=True)
    elif normalise == SOFTMAX:
        best = F.softmax(best, -1)
    return best.to(dtype), places[:, :chosen].contiguous()  # as the operator's fake promises

"""The load-time self-test of operators in FP8: multiplied by layers of the model, against sums block by block.

A wrong scale is in both readings of the self-test of logits, whose eager forward runs the same operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from specdec.errors import UnsupportedModelError
from specdec.ops.fp8 import BLOCK, FP8, fp8_linear, fp8_quantise
from specdec.ops.fp8_experts import fp8_expert_matmul
from specdec.wrapped.fp8 import Fp8Layers

_TOLERANCE = 0.01
"""Largest error of a matmul over its result, rms of any block of rows: bfloat16 rounds by 0.002."""
_TOKENS = (3, 40)
_FP8_ROWS = 4 * BLOCK


@torch.inference_mode()
def fp8_self_test(layers: Fp8Layers) -> None:
    """Multiply by one layer of every shape.

    Raises:
        UnsupportedModelError: an operator comes out wrong on this device; the message names the layer.
    """
    linear = {(m.weight.shape, m.activation_scale is None): (n, m) for n, m in layers.linear.items()}
    for name, module in linear.values():
        for tokens in _TOKENS:
            _test_linear(name, module, tokens)
    mixtures = {m.down_proj.shape: (n, m) for n, m in layers.experts.items()}
    for name, module in mixtures.values():
        _test_experts(name, module)


def _test_linear(name: str, module: Any, tokens: int) -> None:
    weight, static = module.weight, module.activation_scale
    x = _random(tokens, weight, static)
    ours = fp8_linear(x, weight, module.weight_scale_inv, None, static).float()
    blocks = module.weight_scale_inv.reshape(1, 1) if module.block_size is None else module.weight_scale_inv
    blocks = blocks.expand(math.ceil(weight.shape[0] / BLOCK), math.ceil(weight.shape[1] / BLOCK))
    for start in sorted({0, max(weight.shape[0] - _FP8_ROWS, 0) // BLOCK * BLOCK}):
        part = slice(start, start + _FP8_ROWS)
        right = _summed(x, static, weight[part], blocks[start // BLOCK :])
        _compare(name, ours[:, part], right)


def _test_experts(name: str, module: Any) -> None:
    stack, scales = module.down_proj, module.down_proj_scale_inv
    index = torch.arange(3, device=stack.device)[:, None] % len(stack)
    x = _random(3, stack, None)
    quantised, x_scales = fp8_quantise(x)
    ours = fp8_expert_matmul(quantised[:, None], x_scales[:, None], stack, scales, index, torch.float32)
    for token, expert in enumerate(index.flatten().tolist()):
        _compare(name, ours[token], _summed(x[token : token + 1], None, stack[expert], scales[expert]))


def _random(tokens: int, weight: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
    """[T, I] bfloat16; groups of different size, by which a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[-1]
    sizes = torch.rand(tokens, math.ceil(width / BLOCK), generator=generator).add(0.2).repeat_interleave(BLOCK, 1)
    x = (torch.randn(tokens, width, generator=generator) * sizes[:, :width]).to(weight.device, torch.bfloat16)
    return x if static is None else x * (100 * static).to(x.dtype)


def _summed(x: torch.Tensor, static: torch.Tensor | None, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, I] rounded to 8 bits, times weight [O, I] with scales [≥⌈O/128⌉, ⌈I/128⌉]: [T, O] float32, plainly."""
    out = torch.zeros(len(x), len(weight), device=x.device)
    for group in range(math.ceil(x.shape[1] / BLOCK)):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        part = x[:, columns].float()
        scale = part.abs().amax(1, keepdim=True) / 448 if static is None else static.float().reshape(1, 1)
        rounded = (part / scale).clamp(-448, 448).to(FP8).float()
        by_row = scales[:, group].repeat_interleave(BLOCK)[: len(weight)]
        out += (rounded @ weight[:, columns].float().t()) * scale * by_row
    return out


def _compare(name: str, ours: torch.Tensor, right: torch.Tensor) -> None:
    """[T, O] each, block by block of rows."""
    errors = [
        float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float32).tiny))
        for a, b in zip(ours.split(BLOCK, 1), right.split(BLOCK, 1), strict=True)
    ]
    if not (worst := max(errors)) <= _TOLERANCE:
        raise UnsupportedModelError(
            f"a matmul in FP8 comes out wrong on {ours.device}: relative error {worst:.2g} (allowed: {_TOLERANCE:g}) "
            f"with the weight of {name}, {len(ours)} tokens"
        )

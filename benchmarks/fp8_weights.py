"""Linear layers and SwiGLU experts of a random model in fine-grained FP8, as published checkpoints have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from specdec.ops.fp8 import BLOCK, FP8, FP8_MAX


def quantise(model: PreTrainedModel) -> None:
    """Put an FP8Linear in place of every linear layer but the output embedding, and FP8Experts in place of experts, on
    the device where the weights are.

    Raises:
        ValueError: 128 does not divide a size.
    """
    output = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not output and module.out_features > 1:
            model.set_submodule(name, _quantised(module))
        elif name.endswith(".experts"):
            model.set_submodule(name, _quantised_experts(module))


def _quantised_experts(layer: Any) -> FP8Experts:
    with torch.device("meta"):
        new = FP8Experts(layer.config, (BLOCK, BLOCK))
    for name in ("gate_up_proj", "down_proj"):
        pairs = [_in_blocks(matrix) for matrix in getattr(layer, name)]
        setattr(new, name, nn.Parameter(torch.stack([weight for weight, _ in pairs]), requires_grad=False))
        scales = nn.Parameter(torch.stack([scale for _, scale in pairs]), requires_grad=False)
        setattr(new, f"{name}_scale_inv", scales)
        delattr(layer, name)
    return new.eval()


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, and the scales of its blocks."""
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{BLOCK} does not divide a weight of {rows} x {columns}")
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    return (blocks / scale[:, None, :, None]).to(FP8).view(rows, columns), scale


def _quantised(layer: nn.Linear) -> FP8Linear:
    rows, columns = layer.weight.shape
    weight, scale = _in_blocks(layer.weight)
    with torch.device("meta"):
        new = FP8Linear(columns, rows, (BLOCK, BLOCK), has_bias=layer.bias is not None)
    new.weight = nn.Parameter(weight, requires_grad=False)
    new.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    new.bias = layer.bias
    return new.eval()


def fp8_weights(model: nn.Module) -> tuple[int, int]:
    """Numbers of weights in 8 bits, and of their scales."""
    layers = [m for m in model.modules() if isinstance(m, FP8Linear)]
    return sum(m.weight.numel() for m in layers), sum(m.weight_scale_inv.numel() for m in layers)

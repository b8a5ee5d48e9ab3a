"""The linear layers of a random model in fine-grained FP8, as published checkpoints have them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Linear

from specdec.ops.fp8 import BLOCK, FP8, FP8_MAX


def quantise(model: PreTrainedModel) -> None:
    """Put an FP8Linear in place of every linear layer but the output embedding, on the device where the weights are.

    Raises:
        ValueError: there are experts, whose stacked weights this does not know, or sizes that 128 does not divide.
    """
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise ValueError("experts are not quantised here; take a dense shape")
    output = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not output:
            model.set_submodule(name, _quantised(module))


def _quantised(layer: nn.Linear) -> FP8Linear:
    rows, columns = layer.weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{BLOCK} does not divide a weight of {rows} x {columns}")
    blocks = layer.weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    weight = (blocks / scale[:, None, :, None]).to(FP8).view(rows, columns)
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

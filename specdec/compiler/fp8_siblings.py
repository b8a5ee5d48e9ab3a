"""A linear layer in FP8 whose weight and scales are slices of tensors that it shares with its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.ops.fp8 import BLOCK, fp8_linear
from specdec.wrapped.fp8 import Fp8Linear


class SiblingFp8Linear(Fp8Linear):
    """As `specdec.compiler.siblings.SiblingLinear`: the user's own module, of another class for a while.

    Attributes:
        fused_weight: [sum of widths, in_features] e4m3; fused_scale: of its blocks, float32; fused_bias: or None.
        rows: of the fused weight, the layer's own. holders: the engines whose compiled code reads it.
    """

    rows: slice
    fused_weight: torch.Tensor
    fused_scale: torch.Tensor
    fused_bias: torch.Tensor | None
    holders: set[object]

    @staticmethod
    def join(own: Fp8Linear, fused: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], start: int) -> None:
        """Make rows start … start + out_features of (weight, scale, bias) those of `own`, which holds these values.

        start is a multiple of 128, so that a block belongs to one layer.
        """
        sibling: Any = own
        sibling.__class__ = SiblingFp8Linear
        sibling.rows, sibling.holders = slice(start, start + own.out_features), set()
        sibling.fused_weight, sibling.fused_scale, sibling.fused_bias = fused
        for parameter, part in sibling._parts():
            parameter.data = part

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return fp8_linear(input, self.fused_weight, self.fused_scale, self.fused_bias)[..., self.rows]
        return super().forward(input)

    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter with its slice of the fused tensor."""
        blocks = slice(self.rows.start // BLOCK, -(-self.rows.stop // BLOCK))
        found: list[tuple[torch.Tensor, torch.Tensor]]
        found = [(self.weight, self.fused_weight[self.rows]), (self.weight_scale_inv, self.fused_scale[blocks])]
        if self.bias is not None and self.fused_bias is not None:
            found.append((self.bias, self.fused_bias[self.rows]))
        return found

    @property
    def is_stale(self) -> bool:
        """Whether its parameters no longer lie in the fused tensors."""
        return any(own.data_ptr() != part.data_ptr() or own.dtype != part.dtype for own, part in self._parts())

    def part(self) -> None:
        """Make it the `Fp8Linear` that it was, with its present values in memory of its own."""
        for own, part in self._parts():
            if own.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
                own.data = own.data.clone()
        del self.rows, self.fused_weight, self.fused_scale, self.fused_bias, self.holders
        plain: Any = self
        plain.__class__ = Fp8Linear


def fusible(layers: Sequence[Any]) -> bool:
    """Whether FP8 layers that read one tensor can be one matmul: all quantise it alike, and no block has two layers."""
    partial = [layer for layer in layers if layer.out_features % BLOCK]
    return len(partial) <= 1 and all(m.block_size is not None and m.activation_scale is None for m in layers)


def fuse(layers: Sequence[Any]) -> None:
    """Move their weights, scales and biases into one tensor each; a layer that ends inside a block comes last."""
    layers = sorted(layers, key=lambda layer: layer.out_features % BLOCK > 0)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    scale = torch.cat([layer.weight_scale_inv.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    for tensor in (weight, scale, bias):
        if tensor is not None:
            torch._dynamo.mark_static(tensor)
    start = 0
    for layer in layers:
        SiblingFp8Linear.join(layer, (weight, scale, bias), start)
        start += layer.out_features

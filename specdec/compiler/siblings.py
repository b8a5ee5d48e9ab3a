"""Sibling projections fused for compiled code, and parted again.

Projections that read the same input (q, k, v; gate, up) are one matmul when their weights lie in one tensor. Each
sibling stays a module of its own: in compiled code it asks for the whole fused matmul and takes its slice, and
`specdec.compiler.passes` leaves one of the equal matmuls. In eager code it is the linear layer it was, on a view. What
is done to the modules is registered with `specdec.wrapped.alterations`, and undone when the engine is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attention.hf.gate import gate_of
from attention.hf.patches import attention_configs
from attention.hf.weights import address_of, computes_plainly
from specdec.ops.fp8 import BLOCK, fp8_linear
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.fp8 import Fp8Linear


class SiblingLinear(nn.Linear):
    """A linear layer whose weight is a slice of a tensor it shares with its siblings.

    The user's own `nn.Linear` of another class for a while: the module and its parameters stay the same objects, so
    that hooks, optimisers and adapters keep what they hold; only the parameters' memory moves.

    Attributes:
        fused_weight: [sum of widths, in_features]; fused_bias: [sum of widths] or None.
        rows: of these two, the layer's own.
        holders: the engines whose compiled code reads it.
    """

    rows: slice
    fused_weight: torch.Tensor
    fused_bias: torch.Tensor | None
    holders: set[object]

    @staticmethod
    def join(own: nn.Linear, fused_weight: torch.Tensor, fused_bias: torch.Tensor | None, start: int) -> SiblingLinear:
        """Make rows start … start + out_features of fused_weight the weight of `own`, which holds these values."""
        rows = slice(start, start + own.out_features)
        own.weight.data = fused_weight[rows]
        if fused_bias is not None:
            own.bias.data = fused_bias[rows]
        sibling: Any = own
        sibling.__class__ = SiblingLinear
        sibling.rows, sibling.fused_weight, sibling.fused_bias = rows, fused_weight, fused_bias
        sibling.holders = set()
        return sibling

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return F.linear(input, self.fused_weight, self.fused_bias)[..., self.rows]
        return F.linear(input, self.weight, self.bias)

    @property
    def is_stale(self) -> bool:
        """Whether its parameters no longer lie in the fused tensors: the model was moved or got other parameters."""
        return any(
            fused is None or own.data_ptr() != fused[self.rows].data_ptr() or own.dtype != fused.dtype
            for own, fused in ((self.weight, self.fused_weight), (self.bias, self.fused_bias))
            if own is not None
        )

    def part(self) -> None:
        """Make it the `nn.Linear` that it was, with its present values in memory of its own."""
        for own, fused in ((self.weight, self.fused_weight), (self.bias, self.fused_bias)):
            if own is not None and fused is not None and _share_memory(own, fused):
                own.data = own.data.clone()
        del self.rows, self.fused_weight, self.fused_bias, self.holders
        plain: Any = self
        plain.__class__ = nn.Linear


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


def fp8_fusible(layers: Sequence[Any]) -> bool:
    """Whether FP8 layers that read one tensor can be one matmul: all quantise it alike, and no block has two layers."""
    partial = [layer for layer in layers if layer.out_features % BLOCK]
    return len(partial) <= 1 and all(m.block_size is not None and m.activation_scale is None for m in layers)


def fuse_fp8(layers: Sequence[Any]) -> None:
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


_SIBLINGS = (SiblingLinear, SiblingFp8Linear)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def fuse_siblings(root: nn.Module, run: Callable[[], object], alterations: Alterations) -> int:
    """Find linear layers of one parent that read the same tensor while `run` runs, and fuse their weights.

    Weights that belong to two modules (tied) are left alone. Layers that are fused already, for another engine, stay so
    until the last of these engines lets go; layers that were moved since are fused anew.

    Returns:
        The number of newly fused groups.
    """
    fused_before = [module for module in root.modules() if isinstance(module, _SIBLINGS)]
    for module in fused_before:
        if module.is_stale:
            module.part()
    count = _fuse_groups(root, run)
    siblings, holder = [module for module in root.modules() if isinstance(module, _SIBLINGS)], object()
    for module in siblings:
        module.holders.add(holder)
    alterations.on_undo(partial(_let_go, siblings, holder, attention_configs(root)))
    return count


def _let_go(siblings: list[SiblingLinear | SiblingFp8Linear], holder: object, configs: Sequence[Any]) -> None:
    """One engine less that reads them; without any they are what they were. No forward runs meanwhile."""
    with gate_of(configs[0] if configs else None).held(), torch.no_grad():
        for module in siblings:
            if isinstance(module, _SIBLINGS) and holder in module.holders:
                module.holders.remove(holder)
                if not module.holders:
                    module.part()


def _fuse_groups(root: nn.Module, run: Callable[[], object]) -> int:
    """Fuse what reads the same tensor while `run` runs; the number of groups."""
    ours = ((name, m) for name, m in root.named_modules() if type(m) is Fp8Linear or computes_plainly(m))
    names = {module: name for name, module in ours}
    owners = [address_of(p) for _, p in root.named_parameters(remove_duplicate=False)]
    readers: dict[tuple[str, int], list[str]] = {}
    kept: list[torch.Tensor] = []  # keeps the inputs alive, so that equal ids mean equal tensors

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        name = names[module]
        kept.append(args[0])
        readers.setdefault((name.rpartition(".")[0], id(args[0])), []).append(name)

    hooks = [module.register_forward_pre_hook(note) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups = {tuple(dict.fromkeys(group)) for group in readers.values()}
    fused = [group for group in groups if len(group) > 1 and _fusible(root, group, owners)]
    for group in fused:
        _fuse(root, group)
    return len(fused)


def _fusible(root: nn.Module, group: tuple[str, ...], owners: list[int]) -> bool:
    layers: list[Any] = [root.get_submodule(name) for name in group]
    kinds = {(type(layer), layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    if type(layers[0]) is Fp8Linear and not fp8_fusible(layers):
        return False
    whole = all(layer.weight.is_contiguous() for layer in layers)
    return whole and len(kinds) == 1 and all(owners.count(layer.weight.data_ptr()) == 1 for layer in layers)


def _fuse(root: nn.Module, group: tuple[str, ...]) -> None:
    layers: list[Any] = [root.get_submodule(name) for name in group]
    if type(layers[0]) is Fp8Linear:
        fuse_fp8(layers)
        return
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    for tensor in (weight, bias):
        if tensor is not None:  # no parameter, whose sizes the compiler takes as constants by itself
            torch._dynamo.mark_static(tensor)
    start = 0
    for layer in layers:
        SiblingLinear.join(layer, weight, bias, start)
        start += layer.out_features

"""Sibling projections fused for compiled code, and separated again.

Projections that read the same input (q, k, v; gate, up) are one matmul when their weights lie in one tensor. Each
sibling stays a separate module: in compiled code it computes the whole fused matmul and takes its slice, and
`specdec.compiler.passes` merges the equal matmuls into one. In eager code it is the linear layer it was, on a view.
Changes to the modules are registered with `specdec.wrapped.alterations`, and undone when the engine is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.hf.gate import gate_of
from attention.hf.patches import attention_configs
from attention.hf.weights import address_of, computes_plainly
from specdec.ops.fp8 import BLOCK, fp8_linear
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.quantised_layers import Fp8Linear


class _Sibling(nn.Module):
    """A layer whose parameters are slices of tensors that it shares with its siblings.

    The user's own module, temporarily of another class: the module and its parameters stay the same objects, so that
    hooks, optimisers and adapters keep their references; only the parameters' memory moves.

    Attributes:
        fused_weight: [sum of widths, in_features]; fused_bias: [sum of widths] or None.
        fused_scale: block scales of an FP8 layer's fused weight, float32; else None.
        rows: the layer's rows of the fused weight and bias.
        holders: the engines whose compiled code reads it.
        plain: the class that it has otherwise.
    """

    plain: ClassVar[type[nn.Module]]
    rows: slice
    fused_weight: Tensor
    fused_bias: Tensor | None
    fused_scale: Any
    holders: set[object]

    @classmethod
    def join(
        cls,
        own: Any,
        fused_weight: Tensor,
        fused_bias: Tensor | None,
        start: int,
        fused_scale: Tensor | None = None,
    ) -> None:
        """Make `own` a view of rows start … start + out_features of the fused tensors, which hold its values."""
        own.__class__ = cls
        own.rows = slice(start, start + own.out_features)
        own.holders = set()
        own.fused_weight = fused_weight
        own.fused_bias = fused_bias
        own.fused_scale = fused_scale
        for parameter, part in own.parts():
            parameter.data = part

    def parts(self) -> list[tuple[Any, Tensor]]:
        """Each parameter with its slice of the fused tensor."""
        pairs = ((self.weight, self.fused_weight), (self.bias, self.fused_bias))
        return [(own, fused[self.rows]) for own, fused in pairs if own is not None and fused is not None]

    @property
    def is_stale(self) -> bool:
        """Whether its parameters no longer lie in the fused tensors: the model was moved or got other parameters."""
        moved = any(own.data_ptr() != part.data_ptr() or own.dtype != part.dtype for own, part in self.parts())
        return moved or (self.bias is not None and self.fused_bias is None)

    def part(self) -> None:
        """Make it a plain layer again, with its current values in separate memory."""
        for own, part in self.parts():
            # Otherwise the model was moved or got other parameters, which lie in separate memory already.
            if own.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
                own.data = own.data.clone()
        del self.rows, self.holders, self.fused_weight, self.fused_bias, self.fused_scale
        layer: Any = self
        layer.__class__ = self.plain


class SiblingLinear(_Sibling, nn.Linear):
    """A linear layer whose weight is a slice of a tensor that it shares with its siblings."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return F.linear(input, self.fused_weight, self.fused_bias)[..., self.rows]
        return F.linear(input, self.weight, self.bias)


class SiblingFp8Linear(_Sibling, Fp8Linear):
    """As `SiblingLinear`, in FP8: fused_weight is e4m3, and rows begin at a multiple of 128, so no block is shared."""

    plain = Fp8Linear

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return fp8_linear(input, self.fused_weight, self.fused_scale, self.fused_bias)[..., self.rows]
        return super().forward(input)

    def parts(self) -> list[tuple[Any, Tensor]]:
        """Each parameter with its slice of the fused tensor."""
        blocks = slice(self.rows.start // BLOCK, -(-self.rows.stop // BLOCK))
        return [*super().parts(), (self.weight_scale_inv, self.fused_scale[blocks])]


def fp8_fusible(layers: Sequence[Any]) -> bool:
    """Whether FP8 layers that read one tensor can be one matmul: all quantise it alike, and no block has two layers."""
    partial = [layer for layer in layers if layer.out_features % BLOCK]
    return len(partial) <= 1 and all(m.block_size is not None and m.activation_scale is None for m in layers)


def fuse_siblings(root: nn.Module, run: Callable[[], object], alterations: Alterations) -> int:
    """Find linear layers of one parent that read one tensor while `run` runs, fuse their weights, count new groups.

    Weights that belong to two modules (tied) are left alone. Layers that are fused already, for another engine, stay so
    until the last of these engines releases them; layers that were moved since are fused again.
    """
    fused_before = [module for module in root.modules() if isinstance(module, _Sibling)]
    for module in fused_before:
        if module.is_stale:
            module.part()
    count = _fuse_groups(root, run)
    siblings = [module for module in root.modules() if isinstance(module, _Sibling)]
    holder = object()
    for module in siblings:
        module.holders.add(holder)
    alterations.on_undo(partial(_let_go, siblings, holder, attention_configs(root)))
    return count


def _let_go(siblings: list[_Sibling], holder: object, configs: Sequence[Any]) -> None:
    """Unregister one engine; after the last, they are plain layers again. No forward runs meanwhile."""
    with gate_of(configs[0] if configs else None).held(), torch.no_grad():
        for module in siblings:
            if isinstance(module, _Sibling) and holder in module.holders:
                module.holders.remove(holder)
                if not module.holders:
                    module.part()


def _fuse_groups(root: nn.Module, run: Callable[[], object]) -> int:
    """Fuse layers that read the same tensor during `run`; returns the number of groups."""
    ours = ((name, m) for name, m in root.named_modules() if type(m) is Fp8Linear or computes_plainly(m))
    names = {module: name for name, module in ours}
    owners = [address_of(p) for _, p in root.named_parameters(remove_duplicate=False)]
    readers: dict[tuple[str, int], list[str]] = {}
    kept = []  # keeps the inputs alive, so that equal ids mean equal tensors

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
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
    found = [[root.get_submodule(name) for name in group] for group in groups if len(group) > 1]
    fused = [layers for layers in found if _fusible(layers, owners)]
    for layers in fused:
        _fuse(layers)
    return len(fused)


def _fusible(layers: list[Any], owners: list[int]) -> bool:
    kinds = {(type(layer), layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    if type(layers[0]) is Fp8Linear and not fp8_fusible(layers):
        return False
    whole = all(layer.weight.is_contiguous() for layer in layers)
    return whole and len(kinds) == 1 and all(owners.count(layer.weight.data_ptr()) == 1 for layer in layers)


def _fuse(layers: list[Any]) -> None:
    """Move weights, scales and biases of layers into one tensor each."""
    kind: type[_Sibling] = SiblingLinear
    if type(layers[0]) is Fp8Linear:
        kind = SiblingFp8Linear
        layers.sort(key=lambda layer: layer.out_features % BLOCK > 0)  # one that ends inside a block comes last
    fused = {}
    for name in ("weight", "bias", "weight_scale_inv"):
        if getattr(layers[0], name, None) is not None:
            fused[name] = torch.cat([getattr(layer, name).detach() for layer in layers])
            torch._dynamo.mark_static(fused[name])  # the compiler does it for parameters
    start = 0
    for layer in layers:
        kind.join(layer, fused["weight"], fused.get("bias"), start, fused.get("weight_scale_inv"))
        start += layer.out_features

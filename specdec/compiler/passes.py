"""Rewrites of the compiler's graph of a model before it generates kernels.

Patterns are found by their form and replaced by an equivalent operator; code of another form stays.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from attention.backends.limits import HALF
from specdec.compiler.fp8_passes import quantise_at_once
from specdec.compiler.router_passes import choose_at_once
from specdec.errors import UnsupportedModelError
from specdec.ops.elementwise import (  # noqa: F401 (registers the operators)
    add_rms_norm,
    rms_norm,
    rotated,
    rotated_together,
    silu_product,
)
from specdec.ops.linear import few_tokens_linear, invariant_linear  # noqa: F401 (registers the operators)
from specdec.wrapped.group import GRAPH_PASSES

_SHAPE_OPS = ("view", "reshape", "_unsafe_view", "permute", "t", "transpose", "unsqueeze", "squeeze", "expand")
_MATMULS = ("mm", "addmm", "fp8_quantise", "fp8_quantise_by", "fp8_matmul")
aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_ATEN_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class Rewriting(torch._inductor.custom_graph_pass.CustomGraphPass):
    """Equal matmuls become one; matmuls with a weight, norms, rotary embeddings, gated activations and routers' choices
    become operators with kernels, which quantise results that only FP8 layers read."""

    def __init__(self, batch_invariant: bool = False) -> None:
        """batch_invariant: matmuls with a weight must give a token the same bits in any batch."""
        self._batch_invariant = batch_invariant

    def __call__(self, graph: Graph) -> None:
        """Rewrite the compiler's graph."""
        # Equal matmuls are merged first, while they are matmuls: siblings compute the whole fused one each. Quantising
        # is fused last, into the operators that the other rewritings make.
        for each in GRAPH_PASSES:
            each(graph)
        leave_one_matmul(graph)
        (sum_alike if self._batch_invariant else read_weights_once)(graph)
        norm_at_once(graph)
        rotate_at_once(graph)
        rotate_joined_at_once(graph)
        gate_at_once(graph)
        choose_at_once(graph)
        quantise_at_once(graph)

    def uuid(self) -> str:
        """Part of the compiler cache's key."""
        # Change a number with every change of a rewriting: the compiler would reuse cached code of the old one.
        return f"specdec-rewriting-6{'-batch-invariant' if self._batch_invariant else ''}-fp8-1"


def leave_one_matmul(graph: Graph) -> None:
    """Common-subexpression elimination of matmuls and of the reshapes around them; inference graphs get none."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        taken = node.target is operator.getitem or getattr(packet, "__name__", "") in _SHAPE_OPS + _MATMULS
        if node.op != "call_function" or not taken:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def read_weights_once(graph: Graph) -> None:
    """Every mm of a matrix [T, I] with a transposed input [O, I] of the graph becomes `few_tokens_linear`."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default and (weight := _transposed_input(node.args[1])):
            _replace(graph, node, torch.ops.specdec.few_tokens_linear, (node.args[0], weight))


def sum_alike(graph: Graph) -> None:
    """Every matmul of [T, I] with a transposed input [O, I], with or without a bias [O], becomes `invariant_linear`.

    Raises:
        UnsupportedModelError: the graph has a matmul of another form, or not in half precision.
    """
    for node in list(graph.nodes):
        if node.target not in _ATEN_MATMULS or _sums_nothing(node):
            continue
        if (args := _matmul_with_weight(node)) is None:
            sizes = (f"{list(_shape(arg))} {_dtype(arg)}" for arg in node.args if _shape(arg))
            raise UnsupportedModelError(f"not batch-invariant: a matmul {node.target} of {' and '.join(sizes)}")
        _replace(graph, node, torch.ops.specdec.invariant_linear, args)


def _matmul_with_weight(node: Node) -> tuple[Any, Any, Any] | None:
    """(x, weight, bias or None) of x · weightᵀ + bias in half precision, when `node` is one."""
    if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    *biases, x, transposed = node.args
    weight, bias = _transposed_input(transposed), biases[0] if biases else None
    if weight is None or _dtype(x) not in HALF or (bias is not None and _shape(bias) != _shape(weight)[:1]):
        return None
    return x, weight, bias


def _sums_nothing(node: Node) -> bool:
    """Whether each result of a matmul is one term, as in rotary frequencies times positions."""
    return not node.kwargs and len(node.args) == 2 and _shape(node.args[0])[-1:] == (1,)


def _replace(graph: Graph, node: Node, packet: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        new = _call(graph, packet, args)
    new.meta.update(node.meta)  # shapes and dtypes, which the later rewritings read
    node.replace_all_uses_with(new)
    _erase(graph, node)


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node without users and nodes that only it has read; the compiler computes even unread concatenations."""
    if not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for each in inputs:
            _erase(graph, each)


def norm_at_once(graph: Graph) -> None:
    """Every RMS norm of hidden states [1, T, H] becomes `rms_norm`, or `add_rms_norm` where its input is a sum."""
    for node in list(graph.nodes):
        norm = _norm_around(node)
        if norm is None:
            continue
        total = norm.x
        if _is(total, aten.add.Tensor) and not total.kwargs and all(_alike(arg, total) for arg in total.args):
            with graph.inserting_before(total):
                both = _call(graph, torch.ops.specdec.add_rms_norm, (*total.args, norm.weight, norm.eps))
                new_total, normed = _results(graph, both, (total, norm.out))
            total.replace_all_uses_with(new_total)
        else:
            with graph.inserting_before(norm.out):
                normed = _call(graph, torch.ops.specdec.rms_norm, (total, norm.weight, norm.eps))
            normed.meta.update(norm.out.meta)
        norm.out.replace_all_uses_with(normed)


@dataclass(frozen=True)
class _Norm:
    """x [1, T, H] and weight [H], an input of the graph; `out` is the norm's result. All but eps are nodes."""

    x: Any
    weight: Any
    eps: float
    out: Any


def _norm_around(rsqrt: Any) -> _Norm | None:
    """The norm in half precision around a reciprocal square root: weight · half(float(x) · rsqrt(mean(x²) + eps))."""
    if not _is(rsqrt, aten.rsqrt.default) or not _is(shifted := rsqrt.args[0], aten.add.Tensor):
        return None
    mean, eps = shifted.args
    if not isinstance(eps, float) or not _is(mean, aten.mean.dim) or mean.args[1:] not in (([-1], True), ([2], True)):
        return None
    if shifted.kwargs or mean.kwargs:
        return None
    square = mean.args[0]
    if not _is(square, aten.pow.Tensor_Scalar) or square.args[1] != 2 or not _is(wide := square.args[0], convert):
        return None
    # Only users: a second reader of an inner value would need it computed as well, and nothing would be saved.
    scaled = _only_user(rsqrt, aten.mul.Tensor)
    if scaled is None or set(scaled.args) != {wide, rsqrt} or (half := _only_user(scaled, convert)) is None:
        return None
    out, (x, wide_dtype) = _only_user(half, aten.mul.Tensor), wide.args
    if out is None or half.args[1] != _dtype(x) or _dtype(x) not in HALF or wide_dtype != torch.float32:
        return None
    weight = next((arg for arg in out.args if isinstance(arg, Node) and arg is not half), None)
    if weight is None or weight.op != "placeholder" or _dtype(weight) != _dtype(x):
        return None
    shape = _shape(x)
    return _Norm(x, weight, eps, out) if len(shape) == 3 and shape[0] == 1 and _shape(weight) == shape[2:] else None


def rotate_at_once(graph: Graph) -> None:
    """The rotary embeddings of a query and a key [1, heads, T, D] with the same cos and sin become one `rotated`."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting: dict[tuple[Node, Node], _Rotation] = {}
    # Queries and keys come in one order in every model: the first rotation with these cos and sin waits for the second.
    for node in list(graph.nodes):
        key = _rotation_at(node)
        if key is None:
            continue
        query = waiting.pop((key.cos, key.sin), None)
        if query is None or _needs(key.x, query.out, place):
            waiting[key.cos, key.sin] = key
            continue
        with graph.inserting_before(key.out):
            both = _call(graph, torch.ops.specdec.rotated, (query.x, key.x, key.cos, key.sin))
            results = _results(graph, both, (query.out, key.out))
        place |= dict.fromkeys((both, *results), place[key.out])
        for rotation, result in zip((query, key), results, strict=True):
            rotation.out.replace_all_uses_with(result)
    stable_topological_sort(graph)  # a reader of the rotated query may come before the key in the old order


def rotate_joined_at_once(graph: Graph) -> None:
    """The rotary embedding of cat(query, key) [T, heads, D] in float32, as draft heads write it: one operator."""
    for node in list(graph.nodes):
        args = _joined_rotation_at(node)
        if args is not None:
            _replace(graph, node, torch.ops.specdec.rotated_together, args)


def _joined_rotation_at(out: Any) -> tuple[Any, Any, Any, Any] | None:
    """Query, key [T, heads, D], cos and sin [T, 1, D/2] float32, when `out` rotates both in one tensor.

    half(cat(x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)) of the halves x₁, x₂ of x = float(cat(query, key)).
    """
    if not _is(out, convert) or _dtype(out) not in HALF or not _is_cat(out.args[0], -1):
        return None
    low, high = out.args[0].args[0]
    if not _is(low, aten.sub.Tensor) or not _is(high, aten.add.Tensor) or low.kwargs or high.kwargs:
        return None
    if not all(_is(arg, aten.mul.Tensor) for arg in (*low.args, *high.args)):
        return None
    (first, cos), (second, sin) = (arg.args for arg in low.args)
    if [arg.args for arg in high.args] != [(second, cos), (first, sin)]:
        return None
    joined = _halved(first, second)
    if not _is_cat(joined, 1) or len(shape := _shape(joined)) != 3:
        return None
    query, key = joined.args[0]
    if any(_dtype(node) != _dtype(out) for node in (query, key)):
        return None
    wanted = (shape[0], 1, shape[2] // 2)
    fits = all(_shape(node) == wanted and _dtype(node) == torch.float32 for node in (cos, sin))
    return (query, key, cos, sin) if fits else None


def _halved(first: Any, second: Any) -> Any:
    """x, when the two are the halves of float(x) [T, heads, D] along its last dimension."""
    if not all(_is(part, operator.getitem) for part in (first, second)):
        return None
    (parts, zero), (other, one) = first.args, second.args
    if parts is not other or (zero, one) != (0, 1) or not _is(parts, aten.split.Tensor) or parts.args[2:] != (-1,):
        return None
    wide, size = parts.args[:2]
    if not _is(wide, convert) or wide.args[1] != torch.float32 or 2 * size != _shape(wide)[-1]:
        return None
    return wide.args[0]


def _is_cat(node: Any, dim: int) -> bool:
    """Whether `node` is two tensors side by side."""
    return _is(node, aten.cat.default) and node.args[1:] == (dim,) and len(node.args[0]) == 2


def gate_at_once(graph: Graph) -> None:
    """Every silu(gate) · up of [T, F] or [1, T, F] in half precision becomes `silu_product`."""
    for node in list(graph.nodes):
        args = _gated_at(node)
        if args is not None:
            _replace(graph, node, torch.ops.specdec.silu_product, args)


def _gated_at(out: Any) -> tuple[Node, Any] | None:
    """gate and up, when `out` is half(silu(float(gate))) · up."""
    if not _is(out, aten.mul.Tensor) or out.kwargs:
        return None
    shape = _shape(out)
    if len(shape) != 2 and (len(shape) != 3 or shape[0] != 1):
        return None
    for activated, up in (out.args, out.args[::-1]):
        gate = _silu_of(activated)
        if gate is not None and _alike(gate, out) and _alike(up, out):
            return gate, up
    return None


def _silu_of(half: Any) -> Any:
    """x in half precision, when `half` is half(x / (exp(-x) + 1)), computed in float32; else None."""
    if not _is(half, convert) or _dtype(half) not in HALF or not _is(half.args[0], aten.div.Tensor):
        return None
    wide, shifted = half.args[0].args
    if half.args[0].kwargs or not _is(wide, convert) or wide.args[1] != torch.float32:
        return None
    if not _is(shifted, aten.add.Tensor) or shifted.kwargs or shifted.args[1] != 1:
        return None
    grown = shifted.args[0]
    is_exp = _is(grown, aten.exp.default) and _is(grown.args[0], aten.neg.default) and grown.args[0].args[0] is wide
    return wide.args[0] if is_exp else None


def _needs(node: Node, other: Node, place: dict[Node, int]) -> bool:
    """Whether `node` is computed from `other`."""
    found, stack = {node}, [node]
    while stack:
        if (current := stack.pop()) is other:
            return True
        new = {arg for arg in current.all_input_nodes if place[arg] >= place[other]} - found
        found |= new
        stack += new
    return False


@dataclass(frozen=True)
class _Rotation:
    """Nodes: x [1, heads, T, D], cos and sin [1, 1, T, D]; `out` is x rotated."""

    x: Any
    cos: Any
    sin: Any
    out: Any


def _rotation_at(out: Any) -> _Rotation | None:
    """x · cos + cat(-x₂, x₁) · sin in half precision, when `out` is one."""
    if not _is(out, aten.add.Tensor) or out.kwargs or not all(_is(arg, aten.mul.Tensor) for arg in out.args):
        return None
    (x, cos), (half_rotated, sin) = (arg.args for arg in out.args)
    if _dtype(x) not in HALF or any(_dtype(node) != _dtype(x) for node in (cos, half_rotated, sin)):
        return None
    shape = _shape(x)
    if len(shape) != 4 or shape[0] != 1 or not _is_rotate_half(half_rotated, x, shape[3]):
        return None
    wanted = (1, 1, shape[2], shape[3])
    return _Rotation(x, cos, sin, out) if _shape(cos) == wanted == _shape(sin) else None


def _is_rotate_half(node: Any, x: Any, dim: Any) -> bool:
    """Whether `node` is rotate_half of x: cat(-second half of x, first half of x)."""
    if not _is(node, aten.cat.default) or node.args[1:] not in ((-1,), (3,)) or len(node.args[0]) != 2:
        return False
    negated, first = node.args[0]
    if not _is(negated, aten.neg.default) or not _is(first, aten.slice.Tensor):
        return False
    second, half = negated.args[0], dim // 2
    return (
        _is(second, aten.slice.Tensor)
        and dim == 2 * half
        and first.args == (x, 3, 0, half)
        and second.args in ((x, 3, half), (x, 3, half, dim), (x, 3, half, sys.maxsize))
    )


def _call(graph: Graph, packet: Any, args: tuple[Any, ...]) -> Node:
    return graph.call_function(packet.default, args)


def _results(graph: Graph, node: Node, old: tuple[Node, ...]) -> list[Node]:
    """The results of `node`, which replace `old`."""
    node.meta["val"] = tuple(_value(o) for o in old)
    results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(old))]
    for result, o in zip(results, old, strict=True):
        result.meta.update(o.meta)
    return results


def _is(node: Any, target: Callable[..., Any]) -> bool:
    return isinstance(node, Node) and node.target is target


def _only_user(node: Any, target: Callable[..., Any]) -> Any:
    users = list(node.users)
    return users[0] if len(users) == 1 and _is(users[0], target) else None


def _value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node's result; None for anything that is no node or has no tensor as its result."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _dtype(node: Any) -> torch.dtype | None:
    value = _value(node)
    return None if value is None else value.dtype


def _shape(node: Any) -> tuple[Any, ...]:
    value = _value(node)
    return () if value is None else tuple(value.shape)


def _alike(node: Any, other: Node) -> bool:
    return _dtype(node) == _dtype(other) and _shape(node) == _shape(other)


def _transposed_input(node: Any) -> Node | None:
    """The graph's input [O, I] that `node` transposes; None when it is something else."""
    if node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0]):
        source = node.args[0]
        return source if isinstance(source, Node) and source.op == "placeholder" else None
    return None


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return value

"""Rewrites of the compiler's graph of a model before it generates kernels.

Patterns are found by their form and replaced by an equivalent operator; code of another form stays.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from attention.backends.limits import HALF
from specdec.compiler.patterns import (
    Call,
    alike,
    aten,
    call_of_many,
    calls,
    convert,
    dtype_of,
    erase,
    match,
    replace,
    results_at,
    shape_of,
    value_at,
)
from specdec.errors import UnsupportedModelError
from specdec.ops.elementwise import (  # noqa: F401 (registers the operators)
    add_rms_norm,
    rms_norm,
    rotated,
    rotated_together,
    silu_product,
)
from specdec.ops.fp8 import add_rms_norm_fp8, rms_norm_fp8, silu_product_fp8  # noqa: F401 (registers them)
from specdec.ops.linear import few_tokens_linear, invariant_linear  # noqa: F401 (registers the operators)
from specdec.ops.mixtures.routed import MOST_EXPERTS, SOFTMAX, SUM, best_experts  # noqa: F401 (registers it)
from specdec.wrapped.group import GRAPH_PASSES

_OURS = torch.ops.specdec
_SHAPE_OPS = ("view", "reshape", "_unsafe_view", "permute", "t", "transpose", "unsqueeze", "squeeze", "expand")
_MATMULS = ("mm", "addmm", "fp8_quantise", "fp8_quantise_by", "fp8_matmul")
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
        return f"specdec-rewriting-8{'-batch-invariant' if self._batch_invariant else ''}-fp8-2"


def leave_one_matmul(graph: Graph) -> None:
    """Common-subexpression elimination of matmuls and of the reshapes around them; inference graphs get none."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        taken = node.target is operator.getitem or getattr(packet, "__name__", "") in _SHAPE_OPS + _MATMULS
        if node.op != "call_function" or not taken:
            continue
        key = (node.target, repr((node.args, node.kwargs)))  # which has the unique names of other nodes
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def read_weights_once(graph: Graph) -> None:
    """Every mm of a matrix [T, I] with a transposed input [O, I] of the graph becomes `few_tokens_linear`."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default and (weight := _transposed_input(node.args[1])):
            replace(graph, node, _OURS.few_tokens_linear, (node.args[0], weight))


def sum_alike(graph: Graph) -> None:
    """Every matmul of [T, I] with a transposed input [O, I], with or without a bias [O], becomes `invariant_linear`.

    Raises:
        UnsupportedModelError: the graph has a matmul of another form, or in another dtype.
    """
    for node in list(graph.nodes):
        if node.target not in _ATEN_MATMULS:
            continue
        if not node.kwargs and len(node.args) == 2 and shape_of(node.args[0])[-1:] == (1,):
            continue  # each result is one term, as of rotary frequencies times positions
        if (args := _matmul_with_weight(node)) is None:
            sizes = (f"{list(shape_of(arg))} {dtype_of(arg)}" for arg in node.args if shape_of(arg))
            raise UnsupportedModelError(f"not batch-invariant: a matmul {node.target} of {' and '.join(sizes)}")
        replace(graph, node, _OURS.invariant_linear, args)


def _matmul_with_weight(node: Node) -> tuple[Any, Any, Any] | None:
    """(x, weight, bias or None) of x · weightᵀ + bias in half precision or float32, when `node` is one."""
    if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    *biases, x, transposed = node.args
    weight = _transposed(transposed)
    bias = biases[0] if biases else None
    if weight is None or dtype_of(x) not in (*HALF, torch.float32):
        return None
    if bias is not None and shape_of(bias) != shape_of(weight)[:1]:
        return None
    return x, weight, bias


def _times(one: Any, other: Any) -> Call:
    return Call(aten.mul.Tensor, (one, other))


_WIDE = Call(convert, ("x", torch.float32), name="wide")
_MEAN = Call(aten.mean.dim, (Call(aten.pow.Tensor_Scalar, (_WIDE, 2)), lambda dims: dims in ([-1], [2]), True))
# Only readers: a second reader of an inner value would need it computed as well, and nothing would be saved.
_RSQRT = Call(aten.rsqrt.default, (Call(aten.add.Tensor, (_MEAN, "eps")),), readers=1)
_SCALED = Call(convert, (Call(aten.mul.Tensor, (_WIDE, _RSQRT), readers=1), "dtype"), readers=1)
_NORM = _times("weight", _SCALED)


def norm_at_once(graph: Graph) -> None:
    """Every RMS norm of hidden states [1, T, H] becomes `rms_norm`, or `add_rms_norm` where its input is a sum.

    A norm in half precision: weight · half(float(x) · rsqrt(mean(x²) + eps)), with a weight [H] that is an input.
    """
    for node in list(graph.nodes):
        norm = match(_NORM, node)
        if norm is None or not _is_of_hidden_states(**norm):
            continue
        total = norm["x"]
        others = (norm["weight"], norm["eps"])
        if not calls(total, aten.add.Tensor) or total.kwargs or not all(alike(arg, total) for arg in total.args):
            replace(graph, node, _OURS.rms_norm, (total, *others))
            continue
        with graph.inserting_before(total):
            args = (*total.args, *others)
            values = (value_at(total), value_at(node))
            new_total, normed = call_of_many(graph, _OURS.add_rms_norm, args, values)
        total.replace_all_uses_with(new_total)
        node.replace_all_uses_with(normed)


def _is_of_hidden_states(x: Any, weight: Any, eps: Any, dtype: Any, wide: Any) -> bool:
    shape = shape_of(x)
    half = dtype in HALF and dtype == dtype_of(x) == dtype_of(weight)
    given = isinstance(eps, float) and isinstance(weight, Node) and weight.op == "placeholder"
    return half and given and len(shape) == 3 and shape[0] == 1 and shape_of(weight) == shape[2:]


# x · cos + cat(-x₂, x₁) · sin of the halves x₁, x₂ of x.
_HALVES = [Call(aten.neg.default, ("second",)), Call(aten.slice.Tensor, ("x", 3, 0, "half"))]
_TURNED = Call(aten.cat.default, (_HALVES, lambda dim: dim in (-1, 3)), name="turned")
_ROTATION = Call(aten.add.Tensor, (_times("x", "cos"), _times(_TURNED, "sin")))


def rotate_at_once(graph: Graph) -> None:
    """The rotary embeddings of a query and a key [1, heads, T, D] with the same cos and sin become one `rotated`."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting: dict[tuple[Node, Node], tuple[Node, Node]] = {}
    # Queries and keys come in one order in every model: the first rotation with these cos and sin waits for the second.
    for node in list(graph.nodes):
        found = match(_ROTATION, node)
        if found is None or not _is_of_heads(**found):
            continue
        x = found["x"]
        cos = found["cos"]
        sin = found["sin"]
        query, rotated_query = waiting.pop((cos, sin), (None, node))
        if query is None or _needs(x, rotated_query, place):
            waiting[cos, sin] = x, node
            continue
        with graph.inserting_before(node):
            values = value_at(rotated_query), value_at(node)
            results = call_of_many(graph, _OURS.rotated, (query, x, cos, sin), values)
        place |= dict.fromkeys((results[0].args[0], *results), place[node])
        for old, result in zip((rotated_query, node), results, strict=True):
            old.replace_all_uses_with(result)
    stable_topological_sort(graph)  # a reader of the rotated query may come before the key in the old order


def _is_of_heads(x: Any, cos: Any, sin: Any, turned: Any, second: Any, half: Any) -> bool:
    shape = shape_of(x)
    if dtype_of(x) not in HALF or any(dtype_of(node) != dtype_of(x) for node in (cos, turned, sin)):
        return False
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 2 * half or not calls(second, aten.slice.Tensor):
        return False
    to_the_end = second.args in ((x, 3, half), (x, 3, half, 2 * half), (x, 3, half, sys.maxsize))
    return to_the_end and shape_of(cos) == (1, 1, shape[2], shape[3]) == shape_of(sin)


# half(cat(x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)) of the halves x₁, x₂ of x = float(cat(query, key)).
_JOINED = Call(aten.cat.default, (["query", "key"], 1), name="joined")
_PARTS = Call(aten.split.Tensor, (Call(convert, (_JOINED, torch.float32)), "half", -1), name="parts")
_FIRST, _SECOND = (Call(operator.getitem, (_PARTS, i)) for i in (0, 1))
_LOW = Call(aten.sub.Tensor, (_times(_FIRST, "cos"), _times(_SECOND, "sin")))
_HIGH = Call(aten.add.Tensor, (_times(_SECOND, "cos"), _times(_FIRST, "sin")))
_JOINED_ROTATION = Call(convert, (Call(aten.cat.default, ([_LOW, _HIGH], -1)), "dtype"))


def rotate_joined_at_once(graph: Graph) -> None:
    """The rotary embedding of cat(query, key) [T, heads, D] in float32, as draft heads write it: one operator."""
    for node in list(graph.nodes):
        found = match(_JOINED_ROTATION, node)
        if found is not None and _is_joined(**found):
            args = tuple(found[name] for name in ("query", "key", "cos", "sin"))
            replace(graph, node, _OURS.rotated_together, args)


def _is_joined(query: Any, key: Any, cos: Any, sin: Any, joined: Any, half: Any, dtype: Any, parts: Any) -> bool:
    shape = shape_of(joined)
    if dtype not in HALF or any(dtype_of(node) != dtype for node in (query, key)):
        return False
    wanted = (shape[0], 1, half) if len(shape) == 3 and shape[2] == 2 * half else None
    return all(shape_of(node) == wanted and dtype_of(node) == torch.float32 for node in (cos, sin))


_GATE = Call(convert, ("gate", torch.float32), name="wide")
_GROWN = Call(aten.exp.default, (Call(aten.neg.default, (_GATE,)),))
_SILU = Call(convert, (Call(aten.div.Tensor, (_GATE, Call(aten.add.Tensor, (_GROWN, 1)))), "dtype"))
_GATED = _times(_SILU, "up")


def gate_at_once(graph: Graph) -> None:
    """Every silu(gate) · up of [T, F] or [1, T, F] in half precision becomes `silu_product`."""
    for node in list(graph.nodes):
        found = match(_GATED, node)
        if found is None or dtype_of(node) not in HALF or not _is_one_row_of_tokens(node):
            continue
        if alike(found["gate"], node) and alike(found["up"], node):
            replace(graph, node, _OURS.silu_product, (found["gate"], found["up"]))


def _needs(node: Node, other: Node, place: dict[Node, int]) -> bool:
    """Whether `node` is computed from `other`."""
    found = {node}
    stack = [node]
    while stack:
        if (current := stack.pop()) is other:
            return True
        new = {arg for arg in current.all_input_nodes if place[arg] >= place[other]} - found
        found |= new
        stack += new
    return False


_MOST_CHOSEN = 32
_COMPUTED = (torch.float32, *HALF)
"""Scores that float32, in which the operator compares, holds as they are."""


def _is_last(dims: Any) -> bool:
    return dims in ([-1], [1])


def _divided(x: Call) -> Call:
    """x / its sum along the last axis; x is read by nothing else."""
    return Call(aten.div.Tensor, (x, Call(aten.sum.dim_IntList, (x, _is_last, True), readers=1)))


def _softened(x: Any) -> Call:
    """softmax(x) along the last axis, as the compiler writes it."""
    shifted = Call(aten.sub.Tensor, (x, Call(aten.amax.default, (x, _is_last, True), readers=1)), readers=1)
    return _divided(Call(aten.exp.default, (shifted,), name="grown", readers=2))


_WIDE_CHOSEN = Call(convert, (Call(operator.getitem, ("top", 0), readers=1), torch.float32), name="wide", readers=2)
_CHOSEN = Call(operator.getitem, ("top", 0), name="chosen", readers=2)
_WEIGHTS = ((_divided(_CHOSEN), SUM), (_softened(_WIDE_CHOSEN), SOFTMAX), (_softened(_CHOSEN), SOFTMAX))
"""How the chosen experts' scores are normalised, if nothing else reads them."""
_SCORES = _softened("x")


def choose_at_once(graph: Graph) -> None:
    """Every top-k of scores [T, E] of so few experts becomes `best_experts`."""
    normalised = {}
    for node in graph.nodes:
        for pattern, normalise in _WEIGHTS if calls(node, aten.div.Tensor) else ():
            if found := match(pattern, node):
                cast = next(iter(node.users), None) if len(node.users) == 1 else None
                normalised[found["top"]] = (cast if cast is not None and calls(cast, convert) else node), normalise
    for top in [node for node in graph.nodes if node.target is aten.topk.default and _is_choice(node)]:
        last, normalise = normalised.get(top, (None, ""))
        scores: Any = top.args[0]
        softmax = match(_SCORES, scores) if len(scores.users) == 1 and dtype_of(scores) == torch.float32 else None
        if softmax is not None:
            scores = softmax["x"]
            scores = scores.args[0] if calls(scores, convert) else scores
        value, places = top.meta["val"]
        value = value if last is None else last.meta["val"]
        args = (scores, top.args[1], softmax is not None, normalise, value.dtype)
        with graph.inserting_before(top.next):
            weight, place = call_of_many(graph, _OURS.best_experts, args, (value, places))
        for old in results_at(top, 1):
            old.replace_all_uses_with(place)
        for old in results_at(top, 0) if last is None else [last]:
            old.replace_all_uses_with(weight)
        graph.eliminate_dead_code()


def _is_choice(node: Node) -> bool:
    value = value_at(node.args[0])
    if value is None or value.dim() != 2 or value.dtype not in _COMPUTED or node.kwargs:
        return False
    experts = value.shape[1]
    (chosen, *others) = node.args[1:]
    few = isinstance(experts, int) and experts <= MOST_EXPERTS and isinstance(chosen, int) and chosen <= _MOST_CHOSEN
    return few and tuple(others) in ((), (-1,), (1,), (-1, True), (1, True), (-1, True, True), (1, True, True))


_VIEWS = (aten.view.default, aten.reshape.default)
_IN_8_BITS: dict[Any, Any] = {
    _OURS.rms_norm.default: _OURS.rms_norm_fp8,
    _OURS.silu_product.default: _OURS.silu_product_fp8,
    _OURS.add_rms_norm.default: _OURS.add_rms_norm_fp8,
}


def quantise_at_once(graph: Graph) -> None:
    """Fuse `fp8_quantise` with the norm or gated activation whose result it alone reads.

    Run after the other rewritings, which leave one `fp8_quantise` for all layers that read a tensor.
    """
    for node in list(graph.nodes):
        source = _only_read_by(node.args[0], node) if node.target is _OURS.fp8_quantise.default else None
        if source is not None:
            sums = source.target is operator.getitem and source.args[1] == 1  # a norm's, after its residual sum
            maker: Any = source.args[0] if sums else source
            if maker.target in _IN_8_BITS and sums == (maker.target is _OURS.add_rms_norm.default):
                _quantise_in(graph, maker, node)


def _quantise_in(graph: Graph, old: Node, quantise: Node) -> None:
    """Compute the result of `quantise` at `old`, after a residual sum, if `old` computes one."""
    packet = _IN_8_BITS[old.target]
    total = old.meta["val"][:1] if packet is _OURS.add_rms_norm_fp8 else ()
    with graph.inserting_before(old):
        results = call_of_many(graph, packet, old.args, (*total, *quantise.meta["val"]))
    if total:
        for node in results_at(old, 0):
            node.replace_all_uses_with(results[0])
    for place in (0, 1):
        for node in results_at(quantise, place):
            node.replace_all_uses_with(results[len(total) + place])
    erase(graph, quantise)


def _only_read_by(value: Any, reader: Node) -> Node | None:
    """The node that computes `value`, behind any views, if only `reader` reads it."""
    while isinstance(value, Node) and len(value.users) == 1:
        if value.target not in _VIEWS:
            return value if _is_one_row_of_tokens(value) else None
        value = value.args[0]
    return None


def _is_one_row_of_tokens(node: Node) -> bool:
    """Whether it is [1, T, H] or [T, H], so that a view as [T, H] quantises its last axis."""
    shape = shape_of(node)
    return len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)


def _transposed_input(node: Any) -> Node | None:
    """The graph's input [O, I] that `node` transposes; None when it is something else."""
    source = _transposed(node)
    return source if source is not None and source.op == "placeholder" else None


def _transposed(node: Any) -> Node | None:
    """What [O, I] `node` transposes: an input of the graph, or one in another dtype; None when it is something else."""
    if node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0]):
        source = node.args[0]
        read = source.args[0] if isinstance(source, Node) and source.target is convert else source
        return source if isinstance(read, Node) and read.op == "placeholder" else None
    return None

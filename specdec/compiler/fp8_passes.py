"""Graph passes for models with FP8 layers: results that are only quantised are never written in half precision."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from specdec.ops.fp8 import add_rms_norm_fp8, rms_norm_fp8, silu_product_fp8  # noqa: F401 (registers them)

_OURS = torch.ops.specdec
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def quantise_at_once(graph: Graph) -> None:
    """Fuse `fp8_quantise` with the norm or gated activation whose result it alone reads.

    Run after the other rewritings, which leave one `fp8_quantise` for all layers that read a tensor.
    """
    for node in list(graph.nodes):
        if node.target is _OURS.fp8_quantise.default and (source := _only_read_by(node.args[0], node)) is not None:
            _fuse(graph, source, node)


def _fuse(graph: Graph, source: Node, quantise: Node) -> None:
    """source: the node that computes the values, before any views. Does nothing unless it is a specdec operator."""
    if source.target is _OURS.rms_norm.default:
        _replace(graph, source, quantise, _OURS.rms_norm_fp8.default, [])
    elif source.target is _OURS.silu_product.default:
        _replace(graph, source, quantise, _OURS.silu_product_fp8.default, [])
    elif source.target is operator.getitem and source.args[1] == 1:
        both: Any = source.args[0]
        if both.target is _OURS.add_rms_norm.default:
            _replace(graph, both, quantise, _OURS.add_rms_norm_fp8.default, _places(both, 0))


def _replace(graph: Graph, old: Node, quantise: Node, target: Any, sums: list[Node]) -> None:
    """Compute the result of `quantise` at `old`; sums: nodes for the residual sum, its first result."""
    values, scales = quantise.meta["val"]
    total = [node.meta["val"] for node in sums[:1]] or (
        [old.meta["val"][0]] if target is _OURS.add_rms_norm_fp8.default else []
    )
    with graph.inserting_before(old):
        new = graph.call_function(target, old.args)
        new.meta["val"] = (*total, values, scales)
        results = [graph.call_function(operator.getitem, (new, place)) for place in range(len(total) + 2)]
    for result, value in zip(results, new.meta["val"], strict=True):
        result.meta["val"] = value
    for node in sums:
        node.replace_all_uses_with(results[0])
    for place in (0, 1):
        for node in _places(quantise, place):
            node.replace_all_uses_with(results[len(total) + place])
    _erase(graph, quantise)


def _places(node: Node, place: int) -> list[Node]:
    """The nodes that take result number `place` of `node`."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def _only_read_by(value: Any, reader: Node) -> Node | None:
    """The node that computes `value`, behind any views, if only `reader` reads it."""
    while isinstance(value, Node) and len(value.users) == 1:
        if value.target not in _VIEWS:
            return value if _is_one_row_of_tokens(value) else None
        value = value.args[0]
    return None


def _is_one_row_of_tokens(node: Node) -> bool:
    """Whether it is [1, T, H] or [T, H], so that a view as [T, H] quantises its last axis."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dim() == 2 or (value.dim() == 3 and value.shape[0] == 1))


def _erase(graph: Graph, node: Node) -> None:
    """Erase unread nodes: parts of the node's result first, then nodes that only it has read."""
    for user in list(node.users):
        if user.target is operator.getitem and not user.users:
            graph.erase_node(user)
    if not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for each in inputs:
            _erase(graph, each)

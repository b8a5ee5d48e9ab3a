"""Patterns of the compiler's graphs, and the steps that every rewriting takes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)
Arguments = tuple[Any, ...]
Found = dict[str, Any]
"""What the names of a pattern stand for."""


@dataclass(frozen=True)
class Call:
    """A node that calls `target` without keywords; sums and products in either order.

    args: names (strings), each of which stands for one value throughout a pattern; calls; lists of these; conditions
    (functions); or constants. name: the node's own. readers: how many nodes read it; 0: any number.
    """

    target: Any
    args: Arguments
    name: str = ""
    readers: int = 0


def match(pattern: Call, node: Any) -> Found | None:
    """The values of a pattern's names where `node` has this form, else None."""
    return next(_matches(pattern, node, {}), None)


def _matches(pattern: Any, value: Any, found: Found) -> Iterator[Found]:
    if isinstance(pattern, str):
        if found.get(pattern, value) == value:
            yield found | {pattern: value}
    elif isinstance(pattern, Call):
        if calls(value, pattern.target) and not value.kwargs and pattern.readers in (0, len(value.users)):
            for own in _matches(pattern.name, value, found) if pattern.name else (found,):
                yield from _all(pattern.args, value.args, own)
                if pattern.target in _COMMUTE:
                    yield from _all(pattern.args, value.args[::-1], own)
    elif isinstance(pattern, list):
        yield from _all(pattern, value, found)
    elif pattern(value) if callable(pattern) else value == pattern:
        yield found


def _all(patterns: Sequence[Any], values: Sequence[Any], found: Found) -> Iterator[Found]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield found
        return
    for own in _matches(patterns[0], values[0], found):
        yield from _all(patterns[1:], values[1:], own)


def calls(node: Any, target: Any) -> bool:
    """Whether `node` is a node that calls `target`."""
    return isinstance(node, Node) and node.target is target


def value_at(node: Any) -> Tensor | None:
    """The fake tensor of a node's result; None for anything that is no node or has no tensor as its result."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node's result; None without a tensor."""
    value = value_at(node)
    return None if value is None else value.dtype


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of a node's result; () without a tensor."""
    value = value_at(node)
    return () if value is None else tuple(value.shape)


def alike(node: Any, other: Node) -> bool:
    """Whether two results have one dtype and shape."""
    return dtype_of(node) == dtype_of(other) and shape_of(node) == shape_of(other)


def replace(graph: Graph, node: Node, packet: Any, args: Arguments) -> None:
    """Call an operator of one result in place of `node`."""
    with graph.inserting_before(node):
        new = graph.call_function(packet.default, args)
    new.meta.update(node.meta)  # shapes and dtypes, which the later rewritings read
    node.replace_all_uses_with(new)
    erase(graph, node)


def call_of_many(graph: Graph, packet: Any, args: Arguments, values: Sequence[Any]) -> list[Node]:
    """Call an operator of several results with these fake tensors; returns the results, the call before them."""
    called = graph.call_function(packet.default, args)
    called.meta["val"] = tuple(values)
    results = [graph.call_function(operator.getitem, (called, i)) for i in range(len(values))]
    for result, value in zip(results, values, strict=True):
        result.meta["val"] = value
    return results


def results_at(node: Node, place: int) -> list[Node]:
    """The nodes that take result number `place` of `node`."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def erase(graph: Graph, node: Node) -> None:
    """Erase unread nodes: parts of the node's result first, then nodes that only it has read.

    The compiler computes even unread concatenations.
    """
    for user in list(node.users):
        if user.target is operator.getitem and not user.users:
            graph.erase_node(user)
    if not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for each in inputs:
            erase(graph, each)

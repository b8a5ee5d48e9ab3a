"""Graph passes for mixtures of experts: a router's choice, with the softmax before or after it, as one operator."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from attention.backends.limits import HALF
from specdec.ops.mixtures.routed import MOST_EXPERTS, SOFTMAX, SUM, best_experts  # noqa: F401 (registers it)

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_MOST_CHOSEN = 32
_COMPUTED = (torch.float32, *HALF)
"""Scores that float32, in which the operator compares, holds as they are."""
_LAST = ([-1], True), ([1], True)


class _Weights(NamedTuple):
    """The treatment of the chosen experts' scores: `out`, its last node, and the normalisation."""

    out: Node
    normalise: str


def choose_at_once(graph: Graph) -> None:
    """Every top-k of scores [T, E] of so few experts becomes `best_experts`."""
    for node in list(graph.nodes):
        if node.target is aten.topk.default and _fits(node):
            _fuse(graph, node)


def _fits(node: Node) -> bool:
    scores: Any = node.args[0]
    value = scores.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype not in _COMPUTED or node.kwargs:
        return False
    experts, (chosen, *others) = value.shape[1], node.args[1:]
    few = isinstance(experts, int) and experts <= MOST_EXPERTS and isinstance(chosen, int) and chosen <= _MOST_CHOSEN
    return few and tuple(others) in ((), (-1,), (1,), (-1, True), (1, True), (-1, True, True), (1, True, True))


def _fuse(graph: Graph, top: Node) -> None:
    values, places = ([user for user in top.users if user.args[1] == i] for i in (0, 1))
    scores: Any = top.args[0]
    logits = _softmax_of(scores)
    after = _after(values[0]) if len(values) == 1 else None
    value = top.meta["val"][0] if after is None else after.out.meta["val"]
    given = (scores if logits is None else logits, top.args[1], logits is not None, after.normalise if after else "")
    with graph.inserting_before(top.next):
        new = graph.call_function(torch.ops.specdec.best_experts.default, (*given, value.dtype))
        new.meta["val"] = (value, top.meta["val"][1])
        weight, place = (graph.call_function(operator.getitem, (new, i)) for i in (0, 1))
    weight.meta["val"], place.meta["val"] = new.meta["val"]
    for old in places:
        old.replace_all_uses_with(place)
    for old in values if after is None else [after.out]:
        old.replace_all_uses_with(weight)
    graph.eliminate_dead_code()


def _softmax_of(node: Any) -> Node | None:
    """x, when `node` is softmax(x) in float32 along the last axis, and only the choice reads it; else None."""
    if not _is(node, aten.div.Tensor) or len(node.users) != 1 or _dtype(node) != torch.float32:
        return None
    grown, total = node.args
    if not _is(grown, aten.exp.default) or not _is(total, aten.sum.dim_IntList):
        return None
    if total.args != (grown, *total.args[1:]) or total.args[1:] not in _LAST or not _is(grown.args[0], aten.sub.Tensor):
        return None
    x, most = grown.args[0].args
    if not _is(most, aten.amax.default) or most.args[0] is not x or most.args[1:] not in _LAST:
        return None
    source = x.args[0] if _is(x, convert) else x
    return source if isinstance(source, Node) and _dtype(source) is not None else None


def _after(value: Node) -> _Weights | None:
    """How the chosen experts' scores are normalised, if they have no other reader; a final cast belongs to it."""
    wide = _only(value, convert)
    return _divided(value, SUM) or (None if wide is None else _softened(wide)) or _softened(value)


def _divided(value: Node, normalise: str) -> _Weights | None:
    """value / its sum along the last axis."""
    total = next((user for user in value.users if _is(user, aten.sum.dim_IntList)), None)
    if total is None or total.args[1:] not in _LAST or len(value.users) != 2:
        return None
    out = _only(total, aten.div.Tensor)
    if out is None or out.args != (value, total):
        return None
    cast = _only(out, convert)
    return _Weights(out if cast is None else cast, normalise)


def _softened(value: Node) -> _Weights | None:
    """softmax(value) along the last axis."""
    most = next((user for user in value.users if _is(user, aten.amax.default)), None)
    if most is None or most.args[1:] not in _LAST or len(value.users) != 2:
        return None
    shifted = _only(most, aten.sub.Tensor)
    grown = None if shifted is None or shifted.args != (value, most) else _only(shifted, aten.exp.default)
    return None if grown is None else _divided(grown, SOFTMAX)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _only(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None

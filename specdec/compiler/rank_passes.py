"""What we change in the compiler's graph of a share of a tensor-parallel model: two sums between ranks become one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from specdec.parallel.operators import sum_ranks  # noqa: F401 (registers the operator)

_SUM: Any = torch.ops.specdec.sum_ranks.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def sum_once(graph: Graph) -> None:
    """sum_ranks(a) + sum_ranks(b) becomes sum_ranks(a + b), where nothing else reads the sums or views of them.

    So a mixture of experts and its shared experts, whose results are added, are summed between ranks together. Every
    rank has the same graph, so all of them do it.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        first, second = map(_sum_behind, node.args)
        if first is None or second is None or first is second or not _same_shape(*node.args):
            continue
        for each in (first, second):
            parts: Any = each.args[0]
            each.replace_all_uses_with(parts)
            graph.erase_node(each)
        with graph.inserting_after(node):
            total = graph.call_function(_SUM, (node,))
        total.meta.update(node.meta)
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)


def _sum_behind(found: Any) -> Node | None:
    """The sum that `found` is, or a view of it, where nothing else reads either."""
    while isinstance(found, Node) and found.target in _VIEWS and len(found.users) == 1:
        found = found.args[0]
    if not isinstance(found, Node) or found.target is not _SUM or len(found.users) != 1:
        return None
    parts: Any = found.args[0]
    return found if parts.meta["val"].is_contiguous() else None  # what a view was taken of, it can be taken of again


def _same_shape(a: Any, b: Any) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape)

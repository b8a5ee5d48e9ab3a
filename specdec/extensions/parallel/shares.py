"""Turns a model that transformers has divided among ranks into plain modules over this rank's share.

transformers plans, and every rank reads its part of each divided parameter. Its distributed tensors and replaced
forwards are taken off again: what stays is the model's own classes with fewer heads and narrower layers, hooks that sum
partial results, and an lm_head that multiplies its own rows and gathers. So probe, KV cache, compiler and CUDA graphs
know nothing of ranks. Sums and gathers are opaque operators, which find what carries them when they run (`exchanging`).
A graph pass replaces two sums that are added by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node

from attention.hf.custom_op import opaque_operator
from specdec.errors import SpecdecError
from specdec.extensions.parallel.collectives import Collectives
from specdec.extensions.parallel.plan import ShardingPlan, Share, pattern_of
from specdec.wrapped.group import GRAPH_PASSES

_ALONE = (
    "a forward of a tensor-parallel model was called on one rank alone: every rank holds a part of its weights, and "
    "only the rounds of SpeculativeModel (generate, stream, …) run on all of them; load the model without "
    "tensor_parallel_size to call hf_model itself"
)
_here = local()


@contextmanager
def exchanging(collectives: Collectives) -> Iterator[None]:
    """A with-block in which all ranks run the same. Only inside, and on this thread, are forwards allowed."""
    before = getattr(_here, "collectives", None)
    _here.collectives = collectives
    try:
        yield
    finally:
        _here.collectives = before


def _current() -> Collectives:
    """The exchanges of this thread. Raises SpecdecError outside of `exchanging`: others would not answer."""
    found: Collectives | None = getattr(_here, "collectives", None)
    if found is None:
        raise SpecdecError(_ALONE)
    return found


@opaque_operator(lambda x: x.new_empty(x.shape))
def sum_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' x, the same bits on each of them. Raises SpecdecError: this rank runs alone."""
    return _current().sum(x)


@opaque_operator(lambda x, size: x.new_empty(*x.shape[:-1], size * x.shape[-1]))
def gather_ranks(x: Tensor, size: int) -> Tensor:
    """x [..., C] of each of `size` ranks -> [..., size·C], in the order of ranks.

    Raises:
        SpecdecError: this rank runs alone.
    """
    found = _current().gather(x)
    return found.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])


_SUM: Any = torch.ops.specdec.sum_ranks.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def sum_once(graph: Graph) -> None:
    """sum_ranks(a) + sum_ranks(b) becomes sum_ranks(a + b), if the sums and their views have no other reader.

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
    """The sum that `found` is, or is a view of; None if either has another reader."""
    while isinstance(found, Node) and found.target in _VIEWS and len(found.users) == 1:
        found = found.args[0]
    if not isinstance(found, Node) or found.target is not _SUM or len(found.users) != 1:
        return None
    parts: Any = found.args[0]
    return found if parts.meta["val"].is_contiguous() else None  # what a view was taken of, it can be taken of again


def _same_shape(a: Any, b: Any) -> bool:
    return a.meta["val"].shape == b.meta["val"].shape


GRAPH_PASSES.append(sum_once)


_SUMMED = ("rowwise", "moe_tp_experts", "all_reduce")


def take_share(model: Any, plan: ShardingPlan, rank: int, size: int) -> Share:
    """Turn a divided model into plain modules over rank's share, in place; returns a description of the share."""
    divided = set()
    repeated: dict[str, int] = {}
    kv_copies = set()
    for name, module in list(model.named_modules()):
        divided |= {f"{name}.{part}" for part in _take_off(module)}
        style = plan.style_of(name)
        is_cut = pattern_of(name) in plan.kv_cut
        if hasattr(module, "k_proj") and hasattr(module, "o_proj"):
            own = plan.style_of(f"{name}.k_proj") != "replicate"
            kv_copies.add(_kv_copies(module, size) if is_cut else 1 if own else size)
        if isinstance(module, nn.Linear) and style != "replicate":
            module.out_features, module.in_features = module.weight.shape
        if is_cut:
            for projection in ("k_proj", "v_proj"):
                parts = getattr(module, projection).named_parameters(f"{name}.{projection}", recurse=False)
                repeated |= {part: _kv_copies(module, size) for part, _ in parts}
            _keep_one_kv_head(module, rank, size)
        if style in _SUMMED:
            _add_once(module, rank)
            module.register_forward_hook(_summed)
    # transformers' marks of a model that it has divided; the modules are plain ones now.
    for attribute in ("_device_mesh", "_mesh_manager", "_tp_size"):
        vars(model).pop(attribute, None)
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            vars(config).pop("distributed_config", None)
    output = model.get_output_embeddings()
    if type(output) is nn.Linear:
        # Each rank multiplies its own rows. In place: the module and its weight, which heads and a tied embedding
        # share, stay the same objects.
        output.__class__ = DividedRows
        count = -(-output.out_features // size)
        vars(output).update(size=size, count=count, first=min(rank * count, output.out_features))
    return Share(frozenset(divided), repeated, frozenset(kv_copies))


def _kv_copies(module: Any, size: int) -> int:
    """How many ranks have the same KV head of a module, which is still whole."""
    return size // (module.k_proj.out_features // module.head_dim)


def _take_off(module: nn.Module) -> list[str]:
    """Undo transformers' changes of one module, except narrower parameters; returns the names of those."""
    divided = []
    if vars(module).pop("_is_hooked", False):
        # transformers has replaced it on the instance; now the class's forward is found again.
        vars(module).pop("forward", None)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            divided += [name] if any(not p.is_replicate() for p in parameter.placements) else []
            local = parameter.to_local().detach().contiguous()
            module._parameters[name] = nn.Parameter(local, requires_grad=False)
    return divided


def _keep_one_kv_head(module: Any, rank: int, size: int) -> None:
    """Cut keys and values that were read whole to the head that this rank's queries attend to."""
    kv_heads = module.k_proj.out_features // module.head_dim
    head = rank * kv_heads // size
    module.num_key_value_groups = module.num_key_value_groups * kv_heads // size
    for projection in (module.k_proj, module.v_proj):
        width = projection.out_features // kv_heads
        rows = slice(head * width, (head + 1) * width)
        for name, parameter in list(projection.named_parameters(recurse=False)):
            projection._parameters[name] = nn.Parameter(parameter.detach()[rows].clone(), requires_grad=False)
        projection.out_features = width


def _add_once(module: nn.Module, rank: int) -> None:
    """Let only rank 0 add a bias behind a summed matmul."""
    if rank == 0:
        return
    bias = module._parameters.get("bias" if isinstance(module, nn.Linear) else "down_proj_bias")
    if bias is not None:
        with torch.no_grad():
            bias.zero_()


def _summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return sum_ranks(output)


class DividedRows(nn.Linear):
    """A linear layer of which each of `size` ranks multiplies `count` own rows, from `first` on, and gathers all.

    The user's own `nn.Linear` of another class: its weight stays whole, heads and a tied embedding share it. The last
    rows may lie beyond the weight.
    """

    size: int
    first: int
    count: int

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = slice(self.first, self.first + self.count)
        own = F.linear(input, self.weight[rows], None if self.bias is None else self.bias[rows])
        if own.shape[-1] < self.count:
            own = F.pad(own, (0, self.count - own.shape[-1]))
        return gather_ranks(own, self.size)[..., : self.out_features]

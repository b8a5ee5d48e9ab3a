"""From a model that transformers has divided to plain modules over this rank's share.

transformers plans and reads: every rank reads its part of each divided parameter. Its distributed tensors and replaced
forwards are taken off again. What stays is the model's own classes with fewer heads and narrower layers, hooks that sum
partial results, and an lm_head that multiplies its own rows and gathers; so the probe, the KV cache, MLA's absorbed
form, the compiler and CUDA graphs need to know nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from specdec.parallel.operators import gather_ranks, sum_ranks
from specdec.parallel.plan import Plan, Share, pattern_of

_SUMMED = ("rowwise", "moe_tp_experts", "all_reduce")


def take_share(model: Any, plan: Plan, rank: int, size: int) -> Share:
    """Turn a divided model into plain modules over rank's share, in place; what that is."""
    divided: set[str] = set()
    repeated: dict[str, int] = {}
    kv_copies: set[int] = set()
    for name, module in list(model.named_modules()):
        divided |= {f"{name}.{part}" for part in _take_off(module)}
        style = plan.style_of(name)
        if hasattr(module, "k_proj") and hasattr(module, "o_proj"):
            own = plan.style_of(f"{name}.k_proj") != "replicate"
            kv_copies.add(_kv_copies(module, size) if pattern_of(name) in plan.kv_cut else 1 if own else size)
        if pattern_of(name) in plan.kv_cut:
            for projection in ("k_proj", "v_proj"):
                parts = dict(getattr(module, projection).named_parameters(recurse=False))
                repeated |= {f"{name}.{projection}.{part}": _kv_copies(module, size) for part in parts}
        if isinstance(module, nn.Linear) and style != "replicate":
            module.out_features, module.in_features = module.weight.shape
        if pattern_of(name) in plan.kv_cut:
            _keep_one_kv_head(module, rank, size)
        if style in _SUMMED:
            _add_once(module, rank)
            module.register_forward_hook(_summed)
    for attribute in ("_device_mesh", "_mesh_manager", "_tp_size"):
        if attribute in vars(model):
            delattr(model, attribute)
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        vars(config).pop("distributed_config", None)
    output = model.get_output_embeddings()
    if type(output) is nn.Linear:
        divide_rows(output, rank, size)
    return Share(frozenset(divided), repeated, frozenset(kv_copies))


def _kv_copies(module: Any, size: int) -> int:
    """Ranks that have the same one of a module's KV heads, which is whole yet."""
    return size // (module.k_proj.out_features // module.head_dim)


def _take_off(module: nn.Module) -> list[str]:
    """Undo what transformers did to one module beside narrowing its parameters; names of those that it narrowed."""
    divided = []
    if vars(module).pop("_is_hooked", False):
        vars(module).pop("forward", None)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            divided += [name] if any(not p.is_replicate() for p in parameter.placements) else []
            local = parameter.to_local().detach().contiguous()
            module._parameters[name] = nn.Parameter(local, requires_grad=False)
    return divided


def _keep_one_kv_head(module: Any, rank: int, size: int) -> None:
    """Of keys and values that were read whole: the head that this rank's queries attend to."""
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
    """A bias behind a summed matmul is added by rank 0 alone."""
    if rank == 0:
        return
    names = ("bias",) if isinstance(module, nn.Linear) else ("down_proj_bias",)
    for name in names:
        bias = module._parameters.get(name)
        if bias is not None:
            with torch.no_grad():
                bias.zero_()


def _summed(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return sum_ranks(output)


class DividedRows(nn.Linear):
    """A linear layer of which each rank multiplies its own rows, and gathers all.

    The user's own `nn.Linear` of another class: its weight stays whole, heads and a tied embedding share it.

    Attributes:
        size: N. first, count: the rank's rows, every rank's count the same; the last rows may lie beyond the weight.
    """

    size: int
    first: int
    count: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = slice(self.first, self.first + self.count)
        own = F.linear(input, self.weight[rows], None if self.bias is None else self.bias[rows])
        if own.shape[-1] < self.count:
            own = F.pad(own, (0, self.count - own.shape[-1]))
        return gather_ranks(own, self.size)[..., : self.out_features]


def divide_rows(layer: Any, rank: int, size: int) -> None:
    """Let each rank multiply its own rows of `layer`."""
    layer.__class__ = DividedRows
    layer.size, layer.count = size, -(-layer.out_features // size)
    layer.first = min(rank * layer.count, layer.out_features)
